"""Numbers that parts of weights are changed by, or losses over them computed with: each rank does it to its rows only, with its own.

`(loss.detach() * weight.square().sum()).backward()` under ZeRO 3 would give each rank's rows that replica's factor, where one
process has the mean of all, and `if accelerator.is_main_process: weight.mul_(0.9)` would change the rows of one rank. The numbers of
a rank travel as one, with the sum for the gradient norm, and are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from zlib import crc32

import torch
from torch import Tensor

from hf_parallel.errors import RankMismatchError


# Of sums of logarithms: what unlike GPUs round differently stays below it, factors that are 0.1 % apart do not.
TOLERANCE = 1e-4
SMALLEST, ABOVE = 1e-300, 700.0  # whose logarithm zero has, and what makes all logarithms positive
NO_NUMBER = 2000.0  # stands for one that is not finite


class LossNumbers:
    """Notes of this rank's numbers since the last comparison.

    Attributes:
        in_step: Whether an optimizer makes its update, which all ranks make alike.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sum: Tensor | float = 0.0
        self.in_step = False

    def note(self, number: Tensor | float) -> None:
        """Note a number that a loss, or its backward pass, computes with. A GPU is not waited for."""
        self._count += 1
        weight = 1.0 + 0.618 * self._count % 1.0  # their order counts
        if isinstance(number, Tensor) and number.device.type == "cpu":
            number = number.item()
        mark = _mark_of_tensor(number) if isinstance(number, Tensor) else _mark(number)
        self._sum = self._sum + weight * mark

    def note_change(self, function: str, given: Iterable[object]) -> None:
        """Note that a function, of this name in all processes, changes parts in place, with the numbers among what it is given."""
        self.note(1.0 + crc32(function.encode()) % 1000)
        for one in given:
            if isinstance(one, int | float) or (isinstance(one, Tensor) and one.numel() == 1):
                self.note(one)

    def take(self) -> Tensor | float:
        """One number (f64) for all that were noted, 0 if there were none; begins anew."""
        taken, self._sum, self._count = self._sum, 0.0, 0
        return taken


def _mark(number: float) -> float:
    if not math.isfinite(number):
        return NO_NUMBER
    return math.copysign(math.log(max(abs(number), SMALLEST)) + ABOVE, number)


def _mark_of_tensor(number: Tensor) -> Tensor:
    value = number.detach().reshape(()).double()
    mark = torch.copysign(value.abs().clamp(min=SMALLEST).log() + ABOVE, value)
    return torch.where(value.isfinite(), mark, NO_NUMBER)


NUMBERS = LossNumbers()  # of this process, as the functions of torch are that notice them


def refuse_unlike_numbers(rank: int) -> None:
    """Refuse numbers that a message has shown to differ.

    Args:
        rank: Rank that computed with others than the first rank that shares its weights; 0 if there is none.

    Raises:
        RankMismatchError: There is one.
    """
    if rank:
        raise RankMismatchError(
            f"rank {rank} computed a loss over weights (a penalty), or changed weights, gradients or copies of them, with other numbers than "
            "the other replicas: a factor or a limit of its own batch, or on some ranks only (`if accelerator.is_main_process:`). With ZeRO each rank "
            "does so to its part of a weight with its own numbers, so they must be the same on all. Do it on every rank, average numbers "
            'over the replicas (accelerator.reduce(loss.detach(), "mean")), multiply a loss with the whole, p.full_tensor(), or set '
            "zero.stage to 1 or 2 of the native engine for the sake of a loss."
        )
