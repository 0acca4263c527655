"""The batches a model is tried with before it is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_parallel.batches import num_rows, split_rows
from hf_parallel.compat.private_peft import base_model
from hf_parallel.compat.private_transformers import other_task
from hf_parallel.errors import ParallelError, PlanError, UnsupportedError
from hf_parallel.model.samples import (
    probe_samples,
    signature_of,
    taken,
    tiny_samples,
    typical_sample,
    typical_shape,
    with_labels_of,
)


class Probes:
    """The batches a model is tried with before it is changed; every rank makes them alike.

    Args:
        model: The whole model.
        device: Device of the model.
        sample: A small batch of the kind it will be trained on, as the collator makes it; None for made-up text.

    Attributes:
        check: Batches of the self-check.
        discovery: Batches for `discover_stages`.
        typical: The batch that costs are measured with.
        cost_tokens: (B, S) that costs are counted for; None for those of the sample.

    Raises:
        PlanError: No sample, and the vocabulary is not known.
    """

    def __init__(self, model: nn.Module, device: torch.device, sample: Mapping[str, Any] | None = None) -> None:
        self._name = type(model).__name__
        self._given = sample is not None
        base = base_model(model)
        task = other_task(base)
        if sample is None:
            size = vocab_size(model)
            # transformers computes softmax in fp32, where what float64 masks with is -inf: what sees padding alone is NaN.
            leads = all(parameter.dtype is not torch.float64 for parameter in model.parameters())
            made = tiny_samples(size, device=device, leads=leads, use_cache=False)
            self.check = [taken(signature_of(model), batch) for batch in made]
            self.discovery = probe_samples(model, size, device)
            self.typical = typical_sample(model, size, device)
            self.cost_tokens: tuple[int, int] | None = typical_shape(model)
            if task is not None:  # its labels are no tokens
                self.check, self.discovery = (
                    [with_labels_of(base, task, batch) for batch in one] for one in (self.check, self.discovery)
                )
                self.typical = with_labels_of(base, task, self.typical)
            return
        batch = {**taken(signature_of(model), {"use_cache": False}), **send_to_device(dict(sample), device)}
        if task is not None and "labels" not in batch and "input_ids" in batch:  # TRL computes a loss of its own
            batch["labels"] = with_labels_of(base, task, batch).get("labels")
        self.check = [batch, *_first_row(batch)]
        self.discovery = [batch, *self._text(model, device)]
        self.typical, self.cost_tokens = batch, None

    @property
    def batch(self) -> dict[str, Any]:
        """The batch that plans are made with."""
        return self.check[0]

    def _text(self, model: nn.Module, device: torch.device) -> list[dict[str, Any]]:
        """Text alone: covered as well if it takes the same path."""
        try:
            return probe_samples(model, vocab_size(model), device)
        except PlanError:
            return []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, an error of the model's own code says that the batch may be the cause.

        Raises:
            PlanError: From any error that is not ours.
        """
        try:
            yield
        except ParallelError:
            raise
        except Exception as error:
            raise PlanError(
                f"cannot plan {self._name}: its forward fails on "
                f"{'the given sample' if self._given else 'a made-up batch of text'} with {type(error).__name__}: {error}. "
                "Pass a small batch of the kind you train on, such as HFParallelCallback(sample=collator([data[0], "
                "data[1]]))."
            ) from error


def _first_row(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first row of a batch by itself; nothing where the batch has one row, no labels, or images that cannot be told apart by rows."""
    rows = num_rows(batch)
    if rows == 1 or not isinstance(batch.get("labels"), torch.Tensor):
        return []
    try:
        return split_rows(batch, rows)[:1]
    except UnsupportedError:
        return []


def vocab_size(model: Any) -> int:
    """Size of the model's (text) vocabulary.

    Raises:
        PlanError: The config does not say.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise PlanError(
            f"{type(model).__name__}: config.vocab_size is {size!r}, so no probe batch can be made. Give a module that holds a model "
            "the config of that model: self.config = model.config."
        )
    return size
