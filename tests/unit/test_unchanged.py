"""A trial of a model leaves nothing behind: what begins from the first batch of the training begins from that, not from made-up text."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from hf_parallel.errors import UnsupportedError
from hf_parallel.model.unchanged import unchanged


class Calls:
    """Counts its calls."""

    seen = 0

    def __call__(self) -> None:
        self.seen += 1


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], bool]]] = {
    # name -> what it begins with, what it is after the first batch, whether it says so
    "bool": (lambda: False, lambda ready: True, bool),
    "number": (lambda: 0, lambda ready: ready + 1, bool),
    "text": (lambda: None, lambda ready: "yes", bool),
    "dict": (lambda: {"a": False}, lambda ready: ready.update(a=True) or ready, lambda ready: ready["a"]),
    "of_adapters": (
        lambda: defaultdict(dict, a={"ready": False}),
        lambda ready: ready["a"].update(ready=True) or ready,
        lambda ready: ready["a"]["ready"],
    ),
    "list": (list, lambda ready: ready.append(1) or ready, bool),
    "set": (set, lambda ready: ready.add(1) or ready, bool),
    "deque": (deque, lambda ready: ready.append(1) or ready, bool),
    "object": (
        lambda: SimpleNamespace(ready=False),
        lambda ready: setattr(ready, "ready", True) or ready,
        lambda ready: ready.ready,
    ),
    "called": (Calls, lambda ready: ready() or ready, lambda ready: ready.seen > 0),
    "tensor": (lambda: torch.zeros(1), lambda ready: ready.add_(1), lambda ready: bool(ready)),
    "tensors": (lambda: [torch.zeros(1)], lambda ready: ready[0].add_(1) and ready, lambda ready: bool(ready[0])),
}


class First(nn.Module):
    """Centres with the mean of the first batch (ActNorm, scales of quantisers, codebooks begin so)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        begin, self.after, self.says = STATES[name]
        self.ready = begin()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.says(self.ready):
            self.mean.copy_(x.detach().mean())
            self.ready = self.after(self.ready)
            self.later = True
        return x - self.mean


def test_all_modules_are_put_back() -> None:
    model = nn.Sequential(*(First(name) for _ in range(20) for name in STATES))
    with unchanged(model):
        model(torch.ones(3))
    assert not any(layer.says(layer.ready) for layer in model)  # type: ignore[operator]


@pytest.mark.parametrize("name", STATES)
def test_what_begins_from_a_first_batch_begins_from_that(name: str) -> None:
    layer = First(name)
    model = nn.Sequential(layer)
    held = layer.ready
    for _ in range(2):
        with unchanged(model):
            model(torch.ones(3))
            assert layer.mean == 1
        assert not layer.says(layer.ready)
        assert layer.ready is held
        assert not hasattr(layer, "later")
        assert layer.mean == 0
    model(torch.full((3,), 2.0))
    assert layer.mean == 2


def test_the_hooks_of_transformers_stay_with_their_flag() -> None:
    model = tiny.llama()
    with unchanged(model):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), output_hidden_states=True)
    before = [len(module._forward_hooks) for module in model.modules()]
    found = model(input_ids=torch.ones(1, 3, dtype=torch.long), output_hidden_states=True)
    assert [len(module._forward_hooks) for module in model.modules()] == before
    assert len(found.hidden_states) == model.config.num_hidden_layers + 1


class Writes(nn.Module):
    """To its weight, in a way that torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(300, 7))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return x


def test_a_forward_that_writes_to_a_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Writes())
    with pytest.raises(UnsupportedError, match=r"writes to parameter 1\.weight \("), unchanged(model):
        model(torch.ones(2))


def test_what_went_wrong_inside_is_said_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Writes())

    def fails() -> None:
        with unchanged(model):
            model(torch.ones(2))
            raise KeyError

    with pytest.raises(KeyError):
        fails()


class Marks(torch.nn.Linear):
    """Scales its weight once, and says so."""

    scaled = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.scaled:
            self.weight.data.div_(2.0)
            self.scaled = True
        return super().forward(x)


def test_what_a_library_says_of_weights_that_it_changed_stays() -> None:
    layer = Marks(2, 2, bias=False)
    model = nn.Sequential(layer, First("bool"))
    weight = layer.weight.detach().clone()
    Marks.__module__ = "transformers.models.marks"
    with unchanged(model):
        model(torch.ones(2))
    assert layer.scaled
    assert torch.equal(layer.weight, weight / 2)
    assert not model[1].ready
