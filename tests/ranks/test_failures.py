"""What cannot work is refused on every rank, and what only looks so trains.

If a test fails here, a user sees a hang without a cause, an error on one rank only, or, worst, a run that trains wrong.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from rank_runner import run_ranks
from torch.utils.data import DataLoader
from trainer_cases import Case, make_trainer, run_case


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 4}
TP2 = {"tp_size": 2}
DP2: dict[str, Any] = {}


def trainer_on(parallel: dict[str, Any], folder: str, collator: Callable[..., Any] | None = None, **case: Any) -> Any:
    trainer = make_trainer(Case("failing", steps=6, parallel=parallel, **case), Path(folder), 2)
    if collator is not None:
        trainer.data_collator = collator
    return trainer


def raw_loop(parallel: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, torch.Tensor]]:
    """Accelerator, prepared model and optimizer of a loop without a Trainer, and one batch."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **parallel))
    model = tiny.llama()
    loader = DataLoader(tiny.rows(16), batch_size=8, collate_fn=tiny.collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, model, optimizer, next(iter(loader))


# -- refusals: one launch; each returns nothing and must raise ---------------------------------------------------------


def unlike_batches(rank: int, folder: str) -> None:
    def collate(features: list[Any]) -> dict[str, torch.Tensor]:
        batch = tiny.collate(features)
        batch["input_ids"][0, 0] = 1 + int.from_bytes(os.urandom(6), "big") % 97 if rank else 0
        return batch

    trainer_on(PP2, folder, collate).train()


def unlike_configs(rank: int, folder: str) -> None:
    trainer_on({"pp_size": 2, "num_microbatches": 4 + rank}, folder)


def unlike_layouts(rank: int, folder: str) -> None:
    trainer_on([PP2, TP2][rank], folder)


def unlike_configs_of_machines(rank: int, folder: str) -> None:
    with mock.patch("socket.gethostname", return_value=f"node{rank}"):
        unlike_configs(rank, folder)


def unlike_batches_of_machines(rank: int, folder: str) -> None:
    with mock.patch("socket.gethostname", return_value=f"node{rank}"):
        unlike_batches(rank, folder)


def unlike_models(rank: int, folder: str) -> None:
    trainer = trainer_on(PP2, folder)
    if rank:
        trainer.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    trainer.train()


def forward_replaced(rank: int, folder: str) -> None:
    accelerator, model, _, _ = raw_loop(PP2)
    model.forward = type(model).forward.__get__(model)
    accelerator.backward(torch.zeros((), requires_grad=True))


def forward_replaced_in_trainer(rank: int, folder: str) -> None:
    from transformers import TrainerCallback

    class Replace(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            installed = model.forward
            model.forward = lambda *inputs, **named: installed(*inputs, **named)

    trainer = trainer_on(PP2, folder)
    trainer.add_callback(Replace())
    trainer.train()


def adafactor(rank: int, folder: str) -> None:
    trainer_on(TP2, folder, arguments={"optim": "adafactor"}).train()


def step_without_reduction(rank: int, folder: str) -> None:
    _, model, optimizer, _ = raw_loop(DP2)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(sum(p.square().sum() for p in parameters), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def step_inside_no_sync(rank: int, folder: str) -> None:
    _, model, optimizer, batch = raw_loop({"zero": {"stage": 3}})
    with model.no_sync():
        model(**batch).loss.backward()
        optimizer.step()


def parts_reduced(rank: int, folder: str) -> None:
    accelerator, model, *_ = raw_loop({"zero": {"stage": 3}})
    accelerator.reduce([parameter.data for parameter in model.parameters()], "mean")


def parts_gathered(rank: int, folder: str) -> None:
    accelerator, model, *_ = raw_loop({"zero": {"stage": 3}})
    accelerator.gather(model.model.norm.weight)


def two_models(rank: int, folder: str) -> None:
    accelerator, *_ = raw_loop(PP2)
    accelerator.prepare(tiny.llama())


def generate(rank: int, folder: str) -> None:
    _, model, _, batch = raw_loop(PP2)
    model.eval()
    model.generate(batch["input_ids"][:, :4], max_new_tokens=2, do_sample=False, prompt_lookup_num_tokens=2)


def device_map(rank: int, folder: str) -> None:
    trainer = trainer_on(PP2, folder)
    trainer.model.hf_device_map = {"model": 0, "lm_head": 1}
    trainer.train()


def quantised(rank: int, folder: str) -> None:
    trainer = trainer_on(TP2, folder)
    trainer.model.quantization_method = "bitsandbytes"
    trainer.train()


def quantised_layers(rank: int, folder: str) -> None:
    trainer = trainer_on(TP2, folder)
    layer = trainer.model.model.layers[0].mlp.up_proj
    weight = layer.weight.detach()
    layer.weight = torch.nn.Parameter((weight * 100).to(torch.int8), requires_grad=False)
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight / 100)
    trainer.train()


def width_in_the_loss(rank: int, folder: str) -> None:
    """Each pair is right by itself, but the loss looks at the shape of a weight, where nobody can notice."""
    from transformers import LlamaForCausalLM

    class WidthAware(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            if output.get("loss") is not None:
                output["loss"] = output["loss"] * self.model.layers[0].self_attn.q_proj._parameters["weight"].shape[0]
            return output

    trainer = trainer_on(TP2, folder)
    trainer.model.__class__ = WidthAware
    trainer.train()


def too_many_stages(rank: int, folder: str) -> None:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, pp_size=2)).prepare(tiny.llama(layers=1))


def too_long_a_split(rank: int, folder: str) -> None:
    trainer_on({"pp_size": 2, "split": [1, 1]}, folder).train()


def deepcopy_of_a_stage(rank: int, folder: str) -> None:
    _, model, _, _ = raw_loop(PP2)
    copy.deepcopy(model)


def added_too_late(rank: int, folder: str) -> None:
    from hf_parallel import HFParallelCallback

    trainer = make_trainer(Case("late", parallel=None), Path(folder), 2)
    trainer.add_callback(HFParallelCallback({}, **PP2))
    trainer.train()


def half_of_the_parameters_clipped(rank: int, folder: str) -> None:
    accelerator, model, _, batch = raw_loop(TP2)
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0)


REFUSALS: dict[Callable[[int, str], None], str] = {
    unlike_batches: r"RankMismatchError: rank 1 \(pp 1 of 2\) read a different batch than rank 0 .*seeded alike",
    unlike_configs: r"RankMismatchError: rank 1.* made another config than rank 0.*num_microbatches\": 4.*num_microbatches\": 5.*same YAML",
    unlike_configs_of_machines: r"RankMismatchError: rank 1 on node1 \[.* in code.*\] made another config than rank 0 on node0 \[.*in code",
    unlike_batches_of_machines: r"rank 1 \(pp 1 of 2\) on node1 read a different batch than rank 0 \(pp 0 of 2\) on node0",
    unlike_layouts: r"RankMismatchError: rank 1 made another config than rank 0",
    unlike_models: r"RankMismatchError: rank 1 \(pp 1 of 2\) made another plan than rank 0.*load the same model",
    forward_replaced: r"UnsupportedError: model\.forward was replaced by transformers\..*LlamaForCausalLM\.forward",
    forward_replaced_in_trainer: r"UnsupportedError: model\.forward was replaced by .*Replace.*before trainer\.train\(\)",
    adafactor: r"UnsupportedError: .*Adafactor.*tp_size 1",
    step_without_reduction: r"UnsupportedError: optimizer\.step\(\) was called on gradients that were never reduced",
    step_inside_no_sync: r"UnsupportedError: optimizer\.step\(\) was called on gradients that were never reduced.* outside of no_sync",
    parts_reduced: r"UnsupportedError: accelerator\.reduce\(\) of a tensor of shape \(\d+, 32\) that the replicas share out",
    parts_gathered: r"UnsupportedError: accelerator\.gather\(\) of a tensor of shape \(32,\).*full_tensor\(\)",
    two_models: r"UnsupportedError: a second model \(LlamaForCausalLM\)",
    generate: r"UnsupportedError: model\.generate\(prompt_lookup_num_tokens\) with pp_size=2: .*no key-value cache.*save_model",
    device_map: r"UnsupportedError: .*device_map=\['0', '1'\].*Load it without device_map",
    quantised: r"UnsupportedError: .*quantised weights \(bitsandbytes\) with tp_size=2.*without quantization_config",
    quantised_layers: r"PlanError: .*layers\.0\.mlp\.up_proj\.weight holds torch\.int8 values of shape \(64, 32\).*tp_size to 1",
    width_in_the_loss: r"PlanError: tp_size=2: the sharded model differs .* in \d+ quantities by more than 1e-03: output 0 of "
    r"tp rank 0 \(relative error 5\.0e-01\)",
    too_many_stages: r"PlanError: cannot pipeline .*at least 2 repeated blocks.*Use tensor parallel",
    too_long_a_split: r"PlanError: .*split=\[1, 1\].*4 blocks",
    deepcopy_of_a_stage: r"UnsupportedError: copy\.deepcopy of a parallelized model.*copies of this rank's weights by name",
    added_too_late: r"ConfigError: .*add_callback\(\).*callbacks=\[HFParallelCallback\(\)\]",
    half_of_the_parameters_clipped: r"UnsupportedError: clip_grad_norm_ on a part of the model.*model\.parameters\(\)",
}


def refusals_main(rank: int, world_size: int, folder: str) -> dict[str, str]:
    from accelerate.state import AcceleratorState

    heard = {}
    for refused in REFUSALS:
        AcceleratorState._reset_state()  # one process stands for many runs
        try:
            refused(rank, f"{folder}/{refused.__name__}")
            heard[refused.__name__] = "nothing was raised"
        except Exception as error:
            heard[refused.__name__] = f"{type(error).__name__}: {error}"
    return heard


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("refusals")
    return run_ranks(refusals_main, 2, str(folder), tmp_path=folder, env=ENV, timeout=150)


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda function: function.__name__)
def test_it_is_refused_on_every_rank_with_the_same_text(
    refused: Callable[[int, str], None], heard: list[dict[str, str]]
) -> None:
    here, there = (of_rank[refused.__name__] for of_rank in heard)
    assert re.search(REFUSALS[refused], here, re.DOTALL), here
    assert here == there


# -- what looks odd and is right ---------------------------------------------------------------------------------------


def patched_after_init(world_size: int, folder: str) -> tuple[list[float], int]:
    """Losses with a forward wrapped as TRL does, after the Trainer's constructor; and how often the wrapper ran."""
    case = Case("patched", steps=3, parallel=PP2)
    trainer = make_trainer(case, Path(folder), world_size)
    genuine, calls = trainer.model.forward, []

    @functools.wraps(genuine)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        output = genuine(*args, **kwargs)
        output["loss"] = 2.0 * output["loss"] if output.get("loss") is not None else None
        return output

    trainer.model.forward = wrapper
    trainer.train()
    assert inspect.signature(trainer.model.forward) == inspect.signature(genuine)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], len(calls)


def copy_of_a_replica(world_size: int) -> bool:
    """Whether a copy of a data-parallel model, as an EMA makes one, computes with weights of its own."""
    _, model, _, batch = raw_loop(DP2)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        zero = copied(**batch).logits.abs().max().item() == 0.0
        assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"
        return zero and model(**batch).logits.abs().max().item() > 0.0


def slow_outside_the_engine(world_size: int, folder: str) -> int:
    """Steps made when every rank works for longer than the timeout between two steps, and nobody waits."""
    from transformers import TrainerCallback

    class Work(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                time.sleep(2.0)

    trainer = trainer_on({**PP2, "monitor": {"hang_timeout_s": 0.8}}, folder)
    trainer.add_callback(Work())
    trainer.train()
    trainer.accelerator.hf_parallel.watchdog.stop()
    return int(trainer.state.global_step)


def odd_main(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    found: dict[str, Any] = {"patched": patched_after_init(world_size, f"{folder}/patched")}
    case = Case("many_microbatches", steps=3, parallel={"pp_size": 2, "num_microbatches": 64})
    found["many_microbatches"] = run_case(case, Path(folder) / f"{case.name}{world_size}", world_size)["history"]
    if world_size > 1:
        AcceleratorState._reset_state()
        found["slow"] = slow_outside_the_engine(world_size, f"{folder}/slow")
        AcceleratorState._reset_state()
        found["copy"] = copy_of_a_replica(world_size)
    return found


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("odd")
    alone = run_ranks(odd_main, 1, str(folder), tmp_path=folder, env=ENV, init_group=False)
    both = run_ranks(odd_main, 2, str(folder), tmp_path=folder, env=ENV)
    return alone[0], both[0]


def test_a_forward_patched_between_init_and_train_is_respected(odd: tuple[dict[str, Any], dict[str, Any]]) -> None:
    (expected, _), (losses, calls) = odd[0]["patched"], odd[1]["patched"]
    assert calls > 0
    assert losses == pytest.approx(expected, rel=1e-5)
    assert min(losses) > 6.0  # twice ln(99) to start with: the wrapper is in effect


def test_more_microbatches_than_rows_train_alike(odd: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for here, there in zip(odd[1]["many_microbatches"], odd[0]["many_microbatches"], strict=True):
        assert here == pytest.approx(there, abs=1e-5)


def test_a_copy_of_a_replica_has_weights_of_its_own(odd: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert odd[1]["copy"]


def test_work_between_two_steps_is_no_hang(odd: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert odd[1]["slow"] == 6
