"""Intercepts the blocks of a cut model, and keeps the state of the one call in progress.

One model may carry several stages. A block is skipped, run, or ends the forward depending on which of them is running;
 outside any call (recomputation in a backward) a block that is here runs its genuine forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import around_call, forward_hooks, module_hooks
from hf_parallel.errors import PlanError
from hf_parallel.model.random_streams import Streams
from hf_parallel.model.stack import blocks_of
from hf_parallel.model.structure import Leaf, Path, get_at, leaves, rebuild, set_at
from hf_parallel.pipeline_parallel.run.cut import Uncopyable, ZeroOutput
from hf_parallel.pipeline_parallel.stage_plan import CrossingKey, PipelinePlan, Span


class StageExit(BaseException):
    """Ends the model's forward after the last own block. Not an Exception, so that model code cannot swallow it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One stage as the hooks see it: its blocks, the tensors it takes and sends, and the block that ends it."""

    index: int
    span: Span
    keys_in: tuple[CrossingKey, ...]
    keys_out: tuple[CrossingKey, ...]
    exit_block: int | None  # None on the last stage, which runs to the end


class Run:
    """State of one call: tensors by address, the own block that runs, and how often its hooked modules ran."""

    def __init__(self, part: Part, received: dict[CrossingKey, Tensor], streams: Streams | None) -> None:
        self.part = part
        self.streams = streams
        self.tensors = received
        self.hooked: dict[str, int] = {}
        self.block = -1
        self.passed = 0
        self.skipped: Any = None  # what the last block that was skipped returned

    def leave(self, block: int) -> None:
        """Block `block` was run or skipped: the next segment begins."""
        self.block = -1
        if self.streams is not None:
            self.streams.enter(block + 1)


class Calls:
    """The call in progress on one cut model, shared by all that is installed on it."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self._last: list[tuple[dict[int, Any], int]] = []
        self._skipped: list[_Late] = []

    def install_last(self, block: nn.Module, hook: Callable[..., Any]) -> None:
        """Install `hook` behind all forward hooks of a block: what it sees is what the block's caller gets."""
        handle = block.register_forward_hook(hook, with_kwargs=True)
        self._last.append((forward_hooks(block), handle.id))

    def stay_last(self) -> None:
        """Move our hooks behind those that users have registered since."""
        for hooks, key in self._last:
            if key in hooks and next(reversed(hooks)) != key:
                hooks[key] = hooks.pop(key)

    def install_skipped(self, block: nn.Module, stages: Collection[int]) -> None:
        """`block` (or an embedding) has all that it was cut with; `stages` skip it, or have no use for what it returns."""
        self._skipped.append(_Late(block, stages))

    @contextmanager
    def as_cut(self, stage: int) -> Iterator[None]:
        """Inside, modules that `stage` skips have no forward hooks but those that were there when the model was cut.

        What a user puts on a block since then is in effect where the block runs. Here it would see tensors that the block
        did not make, and could write to them or scale their gradients once more.
        """
        taken = [late for late in self._skipped if stage in late.stages and late.found]
        for late in taken:
            late.take()
        try:
            yield
        finally:
            for late in taken:
                late.give_back()


class _Late:
    """Hooks, and a forward around ours, that were put on a block after the cut, and all its hooks of the backward pass."""

    def __init__(self, block: nn.Module, stages: Collection[int]) -> None:
        self.block, self.stages, self.forward = block, frozenset(stages), vars(block).get("forward")
        *forward, before_backward, backward = module_hooks(block)
        self._hooks = [(hooks, frozenset(hooks)) for hooks in forward]
        # Gradients of a skipped block have passed its hooks, or will, where it runs.
        self._hooks += [(hooks, frozenset()) for hooks in (before_backward, backward)]
        self._taken: list[dict[int, Any]] = []
        self._replaced: Any = None

    @property
    def found(self) -> bool:
        """Whether there is any."""
        if vars(self.block).get("forward") is not self.forward:
            return True
        return any(hooks and hooks.keys() != cut for hooks, cut in self._hooks)

    def take(self) -> None:
        self._taken = [{key: hooks[key] for key in hooks if key not in cut} for hooks, cut in self._hooks]
        for (hooks, _), taken in zip(self._hooks, self._taken, strict=True):
            hooks.update(dict.fromkeys(taken, _nothing))  # in their places: a handle may be removed meanwhile
        self._replaced = self._put(self.forward)

    def give_back(self) -> None:
        for (hooks, _), taken in zip(self._hooks, self._taken, strict=True):
            hooks.update({key: hook for key, hook in taken.items() if key in hooks})
        self._put(self._replaced)
        self._taken, self._replaced = [], None

    def _put(self, forward: Any) -> Any:
        """Give the block a forward, or with None that of its class; what it had."""
        before = vars(self.block).pop("forward", None)
        if forward is not None:
            self.block.forward = forward
        return before


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in the place of a hook."""


class _SkippedBlock(Uncopyable):
    """Stands for one block on a later stage: puts what was received where the block would have left it."""

    def __init__(self, plan: PipelinePlan, block: nn.Module, index: int, keys: Sequence[CrossingKey]) -> None:
        self.trace, self.index = plan.blocks[index], index
        self.block = block
        self.returned = {k.path: k for k in keys if k.kind == "return"}
        self.written = [k for k in keys if k.kind == "argument"]
        self.hooked: dict[tuple[str, int], dict[Path, CrossingKey]] = {}
        for k in keys:
            if k.kind == "hook":
                self.hooked.setdefault((k.module, k.occurrence), {})[k.path] = k
        # Most blocks return one new tensor that this stage has no use for: any of its kind will do.
        returned = self.trace.returned
        new = isinstance(returned, Leaf) and returned.source is None and returned.dtype.is_floating_point
        self.passes_on = new and not keys

    def __call__(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run.passed += 1
        if self.passes_on and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            run.leave(self.index)
            return args[0]
        arguments = [list(args), kwargs]
        hidden = next((t for _, t in leaves(arguments) if t.is_floating_point()), None)
        for key in self.written:
            set_at(arguments, key.path, run.tensors[key])
        for call in self.trace.hooked:
            if (call.module, call.occurrence) in self.hooked:
                here = self.hooked[call.module, call.occurrence]
                value = rebuild(call.output, functools.partial(_fill, run, here, hidden, arguments), arguments)
                _show(self.block.get_submodule(call.module), value)
        value = rebuild(
            self.trace.returned, functools.partial(_fill, run, self.returned, hidden, arguments), arguments
        )
        run.leave(self.index)
        return value


def _fill(
    run: Run, keys: dict[Path, CrossingKey], hidden: Tensor | None, arguments: Any, path: Path, leaf: Leaf
) -> Tensor | None:
    """The tensor at one place of a rebuilt value: received, else passed through, else something of the right kind."""
    if path in keys:
        return run.tensors[keys[path]]
    if leaf.source is not None:
        return get_at(arguments, leaf.source)  # type: ignore[no-any-return]
    if hidden is None or leaf.dtype.is_floating_point:
        return hidden
    return torch.zeros_like(hidden, dtype=leaf.dtype)  # f[B S H] -> i[B S H]: only its type is looked at


def _show(module: nn.Module, value: Any) -> None:
    """Let the forward hooks of a module see `value` as its output."""
    previous = vars(module).get("forward")
    module.forward = lambda *args, **kwargs: value
    try:
        module(value)
    finally:
        del module.forward
        if previous is not None:
            module.forward = previous


class _Forward(Uncopyable):
    """Forward of a block that some stage of this model skips."""

    def __init__(self, calls: Calls, genuine: Callable[..., Any] | None, skips: dict[int, _SkippedBlock]) -> None:
        self.calls, self.genuine, self.skips = calls, genuine, skips

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.calls.run
        skip = self.skips.get(run.part.index) if run is not None else None
        if run is not None and skip is not None:
            run.skipped = skip(run, args, kwargs)
            return run.skipped
        if self.genuine is None:
            raise PlanError(
                "a block of another stage was called outside a stage that skips it: its weights are not here. "
                "Run the pipeline, not the cut model."
            )
        return self.genuine(*args, **kwargs)


def wrap_forward(block: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a block's own forward by `wrapper` of it; a stage that skips the block is not affected."""
    installed = vars(block).get("forward")
    if not isinstance(installed, _Forward):
        block.forward = wrapper(block.forward)
    elif installed.genuine is not None:
        installed.genuine = wrapper(installed.genuine)


class _InnerHook(Uncopyable):
    """Keeps the outputs of one hooked module of an own block that later stages need."""

    def __init__(self, calls: Calls, name: str, keys: Sequence[CrossingKey]) -> None:
        self.calls, self.name, self.keys = calls, name, keys

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        run = self.calls.run
        if run is None or run.block != self.keys[0].block:
            return  # recomputation in a backward, a skipped block, or the same module inside another block
        occurrence = run.hooked.get(self.name, 0)
        run.hooked[self.name] = occurrence + 1
        for key in self.keys:
            if key.occurrence == occurrence:
                run.tensors[key] = get_at(out, key.path)


class _Enter(Uncopyable):
    """Marks which own block runs."""

    def __init__(self, calls: Calls, index: int, owner: Part) -> None:
        self.calls, self.index, self.owner = calls, index, owner

    def __call__(self, module: nn.Module, args: Any) -> None:
        run = self.calls.run
        if run is not None and run.part is self.owner:
            run.block = self.index
            run.hooked.clear()


class _SkippedOutput(Uncopyable):
    """The last hook of a skipped block: a user's hooks have done their part on the stage that runs it."""

    def __init__(self, calls: Calls, skips: Collection[int]) -> None:
        self.calls, self.skips = calls, skips

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        run = self.calls.run
        if run is None or run.part.index not in self.skips:
            return None
        skipped, run.skipped = run.skipped, None
        return None if out is skipped else skipped


class _Leave(Uncopyable):
    """Keeps what an own block hands to later stages; after the last one, ends the forward (`after`)."""

    def __init__(self, calls: Calls, index: int, owner: Part) -> None:
        self.calls, self.index, self.owner = calls, index, owner
        self.is_exit = index == owner.exit_block
        self.keys = [k for k in owner.keys_out if k.block == index and k.kind != "hook"]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        run = self.calls.run
        if run is None or run.part is not self.owner:
            return
        for key in self.keys:
            if key.kind != "return":
                run.tensors[key] = get_at((args, kwargs), key.path)
        run.leave(self.index)

    def after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the block, with what comes behind its hooks: torch adds the nodes of backward hooks to the output last."""

        def called(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            run = self.calls.run
            if run is None or run.part is not self.owner:
                return out
            for key in self.keys:
                if key.kind == "return":
                    run.tensors[key] = get_at(out, key.path)
            if self.is_exit:
                raise StageExit
            return out

        return called


def intercept(model: nn.Module, plan: PipelinePlan, parts: Sequence[Part]) -> Calls:
    """Install the stages `parts` on the blocks of `model`, whose parameters are cut already."""
    calls = Calls()
    for index, block in enumerate(blocks_of(model, plan.stack)):
        if index in plan.blocks:
            _intercept_block(calls, plan, parts, index, block)
    for name in plan.zero_outputs:
        module = model.get_submodule(name)
        # What it returns is none of the model's values there, or goes nowhere (a table that is the head, too).
        dropped = isinstance(vars(module).get("forward"), ZeroOutput)
        skips = [part.index for part in parts if dropped or plan.looks_up_for_nothing(part.span, name)]
        if skips:
            calls.install_skipped(module, skips)
    return calls


def _intercept_block(calls: Calls, plan: PipelinePlan, parts: Sequence[Part], index: int, block: nn.Module) -> None:
    skips = {
        part.index: _SkippedBlock(plan, block, index, [k for k in part.keys_in if k.block == index])
        for part in parts
        if index < part.span.lo
    }
    owner = next((part for part in parts if part.span.lo <= index < part.span.hi), None)
    is_bare = not any(module_hooks(block))
    if skips:
        block.forward = _Forward(calls, None if owner is None else _genuine(block), skips)
    if skips and is_bare:
        around_call(block, functools.partial(_skipped_call, calls, skips))
    elif skips:
        calls.install_last(block, _SkippedOutput(calls, skips))
    if owner is not None:
        _intercept_own(calls, index, block, owner)
    if skips and not is_bare:
        calls.install_skipped(block, skips)


def _skipped_call(calls: Calls, skips: Mapping[int, _SkippedBlock], call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a block without hooks: a stage that skips it pays for none of torch's ways to a forward.

    Most blocks of a deep model are skipped by most stages, so this is what a stage's host time grows with. What a user puts
    on the block later is passed by, as `Calls.as_cut` does for blocks that were cut with hooks.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        run = calls.run
        skip = None if run is None else skips.get(run.part.index)
        return call(*args, **kwargs) if run is None or skip is None else skip(run, args, kwargs)

    return called


def _genuine(block: nn.Module) -> Callable[..., Any]:
    """The forward of a block as it will be when it is called: a class may be patched, or the block given another."""
    if "forward" in vars(block):
        found: Callable[..., Any] = block.forward
        return found

    @functools.wraps(block.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(block).forward(block, *args, **kwargs)

    return forward


def _intercept_own(calls: Calls, index: int, block: nn.Module, owner: Part) -> None:
    hooked = [k for k in owner.keys_out if k.block == index and k.kind == "hook"]
    for name in dict.fromkeys(k.module for k in hooked):
        inner = [k for k in hooked if k.module == name]
        block.get_submodule(name).register_forward_hook(_InnerHook(calls, name, inner))
    block.register_forward_pre_hook(_Enter(calls, index, owner))
    leave = _Leave(calls, index, owner)
    calls.install_last(block, leave)
    if leave.keys or leave.is_exit:
        around_call(block, leave.after)
