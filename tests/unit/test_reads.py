"""What a function reads besides its arguments is noticed when it changes, and nothing else is."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, TrainerState

from hf_parallel.guards.calls.reads import Reads


TINY = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
RATIO = 1.0
SETTINGS = {"ratio": 1.0, "deep": {"ratio": 1.0}}


class Ohem:
    ratio = 1.0
    unread = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    def __call__(self, outputs: Any, labels: Any) -> Any:
        return self.share * labels * self.own

    @property
    def share(self) -> float:
        return self.ratio

    def method(self, outputs: Any, labels: Any) -> Any:
        return F.relu(labels) * self.ratio


class Job:
    """As a Trainer: what it has is read by name."""

    def __init__(self) -> None:
        self.state, self.model = TrainerState(), LlamaForCausalLM(TINY)
        self.other = 0


def of_global(outputs: Any, labels: Any) -> Any:
    return labels * RATIO


def of_settings(outputs: Any, labels: Any) -> Any:
    return [one * SETTINGS["deep"]["ratio"] for one in labels]  # type: ignore[index]


def helped(outputs: Any, labels: Any) -> Any:
    return of_global(outputs, labels)


def case(name: str) -> tuple[Callable[..., Any], Callable[[], None], Callable[[], None]]:
    """A function, what changes something that it reads, and what changes something else."""
    loss, job, box = Ohem(), Job(), types.SimpleNamespace(ratio=1.0, other=0)
    table, weights, held = numpy.ones(3), torch.ones(3), [1.0]
    count = 1.0

    def closed(outputs: Any, labels: Any) -> Any:
        return labels * count

    def recount() -> None:
        nonlocal count
        count = 0.5

    def of_state(outputs: Any, labels: Any) -> Any:
        return labels * (job.state.global_step > 1)

    def of_model(outputs: Any, labels: Any) -> Any:
        return labels * job.model.training * job.model.config.vocab_size

    def asked(outputs: Any, labels: Any) -> Any:
        return labels * getattr(box, "scale", 1.0)

    def late(outputs: Any, labels: Any, of: Any = box) -> Any:
        return labels * of.ratio

    def in_place(outputs: Any, labels: Any) -> Any:
        return labels * weights * table * held[0]

    def nothing() -> None: ...

    cases: dict[str, tuple[Any, Any, Any]] = {
        "attribute": (loss, lambda: setattr(loss, "own", 0.5), lambda: setattr(loss, "unread", 0.5)),
        "attribute_of_class": (loss, lambda: setattr(Ohem, "ratio", 0.5), lambda: setattr(Ohem, "unread", 0.5)),
        "attribute_over_class": (
            loss.method,
            lambda: setattr(loss, "ratio", 0.5),
            lambda: setattr(loss, "unread", 0.5),
        ),
        "closure": (closed, recount, nothing),
        "global": (of_global, lambda: globals().update(RATIO=0.5), lambda: globals().update(OTHER=0.5)),
        "called": (helped, lambda: globals().update(RATIO=0.5), nothing),
        "settings": (of_settings, lambda: SETTINGS["deep"].update(ratio=0.5), nothing),  # type: ignore[attr-defined]
        "state": (of_state, lambda: setattr(job.state, "global_step", 2), lambda: setattr(job.state, "epoch", 2)),
        "model": (of_model, lambda: setattr(job.model.config, "vocab_size", 2), lambda: job.model.eval() and None),
        "default": (late, lambda: setattr(box, "ratio", 0.5), lambda: setattr(box, "other", 0.5)),
        "absent": (asked, lambda: setattr(box, "scale", 0.5), lambda: setattr(box, "ratio", 0.5)),
        "partial": (partial(closed, labels=0), recount, nothing),
        "tensor": (in_place, lambda: weights.mul_(0.5), nothing),
        "array": (in_place, lambda: table.fill(0.5), nothing),
        "list": (in_place, lambda: held.append(2.0), nothing),
    }
    return cases[name]


NAMES = "attribute attribute_of_class attribute_over_class closure global called settings state model default absent partial tensor array list"


@pytest.mark.parametrize("name", NAMES.split())
def test_what_is_read_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ohem, "ratio", 1.0)
    monkeypatch.setitem(SETTINGS, "deep", {"ratio": 1.0})
    monkeypatch.setitem(globals(), "RATIO", 1.0)
    function, changes, changes_another = case(name)
    reads = Reads(function)
    assert not reads.changed()
    function(None, torch.ones(3)) if name != "partial" else None
    changes_another()
    assert not reads.changed()
    changes()
    assert reads.changed()


def test_a_function_of_a_library_reads_nothing_of_the_users() -> None:
    for function in (F.cross_entropy, LlamaForCausalLM.forward, partial(F.cross_entropy, reduction="sum")):
        assert not Reads(function).changed()
    assert Reads(F.cross_entropy)._found == []


class Names:
    """Each function that is found names others."""

    def first(self) -> Any:
        return self.held.second()

    def __init__(self) -> None:
        self.scale = 1.0
        self.held: Any = types.SimpleNamespace(second=lambda: self.third)

    @property
    def third(self) -> float:
        return self.scale


def test_names_that_are_found_on_the_way_are_walked_too() -> None:
    owner = Names()
    reads = Reads(owner.first)
    assert not reads.changed()
    owner.scale = 0.5
    assert reads.changed()


class Odd:
    """It cannot be looked at."""

    scale = 1.0

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise RuntimeError("closed")
        return super().__getattribute__(name)

    def loss(self) -> float:
        return self.scale


def test_what_cannot_be_looked_at_is_left() -> None:
    assert not Reads(Odd().loss).changed()
