"""Compares, once a step before the gradients are reduced, what the ranks of one model copy backpropagated.

User code computes its loss on every rank, but only one rank's counts: the last stage's gradient of the logits, or each
rank's own factor on its own stage's gradients. Where they differ (a NaN, a draw, a rank in the formula) nothing else
would tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.errors import RankMismatchError, UnsupportedError
from hf_parallel.guards.awaited import on_its_way
from hf_parallel.guards.optimizers.settings import OptimizerSettings
from hf_parallel.mesh.groups import Mesh


TOLERANCE = 1e-5  # of one computation on the same kind of device
NO_NUMBER = 1e30  # stands for one that is not finite: equal ones are alike, and the model's own doing
OF_HEADS = ", or a loss on keys or values of a cache, of which each rank has its own heads"
LATE = (
    "A GPU is not waited for within a step, so the optimizer has made this update; nothing was evaluated or saved since. Go back to "
    "the last checkpoint."
)


class Backwards:
    """Notes of the backward passes since the last optimizer step.

    Args:
        mesh: This rank's mesh.
        device: Device of the gradients.
        settings: Settings of this rank's optimizers, which are compared in the same message.
    """

    def __init__(self, mesh: Mesh, device: torch.device, settings: OptimizerSettings) -> None:
        self._mesh, self._device, self._settings = mesh, device, settings
        self._weights: dict[int, Tensor] = {}
        self._under_way: tuple[Tensor, torch.cuda.Event, bool] | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._marks: list[Tensor | float] = []  # numbers on a CPU, where an operation on a tensor costs more
        self._sizes: list[Tensor | float] = []  # of gradients; that of a number is its magnitude
        self._on_logits = False
        self._beside: Tensor | None = None  # f[2]: a mark and a size of what only the loss reads

    def scaled(self, factor: Tensor) -> None:
        """Note `factor` (one element), which a loss was multiplied with before its backward."""
        self._note(factor, factor)

    def lost(self, loss: Tensor) -> None:
        """Note a loss (one element) that is backpropagated."""
        self._note(loss, loss)

    def arrived(self, gradient: Tensor) -> None:
        """Note the gradient f[B S V] of the logits, which every rank has computed for itself."""
        self._on_logits = True
        flat = gradient.detach().reshape(-1, gradient.shape[-1]).float()
        self._note(self._projected(flat), torch.linalg.vector_norm(flat))

    def beside(self, name: str, gradient: Tensor) -> None:
        """Note a gradient of the parameter `name` from past the model's forward, which every rank has computed for itself."""
        flat = gradient.detach().reshape(-1, gradient.shape[-1] if gradient.ndim else 1).float()
        weighed = self._projected(flat) * (
            1.0 + crc32(name.encode()) / 2**32
        )  # by name: the order of arrival may be another one
        both = torch.stack([weighed, torch.linalg.vector_norm(flat)]).nan_to_num(NO_NUMBER, NO_NUMBER, -NO_NUMBER)
        self._beside = both.double() if self._beside is None else self._beside + both

    def _projected(self, flat: Tensor) -> Tensor:
        across, along = self._numbers(flat.shape[1]), self._numbers(flat.shape[0])
        return flat @ across @ along

    def _note(self, mark: Tensor, size: Tensor) -> None:
        first = self._number(mark)
        self._marks.append(first)
        self._sizes.append(first if size is mark else self._number(size))

    def _number(self, value: Tensor) -> Tensor | float:
        here = self._device.type == "cpu"
        return value.item() if here else value.detach().reshape(()).to(torch.float64, copy=True)

    def _numbers(self, count: int) -> Tensor:
        """Fixed numbers to project on: equal norms would hide other labels."""
        size = 1 << max(count - 1, 1).bit_length()
        if size not in self._weights:
            made = torch.randn(size, generator=torch.Generator().manual_seed(size))
            self._weights[size] = made.to(self._device)
        return self._weights[size][:count]

    def agree(self, direct: Sequence[str], *, tolerates_nan: bool) -> None:
        """Compare with the other ranks of this model copy; collective. Waits for the device once.

        Args:
            direct: Parameters that got a gradient past the stages on this rank.
            tolerates_nan: Whether a loss scale may overflow.

        Raises:
            RankMismatchError: On every rank, with what each of them did.
            UnsupportedError: On every rank: some rank has direct gradients, or all multiplied with a number that is none.
        """
        on_logits = self._on_logits
        values = self._gathered(direct).tolist()
        if any(found for _, found, *_ in values):
            self._refuse_direct(direct)
        self._compare([(int(n), mark, size) for n, _, mark, size, *_ in values], on_logits, tolerates_nan)
        self._compare_beside([(mark, size) for *_, mark, size in values])
        self._settings.refuse_unlike([int(word) for *_, word, _, _ in values])

    def agree_later(self) -> None:
        """Compare with the ranks that share every layer; collective. On a GPU it is judged when the next step ends.

        Raises:
            RankMismatchError: On every rank, with what each of them did.
        """
        on_logits = self._on_logits
        values = self._gathered(())
        self.settle()
        if values.device.type != "cuda":
            self._judge(values, on_logits)
            return
        self._under_way = *on_its_way(values), on_logits

    def settle(self) -> None:
        """Judge a step that is not judged yet; before its weights are evaluated or saved. Waits for the device.

        Raises:
            RankMismatchError: For the reasons of `agree_later`.
        """
        before, self._under_way = self._under_way, None
        if before is None:
            return
        before[1].synchronize()
        try:
            self._judge(before[0], before[2])
        except RankMismatchError as error:
            raise RankMismatchError(f"{error} {LATE}") from error

    def _judge(self, values: Tensor, on_logits: bool) -> None:
        rows = values.tolist()
        self._compare([(int(n), mark, size) for n, _, mark, size, *_ in rows], on_logits, True)
        self._settings.refuse_unlike([int(word) for *_, word, _, _ in rows])

    def _gathered(self, direct: Sequence[str]) -> Tensor:
        """Number of marks, presence of direct gradients, marks, sizes and settings of each rank. Begins anew."""
        marks, sizes, beside = self._marks, self._sizes, self._beside
        self.forget()
        # Filled where they are: a tensor that is made of numbers is copied there, which waits for the device.
        everyone = torch.zeros(self._mesh.shape.mp_size, 7, dtype=torch.float64, device=self._device)
        mine = everyone[self._mesh.place_in_copy]
        mine[0].fill_(len(marks))
        mine[1].fill_(bool(direct))
        mine[4].fill_(self._settings.word())
        if marks:
            mark, size = self._sums(marks, sizes)
            mine[2].fill_(mark)
            mine[3].fill_(size)
        if beside is not None:
            mine[5:].copy_(beside)
        dist.all_reduce(everyone, group=self._mesh.mp_group)  # a row each: cheaper than gathering a list
        return everyone

    def _sums(self, marks: Sequence[Any], sizes: Sequence[Any]) -> tuple[Tensor | float, Tensor | float]:
        """Sum of the marks times fixed numbers, since their order counts, and sum of the magnitudes of the sizes."""
        if self._device.type == "cpu":
            return sum((1.0 + 0.618 * place) * mark for place, mark in enumerate(marks)), sum(map(abs, sizes))
        places = torch.arange(len(marks), dtype=torch.float64, device=self._device)
        together = [torch.stack([number.to(self._device) for number in numbers]) for numbers in (marks, sizes)]
        return places.mul_(0.618).add_(1.0) @ together[0], together[1].abs().sum()

    def _compare(self, values: Sequence[tuple[int, float, float]], on_logits: bool, tolerates_nan: bool) -> None:
        count, mark, size = values[0]
        finite = [_is_finite(m) and _is_finite(s) for _, m, s in values]
        if not any(finite):
            if on_logits or tolerates_nan:
                return  # the model's own doing, and the same everywhere
            raise UnsupportedError(
                f"the loss was multiplied by {size} on every rank before its backward: no gradient can be computed from "
                "it. Look at what compute_loss or the loop does to outputs.loss (0 / 0 of a batch without labels?)."
            )
        alike = all(
            n == count and ok and abs(m - mark) <= TOLERANCE * max(size, s)
            for (n, m, s), ok in zip(values, finite, strict=True)
        )
        if alike:
            return
        what = (
            "the gradient that its loss gave to the logits has the norm" if on_logits else "its losses were scaled by"
        )
        if self._mesh.shape.pp_size == 1:
            what = "its losses and what they were scaled by are"
        reported = "; ".join(
            f"{self._mesh.shape.describe(rank)}: {what} {s:.6g}" + ("" if n == 1 else f" over {n} backward passes")
            for rank, (n, _, s) in zip(self._mesh.copy_ranks, values, strict=True)
        )
        raise RankMismatchError(
            f"the ranks of one model copy backpropagated different losses in one optimizer step ({reported}), but all of them "
            "must compute the same: the gradients of each stage or shard follow the loss of its own rank, or of the last stage's. "
            "Look for a rank, a random draw without a common seed or a parameter of one rank in compute_loss or the loop"
            f"{OF_HEADS if self._mesh.shape.tp_size > 1 else ''}."
        )

    def _compare_beside(self, values: Sequence[tuple[float, float]]) -> None:
        mark, size = values[0]
        if all(abs(m - mark) <= TOLERANCE * max(size, s) for m, s in values):
            return
        shape = self._mesh.shape
        reported = "; ".join(
            f"{shape.describe(rank)}: the norm is {s:.6g}"
            for rank, (_, s) in zip(self._mesh.copy_ranks, values, strict=True)
        )
        raise RankMismatchError(
            "the ranks of one model copy gave different gradients to the parameters that only the loss reads "
            f"({reported}), with pp_size={shape.pp_size}: every rank computes the loss, and all must compute the same. Look for "
            "activations or numbers that a forward hook keeps (it runs on the stage that has its module, once for each "
            "microbatch), a rank, or a random draw without a common seed in compute_loss or the loop; compute such a term "
            "in the model's forward, or set pp_size to 1."
        )

    def _refuse_direct(self, direct: Sequence[str]) -> None:
        shape = self._mesh.shape
        everyone: list[list[str]] = [[] for _ in range(shape.mp_size)]
        dist.all_gather_object(everyone, list(direct), group=self._mesh.mp_group)
        names = sorted({name for names in everyone for name in names})
        raise UnsupportedError(
            f"the loss gave gradients to {len(names)} parameters past the model's forward (first: {names[0]}), with "
            f"pp_size={shape.pp_size}: each rank holds the parameters of its own stages only, so a penalty over "
            "model.parameters() is another loss on every rank. Use weight_decay of the optimizer, backpropagate the penalty by "
            "itself in TrainerCallback.on_step_begin if it is a sum over parameters, or set pp_size to 1."
        )


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")
