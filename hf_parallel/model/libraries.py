"""Tells whose code a model is made of."""

from __future__ import annotations

from typing import Final


STOCK: Final = (
    "torch",
    "transformers",
    "peft",
)  # packages whose code does not depend on which block of a stack runs it
QUANTISES: Final = ("bitsandbytes",)  # nor does theirs, but their layers may write to their weights
LIBRARIES: Final = frozenset(
    {*STOCK, "accelerate", "bitsandbytes", "deepspeed", "hf_parallel", "liger_kernel", "torchao", "trl"}
)


def package_of(module: str) -> str:
    """The package of a Python module, by its name."""
    return module.partition(".")[0]
