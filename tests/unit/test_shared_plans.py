"""If these fail, tests train a model with the plan of another one, or plan again what they have planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from shared_plans import _description


def patched(factor: Any, *, method: bool = False) -> Any:
    """As libraries do it: a new function over the forward of each model."""
    model = tiny.llama()
    genuine = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return genuine(*args, **kwargs, factor=factor)

    model.forward = functools.partial(type(model).forward, model, factor) if method else forward
    return model


@pytest.mark.parametrize("method", [False, True])
def test_models_with_functions_of_the_same_code_and_values_are_alike(method: bool) -> None:
    assert _description(patched((2, "a"), method=method)) == _description(patched((2, "a"), method=method))


@pytest.mark.parametrize(
    "other",
    [
        lambda: patched(3),
        lambda: patched([2]),
        lambda: patched(2, method=True),
        lambda: patched(tiny.llama()),
        tiny.llama,
    ],
    ids=["other_value", "state", "other_function", "other_model", "none"],
)
def test_models_whose_functions_differ_in_anything_are_not_alike(other: Callable[[], Any]) -> None:
    assert _description(patched(2)) != _description(other())


def test_what_may_change_is_told_apart_even_if_it_is_equal_now() -> None:
    one, other = patched([2]), patched([2])
    assert _description(one) != _description(other)
