"""Products of user code and layouts: `make test-long` runs those that cover them, the rest is slow (`make test-all`).

Layouts of one family differ in little of what user code can see. A case of the product is one that covers it if its
layout is in no family, or is the one that the family lends to this row; rows take them in turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest


# Flat parts of what the optimizer has, with whole gradients, with parts of them, and in host memory; and pairs of axes.
FAMILIES = (("zero1", "zero2", "zero1_offload"), ("pp2_zero1", "tp2_zero1", "pp2_dp2"))


def covering(cases: Sequence[tuple[str, str]], families: Sequence[Sequence[str]] = FAMILIES) -> list[tuple[str, str]]:
    """Those of the cases (row, layout) that cover them: every row meets every family, every layout of one some rows."""
    kept = []
    for index, row in enumerate(dict.fromkeys(row for row, _ in cases)):
        layouts = [layout for name, layout in cases if name == row]
        for family in families:
            found = [layout for layout in family if layout in layouts]
            for layout in found:
                if layout != found[index % len(found)]:
                    layouts.remove(layout)
        kept += [(row, layout) for layout in layouts]
    return kept


def unsaid(
    cases: Sequence[tuple[str, str]], kept: Sequence[tuple[str, str]], text_of: Callable[[str, str], str]
) -> list[tuple[str, str]]:
    """A case of every row and text that it is refused with (none: "") where no kept case of the row is refused with it."""
    said = {(row, text_of(row, layout)) for row, layout in kept}
    found = {(row, text): (row, layout) for row, layout in reversed(cases) if (text := text_of(row, layout))}
    return [case for key, case in found.items() if key not in said]


def thinned(cases: Sequence[tuple[str, str]], families: Sequence[Sequence[str]] = FAMILIES) -> list[Any]:
    """The cases as parameters; those that are not needed to cover them are slow."""
    kept = covering(cases, families)
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.slow) for case in cases]


def chosen(
    request: pytest.FixtureRequest, cases: Sequence[tuple[str, str]], names: tuple[str, str] = ("name", "layout")
) -> list[tuple[str, str]]:
    """Those of the cases whose tests of this file run: `-m` and `-k` have left out others."""
    items: list[Any] = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    given = [item.callspec.params for item in items if item.callspec.params.keys() >= set(names)]
    run = {tuple(params[name] for name in names) for params in given}
    return [case for case in cases if case in run]


def in_turns(*axes: Sequence[Any], step: int | None = None) -> list[Any]:
    """The product of axes as parameters, of which those are slow that are not needed for every pair of a first and a later value.

    Args:
        axes: Values of each.
        step: One of so many is kept; None: of as many as the last axis has values, which the others then take in turns.
    """
    every = step or len(axes[-1])
    product = itertools.product(*(enumerate(axis) for axis in axes))
    cases = (tuple(zip(*case, strict=True)) for case in product)
    return [
        pytest.param(*values, marks=() if sum(places) % every == 0 else pytest.mark.slow) for places, values in cases
    ]


def half_long(parameters: Sequence[Any]) -> list[Any]:
    """The same; of those that are not slow every other one is long."""
    quick = [parameter for parameter in parameters if not parameter.marks]
    return [
        pytest.param(*parameter.values, marks=pytest.mark.long) if parameter in quick[1::2] else parameter
        for parameter in parameters
    ]


def slow_if(name: object, rest: Collection[object]) -> Any:
    """Marks of a case that are those of the rest of a product, or none."""
    return pytest.mark.slow if name in rest else ()


def rest_runs(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests of this file run too, so that a fixture has to make what they look at."""
    return any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)
