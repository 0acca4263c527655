"""The batches of one accumulation window, which run as the microbatches of one schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.batches import Announced


# What the Trainer adds to a batch when it calls the model.
COUNTS = frozenset({"num_items_in_batch", "use_cache"})
STEP_IN_WINDOW = (
    "an optimizer step is due before the last of the batches that were fetched for it, with pp_size above 1: they ran as one "
    "schedule, so the step would have the gradients of all. Change TrainingArguments.gradient_accumulation_steps between epochs "
    "(on_epoch_begin), and not where a run resumes within an epoch."
)
RunSchedule = Callable[[list[dict[str, Any]]], list[torch.Tensor]]


class Window:
    """Batches that were announced before their forwards. The first forward runs them all, the others return its losses.

    Args:
        batches: In the order in which the model will be called with them.

    Attributes:
        seed: Factor of the losses that the schedule backpropagated.
    """

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self._batches = [Announced(batch) for batch in batches]
        self._losses: list[torch.Tensor] = []
        self._extras: dict[str, Any] = {}
        self._position = 0
        self.seed = 1.0

    @property
    def has_begun(self) -> bool:
        """Whether the schedule of all batches has run, and some of its losses are still to be given out."""
        return 0 < self._position < len(self._batches)

    def holds(self, batch: dict[str, Any]) -> bool:
        """Whether `batch` is the next one, with the very tensors announced, unchanged.

        Raises:
            UnsupportedError: It is not, and the schedule of the whole window has run already.
        """
        if self._position == len(self._batches):
            return False
        same = self._batches[self._position].is_in(batch, COUNTS)
        if self._position == 0:
            return same
        if same and all(batch.get(name) is value for name, value in self._extras.items()):
            return True
        raise UnsupportedError(
            f"batch {self._position} of an accumulation window changed between the data loader and the model: "
            "the schedule of the whole window has already run. Change batches in the collator instead."
        )

    def next_loss(self, batch: dict[str, Any], run: RunSchedule) -> torch.Tensor:
        """The loss (0-d) of the batch that `holds` found to be the next.

        Args:
            batch: Batch with which the model was called.
            run: Runs the schedule of all batches, and gives a loss for each.
        """
        if self._position == 0:
            self._extras = {name: value for name, value in batch.items() if name in COUNTS}
            self._losses = run([{**other.batch, **self._extras} for other in self._batches])
        loss = self._losses[self._position]
        self._position += 1
        return loss


class WindowFactors:
    """The factor that upstream code gives all losses of a window: one number, which is applied to the summed gradients."""

    def __init__(self) -> None:
        self._factors: list[torch.Tensor] = []

    def forget(self) -> None:
        """Forget the factors of the window before."""
        self._factors = []

    def add(self, factor: torch.Tensor) -> None:
        """Note the factor (0-d) of one loss, which stays on its device."""
        self._factors.append(factor)

    def take(self) -> float:
        """The factor of all losses of the window, which ends; waits for the device once.

        Raises:
            UnsupportedError: Some losses have another factor than the first.
        """
        factors: list[float] = torch.stack(self._factors).tolist()
        self.forget()
        if not all(abs(factor - factors[0]) <= 1e-6 * abs(factors[0]) for factor in factors):
            raise UnsupportedError(
                f"the losses of one accumulation window were scaled differently: {factors}. A fused pipeline "
                "step applies one factor to the gradients of the whole window; scale inside compute_loss_func, or "
                "in a compute_loss or training_step of a Trainer subclass."
            )
        return factors[0]
