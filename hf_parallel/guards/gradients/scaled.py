"""Whether all stages scaled their gradients by the same number.

`sum(p.grad.norm() ** 2 for p in model.parameters())` is the sum of one stage: clipping by it scales each stage by another
factor, and a step that is left out above a limit (`p.grad = None`) is left out by some stages. Where user code took numbers of
gradients one by one, the factor that it then scaled all of them with is compared; that of cleared ones is zero. The message has a digest of what the
optimizers are set to, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.compat.private_collectives import Pending, all_gather_flat
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.optimizers.settings import OptimizerSettings
from hf_parallel.mesh.groups import Mesh


TOLERANCE = 1e-4
_STEPS, _RANGE = 1e6, 60.0  # a word counts millionths of the logarithm of a factor, from exp(-60) on


class StageFactors:
    """The factor of this stage between a reduction and the optimizer step, and those of the others.

    Args:
        mesh: This rank's mesh.
        settings: Settings of this rank's optimizers.

    Attributes:
        lag: Number of later calls of `settle` after which words are compared, if not by `judge` before, so that no
            stage waits.
    """

    def __init__(self, mesh: Mesh, settings: OptimizerSettings) -> None:
        self._mesh, self._settings = mesh, settings
        self.lag = 0
        self._taken: dict[str, Tensor] = {}
        self._under_way: deque[tuple[Tensor, Pending | None, bool]] = deque()

    def begin(self) -> None:
        """Begin anew for new gradients."""
        self._taken.clear()

    def take(self, name: str, power: Callable[[], Tensor | None]) -> None:
        """Note that user code takes a number of a gradient, whose sum of squares is `power` (0-d) now."""
        if self._mesh.shape.pp_size > 1 and name not in self._taken:
            now = power()
            if now is not None:
                self._taken[name] = now

    def settle(self, power: Callable[[str], Tensor | None]) -> None:
        """Compare, before a step, the factors and settings of the stages; collective over them, two numbers each.

        On a GPU only ranks on which user code took numbers wait for it, and settings are compared in the next step.

        Args:
            power: Sum of squares of a gradient (0-d, f64) as it is now; None if it is gone.

        Raises:
            UnsupportedError: Stages scaled by different numbers.
            RankMismatchError: Their optimizers are set to different things.
        """
        word, group = self.word(power), self._mesh.pp_group
        if group is None:
            return
        device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        mine = torch.empty(2, dtype=torch.int64, device=device)
        mine[0].fill_(0 if word is None else word)
        mine[1].fill_(self._settings.word())
        words = mine.new_empty(self._mesh.shape.pp_size, 2)
        work = all_gather_flat(words.view(-1), mine, group, async_op=self.lag > 0)
        self._under_way.append((words, work, word is not None or device.type == "cpu"))
        while len(self._under_way) > self.lag:
            self._compare(*self._under_way.popleft())

    def judge(self) -> None:
        """Compare what the stages told each other, if it was not compared yet.

        Raises:
            UnsupportedError: For the reasons of `settle`.
        """
        while self._under_way:
            self._compare(*self._under_way.popleft())

    def _compare(self, words: Tensor, work: Pending | None, reads: bool) -> None:
        if work is not None:
            work.wait()
        if not reads:
            return
        told_now = words.tolist()
        self.refuse_unlike([factor for factor, _ in told_now])
        if work is None and words.is_cpu:
            self._settings.refuse_unlike_stages([setting for _, setting in told_now])

    def word(self, power: Callable[[str], Tensor | None]) -> Tensor | None:
        """A number for the factor since `begin` (0-d int64), 0 for none; None if too few numbers were taken.

        Args:
            power: Sum of squares of a gradient, as for `settle`.
        """
        before, self._taken = self._taken, {}
        now = {name: power(name) for name in before}
        if len(before) < 2 or len({value is None for value in now.values()}) > 1:
            return None
        values = [torch.zeros_like(before[name]) if value is None else value for name, value in now.items()]
        return _word(torch.stack(list(before.values())), torch.stack(values))

    def refuse_unlike(self, words: Sequence[int]) -> None:
        """Compare factors.

        Args:
            words: Words of the ranks of this model copy.

        Raises:
            UnsupportedError: They differ.
        """
        found = [word for word in words if word]
        if found and max(found) - min(found) > TOLERANCE * _STEPS:
            factors = " and ".join(f"{_factor(word):.4g}" for word in dict.fromkeys(found))
            raise UnsupportedError(
                f"all gradients of a stage were multiplied by one number, which is {factors} on different stages, after "
                f"numbers were taken of single gradients: with pp_size={self._mesh.shape.pp_size} a rank has the gradients of its "
                "stages only, so what is added up over model.parameters() is not that of the model. Use "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), limit), torch.nn.utils.get_total_norm or max_grad_norm, which "
                "count all stages, or set pp_size to 1."
            )


def _factor(word: int) -> float:
    return 0.0 if word == 1 else math.exp((word - 1) / _STEPS - _RANGE)


def _word(before: Tensor, now: Tensor) -> Tensor:
    """Word for sums of squares of gradients, f64[n]: 0 unless all were scaled alike; 1 if all were cleared."""
    kept = (before > 0) & (now > 0)
    logs = 0.5 * (torch.where(kept, now, 1.0).log() - torch.where(kept, before, 1.0).log())
    least, most = torch.where(kept, logs, math.inf).min(), torch.where(kept, logs, -math.inf).max()
    alike = (most - least <= TOLERANCE) & (kept.sum() > 1) & (now.bool() == before.bool()).all()
    steps = ((0.5 * (least + most)).clamp(-_RANGE, _RANGE).nan_to_num() + _RANGE) * _STEPS
    cleared = (now == 0).all() & (before > 0).any()
    return torch.where(alike & ~cleared, 1 + steps.round().to(torch.int64), cleared.to(torch.int64))
