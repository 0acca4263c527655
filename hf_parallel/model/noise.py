"""Switching the noise of NEFTune off around some calls, without leaving training mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


ALPHA = "neftune_noise_alpha"  # where transformers' hook on the embeddings, and those of TRL and PEFT, read its size


@contextmanager
def without_noise(model: nn.Module) -> Iterator[None]:
    """Inside, the noise that `TrainingArguments(neftune_noise_alpha=...)` adds to embeddings is zero."""
    sizes = [(module, vars(module)[ALPHA]) for module in model.modules() if ALPHA in vars(module)]
    for module, _ in sizes:
        setattr(module, ALPHA, 0.0)
    try:
        yield
    finally:
        for module, size in sizes:
            setattr(module, ALPHA, size)
