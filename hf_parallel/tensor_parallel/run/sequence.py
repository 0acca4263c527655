"""Sequence parallelism at run time: between the sharded layers of the stack a rank has its part of the sequence only.

The first block of the stack narrows the hidden states to this rank's positions, the last one gathers them, so nothing
outside the stack changes. Inside a block everything runs on the part but the regions of the plan, which gather their
input and reduce-scatter (or narrow) their output. Inside a region nothing differs from a run without sequence parallelism.

A sequence shorter than the number of ranks, and a call that asks for all hidden states, take the ordinary path.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import in_backward_pass, own_parameters
from hf_parallel.compat.private_transformers import run_inside_checkpoint
from hf_parallel.errors import PlanError
from hf_parallel.model.tensors import map_tensors
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.run.functions import SharedCopy, TPGroup
from hf_parallel.tensor_parallel.run.linear import rounded_to, row_product
from hf_parallel.tensor_parallel.run.reads import own
from hf_parallel.tensor_parallel.run.sequence_draws import Draws
from hf_parallel.tensor_parallel.run.sequence_functions import (
    Entry,
    copies_to_tp,
    gather_from_sequence,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
    sequence_sizes,
    unfolded,
)
from hf_parallel.tensor_parallel.run.shard_seeds import PairSeeds
from hf_parallel.tensor_parallel.shard_plan import BlockSequence, Place, Region, SequencePlan


MOST_REMEMBERED = 65536  # inputs of blocks; more than a schedule keeps alive for recomputation


class SequenceMode:
    """State of the forward in progress that the blocks of a stack share; one for each model, kept as `tp_sequence`.

    Args:
        group: The tensor-parallel group.
        dim: The sequence dim of the hidden states.

    Attributes:
        length: Full length of the sequence of which the running block has a part; 0: it has all of it.
        widens: Whether half-precision gradients of parameters are summed in fp32.
        blocked: Whether this forward must take the ordinary path.
        draws: Random numbers of the running block.
    """

    def __init__(self, group: TPGroup, dim: int) -> None:
        self.group, self.dim = group, dim
        self.widens = False
        self.length = 0
        self.blocked = False
        self.draws = Draws(group)
        self._stack_length = 0
        self._remembered: dict[int, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceMode:
        """A copy of a model communicates over the same group, with a state of its own."""
        copied = SequenceMode(self.group, self.dim)
        copied.widens = self.widens
        copied.draws.pairs = copy.deepcopy(self.draws.pairs, memo)
        return copied

    def length_for(self, hidden: Tensor, *, is_first: bool) -> int:
        """The full length in a call of a block with `hidden`; 0 on the ordinary path.

        A part does not tell how long the whole is. In a forward the first block knows it. A block that is recomputed
        in a backward pass gets the storage that it got in the forward, or what a block recomputed just before made;
        by either the length is remembered.

        Raises:
            PlanError: A recomputed block gets another storage.
        """
        if in_backward_pass():
            if hidden.data_ptr() not in self._remembered:
                raise PlanError(
                    "a block is run again in the backward pass with a copy of its input, whose full sequence length is "
                    "not known. Set tensor_parallel.sequence_parallel: false, or do not offload activations."
                )
            return self._remembered[hidden.data_ptr()]
        if is_first:
            whole = self.blocked or hidden.shape[self.dim] < self.group.size()
            self._stack_length = 0 if whole else hidden.shape[self.dim]
        return self.remember(hidden, self._stack_length)

    def remember(self, hidden: Tensor, length: int) -> int:
        """Note `length`, which is returned, for a later call of a block with the storage of `hidden`."""
        self._remembered.pop(hidden.data_ptr(), None)
        self._remembered[hidden.data_ptr()] = length
        if len(self._remembered) > MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return length

    def follow(self, hidden: Tensor) -> Callable[[Tensor], None] | None:
        """Make the function that tells this mode about a recomputed block's copy of `hidden`; None if it is unknown."""
        length = self._remembered.get(hidden.data_ptr())
        if length is None:
            return None

        def moved(copied: Tensor) -> None:
            self.remember(copied, length)

        return moved

    def has_part(self, hidden: Tensor) -> bool:
        """Whether hidden states of the forward in progress are a part of the sequence."""
        return bool(self._stack_length) and hidden.ndim > self.dim and hidden.shape[self.dim] != self._stack_length

    def along(self, length: int = 0) -> tuple[TPGroup, int, list[int]]:
        """Group, dim and sizes for the functions that cut and gather."""
        return self.group, self.dim, sequence_sizes(length or self.length, self.group)


@dataclass
class _BlockState:
    """Settings of a block, kept as `tp_block`."""

    mode: SequenceMode
    plan: BlockSequence
    is_first: bool
    is_last: bool


@dataclass
class _RegionState:
    """Settings of a region, kept as `tp_region`."""

    mode: SequenceMode
    copy: SharedCopy
    plan: Region


@dataclass
class _RowState:
    """Settings of a row that does not sum over the ranks itself, kept as `tp_scatter`."""

    mode: SequenceMode
    scatters: bool


def install_blocks(
    model: nn.Module, plan: SequencePlan, group: TPGroup, sections: Sequence[range] | None = None
) -> SequenceMode:
    """Let the blocks of each section pass parts of the sequence to each other; `install_regions` has to follow. In place.

    Call before anything else is put over the blocks' forwards (stages, recomputation), so that it stays outside.

    Args:
        model: The model.
        plan: Its plan.
        group: The tensor-parallel group.
        sections: Runs of blocks, by index in the stack, each of which begins and ends with whole hidden states; None:
            the whole stack is one.

    Returns:
        What the blocks share, kept as `tp_sequence` of the model.
    """
    mode = vars(model)["tp_sequence"] = SequenceMode(group, plan.dim)
    model.register_forward_pre_hook(_see_call, with_kwargs=True)
    indices = [int(block.name.rpartition(".")[2] or 0) for block in plan.blocks]
    for section in sections or [range(max(indices) + 1)]:
        inside = [block for block, index in zip(plan.blocks, indices, strict=True) if index in section]
        for block in inside:
            state = _BlockState(mode, block, block is inside[0], block is inside[-1])
            put_over(model.get_submodule(block.name), "tp_block", state, _block_forward)
    return mode


def install_regions(
    model: nn.Module, plan: SequencePlan, shared: SharedCopy, holds: Callable[[str], bool], seeds: PairSeeds
) -> None:
    """Let regions gather and rows reduce-scatter. In place; call after the rows are sharded.

    Args:
        model: The model; `install_blocks` was called or is called here.
        plan: Its plan.
        shared: Shared copy of the sharded layers.
        holds: Whether this stage holds the parameter of that name.
        seeds: Random numbers inside pairs.
    """
    if "tp_sequence" not in vars(model):
        install_blocks(model, plan, shared.group)
    mode: SequenceMode = vars(model)["tp_sequence"]
    mode.draws.pairs, mode.widens = seeds, shared.widens
    for block in plan.blocks:
        root = model.get_submodule(block.name)
        prefix = f"{block.name}." if block.name else ""
        if not any(holds(prefix + name) for name, _ in root.named_parameters()):
            continue
        for region in block.regions:
            put_over(
                root.get_submodule(region.module), "tp_region", _RegionState(mode, shared, region), _region_forward
            )
            for row in region.rows:
                module = root.get_submodule(row)
                if "tp_linear" in vars(module) and vars(module)["tp_linear"].bare:
                    module = root.get_submodule(row.rpartition(".")[0])  # the adapter's, which sums for both
                vars(module)["tp_scatter"] = _RowState(mode, region.exit == "row")
                if vars(module).keys() & {"tp_linear", "tp_adapted"}:
                    put_over(module, "tp_scatter", vars(module)["tp_scatter"], _row_forward)


def _see_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hidden states that the model returns are collected block by block: they must be whole then."""
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    asked = kwargs.get("output_hidden_states")
    if asked is None:
        asked = getattr(config, "output_hidden_states", None) or getattr(text, "output_hidden_states", None)
    vars(module)["tp_sequence"].blocked = asked is not None and asked is not False  # 0 is the index of one


def _block_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: _BlockState = self.tp_block
    mode, plan = state.mode, state.plan
    hidden = _found(plan, args, kwargs)
    length = mode.length_for(hidden, is_first=state.is_first)
    out = _run_block(self, state, length, args, kwargs) if length else self.tp_block_inner(*args, **kwargs)
    if in_backward_pass():
        _placed(plan.outputs, lambda x: (mode.remember(x, length), x)[1], out)
    return out


def _run_block(self: Any, state: _BlockState, length: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A block on parts of a sequence of `length`, or on all of it if it has to."""
    mode, plan = state.mode, state.plan
    hidden = _found(plan, args, kwargs)
    along = mode.along(length)
    whole = bool(plan.whole)
    if state.is_first and not whole:
        args, kwargs = _at(plan.inputs, lambda x: scatter_to_sequence(x, *along), args, kwargs)
    if whole and not state.is_first:
        args, kwargs = _at(plan.inputs, lambda x: gather_from_sequence(x, *along, sums=False), args, kwargs)

    def run(forward: Callable[[], Any]) -> Any:
        draws = mode.draws.of_block(hidden.device, trains=self.training and not whole)
        with _running(mode, 0 if whole else length), draws, _used_in_part(self, plan.partial, mode):
            return forward()

    out = run_inside_checkpoint(self, functools.partial(self.tp_block_inner, *args, **kwargs), run)
    if whole and not state.is_last:
        return _placed(plan.outputs, lambda x: scatter_to_sequence(x, *along), out)
    if state.is_last and not whole:
        return _placed(plan.outputs, lambda x: gather_from_sequence(x, *along, sums=False), out)
    return out


def _found(plan: BlockSequence, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    _at(plan.inputs, note, args, kwargs)
    if not found:
        raise PlanError(
            f"block {plan.name} was not given its hidden states at {plan.inputs[0]}, as it was when it was planned. Plan "
            "with the inputs you train on, or set tensor_parallel.sequence_parallel: false."
        )
    return found[0]


def _at(
    places: Sequence[Place], change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _placed(places, change, args), _placed(places, change, dict(kwargs))


def _placed(places: Sequence[Place], change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `change` of the tensors at `places`."""
    return map_tensors(lambda place, tensor: change(tensor) if place in places else tensor, value)


@contextlib.contextmanager
def _running(mode: SequenceMode, length: int) -> Iterator[None]:
    before, mode.length = mode.length, length
    try:
        yield
    finally:
        mode.length = before


@contextlib.contextmanager
def _used_in_part(block: nn.Module, names: Sequence[str], mode: SequenceMode) -> Iterator[None]:
    """Inside, each named parameter is one whose gradient is summed over the ranks; see `apply._partial_forward`."""
    owners = [(block.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    learned = [
        (owner, key, p) for owner, key in owners if (p := own_parameters(owner)[key]) is not None and p.requires_grad
    ]
    if not learned:
        yield
        return
    copies = copies_to_tp([p for _, _, p in learned], mode.group, widens=mode.widens)
    for (owner, key, _), summed in zip(learned, copies, strict=True):
        vars(owner)[key] = summed
    try:
        yield
    finally:
        for owner, key, _ in learned:
            vars(owner).pop(key, None)


def _region_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: _RegionState = self.tp_region
    mode, plan, shared = state.mode, state.plan, state.copy
    if not mode.length:
        return self.tp_region_inner(*args, **kwargs)
    along = mode.along()
    before = shared.entered

    def enter(x: Tensor) -> Tensor:
        entry = Entry(x, *along, widens=shared.widens)
        shared.entered = entry
        return entry.full

    args, kwargs = _at(plan.inputs, enter, args, kwargs)
    try:
        with mode.draws.of_region():
            out = self.tp_region_inner(*args, **kwargs)
    finally:
        shared.entered = before
    if plan.exit == "row":
        return out
    if plan.exit == "split":
        return _placed(plan.outputs, lambda x: scatter_to_sequence(x, *along), out)
    return _placed(plan.outputs, lambda x: reduce_scatter_to_sequence(x, *along, widens=shared.widens), out)


def leaves_partial(module: nn.Module) -> bool:
    """Whether a row is to leave its partial sum now, because the region around it sums over the ranks."""
    state: _RowState | None = vars(module).get("tp_scatter")
    return state is not None and state.mode.length > 0


def _row_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    state: _RowState = self.tp_scatter
    mode = state.mode
    if not mode.length:
        return self.tp_scatter_inner(*args, **kwargs)
    dtype: torch.dtype | None = None
    if "tp_adapted" in vars(self):
        total = self.tp_scatter_inner(*args, **kwargs)
    else:
        linear = self.tp_linear
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        dtype = rounded_to(linear.copy, x) if state.scatters else None
        total = row_product(linear.copy, x, own(self, "weight"), linear.transposed, is_wide=dtype is not None)
    if not state.scatters:
        return total
    if unfolded(total, mode.dim, mode.length).shape[mode.dim] != mode.length:
        raise PlanError(
            f"a row's output of shape {tuple(total.shape)} has no dim {mode.dim} of {mode.length} positions."
        )
    total = reduce_scatter_to_sequence(total, *mode.along(), dtype=dtype)
    mode.draws.leave_region()
    bias: Tensor | None = own(self.base_layer if "tp_adapted" in vars(self) else self, "bias")
    return total if bias is None else total + bias  # after the sum: the bias counts once
