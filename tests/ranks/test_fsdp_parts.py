"""What a model in parts (`fully_shard`) holds and sends, and what may be done with it between steps.

If these fail, ranks hold more than the table says, update what nobody computes with, sample from stale parameters, or
leave a hole in what is refused.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from trainer_cases import NO_NOISE, Case, run_cases
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.data_parallel import fsdp
from hf_parallel.data_parallel.fsdp import self_contained
from hf_parallel.errors import ParallelError


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ENV = {"ACCELERATE_USE_CPU": "true"}


def make_accelerator(precision: str = "no", every: int | None = None, **zero: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = HFParallelPlugin({}, zero={"stage": 3, **zero}, activation_checkpointing={"every": every})
    return Accelerator(cpu=True, mixed_precision=precision, parallelism_config=plugin)


def batch(step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, tiny.VOCAB, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))
    return {"input_ids": ids, "labels": ids}


# -- bytes and messages ----------------------------------------------------------------------------------------------


def held_bytes() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and not isinstance(item, DTensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def bytes_rank(rank: int, world_size: int, stage: int) -> None:
    before = held_bytes()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=4000, hidden_size=256, intermediate_size=704, num_hidden_layers=4)
    model = LlamaForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    assert count > 3e6
    accelerator = make_accelerator(stage=stage, engine="fsdp2")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.arange(16).view(1, 16)
    for step in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        if step:  # the first makes the optimizer's state
            assert held_bytes() - before == pytest.approx((4 + 4 + 8) * count / world_size, rel=0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert held_bytes() - before == pytest.approx((4 + 8) * count / world_size, rel=0.05)
    accelerator.hf_parallel.watchdog.stop()


@pytest.mark.parametrize(("world_size", "stage"), [pytest.param(2, 3, marks=pytest.mark.slow), (4, 3), (2, 2)])
def test_ranks_hold_their_part_of_everything(world_size: int, stage: int, tmp_path: Path) -> None:
    run_ranks(bytes_rank, world_size, stage, tmp_path=tmp_path, env=ENV)


class Counting:
    """A collective of `fully_shard` that is counted."""

    def __init__(self, own: Any, found: Counter[str], name: str) -> None:
        self.own, self.found, self.name = own, found, name

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.own.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.found[self.name] += 1
        return self.own(*args, **kwargs)


def peak_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=4000, hidden_size=256, intermediate_size=704, num_hidden_layers=8)
    ).to(torch.bfloat16)
    given = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in given.items()}
    whole, largest = sum(p.nbytes for p in given.values()), model.lm_head.weight.nbytes * 2
    held, real = [], fsdp.fully_shard

    def counted(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        held.append(held_bytes())
        return made

    fsdp.fully_shard, before = counted, held_bytes()
    make_accelerator(engine="fsdp2").prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    parts = 2 * whole / world_size  # in fp32
    assert max(held) - before < parts + 2 * largest + 2e6
    assert all(torch.equal(p, values[name]) for name, p in given.items())  # who holds one from before


def test_half_precision_parameters_become_fp32_unit_by_unit(tmp_path: Path) -> None:
    run_ranks(peak_rank, 2, tmp_path=tmp_path, timeout=180, env=ENV)


def messages_rank(rank: int, world_size: int, stage: int, every: int | None) -> None:
    accelerator = make_accelerator(stage=stage, engine="fsdp2", every=every)
    accelerator.gradient_accumulation_steps = 3
    model = accelerator.prepare(tiny.llama())
    pieces = math.ceil(4 / (every or 1))
    found: Counter[str] = Counter()
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(Counting(DefaultAllGather(), found, "gather"))
            part.set_custom_reduce_scatter(Counting(DefaultReduceScatter(), found, "scatter"))
    for step in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch(step)).loss)
    gathers, sums = found["gather"], found["scatter"]
    # The embedding, last norm and head are one piece more, which stays gathered until the backward pass.
    assert gathers == 3 * (pieces + 1 + (pieces if stage == 3 else 0)), found
    assert sums == 3 * (pieces + 1), found
    accelerator.hf_parallel.watchdog.stop()


@pytest.mark.parametrize(
    ("stage", "every"),
    [
        pytest.param(2, None, marks=pytest.mark.slow),
        (3, None),
        (3, 1),
        pytest.param(3, 3, marks=pytest.mark.slow),
        (2, 2),
    ],
)
def test_every_backward_pass_sends_as_many_messages_as_the_docs_say(
    stage: int, every: int | None, tmp_path: Path
) -> None:
    """Blocks of a checkpoint are one message: it gathers them once for being run again and for its gradients."""
    run_ranks(messages_rank, 2, stage, every, tmp_path=tmp_path, env=ENV)


# -- between steps ---------------------------------------------------------------------------------------------------


def between_rank(rank: int, world_size: int, stage: int) -> None:
    """Looks between a backward pass and the step, which leave parameters gathered, change nothing."""
    reference = tiny.llama(tied=True)
    mine = tiny.llama(tied=True)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    made_before = torch.optim.AdamW(mine.parameters(), lr=1e-2, foreach=stage == 2)
    for model, optimizer in (
        (reference, expected),
        (mine, made_before),
    ):  # the optimizer has state when it is taken over
        model(**batch(9)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = make_accelerator(stage=stage, engine="fsdp2")
    model, optimizer = accelerator.prepare(mine, made_before)
    assert type(model).__name__ == "LlamaForCausalLM"
    for step in range(3):
        for other in range(world_size):
            (reference(**batch(step, other)).loss / world_size).backward()
        accelerator.backward(model(**batch(step, rank)).loss)
        assert_equal_forward(model, reference)
        expected.step()
        optimizer.step()
        assert_equal_forward(model, reference)
        expected.zero_grad()
        (model if step else optimizer).zero_grad()
    ids = batch(7, rank)["input_ids"][:, : 4 + 3 * rank]  # ranks stop at different times
    options = {"max_new_tokens": 8 + 2 * rank, "do_sample": False, "pad_token_id": 0, "eos_token_id": 98}
    assert model.generate(ids, **options).tolist() == reference.generate(ids, **options).tolist()
    state = accelerator.get_state_dict(model)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert bool(state) == (rank == 0)
    if rank == 0:
        model.save_pretrained("exported", state_dict=state)
        assert LlamaForCausalLM.from_pretrained("exported").config.architectures == ["LlamaForCausalLM"]
    accelerator.hf_parallel.watchdog.stop()


def assert_equal_forward(model: nn.Module, reference: nn.Module) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(**batch(5)).logits, reference(**batch(5)).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_looking_at_the_model_between_steps_changes_nothing(stage: int, tmp_path: Path) -> None:
    run_ranks(between_rank, 2, stage, tmp_path=tmp_path, env=ENV)


# -- precision -------------------------------------------------------------------------------------------------------


def precision_rank(rank: int, world_size: int) -> None:
    accelerator = make_accelerator("bf16")
    model = accelerator.prepare(tiny.llama())
    seen: dict[str, torch.dtype] = {}
    for name in ("model.embed_tokens", "model.layers.1.mlp.up_proj"):

        def note(module: nn.Module, args: Any, name: str = name) -> None:
            seen[name] = module.weight.dtype

        model.get_submodule(name).register_forward_pre_hook(note)
    output = model(**batch(0))
    accelerator.backward(output.loss)
    assert seen == {"model.embed_tokens": torch.float32, "model.layers.1.mlp.up_proj": torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32} == {p.grad.dtype for p in model.parameters()}
    assert output.logits.dtype == torch.float32
    accelerator.hf_parallel.watchdog.stop()


def test_blocks_are_gathered_in_the_dtype_of_autocast_and_updated_in_fp32(tmp_path: Path) -> None:
    run_ranks(precision_rank, 2, tmp_path=tmp_path, env=ENV)


@pytest.mark.parametrize(
    "model", ["llama", "gpt2"]
)  # gpt2: norms that take weights in the dtype of their inputs alone
def test_autocast_follows_one_process(model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": model, "arguments": {**NO_NOISE, "bf16": True}}
    stock = run_cases([Case("stock", parallel=None, **settings)], 1, tmp_path)["stock"]
    mine = run_cases([Case("mine", parallel={"zero": {"stage": 3}}, **settings)], 2, tmp_path)["mine"]
    for here, there in zip(mine["history"], stock["history"], strict=True):
        if "loss" in there:
            assert here["loss"] == pytest.approx(there["loss"], abs=1e-2)
            assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=2e-2)


HALF = Case("half", model="llama_half", steps=4, arguments=NO_NOISE, save=True)


def test_half_precision_parameters_have_fp32_copies_as_with_the_native_engine(tmp_path: Path) -> None:
    """Bit for bit the export of the native engine, and either resumes from the other."""

    def final(world_size: int, zero: dict[str, Any], folder: str, resume_at: int = 0) -> dict[str, torch.Tensor]:
        case = Case(**{**vars(HALF), "parallel": {"zero": zero}, "resume_at": resume_at, "save": not resume_at})
        run_cases([case], world_size, tmp_path / folder)
        return load_file(tmp_path / folder / "half" / "final" / "model.safetensors")

    native, mine = final(2, {"stage": 2}, "native"), final(2, {"stage": 3}, "fsdp")
    resumed, back = final(2, {"stage": 3}, "native", 2), final(2, {"stage": 1}, "fsdp", 2)
    for name, tensor in native.items():
        assert tensor.dtype == torch.bfloat16
        for other in (mine, resumed, back):
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=0)


# -- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "tolerance"), [("int8", 2e-2), ("bf16", 5e-3), pytest.param("fp16", 1e-3, marks=pytest.mark.slow)]
)
def test_gradients_travel_compressed(method: str, tolerance: float, tmp_path: Path) -> None:
    def losses(name: str, **parallel: Any) -> list[float]:
        case = Case(name, parallel={"zero": {"stage": 3}, **parallel}, arguments=NO_NOISE)
        history = run_cases([case], 2, tmp_path / name)[name]["history"]
        return [entry["grad_norm"] for entry in history if "loss" in entry]

    exact, mine = losses("exact"), losses("mine", gradient_compression={"method": method})
    assert mine == pytest.approx(exact, rel=tolerance)
    assert mine != exact


# -- around training -------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_loaded_into_the_parts(tmp_path: Path) -> None:
    """Parameters that an evaluation left gathered do not survive the loading."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    case = Case("best", steps=4, save=True, evaluate=True, eval_count=40, arguments={**NO_NOISE, **best})
    exports = {}
    for world_size, parallel in ((1, None), (2, {"zero": {"stage": 3}})):
        folder = tmp_path / str(world_size)
        run_cases([Case(**{**vars(case), "parallel": parallel})], world_size, folder)
        exports[world_size] = load_file(folder / "best" / "final" / "model.safetensors")
    for name, tensor in exports[1].items():
        torch.testing.assert_close(exports[2][name], tensor, rtol=1e-4, atol=1e-6)


def test_only_blocks_that_share_nothing_are_gathered_by_themselves() -> None:
    model = tiny.llama(tied=True)
    units = [(f"model.layers.{index}",) for index in range(4)]
    pairs = [units[0] + units[1], units[2] + units[3]]
    assert list(self_contained(model, units)) == units
    assert list(self_contained(model, [*units, ("model.embed_tokens",), ("model.rotary_emb",)])) == units
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert list(self_contained(model, units)) == units[2:]
    assert list(self_contained(model, pairs)) == pairs
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    assert list(self_contained(model, pairs)) == []


# -- refusals --------------------------------------------------------------------------------------------------------


def refusals_rank(rank: int, world_size: int) -> dict[str, str]:
    import copy

    from transformers.optimization import Adafactor

    found: dict[str, str] = {}

    def refused(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except ParallelError as error:
            found[name] = str(error)

    scalar, mixed = tiny.llama(), tiny.llama()
    scalar.model.scale = nn.Parameter(torch.tensor(1.0))
    mixed.lm_head.to(torch.bfloat16)
    refused("scalar", lambda: make_accelerator().prepare(scalar))
    refused("mixed", lambda: make_accelerator().prepare(mixed))
    accelerator = make_accelerator()
    model = accelerator.prepare(tiny.llama())
    refused("copy", lambda: copy.deepcopy(model))
    refused("adafactor", lambda: accelerator.prepare(Adafactor(model.parameters())))
    for parameter in model.model.embed_tokens.parameters():
        parameter.requires_grad_(False)
    refused("frozen", lambda: accelerator.backward(model(**batch(0)).loss))
    return found


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    for found in run_ranks(refusals_rank, 2, tmp_path=tmp_path, env=ENV):
        assert "zero.engine=fsdp2: parameter model.scale is a single number" in found["scalar"]
        assert "2 dtypes (model.embed_tokens.weight is float32, lm_head.weight is bfloat16)" in found["mixed"]
        assert "copy.deepcopy of a parallelized model" in found["copy"]
        assert "optimizer Adafactor of transformers.optimization with zero.stage above 0" in found["adafactor"]
        assert "frozen or unfrozen after zero.stage=3" in found["frozen"]


# -- evaluation --------------------------------------------------------------------------------------------------------


def inference_rank(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(0)
    model = tiny.llama(layers=2)
    accelerator = make_accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(2):
        model.eval()
        with torch.inference_mode():
            losses.append(float(model(**batch(step, rank)).loss))
        model.train()
        loss = model(**batch(step, rank)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_an_evaluation_in_inference_mode_may_come_first(tmp_path: Path) -> None:
    for losses in run_ranks(inference_rank, 2, tmp_path=tmp_path, timeout=90, env=ENV):
        assert losses[::2] == pytest.approx(losses[1::2])
