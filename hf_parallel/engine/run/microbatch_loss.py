"""Cutting a batch into microbatches whose losses add up to the loss of the batch.

A model divides its loss by the label tokens it sees. A microbatch must be divided by those of the whole batch instead, and
each kind of loss (`plan/loss_kind.py`) is told so in its own way: by an argument, by a factor afterwards, or not at all, in
which case the batch stays whole.

Extents: V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from hf_parallel.batches import count_targets, empty_microbatch, num_rows, split_rows
from hf_parallel.compat.private_transformers import loss_functions
from hf_parallel.guards.calls.reads import Reads
from hf_parallel.pipeline_parallel.plan.loss_kind import LossKind


logger = logging.getLogger(__name__)

LossFunction: TypeAlias = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Share:
    """Contribution of one microbatch to the loss of its batch.

    Args:
        batch: Index of the batch.
        labels: The labels, for a loss function that is called beside the model.
        num_items: Normaliser of a sum over label positions.
        weight: Factor of the microbatch's loss.
        missing: Loss of the microbatch if it has no labels, for a mean over labels (0-d).
    """

    batch: int
    labels: torch.Tensor | None
    num_items: Any
    weight: float | torch.Tensor = 1.0
    missing: torch.Tensor | None = None


class MicrobatchLoss:
    """The loss of one model, computed by microbatches.

    Args:
        model: The model.
        kind: Way in which its own loss may be computed (see `loss_kind.judge_loss`).
        num_microbatches: Parts a batch is cut into, at most its rows.
        shifted: Whether the first label of a row is no target of the model's own loss.
        fills_up: Whether batches with fewer rows get empty microbatches: replicas that share experts run equally many.
    """

    def __init__(
        self, model: nn.Module, kind: LossKind, num_microbatches: int, *, shifted: bool, fills_up: bool = False
    ) -> None:
        self._fills_up = fills_up
        self._model, self._kind = model, kind
        self._num_microbatches, self._shifted = num_microbatches, shifted
        self._judged = loss_functions(model)
        self._reads = Reads(self._judged)
        self._function: LossFunction | None = None
        self._function_shifts = True

    @property
    def takes_whole_batches(self) -> bool:
        """Whether each batch runs as one microbatch."""
        return self._function is None and self._kind == "whole"

    @property
    def kind(self) -> LossKind:
        """Way in which the model's own loss is computed now."""
        return self._kind

    @contextmanager
    def replaced_by(self, function: LossFunction, *, shifted: bool) -> Iterator[None]:
        """Inside, `function(outputs, labels, num_items_in_batch=n)` computes the loss from the model's outputs."""
        self._function, self._function_shifts = function, shifted
        try:
            yield
        finally:
            self._function = None

    def check(self) -> None:
        """Use whole batches, which is always right, if the loss function, or what it reads, was replaced since it was judged."""
        if self._kind == "whole":
            return
        now = loss_functions(self._model)
        if any(a is not b for a, b in zip(now, self._judged, strict=True)) or self._reads.changed():
            self._kind = "whole"
            logger.warning(
                "hf_parallel: the loss function of %s, or something that it reads, was replaced after the model was parallelized, so "
                "every batch runs as one microbatch. Replace it before trainer.train(), so that its kind can be found out.",
                type(self._model).__name__,
            )

    def split(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Microbatches of a batch without labels."""
        return split_rows(batch, self._num_microbatches)

    def num_parts(self, batch: dict[str, Any]) -> int:
        """Microbatches of a batch with labels."""
        rows = self._num_microbatches if self._fills_up else num_rows(batch)
        return 1 if self.takes_whole_batches else min(self._num_microbatches, rows)

    def cut(self, index: int, batch: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Share]]:
        """Microbatches of a batch with labels, each with its part in the loss.

        Args:
            index: Index of the batch.
            batch: The model's inputs by name.
        """
        if self.takes_whole_batches:
            yield dict(batch), Share(index, batch["labels"], batch.get("num_items_in_batch"))
            return
        whole = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
        total, num_items = self._counts(whole, batch.get("num_items_in_batch"))
        parts = self.split(whole)
        missing_parts = self.num_parts(batch) - len(parts)
        for part, microbatch in enumerate([*parts, *(empty_microbatch(whole) for _ in range(missing_parts))]):
            labels = microbatch.get("labels")
            weight: float | torch.Tensor = 1.0
            missing: torch.Tensor | None = None
            if self._function is not None:
                del microbatch["labels"]
            elif self._kind == "mean":
                weight = count_targets(microbatch, self._shifted) / total.clamp(min=1)
                missing = torch.where(total > 0, 0.0, torch.nan)
            else:
                if self._kind == "sum_and_extra":
                    # c / (N w) + a, times w, is c / N + a w: the sum stays, the extra term is averaged over the rows.
                    weight = num_rows(microbatch) / num_rows(whole) if part < len(parts) else 0.0
                microbatch["num_items_in_batch"] = num_items if weight in (0.0, 1.0) else num_items * weight
            yield microbatch, Share(index, labels, num_items, weight, missing)

    def _counts(self, whole: dict[str, Any], given: Any) -> tuple[Any, Any]:
        """Label tokens of a batch, and what its sum is divided by: the number that upstream code gave, if it did."""
        if self._function is not None:
            counted = given if given is not None else count_targets({"labels": whole["labels"]}, self._function_shifts)
        elif given is None or self._kind == "mean":
            counted = count_targets(whole, self._shifted)
        else:
            counted = given
        return counted, counted if given is None else given

    def of(self, output: Any, share: Share) -> torch.Tensor:
        """The loss (0-d) of one microbatch, from the output of the last stage; they add up to the batch's loss."""
        if self._function is not None:
            return self._function(output, share.labels, num_items_in_batch=share.num_items)
        loss: torch.Tensor = output["loss"]
        if share.missing is None:
            return loss if isinstance(share.weight, float) and share.weight == 1.0 else loss * share.weight
        # A mean over no label is nan, and cross-entropy gives ignored positions a gradient of zero whatever it gets itself.
        return torch.where(torch.as_tensor(share.weight) > 0, loss * share.weight, share.missing)
