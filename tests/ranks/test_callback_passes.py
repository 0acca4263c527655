"""Callbacks that run the model in the middle of a step: a replayed batch, SAM, FGM, an anchor; on each layout as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from callback_runs import ENV, assert_same_state, replicas_of, trained_with
from rank_runner import run_ranks
from thinning import slow_if
from transformers import TrainerCallback


pytestmark = pytest.mark.long


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "sp2": {"sp_size": 2},
    "pp2_zero1": {"pp_size": 2, "num_microbatches": 2, "zero": {"stage": 1}},
}
Share = tuple[int, int]  # this replica, and how many there are


def replayed(model: Any, share: Share) -> None:
    """A batch of its own, of which each replica reads its rows."""
    rows = 4 // share[1]
    batch = {k: v[share[0] * rows : (share[0] + 1) * rows] for k, v in tiny.collate(tiny.rows(40)[32:36]).items()}
    (0.5 * model(**batch).loss).backward()


def sharpness_aware(model: Any, share: Share) -> None:
    """SAM: gradients at the weights that the first gradients lead to."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        kept = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.05)
    for parameter in parameters:
        parameter.grad = None
    replayed(model, share)
    with torch.no_grad():
        for parameter, before in zip(parameters, kept, strict=True):
            parameter.copy_(before)


def adversarial(model: Any, share: Share) -> None:
    """FGM: gradients with an embedding that is moved against the loss, added to those of the step."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        before = weight.detach().clone()
        weight.add_(weight.grad / (weight.grad.norm() + 1e-9), alpha=0.1)
    replayed(model, share)
    with torch.no_grad():
        weight.copy_(before)


class Anchored(TrainerCallback):
    """Pulls weights to where they began, one parameter at a time."""

    def __init__(self) -> None:
        self.anchor: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.anchor = self.anchor or [p.detach().clone() for p in model.parameters()]
        for parameter, anchor in zip(model.parameters(), self.anchor, strict=True):
            (0.3 * (parameter - anchor).pow(2).sum() + 0.05 * parameter.pow(2).sum()).backward()


class Runs(TrainerCallback):
    trainer: Any  # as `trained_with` gives it

    def __init__(self, run: Callable[[Any, Share], None], parallel: dict[str, Any] | None) -> None:
        self.run, self.parallel = run, parallel

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        session = getattr(self.trainer.accelerator, "hf_parallel", None)
        self.run(model, (0 if session is None else session.mesh.dp_rank, replicas_of(self.parallel)))


RUNS = {f.__name__: f for f in (replayed, sharpness_aware, adversarial)}
CASES = (*RUNS, "anchored")


def trained(name: str, parallel: dict[str, Any] | None) -> dict[str, Any]:
    callback = Anchored() if name == "anchored" else Runs(RUNS[name], parallel)
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 1, "adam_epsilon": 1e-3}
    return trained_with(callback, parallel, rows=32, **options)


def main(rank: int, world_size: int, parallel: dict[str, Any] | None) -> dict[str, Any]:
    return {name: trained(name, parallel) for name in CASES}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(
        main, 1, None, tmp_path=tmp_path_factory.mktemp("alone"), init_group=False, env=ENV
    )[0]
    return found


REST = ("zero1", "pp2")  # slow: both at once in another row


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=slow_if(layout, REST)) for layout in LAYOUTS])
def test_a_callback_that_runs_the_model_trains_as_in_one_process(layout: str, alone: Any, tmp_path: Any) -> None:
    ranks = 4 if layout == "pp2_zero1" else 2
    found = run_ranks(main, ranks, LAYOUTS[layout], tmp_path=tmp_path, env=ENV, timeout=120.0)[0]
    for name, wanted in alone.items():
        torch.testing.assert_close(
            torch.tensor(found[name]["history"]), torch.tensor(wanted["history"]), rtol=1e-5, atol=0, msg=name
        )
        assert_same_state(found[name]["state"], wanted["state"], name)
