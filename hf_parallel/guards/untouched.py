"""Whether anybody has written to one of many tensors, asked in a few calls however many there are.

torch itself compares the versions of what a graph has saved. Writes through `tensor.data` count in no version: there the
values are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hf_parallel.compat.private_torch import version_of
from hf_parallel.compat.torch_tools import flattened
from hf_parallel.guards.awaited import on_its_way


Table: TypeAlias = dict[str, Tensor | None]
SMALL = 2**16  # elements of a tensor whose values are compared; larger ones are taken at their version


class Untouched:
    """Tensors as they were when they were last taken.

    Args:
        tables: Tables in which they stand, by attribute; user code may replace them there.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = list(tables)
        self._then: list[Tensor] = []
        self._places: list[int] = []
        self._versions: list[int] = []
        self._saved: Any = None
        self._small: list[list[Tensor]] = []
        self._values: list[Tensor] = []
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Remember the tensors as they are now."""
        self._then, self._places = self._here(), self._identities()
        self._versions = [version_of(tensor) for tensor in self._then]
        plain = [tensor for tensor in self._then if type(tensor) is Tensor and not tensor.is_meta]
        with torch.inference_mode(False), torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            saved: Any = _Saved
            self._saved = saved.apply(anchor, *(t for t in plain if not t.is_inference())).grad_fn
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in plain:
            if 0 < tensor.numel() <= SMALL and tensor.layout == torch.strided:
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._small = list(kinds.values())
        self._values = [flattened(tensors).clone() for tensors in self._small]
        self._asked = None

    @property
    def is_written(self) -> bool:
        """Whether one was replaced, or written to in a way that torch counts."""
        if self._identities() != self._places:
            return True
        try:
            self._saved.saved_tensors  # noqa: B018
        except RuntimeError:
            return True
        return False

    def written(self) -> list[Tensor]:
        """Tensors written to since `take`."""
        before = {id(tensor): version for tensor, version in zip(self._then, self._versions, strict=True)}
        return [tensor for tensor in self._here() if before.get(id(tensor)) != version_of(tensor)]

    @torch.no_grad()
    def rewritten(self) -> list[Tensor]:
        """Tensors whose values differ from `take`.

        On a GPU the answer is that of the previous call, so that the host does not wait for the device.
        """
        asked, self._asked = self._asked, None
        on_gpu = [tensors[0].device for tensors in self._small if tensors[0].is_cuda]
        if on_gpu:
            flags = [
                _differ(then, flattened(t)).to(on_gpu[0]) for then, t in zip(self._values, self._small, strict=True)
            ]
            self._asked = on_its_way(torch.stack(flags).any())
            if asked is None:
                return []
            asked[1].synchronize()
            if not asked[0]:
                return []
        return [
            tensor
            for then, tensors in zip(self._values, self._small, strict=True)
            for tensor in _others(then, tensors)
        ]

    def _here(self) -> list[Tensor]:
        return [tensor for table in self._tables for tensor in table.values() if tensor is not None]

    def _identities(self) -> list[int]:
        """Ids of the objects at each place; put together without a loop of Python."""
        return list(map(id, itertools.chain.from_iterable(map(dict.values, self._tables))))


def _differ(then: Tensor, now: Tensor) -> Tensor:
    """Whether any bit does (0-d)."""
    return (
        torch.ones((), dtype=torch.bool, device=now.device)
        if len(then) != len(now)
        else (_bits(then) != _bits(now)).any()
    )


def _others(then: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors whose values differ from those in a flat tensor of before."""
    now = flattened(tensors)
    if len(then) == len(now) and torch.equal(_bits(then), _bits(now)):
        return []
    if len(then) != len(now):
        return list(tensors)
    sizes = [tensor.numel() for tensor in tensors]
    pairs = zip(tensors, then.split(sizes), now.split(sizes), strict=True)
    return [tensor for tensor, old, new in pairs if not torch.equal(_bits(old), _bits(new))]


def _bits(flat: Tensor) -> Tensor:
    """Bytes of a tensor, by which a nan equals itself."""
    return flat.contiguous().view(torch.uint8)


class _Saved(torch.autograd.Function):
    """A graph that has saved tensors, whose versions torch compares when it is asked for them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("nothing is computed from it")
