"""Compare weights and settings of optimizers of replicas in every step: each updates its copy by itself.

A checkpoint and the end of a Trainer compare them too (`drift`), but a loop of one's own may have neither. A digest of the settings and
of a few elements of some weights, others in each step, rides on the first bucket of gradients, bit by bit: the sum of a bit is none
or all of the ranks where they are alike. Only where it is not do the ranks look closer.

The weights are those that the last update has left. What one rank changes after it may be meant for a file (an average that it saves), so
nothing is compared before the next update has made it everybody's. Ranks with other parts of the model hear of a refusal by the end of
those that raise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.compat.torch_tools import sent_to
from hf_parallel.guards.awaited import Awaited
from hf_parallel.guards.optimizers.settings import OptimizerSettings
from hf_parallel.guards.weights.alike import Slot
from hf_parallel.guards.weights.drift import drift_of, refuse_apart


ELEMENTS = 8  # that are looked at of a weight
WEIGHTS = 64  # that are looked at in a step, others in the next: what is unlike stays so
BITS = 24  # a difference stays unseen in one step of 16 millions
EXACT = 256  # ranks up to which bf16 holds the sum of a bit
MAX_PAUSE = 1024  # steps


class AlikeReplicas:
    """Compares the weights of replicas, and the settings of their optimizers.

    Args:
        named: Names and parameters that the replicas train.
        group: The replicas.
        settings: Settings of this rank's optimizers.

    Attributes:
        num_bits: Bits of the digest.
    """

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup, settings: OptimizerSettings
    ) -> None:
        self._parameters, self._group, self._settings = dict(named), group, settings
        parameters = [parameter for _, parameter in named]
        parts = range(-(-len(named) // WEIGHTS))
        self._slots = cycle([Slot(parameters[part :: len(parts)], ELEMENTS) for part in parts])
        self._slot = next(self._slots)
        self._updated: Tensor | int | None = None  # digest of the weights of the slot after the last update
        self._device = named[0][1].device
        self._places = torch.arange(BITS, device=self._device)
        self._awaited = Awaited(self._judge)
        self._pause, self._steps_left = 0, 0  # after differences of rounding
        self.num_bits = BITS

    @torch.no_grad()
    def updated(self) -> None:
        """Look at the weights that an optimizer has just updated, without waiting for a GPU."""
        self._updated = self._slot.digest()

    def bits(self) -> Tensor:
        """Return zeros and ones of this rank, f[BITS], without waiting for a GPU."""
        if self._updated is None:
            self.updated()
        return self._taken()

    @torch.no_grad()
    def _taken(self) -> Tensor:
        """The bits of the settings and of the last update, if none was taken since; other weights are next."""
        digest = (0 if self._updated is None else self._updated) ^ self._settings.word(of_stage=True)
        self._slot, self._updated = next(self._slots), None
        if isinstance(digest, Tensor):
            return ((digest >> self._places) & 1).float()
        return sent_to(self._device, [float(digest >> place & 1) for place in range(BITS)])

    def judge(self, sums: Tensor) -> None:
        """Look closer where ranks differ, on a GPU when the next step comes; collective over the replicas then.

        Raises:
            RankMismatchError: Names a setting or a weight that differs, on every rank.
        """
        if sums.dtype.itemsize > 2 or self._group.size() <= EXACT:
            self._awaited.give(sums.float())

    def compare(self) -> None:
        """Compare what the last update has left, of which no bucket follows; collective over the replicas. Waits for a GPU.

        Raises:
            RankMismatchError: Names a setting or a weight that differs, on every rank.
        """
        sums = self._taken()
        dist.all_reduce(sums, group=self._group)
        self.judge(sums)
        self._awaited.settle()

    def _judge(self, sums: Tensor) -> None:
        if self._steps_left:
            self._steps_left -= 1
        elif bool(((sums != 0) & (sums != self._group.size())).any()):
            words: list[Any] = [None] * self._group.size()
            dist.all_gather_object(words, self._settings.word(of_stage=True), group=self._group)
            self._settings.refuse_unlike_copies(words, self._group)
            refuse_apart(*drift_of(self._parameters, self._group))
            self._pause = min(MAX_PAUSE, 2 * self._pause + 1)
            self._steps_left = self._pause
