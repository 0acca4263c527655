"""Finds shards of weights that user code multiplies by numbers of single ranks: one process has one number for the whole.

`p.data.div_(p.norm())` after a step, in a loop of users, takes the norm of this rank's part. Such numbers are the same along the
sharded dim, so a few elements along it tell them: what they are now, divided by what the last update left. So it is with what
gradients are changed by (`p.grad.sub_(p.detach() / p.detach().norm())`), divided by the weight. Digests of these ratios travel in
messages that are sent anyway; only where they differ are the ratios compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.weights.trained import BITS
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh


SHARDS = 64  # looked at between two updates, others than between the two before
COMPARED_AFTER = 2  # updates after which replicas have compared weights as they were when somebody changed them
LINES, PLACES = 4, 8  # of a shard, and along the sharded dim of each
ALIKE, APART = 8, 16  # roundings: ratios of one line that are one number, and numbers that are two
_STEPS = 1e6  # a digest counts millionths
_PLAIN = (Tensor, nn.Parameter)


class _Noted(NamedTuple):
    """Numbers (f64) of lines, nan where it is not one number: of weights, or of what their gradients were changed by."""

    names: Sequence[str]
    numbers: Tensor
    rounding: float
    of_weights: bool


class ScaledShards:
    """Ratios of some elements of this rank's shards to what the last update left of them.

    Args:
        ledger: Ledger of the whole model.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        arriving: Whether updated parameters may be on their way, so that they cannot be looked at.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        arriving: Callable[[], bool],
    ) -> None:
        self._mesh, self._arriving = mesh, arriving
        self._parameters, self._given, self._given_before = parameters, list[_Noted](), 0
        self._dims = dims = dict[str, int]()
        for name in parameters if mesh.parts.group is not None else ():
            spec = ledger.entries[name].spec
            sizes = [] if spec is None else [spec.local_size(mesh.parts.size, rank) for rank in range(mesh.parts.size)]
            if spec is not None and min(sizes) >= PLACES:
                dims[name] = spec.dim
        held, parts = list(dims), max(1, -(-len(dims) // SHARDS))
        turns = [{name: (parameters[name], dims[name]) for name in held[part::parts]} for part in range(parts)]
        self._turns = [_Lines(turn) for turn in turns] if held else []
        self._before: Tensor | None = None
        self._found: RankMismatchError | None = None
        self._waits = 0  # updates until that is raised

    def remember(self) -> None:
        """Remember elements as an update has left them: of the shards whose turn it is. Notes of the update before are dropped.

        Raises:
            RankMismatchError: `look` has found it, and replicas, which were compared since, have found the same.
        """
        if not self._turns:
            return
        if self._found is not None:
            self._waits -= 1
            if not self._waits:
                raise self._found
        self._turns.append(self._turns.pop(0))
        self._before = None if self._arriving() else self._turns[0].elements()
        self._given = self._given[self._given_before :]
        self._given_before = len(self._given)

    @torch.no_grad()
    def note(self, name: str, given: Tensor) -> None:
        """Note that the shard of a gradient is changed by a tensor of its shape. A GPU is not waited for.

        Args:
            name: The parameter's name.
            given: What user code has made, of this rank's part of the weight perhaps.
        """
        dim = self._dims.get(name)
        weight = None if dim is None else _some(self._parameters[name].detach(), dim)
        lines = None if dim is None else _some(given.detach(), dim)
        if weight is None or lines is None or lines.shape != weight.shape:
            return
        rounding = max(torch.finfo(weight.dtype).eps, torch.finfo(lines.dtype).eps)
        values = lines.double()
        alone = _numbers(values, rounding)
        # A mask has the same of each line, and of other lines on each rank.
        alone = alone.masked_fill(alone == 1, math.nan)
        numbers = torch.cat([_numbers((values / weight).abs(), rounding), alone])
        self._given.append(_Noted([name] * len(numbers), numbers, rounding, of_weights=False))

    @torch.no_grad()
    def digest(self) -> Tensor | int:
        """A number for all numbers (a 0-d i64 of a GPU, which is not waited for); 0 where nothing is known."""
        noted = [one.numbers for one in self._noted()]
        if not noted:
            return 0
        marks = (torch.cat(noted).nan_to_num(nan=0.0) * _STEPS).clamp(-1e15, 1e15).round().to(torch.int64)
        weights = torch.arange(1, 2 * len(marks), 2, device=marks.device)
        total = (marks * weights).sum()
        found = (total & ((1 << BITS) - 1)) | 1
        return found if found.is_cuda else int(found)

    def look(self) -> None:
        """Do what `compare` does, where digests differ; beside replicas what is found is raised some updates later.

        One of them may be unlike the others, which its ranks alone would leave waiting: a comparison of replicas tells all.
        """
        try:
            self.compare()
        except RankMismatchError as error:
            if self._mesh.copies_group is None:
                raise
            self._found, self._waits = error, self._waits or COMPARED_AFTER

    def compare(self) -> None:
        """Compare the numbers; collective over the model copy.

        Raises:
            RankMismatchError: Names a parameter that ranks multiplied by different numbers, or whose gradient they changed by
                them; on every rank of the copy.
        """
        if self._found is not None:
            raise self._found
        if self._mesh.parts.group is None:
            return
        mine = [(one.names, one.numbers.tolist(), one.rounding, one.of_weights) for one in self._noted()]
        everyone: list[Any] = [None] * self._mesh.shape.mp_size
        dist.all_gather_object(everyone, mine, group=self._mesh.mp_group)
        size = self._mesh.shape.stage_size
        for start in range(0, len(everyone), size):
            for alike in zip(*everyone[start : start + size], strict=False):
                names, _, rounding, of_weights = alike[0]
                if any((one[0], one[3]) != (names, of_weights) for one in alike):
                    continue
                for name, line in zip(names, zip(*(one[1] for one in alike), strict=True), strict=True):
                    self._refuse_apart(name, line, APART * rounding, of_weights=of_weights)

    def _noted(self) -> list[_Noted]:
        if self._before is None or self._arriving():
            return self._given
        lines, before = self._turns[0], self._before
        now = lines.elements()
        if now is None or now.shape != before.shape:
            return self._given
        numbers = _numbers(now / before, lines.rounding)
        numbers = torch.where((now == before).all(1), torch.ones_like(numbers), numbers)
        return [_Noted(lines.names(), numbers, lines.rounding, of_weights=True), *self._given]

    def _refuse_apart(self, name: str, line: Sequence[float], limit: float, *, of_weights: bool) -> None:
        known = [ratio for ratio in line if not math.isnan(ratio)]
        if not known or max(known) - min(known) <= limit * max(map(abs, known)):
            return
        key = "ep_size" if self._mesh.shape.ep_size > 1 else "tp_size"
        changed = (
            f"parameter {name} was multiplied between two steps"
            if of_weights
            else f"the gradient of {name} was changed"
        )
        raise RankMismatchError(
            f"{changed} by numbers that differ between ranks ({min(known):.6g}, {max(known):.6g}), with "
            f"{key}={self._mesh.parts.size}: each of them has a part of it, and in a loop of your own a norm or sum of a weight is "
            "that of this rank's part (p.data.div_(p.norm()), p.renorm_, p.grad.sub_(p.detach() / p.detach().norm())). Take that of the "
            "whole, (torch.zeros_like(p.grad) + p.detach()).norm(), before optimizer.zero_grad(); or do it in a callback of a "
            f"Trainer, where norms are those of whole weights; or set {key} to 1."
        )


def _numbers(lines: Tensor, rounding: float) -> Tensor:
    """The number that the elements of each line are, f64[lines PLACES] -> f64[lines]; nan where they are several, or zero.

    Zero is what masks and pruning write, each rank to other elements.
    """
    means = lines.mean(1)
    alike = lines.amax(1) - lines.amin(1) <= ALIKE * rounding * means.abs()
    return means.masked_fill(~(alike & means.isfinite() & (means != 0)), math.nan)


class _Lines:
    """Some elements of shards, in lines along the sharded dims.

    Args:
        held: Name -> parameter, and its sharded dim.
    """

    def __init__(self, held: Mapping[str, tuple[nn.Parameter, int]]) -> None:
        self._held = held
        self._places: list[int] = []
        self._views: dict[str, Tensor] = {}
        self.rounding = 0.0

    def names(self) -> list[str]:
        """The parameter of each line."""
        return [name for name, view in self._views.items() for _ in range(len(view))]

    def elements(self) -> Tensor | None:
        """Copies of the elements: f64[lines PLACES]."""
        places = [parameter.data_ptr() if type(parameter) in _PLAIN else 0 for parameter, _ in self._held.values()]
        if places != self._places:
            found = {name: _some(parameter.detach(), dim) for name, (parameter, dim) in self._held.items()}
            self._views = {name: view for name, view in found.items() if view is not None}
            self._places = places
            self.rounding = max((torch.finfo(view.dtype).eps for view in self._views.values()), default=0.0)
        return torch.cat(list(self._views.values())).double() if self._views else None


def _some(values: Tensor, dim: int) -> Tensor | None:
    """A view of some elements [<= LINES, PLACES]; None of a kind whose memory cannot be read so."""
    if type(values) not in _PLAIN or not values.numel() or not values.is_floating_point():
        return None
    lines = values.movedim(dim, -1)
    while lines.ndim > 2:
        lines = lines[0]
    lines = lines if lines.ndim == 2 else lines[None]
    rows, length = lines.shape
    return lines[:: max(1, rows // LINES), :: length // PLACES][:LINES, :PLACES]
