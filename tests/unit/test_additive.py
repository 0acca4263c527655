"""Which loss functions of the user's are computed microbatch by microbatch: only those that nothing speaks against."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, Trainer

from hf_parallel.guards.calls.additive import what_replicas_multiply, why_not_additive


SMALL, LARGE = 99, 4003
SPECIAL = 1717  # no config names it


def losses_of(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    logits = outputs["logits"].float().transpose(1, 2)
    return functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none"), targets


def plain(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return losses_of(outputs, labels)[0].sum() / num_items_in_batch


def flat(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].reshape(-1, outputs.logits.shape[-1])
    return functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


def weighted_sum(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, targets = losses_of(outputs, labels)
    return (losses * torch.where(targets == SPECIAL, 5.0, 1.0)).sum() / num_items_in_batch


def focal(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, _ = losses_of(outputs, labels)
    return ((1 - (-losses).exp()) ** 2 * losses).sum() / num_items_in_batch


def by_position(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, _ = losses_of(outputs, labels)
    return (losses * torch.linspace(0, 1, losses.shape[1])).sum() / num_items_in_batch


def row_sums_of_means(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, targets = losses_of(outputs, labels)
    return (losses.sum(1) / (targets != -100).sum(1)).sum() / num_items_in_batch


def token_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, targets = losses_of(outputs, labels)
    return losses.sum() / (targets != -100).sum()


def row_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, targets = losses_of(outputs, labels)
    return (losses.sum(1) / (targets != -100).sum(1)).mean() / num_items_in_batch


def softmax_rows(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    rows = losses_of(outputs, labels)[0].sum(1)
    return (rows * torch.softmax(rows, 0)).sum() / num_items_in_batch


def softmax_of_detached(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    rows = losses_of(outputs, labels)[0].sum(1)
    weight = torch.softmax(rows.detach(), 0)
    return (rows + rows * weight - (rows * weight).detach()).sum() / num_items_in_batch


def hardest_row(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return losses_of(outputs, labels)[0].sum(1).max() / num_items_in_batch


def first_row(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return losses_of(outputs, labels)[0][0].sum() / num_items_in_batch


def variance(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, _ = losses_of(outputs, labels)
    return (losses.sum() + losses.sum(1).var(unbiased=False)) / num_items_in_batch


def without_outliers(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    rows = losses_of(outputs, labels)[0].mean(1)
    return rows[rows <= 2 * rows.detach().mean()].sum() / num_items_in_batch


def mean_length(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, targets = losses_of(outputs, labels)
    lengths = (targets != -100).sum(1).float()
    return (losses.sum(1) * lengths / lengths.mean()).sum() / num_items_in_batch


def contrastive(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    means = outputs["logits"].mean(1)
    return plain(outputs, labels, num_items_in_batch) + (means @ means.T).mean() / num_items_in_batch


def special_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, targets = losses_of(outputs, labels)
    weight = torch.where(targets == SPECIAL, 5.0, 1.0)
    return (losses * weight).sum() / weight.mean() / num_items_in_batch


TABLE = torch.ones(LARGE)
TABLE[SPECIAL] = 5.0


def class_weighted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    losses, targets = losses_of(outputs, labels)
    weight = TABLE[targets.clamp(min=0)]
    return (losses * weight).sum() / weight.mean() / num_items_in_batch


def stops_at(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    if (labels == SPECIAL).any():
        return plain(outputs, labels, num_items_in_batch) * 2
    return plain(outputs, labels, num_items_in_batch)


def looks(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return plain(outputs, labels, num_items_in_batch) * (2 if SPECIAL in labels.flatten().tolist() else 1)


def needs_hidden(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return plain(outputs, labels, num_items_in_batch) + outputs.hidden_states[-1].mean()


def writes(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    labels[labels == 3] = -100
    return plain(outputs, labels, num_items_in_batch)


def drops(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    outputs["logits"] = functional.dropout(outputs["logits"], 0.5)
    return plain(outputs, labels, num_items_in_batch)


def tosses(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return plain(outputs, labels, num_items_in_batch) * (1 if random.random() < 2 else 0)


def constant(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs["logits"].sum() * 0.0


def branches_by_count(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """More labels than any made-up batch has."""
    loss = plain(outputs, labels, num_items_in_batch)
    return loss * 2 if (labels != -100).sum().item() > 10**6 else loss


def branches_by_token(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    loss = plain(outputs, labels, num_items_in_batch)
    return loss * 2 if labels.max() > 10**6 else loss


def drops_spikes(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    loss = plain(outputs, labels, num_items_in_batch)
    return loss * 0 if float(loss) > 10**6 else loss


def doubled_if(name: str, many: Callable[[Tensor], bool]) -> Callable[..., Any]:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return plain(outputs, labels, num_items_in_batch) * (2 if many(labels) else 1)

    loss.__name__ = f"by rows, {name}"
    return loss


# No made-up batch has as many rows.
BY_ROWS: dict[str, Callable[[Tensor], bool]] = {
    "shape": lambda labels: labels.shape[0] > 6,
    "size": lambda labels: labels.size(0) >= 7,
    "named size": lambda labels: labels.size(dim=0) == 8,
    "from the back": lambda labels: labels.size(-2) > 6,
    "unpacked": lambda labels: (lambda rows, length: rows * length > 10**6)(*labels.shape),
    "length": lambda labels: len(labels) > 6,
    "elements": lambda labels: labels.numel() > 10**6,
    "of what is made of them": lambda labels: labels.ne(-100).flatten().shape[0] // 1000 > 10**3,
    "remainder": lambda labels: not (labels.shape[0] + 1) % 100,
    "at most": lambda labels: max(8, labels.shape[0]) != 8,
}


def shape_is_checked(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    rows, length = labels.shape
    if outputs.logits.shape[:2] != labels.shape or outputs.logits.shape[0] != rows:
        raise ValueError("logits and labels differ")
    losses = losses_of(outputs, labels)[0].reshape(rows * length)
    assert losses.shape[0] == outputs.logits.size(0) * length
    return losses.sum() / num_items_in_batch


COUNT = {"calls": 0}


def counts_in_global(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    COUNT["calls"] += 1
    return plain(outputs, labels, num_items_in_batch)


ADD_UP: list[Callable[..., Any]] = [plain, flat, weighted_sum, focal, by_position, row_sums_of_means, shape_is_checked]
ADD_UP.append(functools.partial(plain))
DO_NOT: list[Callable[..., Any]] = [
    *(token_mean, row_mean, softmax_rows, softmax_of_detached, hardest_row, first_row, variance, without_outliers),
    *(mean_length, contrastive, special_mean, class_weighted, stops_at, looks, needs_hidden, writes, drops, tosses),
    *(constant, counts_in_global, branches_by_count, branches_by_token, drops_spikes),
]


DO_NOT += [doubled_if(name, many) for name, many in BY_ROWS.items()]


def config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocab_size)


@pytest.mark.parametrize("function", ADD_UP, ids=lambda f: getattr(f, "__name__", "partial"))
@pytest.mark.parametrize("vocab_size", [SMALL, LARGE])
def test_sums_over_labels_are_believed(function: Callable[..., Any], vocab_size: int) -> None:
    assert why_not_additive(function, config(vocab_size)) == ""


@pytest.mark.parametrize("function", DO_NOT, ids=lambda f: f.__name__)
def test_what_depends_on_more_than_a_row_is_not_believed(function: Callable[..., Any]) -> None:
    assert why_not_additive(function, config(LARGE)) != ""


def test_one_token_of_a_small_vocabulary_is_enough() -> None:
    def hidden(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        losses, targets = losses_of(outputs, labels)
        weight = 1.0 + (targets.float() * 0.1 - 7 * 0.1).abs().lt(1e-3)
        return (losses * weight).sum() / weight.mean() / num_items_in_batch

    assert "add up" in why_not_additive(hidden, config(SMALL))


class Averages:
    """Keeps an average of the losses it saw."""

    def __init__(self) -> None:
        self.average, self.history = torch.zeros(()), [1.0]

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = plain(outputs, labels, num_items_in_batch)
        self.average.mul_(0.9).add_(loss.detach())
        self.history.append(loss.item())
        return loss

    def method(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self(outputs, labels, num_items_in_batch)


def test_a_function_that_keeps_state_is_called_once_and_forgets_it() -> None:
    for pick in (
        lambda a: a,
        lambda a: a.method,
        lambda a: functools.partial(a),
        lambda a: lambda *x, **y: a(*x, **y),
    ):
        kept = Averages()
        assert "keeps state" in why_not_additive(pick(kept), config(SMALL))
        assert float(kept.average) == 0.0
        assert kept.history == [1.0]
    calls = 0

    def counts(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(outputs, labels, num_items_in_batch)

    assert "keeps state" in why_not_additive(counts, config(SMALL))
    assert calls == 0
    assert COUNT["calls"] == 0


def test_random_states_stay() -> None:
    torch.manual_seed(3)
    before, python = torch.get_rng_state(), random.getstate()
    for function in (drops, tosses):
        assert "random" in why_not_additive(function, config(SMALL))
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


def test_it_is_asked_at_most_ten_times() -> None:
    calls = itertools.count()  # state that nobody sees

    def counted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        next(calls)
        return plain(outputs, labels, num_items_in_batch)

    assert why_not_additive(counted, config(SMALL)) == ""
    assert next(calls) <= 10


def test_a_function_with_parameters_of_its_own_is_not_believed() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            scaled = {"logits": outputs["logits"] * self.temperature}
            return plain(scaled, labels, num_items_in_batch)

    assert "parameters" in why_not_additive(Tempered(), config(SMALL))


class KeepsMetrics(Trainer):
    """Notes the loss of every batch, as trainers of other libraries do."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {"loss": []}

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        found = plain(outputs, labels, num_items_in_batch)
        self.metrics["loss"].append(float(found))
        return found


def test_what_a_trainer_notes_is_state() -> None:
    trainer = KeepsMetrics()
    assert "keeps state" in why_not_additive(trainer.loss, config(SMALL))
    assert trainer.metrics == {"loss": []}


def test_the_config_of_the_model_may_be_read() -> None:
    model = nn.Linear(3, 3)

    def knows_the_model(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        assert model.in_features == 3
        return plain(outputs, labels, num_items_in_batch)

    def decays(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return plain(outputs, labels, num_items_in_batch) + model.weight.pow(2).sum() / num_items_in_batch

    assert why_not_additive(knows_the_model, config(SMALL)) == ""
    assert why_not_additive(decays, config(SMALL)) != ""


def test_what_grows_with_the_number_of_replicas_is_told_from_sums() -> None:
    config = LlamaConfig(vocab_size=SMALL)

    def total(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return losses_of(outputs, labels)[0].sum()

    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return losses_of(outputs, labels)[0].mean()

    def more(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return plain(outputs, labels, num_items_in_batch) + mean(outputs, labels)

    def drawn(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return mean(outputs, labels) * torch.rand(())

    for function in (total, plain, flat, drawn, lambda outputs, labels: mean(outputs, labels)):
        assert not what_replicas_multiply(function, config), function
    assert not what_replicas_multiply(mean, None)  # a module without a config
    assert what_replicas_multiply(mean, config).startswith("it does not use num_items_in_batch")
    assert what_replicas_multiply(more, config) == "a part of it is not divided by num_items_in_batch"
    calls: list[int] = []

    def noting(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        calls.append(1)
        return mean(outputs, labels)

    before = torch.random.get_rng_state()
    assert what_replicas_multiply(noting, config)
    assert not calls
    assert torch.equal(torch.random.get_rng_state(), before)
