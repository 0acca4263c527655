"""Steps, batches and replicas whose labels are all ignored: losses, norms and weights are those of the stock Trainer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import user_steps
from transformers import LlamaForCausalLM, Trainer


pytestmark = pytest.mark.long


class OwnMean(LlamaForCausalLM):
    """Takes no number of labels, so that its loss is a mean over those of each batch."""

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, labels: Any = None, attention_mask: Any = None, use_cache: Any = None
    ) -> Any:
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels, use_cache=use_cache)


def own_mean(model: Any) -> None:
    model.__class__ = OwnMean


def mask_rows(trainer: Trainer) -> None:
    """The second step, one batch of the third, and half of a batch of the fourth have no labels."""
    for index in [*range(16, 40), *range(48, 52)]:
        row = trainer.train_dataset[index]
        row["labels"] = [-100] * len(row["labels"])


class OnLogits(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        return user_steps.on_logits(model(**inputs).logits, labels)


user_steps.KINDS |= {
    "none": (Trainer, {"change": mask_rows}),
    "none_mean": (Trainer, {"change": mask_rows, "prepare": own_mean}),
    "none_logits": (OnLogits, {"change": mask_rows}),
}
PP2, TP2 = {"pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}
SHOWN: dict[str, Any] = {"logging_nan_inf_filter": False}
SMOOTHED: dict[str, Any] = {"label_smoothing_factor": 0.1}
# Settings, kind and arguments; replicas are compared with stock DDP, the others with one process.
JOBS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dp2": ({}, "none", {}),
    "dp2_shown": ({}, "none", SHOWN),
    "dp2_mean": ({}, "none_mean", SHOWN),
    "zero1": ({"zero": {"stage": 1}}, "none", SHOWN),
    "zero2_mean": ({"zero": {"stage": 2}}, "none_mean", SHOWN),
    "pp2": (PP2, "none", {}),
    "pp2_shown": (PP2, "none", SHOWN),
    "pp2_mean": (PP2, "none_mean", SHOWN),
    "pp2_smoothed": (PP2, "none", {**SHOWN, **SMOOTHED}),
    "pp2_logits": (PP2, "none_logits", SHOWN),
    "tp2": (TP2, "none", SHOWN),
    "tp2_mean": (TP2, "none_mean", SHOWN),
}


def many(rank: int, world_size: int, jobs: list[Any], folder: str) -> Any:
    return user_steps.many(rank, world_size, copy.deepcopy(jobs), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("none")
    alone: list[Any] = []
    pairs: list[Any] = []
    for parallel, kind, arguments in JOBS.values():
        options = {
            "steps": 5,
            "arguments": {"train_sampling_strategy": "sequential", "logging_first_step": True, **arguments},
        }
        replicated = parallel not in (PP2, TP2)
        alone.append((kind, None, {**options, "rows": 8}))
        # A pair: the run itself, and stock DDP on two processes.
        pairs.append((kind, parallel, {**options, "rows": 4 if replicated else 8}))
        if replicated:
            pairs.append((kind, None, {**options, "rows": 4}))
    found = []
    for world_size, jobs in ((1, alone), (2, pairs)):
        ranks = user_steps.launch(jobs, world_size, folder / str(world_size), many)
        found.append([first for first, *_ in ranks])
    results, others = {}, {}
    rest = iter(found[1])
    for index, (job, (parallel, _, _)) in enumerate(JOBS.items()):
        results[job] = next(rest)
        others[job] = found[0][index] if parallel in (PP2, TP2) else next(rest)
    return [results, others]


@pytest.mark.parametrize("job", JOBS)
def test_no_labels_as_in_stock(job: str, runs: list[dict[str, Any]]) -> None:
    mine, other = (copy.deepcopy(found[job]) for found in runs)
    shown = not JOBS[job][2].get("logging_nan_inf_filter", True)
    assert shown == any(math.isnan(entry.get("loss", 0.0)) for entry in other["history"])
    for history in (mine["history"], other["history"]):
        for entry in history:
            entry.update({key: -1.0 for key, value in entry.items() if math.isnan(value)})
    user_steps.same(mine, other)
