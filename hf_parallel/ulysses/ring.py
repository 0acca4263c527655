"""Attention in which keys and values go round the ranks that share a sequence, and queries stay.

Each rank attends to the keys at hand while the next ones arrive; results are merged by their log-sum-exp. The backward pass goes
round again: gradients of keys and values travel behind them, and home from the last rank that looks at them.

Source: Ring Attention (Liu et al. 2023, arXiv:2310.01889).

Extents: B batch, S sequence, H heads, K key-value heads, D width of a key, W of a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_parallel.errors import UnsupportedError
from hf_parallel.ulysses.blocks import Block, attend, attend_backward, merged
from hf_parallel.ulysses.exchange import SequenceGroup


INSTEAD = "Set sp_attention to ulysses, or sp_size to 1."


@dataclass(frozen=True)
class Route:
    """Says which ranks the keys of each part meet.

    Args:
        seen: For each rank, for each part, whether it attends to any of its keys.
    """

    seen: Sequence[Sequence[bool]]

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.seen)

    def reach(self, part: int) -> int:
        """Hops, from a rank to the next, that the keys of a part make: 0 to size - 1."""
        return max((hop for hop in range(self.size) if self.seen[(part + hop) % self.size][part]), default=0)

    def moves_on(self, part: int, hop: int) -> bool:
        """Whether the keys of a part make hop number `hop`, counted from 0."""
        return hop < self.reach(part)


@dataclass
class Ring:
    """The ring of one model: its ranks, and the routes of the masks that are in use."""

    group: SequenceGroup
    _routes: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def attention(
        self, module: nn.Module, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, named: Mapping[str, Any]
    ) -> tuple[Tensor, None]:
        """Attention of this rank's tokens to the whole row; all ranks of the group call it.

        Args:
            module: The attention module that calls.
            states: Query f[B H S/sp D], key f[B K S/sp D] and value f[B K S/sp W].
            mask: b or i[B 1|H S/sp S] of this rank's queries and all keys, S filled up, as a `Block` has it; None: causal, or all, as
                the module says.
            named: Other arguments of its attention function.

        Returns:
            f[B S/sp H W] and None.

        Raises:
            UnsupportedError: Something that is not known to be exact in parts of a row.
        """
        query, key, value = _alike(states)
        _refuse(module, query.shape[1], named, self.group.size)
        self.group.meet(query.device)
        length = query.shape[2]
        if mask is not None and tuple(mask.shape[-2:]) != (length, length * self.group.size):
            raise UnsupportedError(
                f"a mask of shape {tuple(mask.shape)} in ring attention with sp_size={self.group.size}: only masks that transformers "
                f"makes for these {length} queries of a row are known. {INSTEAD}"
            )
        hides_later = mask is None and is_causal(module, named)
        scaling = named.get("scaling")
        walk = Walk(
            group=self.group,
            route=self._route(mask, hides_later),
            is_causal=hides_later,
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        )
        output: Tensor = _Attention.apply(query, key, value, mask, walk)  # type: ignore[no-untyped-call]
        return output.transpose(1, 2).contiguous(), None

    def _route(self, mask: Tensor | None, is_causal: bool) -> Route:
        ranks = range(self.group.size)
        if mask is None:
            return Route([[part <= rank or not is_causal for part in ranks] for rank in ranks])
        known: Route | None = self._routes.get(mask)
        if known is None:  # every rank has the same masks in the same order
            rows = self.group.gather(_seen(mask, self.group.size).to(torch.int32))
            known = self._routes[mask] = Route(torch.stack(rows).bool().tolist())
        return known


def is_causal(module: nn.Module, named: Mapping[str, Any]) -> bool:
    """Whether attention without a mask hides later tokens, as SDPA in transformers asks its module."""
    given = named.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


@dataclass(frozen=True)
class Walk:
    """One way round.

    Args:
        group: The ranks.
        route: Route of the keys.
        is_causal: Whether there is no mask, and queries see no later keys.
        scale: Factor of the scores.
    """

    group: SequenceGroup
    route: Route
    is_causal: bool
    scale: float

    def part_at(self, hop: int, rank: int | None = None) -> int:
        """The part whose keys this rank, or another one, has after so many hops."""
        return ((self.group.rank if rank is None else rank) - hop) % self.group.size

    def looks_at(self, part: int) -> bool:
        """Whether this rank attends to a part."""
        return self.route.seen[self.group.rank][part]

    def block(self, states: Tensor, like: tuple[Tensor, Tensor], mask: Tensor | None, part: int) -> Block:
        """The keys and values of a part, of what travelled."""
        key, value = (x.view(y.shape) for x, y in zip(_split(states, like), like, strict=True))
        size = key.shape[2]
        own = None if mask is None else mask[..., part * size : (part + 1) * size]
        return Block(key, value, own, self.is_causal and part == self.group.rank, self.scale)

    def keys_to_send(self, held: Tensor | None, hop: int) -> list[tuple[Tensor, int]]:
        """The keys `held` and the rank to send them to at `hop`; empty if they end here."""
        on = held is not None and self.route.moves_on(self.part_at(hop), hop)
        return [(held, (self.group.rank + 1) % self.group.size)] if on and held is not None else []

    def keys_to_come(self, hop: int, like: Tensor) -> list[tuple[Tensor, int]]:
        """Memory for what this rank is sent meanwhile."""
        before = (self.group.rank - 1) % self.group.size
        comes = self.route.moves_on(self.part_at(hop, before), hop)
        return [(torch.empty_like(like), before)] if comes else []

    def gradients_to_send(self, held: Tensor | None, hop: int) -> list[tuple[Tensor, int]]:
        """The gradients `held` and the rank to send them to at `hop`: behind their keys, or home; empty if they stay."""
        part = self.part_at(hop)
        if held is None or hop > self.route.reach(part) or self.route.reach(part) == 0:
            return []
        return [(held, (self.group.rank + 1) % self.group.size if self.route.moves_on(part, hop) else part)]

    def gradients_to_come(self, hop: int, like: Tensor) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
        """Memory for gradients of others that follow their keys, and for this rank's own that come home."""
        before, own = (self.group.rank - 1) % self.group.size, self.route.reach(self.group.rank)
        follow = [(torch.empty_like(like), before)] if self.route.moves_on(self.part_at(hop, before), hop) else []
        home = [(torch.empty_like(like), (self.group.rank + hop) % self.group.size)] if hop == own > 0 else []
        return follow, home


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, walk: Walk) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            output, sums = _around(query, key, value, mask, walk)
        output = output.to(query.dtype)
        ctx.walk = walk
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, mask, output, sums = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            products = (output.to(sums.dtype) * grad.to(sums.dtype)).sum(-1)
            given = query, key, value, mask
            found = _around_again(given, (grad.contiguous(), sums, products), ctx.walk)
        return *(x.to(like.dtype) for x, like in zip(found, (query, key, value), strict=True)), None, None


def _around(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, walk: Walk) -> tuple[Tensor, Tensor]:
    """Output f[B H S/sp W] and log-sum-exp f[B H S/sp] of this rank's queries."""
    found: tuple[Tensor, Tensor] | None = None
    states = _packed(key, value)
    held: Tensor | None = states
    for hop in range(walk.group.size):
        to_come = walk.keys_to_come(hop, states)
        sent = walk.group.pass_on(walk.keys_to_send(held, hop), to_come)
        part = walk.part_at(hop)
        if held is not None and walk.looks_at(part):
            here = attend(query, walk.block(held, (key, value), mask, part))
            found = here if found is None else merged(found, here)
        sent.wait()
        held = to_come[0][0] if to_come else None
    if found is None:  # a part of padding alone
        kind = torch.promote_types(query.dtype, torch.float32)
        shape = query.shape[:-1]
        return query.new_zeros(*shape, value.shape[-1], dtype=kind), query.new_full(shape, -torch.inf, dtype=kind)
    return found


def _around_again(
    given: tuple[Tensor, Tensor, Tensor, Tensor | None], of_output: tuple[Tensor, Tensor, Tensor], walk: Walk
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of this rank's tokens."""
    query, key, value, mask = given
    states = _packed(key, value)
    to_query = torch.zeros_like(query, dtype=of_output[1].dtype)
    blank = torch.zeros_like(states, dtype=of_output[1].dtype)
    held: Tensor | None = states
    gradients: Tensor | None = None  # of the part that was held one hop before
    own = blank
    for hop in range(walk.group.size + 1):
        last = hop == walk.group.size
        to_come = [] if last else walk.keys_to_come(hop, states)
        follow, home = walk.gradients_to_come(hop - 1, blank) if hop else ([], [])
        sends = [] if last else walk.keys_to_send(held, hop)
        sends += walk.gradients_to_send(gradients, hop - 1) if hop else []
        sent = walk.group.pass_on(sends, to_come + follow + home)
        part, mine = walk.part_at(hop), None
        if not last and held is not None and walk.looks_at(part):
            block = walk.block(held, (key, value), mask, part)
            more, *others = attend_backward(query, block, *of_output)
            to_query += more
            mine = _packed(*others)
        sent.wait()
        own = home[0][0] if home else own
        gradients = _added(follow[0][0] if follow else None, mine)
        gradients = blank if gradients is None and held is not None else gradients
        if hop == 0 and walk.route.reach(walk.group.rank) == 0 and gradients is not None:
            own = gradients  # nobody else looks at them
        held = to_come[0][0] if to_come else None
    to_key, to_value = (x.view(y.shape) for x, y in zip(_split(own, (key, value)), (key, value), strict=True))
    return to_query, to_key, to_value


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


def _packed(*tensors: Tensor) -> Tensor:
    """Several tensors as one message."""
    return torch.cat([x.reshape(-1) for x in tensors])


def _split(message: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = message.split([x.numel() for x in like])
    return parts


def _alike(states: Sequence[Tensor]) -> Sequence[Tensor]:
    """The states in one dtype: what attention kernels would get under autocast, or that of the values."""
    kind = states[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states[2].dtype
    return [x.to(dtype) for x in states]


def _seen(mask: Tensor, size: int) -> Tensor:
    """Whether a mask leaves any key of each part to this rank's queries, b[sp]."""
    seen: Tensor = mask.bool().unflatten(-1, (size, -1)).any(-1).flatten(0, -2).any(0)
    return seen


def _refuse(module: nn.Module, heads: int, named: Mapping[str, Any], size: int) -> None:
    """Refuse what attention in blocks does not compute.

    Raises:
        UnsupportedError: Names it.
    """
    of_heads = [name for name, p in module.named_parameters(recurse=False) if p.ndim == 1 and len(p) == heads]
    found = [f"{name}, a number for each head" for name in of_heads]
    found += [f"softcap={named['softcap']}"] if named.get("softcap") is not None else []
    found += [f"dropout={named['dropout']} of attention weights"] if named.get("dropout") else []
    found += [  # models pass on positions and labels, which are integers, and the number of labels, which has no dims
        f"the tensor {name}"
        for name, value in named.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim
    ]
    if found:
        raise UnsupportedError(
            f"{found[0]}, in ring attention with sp_size={size}: scores are computed in blocks, for masks and a scale alone. {INSTEAD}"
        )
