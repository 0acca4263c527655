"""Tells whose code a function is, and names it so that a reader finds it."""

from __future__ import annotations

from typing import Any, Final


OURS: Final = ("hf_parallel.", "transformers.", "accelerate.")


def module_of(function: Any) -> str:
    """The module in which a function was defined."""
    function = getattr(function, "func", function)  # of a partial
    return getattr(function, "__module__", None) or type(function).__module__


def name_of(function: Any) -> str:
    """The qualified name of a function, as a reader finds it in the code."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
