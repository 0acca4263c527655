"""If these fail, a matrix that was thinned out leaves a row or a layout without any test."""

from __future__ import annotations

import itertools

import pytest
from thinning import FAMILIES, covering, in_turns, unsaid


def test_every_row_meets_every_family_and_every_layout_some_row() -> None:
    layouts = ("dp2", "tp2", *itertools.chain(*FAMILIES))
    cases = [(row, layout) for row in "abcdefg" for layout in layouts]
    kept = covering(cases)
    assert len(kept) == 7 * (2 + len(FAMILIES))
    for row, family in itertools.product("abcdefg", (("dp2",), ("tp2",), *FAMILIES)):
        assert len({(row, layout) for layout in family} & set(kept)) == 1
    assert {layout for _, layout in kept} == set(layouts)


def test_a_row_that_lacks_layouts_of_a_family_takes_another() -> None:
    cases = [("a", "zero1"), ("b", "zero1"), ("c", "dp2"), ("d", "zero1"), ("d", "zero2")]
    assert covering(cases) == [("a", "zero1"), ("b", "zero1"), ("c", "dp2"), ("d", "zero2")]


@pytest.mark.parametrize("step", [None, 2])
def test_values_of_later_axes_are_taken_in_turns(step: int | None) -> None:
    axes = ("abcd", (1, 2), "xyz")
    kept = [case.values for case in in_turns(*axes, step=step) if not case.marks]
    assert len(in_turns(*axes)) == 24
    assert len(kept) == 24 // (step or 3)
    assert {(case[0], case[1]) for case in kept} == set(itertools.product("abcd", (1, 2)))
    assert {case[2] for case in kept} == set("xyz")


def test_what_a_row_is_refused_with_is_said_by_one_of_its_cases() -> None:
    texts = {("a", "zero1"): "part", ("a", "zero3"): "part", ("a", "tp2"): "shard", ("b", "zero1"): "part"}
    cases = [(row, layout) for row in "ab" for layout in ("dp2", "zero1", "zero3", "tp2")]
    kept = [("a", "zero3"), ("b", "dp2")]
    assert set(unsaid(cases, kept, lambda *case: texts.get(case, ""))) == {("a", "tp2"), ("b", "zero1")}
