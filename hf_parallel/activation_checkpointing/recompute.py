"""Activation checkpointing of groups of consecutive blocks, inside the model's own loop over them.

The first forward of a group keeps no activation: whatever autograd would save is replaced by a number. The first such
number asked for in the backward runs the group again, from the arguments its blocks were called with, and everything
that would have been saved is taken from this second run. The graph is that of the first forward, so gradients flow as
they do without checkpointing.

Arguments made by an earlier block of the group (its return value, what it stored in a container) are not kept but taken
from the second run. Containers are copied for it, so blocks that store tensors in them change nothing that others see.

What is kept of a group may go to host memory meanwhile (`host_copies`), and results that are expensive to compute may be kept
too (`selective`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_parallel.activation_checkpointing.host_copies import CopyStreams, Follow
from hf_parallel.activation_checkpointing.kept import BlockOutput, Kept, mapped, restored
from hf_parallel.activation_checkpointing.selective import KeptResults
from hf_parallel.compat.private_torch import version_of
from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.model.random_streams import generators_of
from hf_parallel.model.stack import blocks_of
from hf_parallel.model.structure import leaves
from hf_parallel.pipeline_parallel.run.cut import Uncopyable
from hf_parallel.pipeline_parallel.run.intercept import wrap_forward
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, spans_of


logger = logging.getLogger(__name__)

Mode = Literal["block", "alternate", "selective"]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def groups_for(bounds: Sequence[int], every: int, mode: Mode, plan: PipelinePlan) -> list[range]:
    """Groups of blocks to checkpoint.

    Args:
        bounds: block ranges of all stages; no group crosses a boundary.
        every: "block": most blocks of a group; "alternate": one block in so many, alone. At least 1.
        mode: "alternate" leaves some blocks as they are; "selective" checkpoints each by itself, whatever `every` is.
        plan: groups end where code between two blocks works on what the first returned, and at skipped blocks.

    Raises:
        PlanError: `every` or `mode` is unknown.
    """
    if every < 1 or mode not in get_args(Mode):
        raise PlanError(f"every={every} must be at least 1 and mode={mode!r} one of {', '.join(get_args(Mode))}.")
    spans = spans_of(bounds)
    if mode != "block":
        every = every if mode == "alternate" else 1
        return [range(j, j + 1) for span in spans for j in range(span.lo, span.hi, every) if j in plan.blocks]
    groups: list[range] = []
    parted: list[int] = []
    for span in spans:
        mine: list[range] = []
        for j in (j for j in range(span.lo, span.hi) if j in plan.blocks):
            room = bool(mine) and mine[-1].stop == j and len(mine[-1]) < every
            if room and plan.joins(j):
                mine[-1] = range(mine[-1].start, j + 1)
            else:
                parted += [j] if room else []
                mine.append(range(j, j + 1))
        groups += mine
    if parted:
        logger.warning(
            "hf_parallel: %s computes between its blocks (before block %s), so checkpointed groups of %d end there.",
            plan.model_name,
            ", ".join(map(str, parted)),
            every,
        )
    return groups


class Recomputation(Uncopyable):
    """Checkpointing that `recompute_blocks` installed.

    Attributes:
        groups: the checkpointed groups.
        num_recomputed: blocks run a second time so far.
        streams: what copies to and from host memory; None if inputs stay where they are.
        products: one matrix product in so many is not run again; None if everything is.
    """

    def __init__(self, groups: Sequence[range], streams: CopyStreams | None, products: int | None) -> None:
        self.groups = list(groups)
        self.num_recomputed = 0
        self.streams, self.products = streams, products
        self._left: weakref.ref[_Frame] | None = None

    def leave(self, frame: _Frame) -> None:
        """Link a group that a forward has left to the one before: backwards come to them in the opposite order."""
        before = self._left() if self._left is not None else None
        if before is not None and before.group.indices.stop == frame.group.indices.start:
            frame.before = weakref.ref(before)
        self._left = weakref.ref(frame)


def recompute_blocks(
    model: nn.Module,
    stack: str,
    groups: Sequence[range],
    *,
    offload: bool = False,
    products: int | None = None,
    follow: Follow = lambda tensor: None,
) -> Recomputation:
    """Checkpoint groups of blocks of a model in place, before or after it is cut into stages.

    Any number of forwards may be alive at once. Random draws and autocast are repeated as they were. Forward hooks on
    the blocks themselves do not run again. Without autograd nothing changes.

    Args:
        model: the model; its own activation checkpointing must be off.
        stack: name of the list of blocks.
        groups: disjoint ranges of blocks that run one after the other, e.g. from `groups_for`.
        offload: whether what is kept of a group's inputs goes to host memory between its forward and its backward.
        products: keep the results of attention and of one matrix product in so many; None keeps none.
        follow: called for tensors that go to host memory (see `CopyStreams`).

    Raises:
        UnsupportedError: The model checkpoints its blocks itself.
        PlanError: Groups overlap or name blocks that do not exist.
    """
    blocks = blocks_of(model, stack)
    named = [j for group in groups for j in group]
    if len(set(named)) < len(named) or not all(0 <= j < len(blocks) for j in named):
        raise PlanError(f"groups={[list(g) for g in groups]} must be disjoint and within the {len(blocks)} blocks.")
    for name, module in model.named_modules():
        _refuse_second_checkpointing(module, name)
    done = Recomputation(groups, CopyStreams(follow) if offload else None, products)
    for indices in groups:
        group = _Group(done, indices)
        for position, index in enumerate(indices):
            wrap_forward(blocks[index], functools.partial(_Checkpointed, group, position, blocks[index]))
    return done


def _refuse_second_checkpointing(module: nn.Module, name: str) -> None:
    if getattr(module, "gradient_checkpointing", False):
        raise UnsupportedError(
            f"{name or type(module).__name__}.gradient_checkpointing is on together with activation_checkpointing.every: blocks "
            "would be recomputed twice. Leave TrainingArguments(activation_checkpointing=...) False (or call "
            "model.activation_checkpointing_disable()), or remove activation_checkpointing.every."
        )


class _Checkpointed(Uncopyable):
    """Forward of a block of a group."""

    def __init__(self, group: _Group, position: int, block: nn.Module, genuine: Callable[..., Any]) -> None:
        self.group, self.position, self.block, self.genuine = group, position, block, genuine
        group.forwards.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = self.group.frame_for(self) if torch.is_grad_enabled() else None
        if frame is None:
            return self.genuine(*args, **kwargs)
        return frame.run(self, args, kwargs)


class _Group(Uncopyable):
    """The blocks of one group, and the frame of the forward that is inside it."""

    def __init__(self, done: Recomputation, indices: range) -> None:
        self.done, self.indices = done, indices
        self.forwards: list[_Checkpointed] = []
        self.open: _Frame | None = None

    def frame_for(self, forward: _Checkpointed) -> _Frame | None:
        """The frame this call belongs to; None for a block called out of order, which is run as it is."""
        if forward.position == 0:
            _refuse_second_checkpointing(forward.block, f"block {self.indices[0]}")
            self.open = _Frame(self)
        elif self.open is not None and len(self.open.calls) != forward.position:
            self.open = None
        return self.open


class _Frame:
    """One forward of a group: what is needed to run it again, and afterwards what that gave."""

    def __init__(self, group: _Group) -> None:
        self.group = group
        self.calls: list[tuple[Any, list[Tensor]]] = []  # stored arguments and random states of each block
        self.kept: list[Kept] = []
        self.outside: dict[int, tuple[Tensor, Kept]] = {}  # only while the forward is inside the group
        self.before: weakref.ref[_Frame] | None = None
        self.results: list[KeptResults] = []
        self.made: dict[int, tuple[Tensor, BlockOutput]] = {}  # only while the forward is inside the group
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.again: dict[int, Tensor] = {}
        self.contexts = _autocast_of(next(group.forwards[0].block.parameters(), None))

    def run(self, forward: _Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of one block, saving nothing."""
        states = [generator.get_state() for generator in generators_of(forward.block)]
        self.calls.append((self._stored((args, kwargs)), states))
        try:
            with saved_tensors_hooks(self._pack, self._unpack), self._keeping(forward.block):
                out = forward.genuine(*args, **kwargs)
            self._check_kept()
        except BaseException:
            self._leave_group()
            raise
        if self.results:
            self.results[-1].leave(tensor for _, tensor in leaves((out, (args, kwargs))))
        if forward.position == len(self.group.indices) - 1:
            self._leave_group()
        else:
            for path, tensor in leaves((out, (args, kwargs))):
                self.made.setdefault(id(tensor), (tensor, BlockOutput(forward.position, path)))
        return out

    def _keeping(self, block: nn.Module) -> contextlib.AbstractContextManager[object]:
        if self.group.done.products is None:
            return contextlib.nullcontext()
        self.results.append(KeptResults(self.group.done.products, generators_of(block)))
        return self.results[-1].keeping()

    def _taking(self, position: int) -> contextlib.AbstractContextManager[object]:
        return self.results[position].taking() if self.results else contextlib.nullcontext()

    def _leave_group(self) -> None:
        self.made.clear()
        self.outside.clear()
        for kept in self.kept:
            kept.settle()
        self.group.open = None
        self.group.done.leave(self)

    def fetch(self) -> None:
        """Begin to bring back what is in host memory."""
        for kept in self.kept:
            if kept.copy is not None and kept.here is None:
                kept.copy.fetch()

    def _stored(self, value: Any) -> Any:
        """`value` with tensors replaced by what stands for them, in containers of its own."""
        if isinstance(value, Tensor):
            if id(value) in self.made:
                return self.made[id(value)][1]
            known = self.outside.get(id(value))
            if known is None or known[1].version != version_of(value):
                known = self.outside[id(value)] = (value, Kept.of(value, self.group.done.streams))
                self.kept.append(known[1])
            return known[1]
        return mapped(value, self._stored)

    def _check_kept(self) -> None:
        if any(kept.is_changed for kept in self.kept):
            raise PlanError(
                f"a block of [{self.group.indices.start}, {self.group.indices.stop}) changes a tensor it was given in "
                "place, so it cannot be run again. Leave these blocks out of activation checkpointing."
            )

    def _pack(self, tensor: Tensor) -> int:
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def _unpack(self, number: int) -> Tensor:
        if number not in self.again:
            self._run_again()
        return self.again.pop(number)

    def _run_again(self) -> None:
        self._check_kept()
        self.again.clear()
        self.fetch()
        before = self.before() if self.before is not None else None
        if before is not None:
            before.fetch()
        results: list[tuple[Any, Call]] = []
        first = self.group.forwards[0].block
        with contextlib.ExitStack() as stack:
            stack.enter_context(_random_state_kept(first))
            for device, settings in self.contexts.items():
                stack.enter_context(torch.autocast(device, **settings))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(self._pack_again, _same))
            try:
                for forward, (stored, states) in zip(self.group.forwards, self.calls, strict=True):
                    self.group.done.num_recomputed += 1
                    results.append(self._call_again(forward, stored, states, results))
            except _AllTaken as stop:
                # A traceback holds every frame of the second run, and the frames hold its activations.
                stop.__traceback__ = stop.__context__ = None
            finally:
                for kept in self.kept:
                    kept.forget()
        if len(self.again) != len(self.saved):
            raise PlanError(self._differs(f"{len(self.again)} tensors were saved instead of {len(self.saved)}"))

    def _call_again(
        self, forward: _Checkpointed, stored: Any, states: list[Tensor], results: list[tuple[Any, Call]]
    ) -> tuple[Any, Call]:
        args, kwargs = restored(results, stored)
        for generator, state in zip(generators_of(forward.block), states, strict=True):
            generator.set_state(state)
        with self._taking(forward.position):
            return forward.genuine(*args, **kwargs), (args, kwargs)

    def _pack_again(self, tensor: Tensor) -> Tensor:
        number = len(self.again)
        found = (tensor.shape, tensor.dtype)
        if found != self.saved[number]:
            raise PlanError(self._differs(f"tensor {number} is {found} and was {self.saved[number]}"))
        self.again[number] = tensor.detach()
        if len(self.again) == len(self.saved):
            raise _AllTaken
        return self.again[number]

    def _differs(self, how: str) -> str:
        return (
            f"blocks [{self.group.indices.start}, {self.group.indices.stop}) took another path when they were run again "
            f"for the backward: {how}. Leave these blocks out of activation checkpointing."
        )


class _AllTaken(BaseException):
    """Ends the second run when everything that was saved is there. Not an Exception, so that blocks cannot swallow it."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _autocast_of(weight: Tensor | None) -> dict[str, dict[str, Any]]:
    """Settings of autocast in effect, by device type."""
    devices = {"cpu"} | ({weight.device.type} if weight is not None else set())
    return {
        device: {
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device in sorted(devices)
    }


@contextlib.contextmanager
def _random_state_kept(module: nn.Module) -> Iterator[None]:
    before = [(generator, generator.get_state()) for generator in generators_of(module)]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
