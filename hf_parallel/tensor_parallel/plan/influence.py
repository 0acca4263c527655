"""Measure, by differentiating a block, the elements of its tensors on which each part of the row's input depends.

Cut the input of a row linear into one part per rank. Where the gradient of a part with respect to an element of a
parameter is zero, the rank that owns the part does not need the element. So the layouts of fused, grouped, interleaved
and per-head tensors are read off the block instead of being guessed. What mixes all channels (a norm over all heads)
is made transparent on request, because it can run on the gathered channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_buffers, own_modules, own_parameters
from hf_parallel.model.copies import deep_copy
from hf_parallel.model.tensors import map_tensors, only_tensor, tensors_in
from hf_parallel.tensor_parallel.layout import Section, split_units
from hf_parallel.tensor_parallel.plan.trace import NOISE_SEED, LinearInfo, perturb, widen
from hf_parallel.tensor_parallel.shard_plan import Ranges


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
VARIANTS = 3  # forwards with different inputs: an activation may be zero by accident, hardly in all of them


@dataclass
class Block:
    """A private copy of a block in fp32 or fp64 on the CPU, with perturbed parameters, and the inputs of one call."""

    module: nn.Module
    arguments: Arguments
    linears: Mapping[str, LinearInfo]

    @classmethod
    def copied(cls, root: nn.Module, linears: Mapping[str, LinearInfo], arguments: Arguments) -> Block:
        """The block `root` with `arguments` of one of its calls; `root` is not touched."""
        module = widen(deep_copy(root)).eval().cpu()
        perturb(module)
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        args, kwargs = (map_tensors(lambda _, tensor: _on_cpu(tensor), part) for part in arguments)
        return cls(module, (args, kwargs), linears)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


@dataclass
class Influence:
    """Dependence of each part of the row's input on parameters and channels.

    Args:
        tensors: Parameter or float buffer -> per dim, bool[parts size]: whether the part depends on the position.
            Tensors that no part depends on are missing.
        channels: Transparent module -> the same for the last dim of its input.
    """

    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    channels: dict[str, Tensor] = field(default_factory=dict)


def measure_row(
    block: Block,
    row: str,
    parts: Sequence[Ranges],
    transparent: frozenset[str] = frozenset(),
    cut: frozenset[str] = frozenset(),
) -> Influence:
    """Influence on parts of the input of the linear `row`.

    Args:
        block: The block.
        row: The row linear.
        parts: Per rank, (start, length) along the last dim of the row's input.
        transparent: Modules whose mixing of channels is overlooked.
        cut: Linears whose input is not followed further.
    """
    found = Influence()
    for variant in range(VARIANTS):
        taps: dict[str, Tensor] = {}
        seen: list[Tensor] = []

        def keep(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], seen: list[Tensor] = seen) -> None:
            seen.append(only_tensor(args, named))

        with _leaves(block.module) as leaves, _patched(block, transparent, cut, taps):
            handle = block.module.get_submodule(row).register_forward_pre_hook(keep, with_kwargs=True)
            try:
                args, kwargs = _noisy(block.arguments, variant)
                with torch.enable_grad():
                    block.module(*args, **kwargs)
            finally:
                handle.remove()
            for rank, ranges in enumerate(parts):
                values = [_projected(x.narrow(-1, *held)) for x in seen for held in ranges]
                _note(found, torch.stack(values).sum(), leaves, taps, rank, len(parts))
    return found


def measure_parameter(block: Block, owner: str, name: str, masks: Sequence[Tensor]) -> Influence:
    """Influence on the block `owner`'s output when only a part of the parameter `name` takes part.

    Args:
        block: The block.
        owner: Module whose output is the sum.
        name: The parameter that acts as the row, for instance the fused down-projections of experts.
        masks: Per rank, a mask of the shape of the parameter.
    """
    found = Influence()
    path, _, key = name.rpartition(".")
    holder = block.module.get_submodule(path)
    for variant in range(VARIANTS):
        for rank, mask in enumerate(masks):
            outputs: list[Any] = []
            with _leaves(block.module) as leaves, _shadowed(holder, key, mask):
                handle = block.module.get_submodule(owner).register_forward_hook(
                    lambda _, args, output, outputs=outputs: outputs.append(output)
                )
                try:
                    args, kwargs = _noisy(block.arguments, variant)
                    with torch.enable_grad():
                        block.module(*args, **kwargs)
                finally:
                    handle.remove()
                total = torch.stack([_projected(value) for value in tensors_in(outputs) if value.requires_grad]).sum()
                leaves.pop(name, None)
                _note(found, total, leaves, {}, rank, len(masks))
    return found


@contextlib.contextmanager
def _shadowed(module: nn.Module, key: str, mask: Tensor) -> Iterator[None]:
    vars(module)[key] = own_parameters(module)[key].detach() * mask  # type: ignore[union-attr]
    try:
        yield
    finally:
        del vars(module)[key]


def _note(
    found: Influence, total: Tensor, leaves: Mapping[str, Tensor], taps: Mapping[str, Tensor], rank: int, parts: int
) -> None:
    targets = [*leaves.values(), *taps.values()]
    grads = torch.autograd.grad(total, targets, allow_unused=True, retain_graph=True)
    for name, grad in zip([*leaves, *taps], grads, strict=True):
        if grad is None or not bool((grad != 0).any()):
            continue
        used = [
            (grad != 0).flatten(0).bool() if grad.ndim == 0 else _used(grad, dim) for dim in range(max(1, grad.ndim))
        ]
        if name in leaves:
            dims = found.tensors.setdefault(name, [torch.zeros(parts, u.numel(), dtype=torch.bool) for u in used])
            for dim, u in zip(dims, used, strict=True):
                dim[rank] |= u
        else:
            last = found.channels.setdefault(name, torch.zeros(parts, used[-1].numel(), dtype=torch.bool))
            last[rank] |= used[-1]


def _used(grad: Tensor, dim: int) -> Tensor:
    return (grad != 0).transpose(0, dim).flatten(1).any(1) if grad.ndim > 1 else grad != 0


def _projected(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return (x * (0.5 + torch.rand(x.shape, generator=generator, dtype=x.dtype))).sum()


def _noisy(arguments: Arguments, variant: int) -> Arguments:
    generator = torch.Generator().manual_seed(NOISE_SEED + variant)

    def change(_: tuple[str | int, ...], tensor: Tensor) -> Tensor:
        value = tensor.detach().clone()
        if variant and value.is_floating_point() and tensor.requires_grad:
            value += torch.randn(value.shape, generator=generator, dtype=value.dtype) * value.std(correction=0)
        return value.requires_grad_(tensor.requires_grad)

    args, kwargs = (map_tensors(change, part) for part in arguments)
    return args, kwargs


@contextlib.contextmanager
def _leaves(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Parameters, and float buffers made to ask for gradients, by name."""
    leaves: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    changed = []
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and buffer.ndim:
            path, _, key = name.rpartition(".")
            owner = module.get_submodule(path)
            changed.append((owner, key, buffer))
            own_buffers(owner)[key] = leaves[name] = buffer.detach().clone().requires_grad_()
    try:
        yield leaves
    finally:
        for owner, key, buffer in changed:
            own_buffers(owner)[key] = buffer


@contextlib.contextmanager
def _patched(
    block: Block, transparent: frozenset[str], cut: frozenset[str], taps: dict[str, Tensor]
) -> Iterator[None]:
    patched = []
    for name in [*transparent, *cut]:
        module = block.module.get_submodule(name)
        patch = _see_through if name in transparent else _cut_off
        own = vars(module).get("forward")
        patched.append((module, own))
        vars(module)["forward"] = patch(name, module.forward, taps)
    try:
        yield
    finally:
        for module, own in patched:
            del vars(module)["forward"]
            if own is not None:
                vars(module)["forward"] = own


class _Transparent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *inputs: Tensor) -> Tensor:
        ctx.count = len(inputs)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *[grads[0]] * ctx.count)


def _see_through(name: str, forward: Callable[..., Any], taps: dict[str, Tensor]) -> Callable[..., Any]:
    def transparent(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            result = forward(*args, **kwargs)
        inputs: list[Tensor] = []
        map_tensors(lambda _, tensor: inputs.append(tensor), [args, kwargs])
        alike = [tensor for tensor in inputs if tensor.shape == result.shape and tensor.is_floating_point()]
        if not isinstance(result, Tensor) or not alike:
            return forward(*args, **kwargs)
        if alike[0].requires_grad:
            taps[name] = alike[0]
        return _Transparent.apply(result, *alike)  # type: ignore[no-untyped-call]

    return transparent


def _cut_off(name: str, forward: Callable[..., Any], taps: dict[str, Tensor]) -> Callable[..., Any]:
    def cut(*args: Any, **kwargs: Any) -> Any:
        x = only_tensor(args, kwargs)
        if x.requires_grad:
            taps[name] = x
        return forward(x.detach())

    return cut


def mixing_modules(block: Block) -> frozenset[str]:
    """Modules that may mix channels and keep their number: no children, and a weight of one dim."""
    return frozenset(
        name
        for name, module in block.module.named_modules()
        if name
        and not own_modules(module)
        and (weight := own_parameters(module).get("weight")) is not None
        and all(p is None or p.ndim == 1 for p in own_parameters(module).values())
        and weight.numel() > 1
    )


def sections_of(used: Tensor) -> tuple[Section, ...] | None:
    """Sections that give each rank the positions it uses; none if ranks share a part of the positions.

    Args:
        used: bool[ranks positions]. Positions that nobody uses go with their neighbours.
    """
    ranks, size = used.shape
    runs = _runs(used)
    sections: list[Section] = []
    i = 0
    while i < len(runs):
        owners, length = runs[i]
        if len(owners) == ranks:
            sections.append(Section(length, False))
            i += 1
            continue
        pieces = [runs[i + rank] for rank in range(ranks) if i + rank < len(runs)]
        if [owner for owner, _ in pieces] != [frozenset([rank]) for rank in range(ranks)]:
            return None
        section = split_section([length for _, length in pieces])
        if section is None:
            return None
        sections.append(section)
        i += ranks
    return tuple(sections) if sum(section.size for section in sections) == size else None


def split_section(lengths: list[int]) -> Section | None:
    """The section of which ranks hold so much: by single elements if these are cut so, else in the largest units that are."""
    size, ranks = sum(lengths), len(lengths)
    smallest = min(lengths)
    for unit in [1, 0, *range(smallest, 1, -1)]:
        if size % max(1, unit) == 0 and split_units(size, ranks, unit) == lengths:
            return Section(size, True, unit)
    return None


def ranges_used(used: Tensor) -> tuple[Ranges, ...]:
    """Per rank, the (start, length) of the runs it uses."""
    taken = []
    for row in used:
        ranges, start = [], None
        for position, flag in enumerate([*row.tolist(), False]):
            if flag and start is None:
                start = position
            elif not flag and start is not None:
                ranges.append((start, position - start))
                start = None
        taken.append(tuple(ranges))
    return tuple(taken)


def _runs(used: Tensor) -> list[tuple[frozenset[int], int]]:
    """Consecutive positions with the same owners."""
    owners = [frozenset(i for i, flag in enumerate(column) if flag) for column in used.t().tolist()]
    known = next((owner for owner in owners if owner), frozenset(range(used.shape[0])))
    runs: list[tuple[frozenset[int], int]] = []
    for owner in owners:
        known = owner or known
        if runs and runs[-1][0] == known:
            runs[-1] = (known, runs[-1][1] + 1)
        else:
            runs.append((known, 1))
    return runs
