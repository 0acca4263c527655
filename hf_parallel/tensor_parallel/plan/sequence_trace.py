"""Traces hidden states through the stack of blocks in one forward pass of the plain model.

Blocks may work on parts of the sequence only if no code but the blocks reads the hidden states between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_parallel.errors import PlanError
from hf_parallel.model.tensors import map_tensors, tensors_in
from hf_parallel.tensor_parallel.plan.autograd_graph import met_first
from hf_parallel.tensor_parallel.plan.trace import run
from hf_parallel.tensor_parallel.shard_plan import PairPlan, Place, TPPlan


# What a model may ask of a tensor between its blocks: the answer does not depend on the positions.
HARMLESS = frozenset({"to", "requires_grad_", "is_floating_point", "register_hook", "get_device"})
HARMLESS_ATTRIBUTES = frozenset({"device", "dtype", "requires_grad", "is_cuda", "grad_fn", "is_leaf", "ndim", "data"})


@dataclass
class Call:
    """One call of a block: the tensors it got and returned, by place."""

    name: str
    given: dict[Place, Tensor]
    returned: dict[Place, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class HiddenFlow:
    """Places of hidden states among the arguments and results of each block.

    Args:
        stack: Name of the list of blocks.
        dim: Their sequence dim.
        width: Elements per token.
        blocks: Block that runs -> places of its hidden states among its arguments, and in what it returns.
        read: (module inside a block, place in what it returns) that reaches the model's output by another way than
            the hidden states: scores of a router, for a loss of their own.
    """

    stack: str
    dim: int
    width: int
    blocks: Mapping[str, tuple[tuple[Place, ...], tuple[Place, ...]]]
    read: tuple[tuple[str, Place], ...] = ()


def trace_stack(model: nn.Module, plan: TPPlan, sample: Mapping[str, Any]) -> HiddenFlow:
    """Follow the hidden states through the stack that holds the pairs of `plan`.

    Call inside `undisturbed(model)`.

    Raises:
        PlanError: There is no such stack, or the model itself uses the hidden states between its blocks; names the block.
    """
    stack = find_stack(model, plan)
    calls, used, made, output = _calls_of(model, stack, sample)
    hidden = _hidden_of(model, calls)
    given = [[p for p, t in call.given.items() if _is_hidden(t, hidden)] for call in calls]
    returned = [[p for p, t in call.returned.items() if _is_hidden(t, hidden)] for call in calls]
    for i, (before, after) in enumerate(itertools.pairwise(calls)):
        left = {id(before.returned[place]) for place in returned[i]}
        given[i + 1] = [place for place in given[i + 1] if id(after.given[place]) in left]
        taken = {id(after.given[place]) for place in given[i + 1]}
        returned[i] = [place for place in returned[i] if id(before.returned[place]) in taken]
        if not taken:
            raise refusal(model, after.name, f"it does not get what {before.name} returned as it is")
        function = next((used[key] for key in taken if key in used), None)
        if function is not None:
            raise refusal(model, before.name, f"the model itself computes with what it returns ({function})")
    if len(calls) > 1:
        given[0] = [place for place in given[0] if place in given[-1]] or given[0][:1]
        returned[-1] = [place for place in returned[-1] if place in returned[0]] or returned[-1][:1]
    if not given[0] or not returned[-1]:
        raise refusal(model, stack, "its first block gets no hidden states, or its last one returns none")
    ends = zip(calls, given, returned, strict=True)
    blocks = {call.name: (tuple(taken), tuple(left)) for call, taken, left in ends}
    last = {calls[-1].returned[place].grad_fn for place in returned[-1]}
    return HiddenFlow(stack, sequence_dim(hidden, sample), hidden.shape[-1], blocks, _read(output, last, made))


def _read(output: Any, last: Collection[Any], made: Mapping[Any, tuple[str, Place]]) -> tuple[tuple[str, Place], ...]:
    """Results of modules that are met first on every way back from the output, but for those through `last`."""
    return tuple(sorted(met_first(tensors_in(output), made, last), key=repr))


def sequence_dim(hidden: Tensor, sample: Mapping[str, Any]) -> int:
    """The dim of hidden states that is the sequence: the last but one, unless only another one has its length."""
    ids = sample.get("input_ids")
    length = ids.shape[-1] if isinstance(ids, Tensor) else hidden.shape[-2]
    if hidden.shape[-2] != length and length in hidden.shape[:-1]:
        return list(hidden.shape).index(length)
    return hidden.ndim - 2


def find_stack(model: nn.Module, plan: TPPlan) -> str:
    """Name of the list of modules that holds most of the work of the sharded layers.

    Raises:
        PlanError: None of them is in a list.
    """
    found: dict[str, float] = {}
    for name in [*plan.linears, *(pair.root for pair in plan.pairs)]:
        parts = name.split(".")
        prefixes = [".".join(parts[:i]) for i in range(1, len(parts))]
        stack = next((p for p in prefixes if isinstance(model.get_submodule(p), nn.ModuleList)), None)
        if stack is not None:
            found[stack] = found.get(stack, 0.0) + plan.flops.get(name, 0.0)
    if not found:
        raise refusal(model, "the model", "none of its sharded layers is in an nn.ModuleList of blocks")
    return max(found, key=lambda name: found[name])


def plan_of_block(plan: TPPlan, name: str) -> TPPlan:
    """The part of `plan` inside a block, by names relative to it."""
    prefix = f"{name}."

    def inner(full: str) -> str:
        return full.removeprefix(prefix) if full != name else ""

    def inner_pair(pair: PairPlan) -> PairPlan:
        return replace(
            pair,
            root=inner(pair.root),
            columns=tuple(map(inner, pair.columns)),
            row=inner(pair.row),
            rewrites=tuple(replace(rewrite, module=inner(rewrite.module)) for rewrite in pair.rewrites),
            partial=tuple(map(inner, pair.partial)),
            sliced={inner(key): spec for key, spec in pair.sliced.items()},
            norms={inner(key): spec for key, spec in pair.norms.items()},
            entries=tuple(map(inner, pair.entries)),
            scaled=tuple(map(inner, pair.scaled)),
        )

    inside = [pair for pair in plan.pairs if f"{pair.root}.".startswith(prefix)]
    linears = {inner(key): linear for key, linear in plan.linears.items() if key.startswith(prefix)}
    return TPPlan(plan.tp_size, linears, tuple(map(inner_pair, inside)), {}, {}, {})


def refusal(model: nn.Module, name: str, why: str) -> PlanError:
    """Why a model cannot have sequence parallelism."""
    return PlanError(
        f"tensor_parallel.sequence_parallel: true is not possible for {type(model).__name__}: {name}: {why}. Set it to "
        "false."
    )


def _is_hidden(tensor: Tensor, hidden: Tensor) -> bool:
    return tensor.shape == hidden.shape and tensor.requires_grad


def _hidden_of(model: nn.Module, calls: list[Call]) -> Tensor:
    """The first tensor that the first block passes to the second, or gets if there is only one block."""
    handed = (
        {id(t) for t in calls[0].returned.values()} if len(calls) > 1 else {id(t) for t in calls[0].given.values()}
    )
    for tensor in calls[min(1, len(calls) - 1)].given.values():
        if id(tensor) in handed and tensor.requires_grad and tensor.ndim >= 3:
            return tensor
    raise refusal(model, calls[-1].name, "it does not get what the block before it returned as it is")


class _Between(TorchFunctionMode):
    """Notes what is done, outside of all blocks, with tensors that blocks returned."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.watched: set[int] = set()
        self.used: dict[int, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.running and self.watched and not self._is_harmless(func):
            for tensor in tensors_in([args, kwargs or {}]):
                if id(tensor) in self.watched:
                    self.used.setdefault(id(tensor), getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _is_harmless(func: Any) -> bool:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return getattr(getattr(func, "__self__", None), "__name__", "") in HARMLESS_ATTRIBUTES
        return name in HARMLESS


def _calls_of(
    model: nn.Module, stack: str, sample: Mapping[str, Any]
) -> tuple[list[Call], dict[int, str], dict[Any, tuple[str, Place]], Any]:
    """Calls of the stack's blocks in order, what was done outside of them with tensors they returned, by id, which module
    in them made which node of the graph, and the model's output.
    """
    calls: list[Call] = []
    made: dict[Any, tuple[str, Place]] = {}
    between = _Between()

    def enter(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            between.running += 1
            calls.append(Call(name, _places(args) | _places(kwargs)))

        return hook

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        between.running -= 1
        calls[-1].returned = _places(output)
        between.watched |= {id(tensor) for tensor in calls[-1].returned.values()}

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            for place, tensor in _places(output).items():
                if tensor.grad_fn is not None:
                    made.setdefault(tensor.grad_fn, (name, place))

        return hook

    handles = []
    for index, block in enumerate(model.get_submodule(stack).children()):
        for name, part in block.named_modules(prefix=f"{stack}.{index}"):
            handles.append(part.register_forward_hook(note(name)))
        handles.append(block.register_forward_pre_hook(enter(f"{stack}.{index}"), with_kwargs=True))
        handles.append(block.register_forward_hook(leave))
    try:
        with torch.enable_grad(), between:
            output = run(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    names = [call.name for call in calls]
    if not names or len(set(names)) < len(names):
        raise refusal(model, stack, "its blocks run more than once" if names else "its blocks do not run")
    return calls, between.used, made, output


def _places(value: Any) -> dict[Place, Tensor]:
    """Float tensors by place."""
    found: dict[Place, Tensor] = {}

    def note(place: Place, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found[place] = tensor
        return tensor

    map_tensors(note, value)
    return found
