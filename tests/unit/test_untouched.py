"""Writes to tensors, however they are made, are noticed without going through them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_parallel.guards.untouched import Untouched


def tables() -> list[dict[str, Any]]:
    kinds = (torch.float32, torch.int64, torch.bool)
    return [
        {"a": torch.full((3,), float("nan")), "none": None},
        {str(kind): torch.ones(2, 2, dtype=kind) for kind in kinds},
        {"empty": torch.zeros(0), "one": torch.tensor(1.0)},
    ]


def replace(found: list[dict[str, Any]]) -> None:
    found[1]["torch.int64"] = found[1]["torch.int64"].clone()


def replace_by_another_value(found: list[dict[str, Any]]) -> None:
    found[2]["one"] = torch.tensor(2.0)


def replace_by_its_memory(found: list[dict[str, Any]]) -> None:
    found[2]["one"] = found[2]["one"].data


def register(found: list[dict[str, Any]]) -> None:
    found[0]["late"] = torch.zeros(3)


COUNTED: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "in place": lambda found: found[1]["torch.bool"].zero_(),
    "a view": lambda found: found[0]["a"][0].fill_(2.0),
    "replaced": replace,
    "another value": replace_by_another_value,
    "its memory": replace_by_its_memory,
    "registered": register,
}


def give(found: list[dict[str, Any]]) -> None:
    found[2]["one"].data = torch.tensor(3.0)


HIDDEN: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "through data": lambda found: found[1]["torch.int64"].data.zero_(),
    "a nan": lambda found: found[0]["a"].data.fill_(1.0),
    "other memory": give,
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_torch_counts_is_noticed(name: str) -> None:
    found = tables()
    seen = Untouched(found)
    seen.take()
    assert not seen.is_written
    COUNTED[name](found)
    assert seen.is_written
    assert len(seen.written()) == 1
    seen.take()
    assert not seen.is_written
    assert not seen.rewritten()


@pytest.mark.parametrize("name", HIDDEN)
def test_other_values_are_noticed(name: str) -> None:
    found = tables()
    seen = Untouched(found)
    seen.take()
    assert not seen.rewritten()
    HIDDEN[name](found)
    assert len(seen.rewritten()) == 1
    seen.take()
    assert not seen.rewritten()


def test_a_look_takes_no_longer_with_many_tensors() -> None:
    """In calls of Python, which a profile counts."""

    def calls(count: int) -> int:
        seen, number = Untouched([{"b": torch.zeros(4)} for _ in range(count)]), 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal number
            number += 1

        seen.take()
        seen.rewritten()
        gc.disable()  # finalizers that it calls would count
        sys.setprofile(note)
        try:
            assert not seen.is_written
            assert not seen.rewritten()
        finally:
            sys.setprofile(None)
            gc.enable()
        return number

    assert calls(100) == calls(3)
