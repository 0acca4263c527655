"""Replicas that each update all weights: their optimizers' settings must be the same, and no message of a step has them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hf_parallel.compat.private_collectives import rows_of_ranks
from hf_parallel.guards.awaited import Awaited
from hf_parallel.guards.optimizers.settings import OptimizerSettings


EVERY = 8  # steps: a message of one number, which a plain all-reduce of gradients has no room for


class SettingsOfCopies:
    """Compares the settings of the replicas in the first step and in each `EVERY` steps later.

    Args:
        group: The replicas.
        settings: Settings of this rank's optimizers.
        device: Device that the ranks send from.
    """

    def __init__(self, group: dist.ProcessGroup, settings: OptimizerSettings, device: torch.device) -> None:
        self._group, self._settings, self._device, self._steps = group, settings, device, 0
        self._awaited = Awaited(self._judge)

    def before_step(self) -> None:
        """Compare the optimizers' settings before a step; collective over the replicas in some steps.

        Raises:
            RankMismatchError: A setting differs; on each of these ranks. On a GPU at the next comparison.
        """
        self._steps += 1
        if self._steps % EVERY == 1:
            word = torch.full((1,), self._settings.word(), dtype=torch.float64, device=self._device)
            self._awaited.give(rows_of_ranks(word, self._group))

    def settle(self) -> None:
        """Judge what is not judged yet."""
        self._awaited.settle()

    def _judge(self, words: torch.Tensor) -> None:
        self._settings.refuse_unlike_copies([int(word) for word in words.flatten().tolist()], self._group)
