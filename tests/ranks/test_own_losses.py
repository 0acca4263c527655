"""Losses that users put in place of the model's own train on a mesh as on one process, whatever they depend on."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from thinning import slow_if
from torch.nn import functional
from trainer_cases import ENV, Case, Snapshots, compare, finished, make_trainer, stock, wanted_cases
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.loss import loss_utils
from transformers.loss.loss_utils import ForCausalLMLoss


pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SPECIAL = 7  # in some rows, not in the probes
PP2 = {"pp_size": 2, "num_microbatches": 4}
TP2 = {"tp_size": 2}


def tokens_of(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy f[B S] of every position, 0 where the label is ignored, and the targets."""
    targets = functional.pad(labels, (0, 1), value=-100)[..., 1:]
    losses = functional.cross_entropy(logits.float().transpose(1, 2), targets, ignore_index=-100, reduction="none")
    return losses, targets


# -- loss functions of the model ---------------------------------------------------------------------------------


def row_mean(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    losses, targets = tokens_of(logits, labels)
    return (losses.sum(1) / (targets != -100).sum(1).clamp(min=1)).mean()


def class_weighted(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    weight = torch.ones(vocab_size)
    weight[SPECIAL] = 30.0
    targets = functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), weight=weight)


def special_token(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    losses, targets = tokens_of(logits, labels)
    weight = torch.where(targets == SPECIAL, 30.0, 1.0) * (targets != -100)
    return (losses * weight).sum() / weight.sum()


def special_sum(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any
) -> torch.Tensor:
    """Equal to the plain loss wherever the special token does not occur."""
    losses, targets = tokens_of(logits, labels)
    total = (losses * torch.where(targets == SPECIAL, 30.0, 1.0)).sum()
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def no_special(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any
) -> torch.Tensor:
    """The plain function on other labels."""
    return ForCausalLMLoss(logits, labels.masked_fill(labels == SPECIAL, -100), vocab_size)


def special_ignored(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, *, strict: bool, **kwargs: Any
) -> torch.Tensor:
    """Transformers' function, told to ignore another label."""
    given = labels.masked_fill(labels == -100, SPECIAL)
    return ForCausalLMLoss(logits, given, vocab_size, num_items_in_batch, ignore_index=SPECIAL)


class RowMean(LlamaForCausalLM):
    """A forward with a loss of its own on the logits."""

    def forward(self, input_ids: Any = None, labels: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        if labels is not None:
            output.loss = row_mean(output.logits, labels, self.config.vocab_size)
        return output


class RowMeanInTraining(LlamaForCausalLM):
    """Another loss in training than in evaluation; models are loaded in evaluation mode."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, labels=labels, **kwargs)
        if labels is not None and self.training:
            output.loss = row_mean(output.logits, labels, self.config.vocab_size)
        return output


class WithPenalty(LlamaForCausalLM):
    """A small term on the logits beside the model's loss, below what a comparison of losses sees."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss + 1e-4 * torch.logsumexp(output.logits.float(), -1).pow(2).mean()
        return output


class OwnFunction(LlamaForCausalLM):
    """`loss_function` as a method."""

    def loss_function(self, logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        return special_sum(logits, labels, vocab_size, **kwargs)


def with_function(function: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    def build() -> Any:
        model = tiny.llama()
        model.loss_function = function
        return model

    return build


def of_class(kind: type) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        return kind(tiny.llama().config)

    return build


def patched_forward() -> Any:
    """As a library does it: a function over the instance's forward."""
    model = tiny.llama()
    genuine = model.forward

    @functools.wraps(genuine)
    def forward(*args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = genuine(*args, **kwargs)
        if labels is not None:
            output.loss = row_mean(output.logits, labels, tiny.VOCAB)
        return output

    model.forward = forward
    return model


tiny.MODELS |= {
    "row_mean": with_function(row_mean),
    "class_weighted": with_function(class_weighted),
    "special_token": with_function(special_token),
    "special_sum": with_function(special_sum),
    "no_special": with_function(no_special),
    "other_ignored": with_function(functools.partial(special_ignored, strict=False)),
    "row_mean_forward": of_class(RowMean),
    "row_mean_in_training": of_class(RowMeanInTraining),
    "with_penalty": of_class(WithPenalty),
    "own_function": of_class(OwnFunction),
    "patched_forward": patched_forward,
}


# -- functions given to the Trainer ------------------------------------------------------------------------------


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    losses, targets = tokens_of(outputs["logits"], labels)
    return (losses * torch.where(targets == SPECIAL, 30.0, 1.0)).sum() / num_items_in_batch


def softmax_rows(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    rows = tokens_of(outputs["logits"], labels)[0].sum(1) / num_items_in_batch
    return (rows * torch.softmax(rows.detach() * num_items_in_batch, 0)).sum() * len(rows)


def special_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Adds up wherever the special token does not occur."""
    losses, targets = tokens_of(outputs["logits"], labels)
    weight = torch.where(targets == SPECIAL, 30.0, 1.0)
    count = (targets != -100).sum()
    return (losses * weight).sum() / weight.mean() / num_items_in_batch + 0.0 * count


def by_rows(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """The way of a whole batch, whose 8 rows no made-up batch and no microbatch has."""
    return summed(outputs, labels, num_items_in_batch) * (2.0 if labels.shape[0] > 6 else 1.0)


class Warming:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        return summed(outputs, labels, num_items_in_batch) * (1 - 0.5**self.calls)


def noisy(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Draws random numbers for the batch."""
    losses, _ = tokens_of(functional.dropout(outputs["logits"], 0.1), labels)
    return losses.sum() / num_items_in_batch


class Hardest:
    """The sum over the hardest tokens of a batch, of all until somebody lowers the share."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.share = trainer, 1.0

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return self.hardest(tokens_of(outputs["logits"], labels)[0], self.share).sum() / num_items_in_batch

    def by_state(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        share = 1.0 if self.trainer.state.global_step < 1 else 0.3
        return self.hardest(tokens_of(outputs["logits"], labels)[0], share).sum() / num_items_in_batch

    def of_model(self, logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        if self.share == 1.0:
            return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)
        return self.hardest(tokens_of(logits, labels)[0], self.share).mean()

    @staticmethod
    def hardest(losses: torch.Tensor, share: float) -> torch.Tensor:
        return losses if share == 1.0 else losses.flatten().topk(int(losses.numel() * share)).values


class Lowers(TrainerCallback):
    """Lowers the share of the hardest tokens before the second step."""

    def __init__(self, hardest: Hardest) -> None:
        self.hardest = hardest

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.hardest.share = 0.3


FUNCTIONS = {function.__name__: function for function in (summed, softmax_rows, special_mean, noisy, by_rows)}


class Replaces(TrainerCallback):
    """Puts another loss into the model when training begins."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.loss_function = self.function


def run_case(case: Case, folder: Path, world_size: int) -> dict[str, Any]:
    extra: list[TrainerCallback] = []
    snapshots = Snapshots(folder)
    if case.loss.startswith("late_"):
        extra.append(Replaces({"late_row_mean": row_mean, "late_special_sum": special_sum}[case.loss]))
    case = dataclasses.replace(case, arguments={**case.arguments, "remove_unused_columns": False})
    trainer = snapshots.trainer = make_trainer(case, folder, world_size, [snapshots, *extra])
    if case.loss.startswith("hardest"):
        hardest = Hardest(None if case.loss == "hardest_of_model" else trainer)  # a model is copied with its loss
        trainer.add_callback(Lowers(hardest))
        if case.loss == "hardest_of_model":
            trainer.model.loss_function = hardest.of_model
        else:
            trainer.compute_loss_func = hardest.by_state if case.loss == "hardest_by_state" else hardest
    if case.loss == "stateful":
        trainer.compute_loss_func = Warming()
    elif case.loss in FUNCTIONS:
        trainer.compute_loss_func = FUNCTIONS[case.loss]
    if case.loss == "global_patch":
        genuine = loss_utils.fixed_cross_entropy
        loss_utils.fixed_cross_entropy = lambda source, target, *args, **kwargs: functional.cross_entropy(
            source, target, label_smoothing=0.3
        )
        try:
            trainer.train()
        finally:
            loss_utils.fixed_cross_entropy = genuine
    else:
        trainer.train()
    return finished(trainer, folder)


def main(rank: int, world_size: int, cases: list[Case], folder: str) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        try:
            results.append(json.loads(json.dumps(run_case(case, Path(folder) / case.name, world_size))))
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
    return results


def run_all(cases: list[Case], world_size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """What rank 0 returned, by name. Stock runs that differ in their names alone run once."""
    alike = [case.name if case.parallel is not None else repr(dataclasses.replace(case, name="")) for case in cases]
    distinct = list(dict(zip(alike, cases, strict=True)).values())
    results = run_ranks(
        main, world_size, distinct, str(folder), tmp_path=folder, timeout=600.0, init_group=world_size > 1, env=ENV
    )
    found = dict(zip(dict.fromkeys(alike), results[0], strict=True))
    return {case.name: found[key] for case, key in zip(cases, alike, strict=True)}


TWO_RANKS = [
    *(
        Case(
            f"{layout}_{model}",
            model=model,
            parallel=parallel,
            steps=3,
            variable_length=True,
            accumulation=2,
        )
        for layout, parallel in (("pp2", PP2), ("tp2", TP2))
        for model in ("row_mean", "special_token", "special_sum", "with_penalty", "own_function", "other_ignored")
    ),
    *(
        Case(f"pp2_{model}", model=model, parallel=PP2, steps=3, variable_length=True)
        for model in ("class_weighted", "no_special", "row_mean_forward", "row_mean_in_training", "patched_forward")
    ),
    Case("tp2_row_mean_forward", model="row_mean_forward", parallel=TP2, steps=3, variable_length=True),
    Case("tp2_row_mean_in_training", model="row_mean_in_training", parallel=TP2, steps=3, variable_length=True),
    Case(
        "tp2_sequence_special_sum",
        model="special_sum",
        parallel={**TP2, "sequence_parallel": True},
        steps=3,
        variable_length=True,
    ),
    *(
        Case(f"{layout}_{loss}", parallel=parallel, steps=3, variable_length=True, loss=loss, evaluate=True)
        for layout, parallel in (("pp2", PP2), ("tp2", TP2))
        for loss in ("late_row_mean", "late_special_sum", "global_patch")
    ),
    *(
        Case(f"pp2_{loss}", parallel=PP2, steps=3, variable_length=True, loss=loss, accumulation=2)
        for loss in (*FUNCTIONS, "stateful", "hardest", "hardest_by_state", "hardest_of_model")
    ),
    Case("pp2_interleaved_row_mean", model="row_mean", parallel={**PP2, "schedule": "zbv_zero_bubble"}, steps=3),
]
FOUR_RANKS = [
    Case("pp2_tp2_row_mean", model="row_mean", parallel={**PP2, **TP2}, steps=3, variable_length=True),
    Case("pp2_tp2_late_special", parallel={**PP2, **TP2}, steps=3, variable_length=True, loss="late_special_sum"),
    Case("pp2_dp2_row_mean", model="row_mean", parallel=PP2, steps=3, variable_length=True, reference=2),
    Case("pp2_dp2_special_token", model="special_token", parallel=PP2, steps=3, variable_length=True, reference=2),
]
# Slow: a loss that other rows train on the same axis, or on stages where these are shards and the other way round.
REST = (
    "pp2_row_mean",
    "pp2_special_token",
    "tp2_special_sum",
    "tp2_with_penalty",
    "tp2_own_function",
    "tp2_other_ignored",
    "pp2_row_mean_forward",
    "tp2_row_mean_in_training",
    "tp2_late_row_mean",
    "pp2_late_special_sum",
    "tp2_global_patch",
    "pp2_summed",
    "pp2_tp2_row_mean",
    "pp2_dp2_row_mean",
)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The runs of the chosen tests: one launch a world size."""
    two, four = wanted_cases(request, TWO_RANKS), wanted_cases(request, FOUR_RANKS)
    found: dict[str, dict[str, Any]] = {}
    for world_size, chosen in (
        (1, [stock(case) for case in two + four if case.reference == 1]),
        (2, two + [stock(case) for case in two + four if case.reference == 2]),
        (4, four),
    ):
        found |= run_all(chosen, world_size, tmp_path_factory.mktemp(f"world{world_size}"))
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=slow_if(case.name, REST), id=case.name) for case in TWO_RANKS + FOUR_RANKS]
)
def test_a_loss_of_the_users_trains_as_on_one_process(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    mine, reference = runs[case.name], runs[f"stock_{case.name}"]
    assert "error" not in reference, reference
    assert "error" not in mine, mine
    compare(mine, reference)
