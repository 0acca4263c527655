"""Replicas of a model in parts (tp, pp, ep): what code of a loop does to one of them is noticed by those that hold the same part.

The other ranks lose them, and say who failed with what.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
from rank_runner import RankError, run_ranks
from transformers import Trainer, TrainerCallback, TrainingArguments
from user_loops import ENV, LAYOUTS, Loop

from hf_parallel import HFParallelCallback, RankMismatchError


pytestmark = pytest.mark.long

LAYOUTS |= {"tp2_dp2": {"tp_size": 2}, "ep2_dp4": {"ep_size": 2}}
STEPS = 5
AT = 1  # step


def weight(loop: Loop) -> torch.nn.Parameter:
    name = next(
        name for name in loop.named() if name.endswith(("layers.0.mlp.up_proj.weight", "0.mlp.experts.gate_up_proj"))
    )
    return loop.named()[name]


@torch.no_grad()
def own_weights(loop: Loop) -> None:
    weight(loop).data.mul_(0.9)


@torch.no_grad()
def own_memory(loop: Loop) -> None:
    weight(loop).data = weight(loop).data * 0.9


def own_moments(loop: Loop) -> None:
    for state in loop.optimizers[0].state.values():
        state["exp_avg"].zero_()


def own_decay(loop: Loop) -> None:
    loop.optimizers[0].param_groups[0]["weight_decay"] = 0.5


def untouched(loop: Loop) -> None:
    pass


@torch.no_grad()
def average(loop: Loop) -> None:
    """Swapped in for a while by the main process, and left in place by all."""
    older = {name: parameter.detach().clone() for name, parameter in loop.named().items()}
    if loop.accelerator.is_main_process:
        for parameter in loop.named().values():
            parameter.data.mul_(0.5)
        for name, parameter in loop.named().items():
            parameter.data.copy_(older[name])
    for parameter in loop.named().values():
        parameter.data.mul_(0.99)


def freezes(loop: Loop) -> None:
    for name, parameter in loop.named().items():
        parameter.requires_grad_(not name.endswith("o_proj.weight"))


BODIES: dict[str, Callable[[Loop], None]] = {
    body.__name__: body for body in (own_weights, own_memory, own_moments, own_decay, untouched, average, freezes)
}


def loop_main(rank: int, world_size: int, name: str, layout: str, ranks: list[int], experts: bool) -> dict[str, Any]:
    """Change something after one step; an error ends the process, as that of a script does."""
    torch.manual_seed(0)
    loop = Loop(layout, build=tiny.mixtral_plain if experts else None)
    loop.prepare()
    for step in range(STEPS):
        loop.backward(step)
        loop.step()
        if step == AT and rank in ranks:
            BODIES[name](loop)
    return loop.result()


@pytest.mark.parametrize(
    ("name", "layout", "text"),
    [
        ("own_weights", "pp2_dp2", "differs between the replicas by"),
        ("own_weights", "tp2_dp2", "differs between the replicas by"),
        ("own_weights", "ep2_dp4", "differs between the replicas by"),
        ("own_memory", "pp2_dp2", "differs between the replicas by"),
        ("own_moments", "ep2_dp4", "differs between the replicas by"),
        ("own_decay", "pp2_dp2", "weight_decay of parameter group 0 of the optimizer is"),
        ("own_decay", "ep2_dp4", "weight_decay of parameter group 0 of the optimizer is"),
    ],
)
def test_what_is_changed_on_one_replica_ends_the_job(name: str, layout: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=text) as caught:
        run_ranks(loop_main, 4, name, layout, [0], layout == "ep2_dp4", tmp_path=tmp_path, env=ENV, grace=15)
    reports = dict(re.findall(r"(?ms)^rank (\d): (.*?)(?=^rank \d: |\Z)", str(caught.value)))
    assert sum(text in report for report in reports.values()) >= 2, reports


def catching_main(rank: int, world_size: int, folder: str) -> None:
    """Goes on after the error."""
    sys.stderr = open(Path(folder) / f"stderr{rank}.txt", "w", buffering=1)  # noqa: SIM115  for the process's life
    try:
        loop_main(rank, world_size, "own_weights", "pp2_dp2", [0], False)
    except RankMismatchError:
        threading.Event().wait(60)


def test_who_catches_the_error_ends_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="exited with code 86"):
        run_ranks(catching_main, 4, str(tmp_path), tmp_path=tmp_path, env=ENV, grace=15)
    said = "".join(file.read_text() for file in tmp_path.glob("stderr*.txt"))
    assert re.search(r"because rank \d .* raised: parameter \S+ differs between the replicas by", said), said


class Changes(TrainerCallback):
    """Changes a weight on rank 0."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2 and state.is_world_process_zero:
            model.model.layers[0].mlp.up_proj.weight.data.mul_(0.9)


def trainer_main(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, max_steps=8, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    callbacks = [Changes(), HFParallelCallback({"pp_size": 2, "pipeline": {"num_microbatches": 2}})]
    Trainer(tiny.llama(), arguments, train_dataset=tiny.rows(64), callbacks=callbacks).train()


def test_a_trainer_notices_it_before_it_saves(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"up_proj\.weight differs between the replicas by [^']*each replica trains"
    ) as caught:
        run_ranks(trainer_main, 4, str(tmp_path / "run"), tmp_path=tmp_path, env=ENV, grace=15)
    assert "in training_step" in str(caught.value), "at the end of training"


@pytest.mark.parametrize("layout", ["pp2_dp2", "tp2_dp2", "ep2_dp4"])
@pytest.mark.parametrize("name", ["untouched", "average", "freezes"])
def test_what_all_do_is_not_refused(name: str, layout: str, tmp_path: Path) -> None:
    experts = layout == "ep2_dp4"
    alone = run_ranks(loop_main, 1, name, "one", [0], experts, tmp_path=tmp_path, env=ENV, init_group=False)[0]
    found = run_ranks(loop_main, 4, name, layout, list(range(4)), experts, tmp_path=tmp_path, env=ENV)
    assert user_loops.difference(found[0], alone) < 1e-5
