"""What the guards of a step see: a batch that was written to, a digest of every kind of tensor, gradients held apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.batches import BITS, Announced, Digests
from hf_parallel.guards.gradients.aside import add, apart


COUNTS = frozenset({"num_items_in_batch"})


def batch() -> dict[str, Any]:
    return {"input_ids": torch.arange(12).reshape(3, 4), "labels": torch.arange(12).reshape(3, 4), "flag": True}


def write(labels: torch.Tensor) -> None:
    labels[0, 1] = -100


EDITS: dict[str, Any] = {
    "in place": lambda b: write(b["labels"]),
    "through a view": lambda b: b["labels"].view(-1)[3:].fill_(1),
    "detached": lambda b: b["labels"].detach().fill_(1),
    "replaced": lambda b: b.update(labels=b["labels"].clone()),
    "removed": lambda b: b.pop("labels"),
    "added": lambda b: b.update(position_ids=torch.arange(4)[None]),
    "another flag": lambda b: b.update(flag=False),
    "another memory": lambda b: b["labels"].set_(torch.arange(12).reshape(3, 4)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_batch_is_not_the_announced_one(edit: str) -> None:
    given = batch()
    announced = Announced(given)
    assert announced.is_in({**given, "num_items_in_batch": 3}, COUNTS)
    EDITS[edit](given)
    assert not announced.is_in(given, COUNTS)


def test_nested_tensors_are_looked_at_too() -> None:
    given = {"input_ids": torch.ones(2, 2), "images": [torch.zeros(3), {"mask": torch.zeros(3)}]}
    announced = Announced(given)
    assert announced.is_in(given, COUNTS)
    given["images"][1]["mask"].add_(1)
    assert not announced.is_in(given, COUNTS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16, torch.float64])
def test_a_digest_sees_one_changed_element_anywhere(dtype: torch.dtype) -> None:
    digests = Digests()
    numbers = (torch.arange(200_003) % 2).to(dtype)  # longer than one chunk
    first = int(digests.of([{"x": numbers}]))
    assert 0 <= first < 2**BITS
    assert int(torch.tensor(first, dtype=torch.float64)) == first
    for place in (0, 65_535, 65_536, 200_002):
        other = numbers.clone()
        other[place] = 1 - other[place].to(torch.int64)
        assert int(digests.of([{"x": other}])) != first
    assert int(Digests().of([{"x": numbers.clone()}])) == first


def test_a_digest_sees_names_shapes_order_and_batches() -> None:
    ids = torch.arange(6)
    cases = [
        [{"a": ids.reshape(2, 3)}],
        [{"a": ids.reshape(3, 2)}],
        [{"b": ids.reshape(2, 3)}],
        [{"a": ids.flip(0).reshape(2, 3)}],
        [{"a": ids.reshape(2, 3).int()}],
        [{"a": ids}, {"a": ids + 1}],
        [{"a": ids + 1}, {"a": ids}],
        [{"a": ids, "b": ids + 1}],
        [{"a": ids + 1, "b": ids}],
    ]
    digests = Digests()
    assert len({int(digests.of(case)) for case in cases}) == len(cases)
    assert int(digests.of([{"b": ids, "a": ids + 1}])) == int(digests.of([{"a": ids + 1, "b": ids}]))
    graph = torch.ones(2, requires_grad=True)
    assert int(digests.of([{"a": ids, "x": graph * 1}])) == int(digests.of([{"a": ids, "x": graph * 2}]))
    assert int(digests.of([{"flag": True}])) == 0


def test_gradients_made_apart_take_their_factor_once() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    first.grad = torch.full((2,), 10.0)
    kept = first.grad
    with apart([first, second]) as made:
        assert first.grad is None
        (first.sum() + 3 * second.sum()).backward()
    assert first.grad is kept
    assert second.grad is None
    first.grad.add_(1)  # of another loss, in between
    add(made.take(), torch.tensor(0.5))
    assert first.grad.tolist() == [11.5, 11.5]
    assert second.grad is not None
    assert second.grad.tolist() == [1.5, 1.5]
    with pytest.raises(UnsupportedError, match=r"backpropagated twice.*add the losses up before one backward"):
        made.take()


def test_gradients_from_before_survive_a_schedule_that_raises() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    def breaks() -> None:
        with apart([parameter]):
            parameter.sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        breaks()
    assert parameter.grad.tolist() == [1.0, 1.0]
