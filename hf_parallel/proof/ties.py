"""Choices that hang on rounding: a router takes other experts for a token whose scores are equal but for rounding.

No few runs hit the tie that a layout hits. So the references note the scores of every `topk`, and one more run, in which every choice
that is as near as two of them differ is turned, says what such choices are worth.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_parallel.proof.compare import MARGIN


SCORES = "scores.pt"
NEAR = 2 * MARGIN  # times what rounding moves the scores of most rows by: both may move by as much as any tensor may
UNITS = 2  # in the last place: both may move by one


class Ties(TorchFunctionMode):
    """Notes the scores of the choices of one run, and turns near ones if it is told how near.

    Args:
        noise: Size of rounding in the scores of each choice, in the order of execution; empty: no choice is turned.
    """

    def __init__(self, noise: Sequence[float] = ()) -> None:
        super().__init__()
        self._noise = noise
        self._scores: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk) or not args or not args[0].is_floating_point():
            return found
        scores, number = args[0], len(self._scores)
        moved = scores.detach().double()
        self._scores.append(moved.cpu())
        if number >= len(self._noise):
            return found
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        largest = args[3] if len(args) > 3 else kwargs.get("largest", True)
        near = moved.new_tensor(NEAR * self._noise[number])
        moved = moved.scatter_add(dim, found.indices, (-near if largest else near).expand(found.indices.shape))
        indices = func(moved, *args[1:], **kwargs).indices
        return torch.return_types.topk((scores.gather(dim, indices), indices))

    def write(self, folder: Path) -> None:
        """Leave the scores to be compared, if there were any."""
        if self._scores:
            torch.save(self._scores, folder / SCORES)


def noise_of(one: Path, other: Path) -> list[float]:
    """Measure how far rounding moves the scores of each choice, the median over its rows; empty if no scores were noted.

    Scores that were made in bf16 move by whole units in their last place, and those of most rows by none. Two that are `UNITS` such
    units apart, the least that a row moves by, are near as well.
    """
    if not (one / SCORES).exists() or not (other / SCORES).exists():
        return []
    pairs = zip(*(torch.load(folder / SCORES, weights_only=True) for folder in (one, other)), strict=False)
    moves = [_moves(a, b) if a.shape == b.shape else a.new_zeros(1) for a, b in pairs]
    units = [rows[rows > 0].min().item() for rows in moves if rows.any()]
    least = UNITS / NEAR * statistics.median(units or [0.0])
    return [max(rows.median().item(), least) for rows in moves]


def _moves(a: Tensor, b: Tensor) -> Tensor:
    """The most that a score of each row moves by."""
    apart = (a - b).abs().nan_to_num(0.0, 0.0, 0.0)  # masked scores are infinite in both
    return apart.flatten(0, -2).amax(-1) if apart.ndim > 1 else apart.max()[None]
