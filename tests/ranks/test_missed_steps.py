"""Checkpoints in which some parameters have taken fewer optimizer steps than others: each goes on with its own count, or is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from callback_runs import ENV, assert_same_state, trained_with
from rank_runner import run_ranks
from torch import nn
from transformers import TrainerCallback

from hf_parallel.errors import ParallelError


pytestmark = pytest.mark.timeout(200)

SAVED_AT, STEPS = 2, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3}},
}


class Changes(TrainerCallback):
    """Keeps the first block, or one of its weights, out of some steps."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.how == "unused":
            model.lm_head.uses = state.global_step >= SAVED_AT
        if self.how == "scaled":
            model.lm_head.uses = True
        if self.how == "frozen":
            for parameter in of_first_block(model):
                if parameter.requires_grad != (state.global_step >= SAVED_AT):
                    parameter.requires_grad_(state.global_step >= SAVED_AT)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        steps = {"dropped": (0, 1), "dropped_once": (1,)}.get(self.how, ())
        if state.global_step in steps:
            for parameter in of_first_block(model):
                parameter.grad = None


def of_first_block(model: Any) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "layers.0." in name]


def with_scale(model: Any) -> Any:
    """With a weight that the model does not use before somebody sets `uses`."""
    head = model.lm_head
    head.scale, head.uses = nn.Parameter(torch.tensor(1.5)), False
    head.register_forward_hook(lambda module, given, logits: logits * module.scale if module.uses else logits)
    return model


def model_of(how: str) -> Any:
    model = tiny.llama(layers=2)
    return with_scale(model) if how in ("unused", "scaled") else model


def trained(layout: str, how: str, folder: Path, resume: Path | None, optimizer: str) -> Any:
    """What the last steps logged, and weights at the end; or the error."""
    kinds = {"nadam": torch.optim.NAdam, "asgd": torch.optim.ASGD}
    try:
        found = trained_with(
            *(Changes(how), LAYOUTS[layout]),
            rows=32,
            model=partial(model_of, how),
            resume=None if resume is None else str(resume),
            given={} if optimizer == "adamw" else {"optimizer_cls_and_kwargs": (kinds[optimizer], {"lr": 1e-2})},
            output_dir=str(folder),
            max_steps=STEPS,
            adam_epsilon=1e-4,
            weight_decay=0.1,
            save_strategy="steps" if resume is None else "no",
            save_steps=SAVED_AT,
            logging_steps=1,
        )
    except ParallelError as error:
        return str(error)
    return found["history"][-2 * (STEPS - SAVED_AT) :], found["state"]  # a loss and a norm each


Job = tuple[str, str, str, str]  # where to, how, where from (or nowhere), optimizer


def many(rank: int, world_size: int, folder: str, jobs: list[Job]) -> dict[Job, Any]:
    found = {}
    for job in jobs:
        to, how, source, optimizer = job
        resume = Path(folder) / f"{how}-{source}-{optimizer}" / f"checkpoint-{SAVED_AT}" if source else None
        own = Path(folder) / (f"to-{how}-{source}-{to}-{optimizer}" if source else f"{how}-{to}-{optimizer}")
        found[job] = trained(to, how, own, resume, optimizer)
    return found


SAVES: list[Job] = [
    ("zero1", "frozen", "", "adamw"),
    ("zero1", "dropped", "", "adamw"),
    ("zero1", "dropped_once", "", "adamw"),
    ("zero1", "dropped", "", "nadam"),
    ("zero1", "dropped_once", "", "nadam"),
    ("zero1", "unused", "", "adamw"),
    ("pp2", "frozen", "", "adamw"),
    ("pp2", "scaled", "", "nadam"),
    ("zero1", "scaled", "", "asgd"),
]
RIGHT: list[Job] = [
    ("one", "frozen", "zero1", "adamw"),
    ("one", "dropped", "zero1", "adamw"),
    ("one", "dropped_once", "zero1", "adamw"),
    ("one", "dropped", "zero1", "nadam"),
    ("zero3", "frozen", "zero1", "adamw"),
    ("zero3", "dropped_once", "zero1", "adamw"),
    ("zero3", "dropped", "one", "adamw"),
    # What is one number for a parameter is so for one that is a number itself.
    ("zero1", "scaled", "pp2", "nadam"),
    ("one", "scaled", "zero1", "asgd"),
]
REFUSED: list[Job] = [
    ("zero1", "frozen", "zero1", "adamw"),
    ("zero2", "dropped", "zero1", "adamw"),
    ("zero2", "dropped_once", "zero1", "adamw"),
    ("zero1", "dropped", "one", "adamw"),
    ("zero1", "frozen", "pp2", "adamw"),
    ("zero2", "dropped", "one", "nadam"),
]
WARNED: Job = ("zero1", "unused", "zero1", "adamw")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Any]:
    folder = tmp_path_factory.mktemp("missed")

    def launch(jobs: list[Job], world_size: int) -> dict[Job, Any]:
        given: Any = (many, world_size, str(folder), jobs)
        options: Any = {"tmp_path": folder, "timeout": 150, "env": ENV}
        every = run_ranks(*given, **options, init_group=world_size > 1)
        errors = [{job: one for job, one in found.items() if isinstance(one, str)} for found in every]
        assert all(one.keys() == errors[0].keys() for one in errors), errors
        return dict(every[0])

    references = {("one", how, "", optimizer): None for _, how, _, optimizer in [*RIGHT, *REFUSED]}
    found = launch(list(references), 1) | launch(SAVES, 2)
    found |= launch([job for job in RIGHT if job[0] == "one"], 1)
    return found | launch([job for job in [*RIGHT, *REFUSED, WARNED] if job[0] != "one"], 2)


def refuse_unlike(mine: Any, reference: Any) -> None:
    assert not isinstance(mine, str), mine
    assert mine[0] == pytest.approx(reference[0], rel=1e-5)
    assert_same_state(mine[1], reference[1])


@pytest.mark.parametrize("job", RIGHT, ids=lambda job: "-".join(filter(None, job)))
def test_a_run_goes_on_with_the_steps_that_each_parameter_took(job: Job, runs: dict[Job, Any]) -> None:
    refuse_unlike(runs[job], runs[("one", job[1], "", job[3])])


@pytest.mark.parametrize("job", REFUSED, ids=lambda job: "-".join(filter(None, job)))
def test_zero_does_not_go_on_with_one_count_for_parameters_that_took_others(job: Job, runs: dict[Job, Any]) -> None:
    assert isinstance(runs[job], str), runs[job][0]
    assert "layers.0." in runs[job]
    assert "took no part in" in runs[job]
    assert "set zero.stage to 0 or 3" in runs[job]


def test_what_the_model_did_not_use_goes_on_as_if_nothing_had_been_saved(runs: dict[Job, Any]) -> None:
    refuse_unlike(runs[WARNED], runs[("zero1", "unused", "", "adamw")])


def test_numbers_that_are_not_known_are_not_saved(runs: dict[Job, Any]) -> None:
    said = runs[("zero1", "dropped_once", "", "nadam")]
    assert "NAdam keeps mu_product beside its count of steps" in said
    assert "had a gradient in 1 of 2 steps" in said
    assert "Set zero.stage to 0 or 3, or save_strategy to no" in said
