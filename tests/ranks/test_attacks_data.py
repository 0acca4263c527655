"""Where a Trainer's batches come from, and how many a step has: on ranks of a model copy as in one process."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import tiny
import torch
import user_steps
from transformers import Trainer, TrainerCallback


pytestmark = pytest.mark.long


SHARED = {"pp2": {"pp_size": 2, "num_microbatches": 2}, "tp2": {"tp_size": 2}}  # both ranks are one model copy


def masks_at_random(features: list[Any]) -> dict[str, torch.Tensor]:
    batch = tiny.collate(features)
    batch["labels"].masked_fill_(torch.rand(batch["labels"].shape) < 0.3, -100)
    return batch


class ChangesAccumulation(TrainerCallback):
    """From the second step on a step has three batches, not two: the third of those that are fetched is of the next step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            args.gradient_accumulation_steps = 3


user_steps.KINDS |= {
    "masks_at_random": (Trainer, {"collator": lambda: masks_at_random}),
    "changes_accumulation": (Trainer, {"change": lambda trainer: trainer.add_callback(ChangesAccumulation())}),
}
# Name and arguments of the Trainer.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "random_collator": ("masks_at_random", {}),
    "random_collator_in_workers": (
        "masks_at_random",
        {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"},
    ),
    "accumulation": ("changes_accumulation", {}),
    "batch_rebalance": ("Trainer", {"train_sampling_strategy": "batch_rebalance"}),
}


def many(rank: int, world_size: int, jobs: list[Any], folder: str) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may not start the workers of a loader
    return user_steps.many(rank, world_size, jobs, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("data")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for layouts in ({"one": None}, SHARED):
        names = [(job, layout) for layout in layouts for job in JOBS]
        jobs = [(JOBS[job][0], layouts[layout], {"arguments": JOBS[job][1]}) for job, layout in names]
        ranks = user_steps.launch(jobs, 2 if layouts is SHARED else 1, folder / "-".join(layouts), many)
        found |= {name: first for name, (first, *_) in zip(names, ranks, strict=True)}
    return found


@pytest.mark.parametrize("layout", SHARED)
@pytest.mark.parametrize("job", JOBS)
def test_as_one_process(job: str, layout: str, runs: dict[tuple[str, str], dict[str, Any]]) -> None:
    user_steps.same(runs[job, layout], runs[job, "one"])
