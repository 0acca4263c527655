"""Notices what user code does to gradients that are parts of shards: norms that torch takes of them are those of one rank."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.awaited import Awaited


class ChangedParts:
    """Compares gradients before a step with what the reduction left; a change of a DTensor leaves no other trace.

    No step waits for a GPU: its answer is judged before the next one, when the device has long got to it.

    Args:
        power: The sum of the squares of this rank's parts (0-d).
        tp_size: Ranks that share each layer.
    """

    def __init__(self, power: Callable[[], Tensor], tp_size: int) -> None:
        self._power, self._tp_size = power, tp_size
        self._known: Tensor | None = None
        self._changed = Awaited(self._judge)

    def remember(self) -> None:
        """Remember the gradients as they are now, which is right."""
        self._known = self._power()

    def remember_again(self) -> None:
        """Remember them again after a change of our own."""
        if self._known is not None:
            self.remember()

    def refuse_changes(self) -> None:
        """Refuse, before a step, gradients that are not those of `remember`; on a GPU a step later.

        Raises:
            UnsupportedError: Gradients were changed, on a GPU those of the step before.
        """
        self.judge()
        known, self._known = self._known, None
        if known is None:
            return
        self._changed.give((known == known) & (known != self._power()))  # NaN is no change

    def judge(self) -> None:
        """Judge a step that is not judged yet; before its weights are evaluated or saved.

        Raises:
            UnsupportedError: Its gradients were changed.
        """
        self._changed.settle()

    def _judge(self, changed: Tensor) -> None:
        if changed:
            raise UnsupportedError(
                "gradients were changed between the backward pass and the step (torch.nn.utils.clip_grad_norm_, p.grad.mul_) with "
                f"tp_size={self._tp_size} and parameters shared out over replicas: a norm of them counts this rank's "
                "shards only. Use max_grad_norm or accelerator.clip_grad_norm_, hooks on parameters, or zero.stage 1 or 2 of the "
                "native engine."
            )
