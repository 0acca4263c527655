"""Numbers by which user code changes shards of gradients: one process has one for the whole, so all ranks with a shard must have it.

`p.grad.mul_(0.01 * p.detach().norm() / p.grad.norm())` in a loop of users takes the norm of this rank's part of the weight, and
would change each shard by another number. The numbers of a rank travel as one, beside what is sent anyway: norms of single
gradients that user code reads (on CPUs), and the digests of the next batch. Those of the last step are compared in
`accelerator.wait_for_everyone()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.data_parallel.loss_numbers import TOLERANCE, LossNumbers
from hf_parallel.errors import RankMismatchError
from hf_parallel.mesh.groups import Mesh


_STEPS = 1e6  # a word counts millionths


class NumbersOfShards:
    """Notes of this rank's numbers since a batch began.

    Args:
        mesh: This rank's mesh.

    Attributes:
        note_part: Called with the parameter's name and a tensor of the shard's shape by which the shard of its gradient is changed.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._group = mesh.parts.group
        self._numbers = LossNumbers()
        self._sum: Tensor | float = 0.0
        self.note_part: Callable[[str, Tensor], None] = lambda name, given: None
        self._names: list[str] = []  # of parameters whose gradients were changed since numbers were last the same

    def note(self, name: str, given: Iterable[object]) -> None:
        """Note that the shard of a gradient is changed.

        Args:
            name: The parameter's name.
            given: What it is changed by; numbers, and tensors that are the same for each of its rows, are noted.
        """
        if self._group is None:
            return
        self._names.append(name)
        for one in given:
            if isinstance(one, Tensor):
                self._numbers.note(one if one.numel() == 1 else one.detach().double().sum())
            elif isinstance(one, int | float) and math.isfinite(one):  # else it overflows, and all ranks skip the step
                self._numbers.note(one)

    def word(self) -> Tensor | int:
        """A number for all that were noted (a 0-d i64 of a GPU), 0 for none; begins anew."""
        taken = self._so_far()
        self._sum = 0.0
        return (taken * _STEPS).round().to(torch.int64) if isinstance(taken, Tensor) else round(taken * _STEPS)

    def refuse_unlike(self, words: Sequence[int]) -> None:
        """Compare the words of ranks.

        Args:
            words: Words of the ranks of this model copy.

        Raises:
            RankMismatchError: Ranks of one stage have changed their shards by different numbers.
        """
        size = self._mesh.shape.stage_size
        for start in range(0, len(words), size):
            self._refuse_unlike([word / _STEPS for word in words[start : start + size]])
        self._names.clear()

    def beside(self, powers: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Powers to be reduced over the ranks that have shards, f64[n], and behind them a slot for the notes of each: f64[n + ranks]."""
        fill = 0.0 if operation == dist.ReduceOp.SUM else -math.inf
        slots = powers.new_full((self._mesh.parts.size,), fill)
        slots[self._mesh.parts.rank] = self._so_far()
        return torch.cat([powers, slots])

    def compared(self, reduced: Tensor) -> Tensor:
        """Powers that `beside` has lengthened, once they are reduced; the slots behind them are compared.

        Raises:
            RankMismatchError: Ranks have changed their shards by different numbers.
        """
        size = self._mesh.parts.size
        self._refuse_unlike(reduced[-size:].tolist())
        self._names.clear()
        return reduced[:-size]

    def compare(self) -> None:
        """Compare the notes where no batch follows that would; collective over the ranks that have shards.

        Raises:
            RankMismatchError: Ranks have changed their shards by different numbers.
        """
        if self._group is None:
            return
        device = torch.device("cuda" if dist.get_backend(self._group) == "nccl" else "cpu")
        slots = torch.zeros(self._mesh.parts.size, dtype=torch.int64, device=device)
        slots[self._mesh.parts.rank] = self.word()
        dist.all_reduce(slots, group=self._group)
        self._refuse_unlike([word / _STEPS for word in slots.tolist()])

    def _so_far(self) -> Tensor | float:
        self._sum = self._sum + self._numbers.take()
        return self._sum

    def _refuse_unlike(self, numbers: Sequence[float]) -> None:
        if max(numbers) - min(numbers) <= TOLERANCE:
            return
        key = "ep_size" if self._mesh.shape.ep_size > 1 else "tp_size"
        names = list(dict.fromkeys(self._names))
        changed = f"of {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "") if names else "of other ranks"
        raise RankMismatchError(
            f"gradients ({changed}) were changed by numbers that differ between ranks, with {key}={self._mesh.parts.size}: each of them "
            "has a part of these parameters. In a loop of your own a norm of a weight is that of this rank's part (p.norm(), "
            "p.detach().norm() or p.data.norm() beside p.grad.norm(), which is that of the whole). Take that of the whole, "
            f"(torch.zeros_like(p.grad) + p.detach()).norm(), change gradients on all ranks alike, or set {key} to 1."
        )
