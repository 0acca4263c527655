"""One pipeline stage: the model's own forward, intercepted at block boundaries.

    received tensors          own blocks               tensors to send
         |                   +-----------+                   |
    [0] pass [1] pass  ...   | [lo..hi)  |  --> stage exit --+      (last stage: the genuine tail and loss run)

Blocks before `lo` do not compute: they put the received tensors where they would have left their own (in the return
value, in a shared container, in the output of a hooked module). The last own block ends the forward by a private
exception. Everything else, masks, position tables, tail and loss, is the model's own code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.errors import PlanError
from hf_parallel.pipeline_parallel.cut import Uncopyable, cut_parameters
from hf_parallel.pipeline_parallel.discover import CrossingKey, PipelinePlan
from hf_parallel.pipeline_parallel.stack import blocks_of
from hf_parallel.pipeline_parallel.structure import Leaf, Path, get_at, leaves, rebuild, set_at


class _StageExit(BaseException):
    """Ends the model's forward after the last own block. Not an Exception, so that model code cannot swallow it."""


class _Run:
    """State of one call: tensors by address, and how often hooked modules ran in the current block."""

    def __init__(self, received: dict[CrossingKey, Tensor]) -> None:
        self.tensors = received
        self.hooked: dict[str, int] = {}
        self.passed = 0


class _PassThrough(Uncopyable):
    """Forward of a block that lives on an earlier stage."""

    def __init__(self, stage: Stage, block: nn.Module, index: int, keys: Sequence[CrossingKey]) -> None:
        self.stage = stage
        self.trace = stage.plan.blocks[index]
        self.block = block
        self.returned = {k.path: k for k in keys if k.kind == "return"}
        self.written = [k for k in keys if k.kind == "argument"]
        self.hooked: dict[tuple[str, int], dict[Path, CrossingKey]] = {}
        for k in keys:
            if k.kind == "hook":
                self.hooked.setdefault((k.module, k.occurrence), {})[k.path] = k

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.stage.current_run()
        run.passed += 1
        arguments = [list(args), kwargs]
        hidden = next((t for _, t in leaves(arguments) if t.is_floating_point()), None)
        for key in self.written:
            set_at(arguments, key.path, run.tensors[key])
        for call in self.trace.hooked:
            if (call.module, call.occurrence) in self.hooked:
                here = self.hooked[call.module, call.occurrence]
                value = rebuild(call.output, functools.partial(_fill, run, here, hidden, arguments), arguments)
                _show(self.block.get_submodule(call.module), value)
        return rebuild(self.trace.returned, functools.partial(_fill, run, self.returned, hidden, arguments), arguments)


def _fill(
    run: _Run, keys: dict[Path, CrossingKey], hidden: Tensor | None, arguments: Any, path: Path, leaf: Leaf
) -> Tensor | None:
    """The tensor at one place of a rebuilt value: received, else handed through, else something of the right kind."""
    if path in keys:
        return run.tensors[keys[path]]
    if leaf.source is not None:
        return get_at(arguments, leaf.source)  # type: ignore[no-any-return]
    if hidden is None or leaf.dtype.is_floating_point:
        return hidden
    return torch.zeros_like(hidden, dtype=leaf.dtype)


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


class _InnerHook(Uncopyable):
    """Keeps the outputs of one hooked module of an own block that later stages need."""

    def __init__(self, stage: Stage, name: str, keys: Sequence[CrossingKey]) -> None:
        self.stage, self.name, self.keys = stage, name, keys

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        run = self.stage.run
        if run is None or self.stage.block != self.keys[0].block:
            return  # recomputation in a backward, or the same module inside another block
        occurrence = run.hooked.get(self.name, 0)
        run.hooked[self.name] = occurrence + 1
        for key in self.keys:
            if key.occurrence == occurrence:
                run.tensors[key] = get_at(out, key.path)


class _Enter(Uncopyable):
    """Marks which own block runs."""

    def __init__(self, stage: Stage, index: int) -> None:
        self.stage, self.index = stage, index

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.stage.run is not None:
            self.stage.block = self.index
            self.stage.run.hooked.clear()


class _Leave(Uncopyable):
    """Keeps what an own block hands to later stages; after the last one, ends the forward."""

    def __init__(self, stage: Stage, keys: Sequence[CrossingKey], is_exit: bool) -> None:
        self.stage, self.is_exit = stage, is_exit
        self.keys = [k for k in keys if k.kind != "hook"]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        run = self.stage.run
        if run is None:
            return
        for key in self.keys:
            run.tensors[key] = get_at(out if key.kind == "return" else (args, kwargs), key.path)
        if self.is_exit:
            raise _StageExit


class Stage(Uncopyable):
    """The part of a model that runs blocks [bounds[i], bounds[i+1]), made by cutting the model in place.

    Nothing is kept between calls, so any number of microbatches may be alive at once. Batch size and sequence length
    are free. The model must already be on its device: placeholders of dropped weights remember it.

    Args:
        model: the whole model; afterwards it holds only what this stage needs, under unchanged names.
        plan: from `discover_stages`, made on this model or on an equal one.
        bounds: block ranges of all stages, [0, ..., num_blocks].
        stage_index: which of them this is, 0 .. len(bounds) - 2.
        forward: the model's genuine forward. Never the model itself when its forward is replaced by one that runs
            this stage.

    Raises:
        PlanError: Bounds that do not fit the plan, or a cut that cannot be made. Nothing is changed then.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PipelinePlan,
        bounds: Sequence[int],
        stage_index: int,
        forward: Callable[..., Any],
    ) -> None:
        _check_bounds(plan, bounds, stage_index)
        self.model, self.plan, self.stage_index, self.forward = model, plan, stage_index, forward
        self.lo, self.hi = bounds[stage_index], bounds[stage_index + 1]
        self.is_first, self.is_last = stage_index == 0, stage_index == len(bounds) - 2
        self.keys_in = () if self.is_first else plan.crossings(self.lo)
        self.keys_out = () if self.is_last else plan.crossings(self.hi)
        self.run: _Run | None = None
        self.block = -1
        self.held = cut_parameters(model, plan, self.lo, self.hi)
        for index, block in enumerate(blocks_of(model, plan.stack)):
            self._intercept(index, block)

    @property
    def num_payload_in(self) -> int:
        """How many tensors a call takes; 0 on the first stage."""
        return len(self.keys_in)

    @property
    def num_payload_out(self) -> int:
        """How many tensors a call returns; 0 on the last stage, which returns the model's output."""
        return len(self.keys_out)

    def __call__(self, payload: tuple[Tensor, ...] = (), **inputs: Any) -> Any:
        """Run this stage on one microbatch.

        Args:
            payload: what the previous stage returned, in the order of `plan.crossings(lo)`; empty on the first stage.
            inputs: the model's keyword arguments, the same on every stage.

        Returns:
            The tensors to send, in the order of `plan.crossings(hi)`; on the last stage the model's own output.

        Raises:
            PlanError: The payload does not fit, or the model took another path than the plan's.
        """
        if len(payload) != self.num_payload_in:
            raise PlanError(
                f"stage {self.stage_index} of {self.plan.model_name} takes {self.num_payload_in} tensors, got "
                f"{len(payload)}: pass what the previous stage returned."
            )
        if self.run is not None:
            raise PlanError(f"stage {self.stage_index} called itself: give it the model's genuine forward.")
        run = self.run = _Run(dict(zip(self.keys_in, payload, strict=True)))
        try:
            out = self.forward(**inputs)
        except _StageExit as stop:
            # The traceback holds every frame of the forward, and the frames hold the activations.
            stop.__traceback__ = stop.__context__ = None
            return self._collect(run)
        finally:
            self.run, self.block = None, -1
        if not self.is_last or run.passed != self.lo:
            raise PlanError(
                self._strayed(f"{run.passed} of {self.lo} earlier blocks and not all of [{self.lo}, {self.hi})")
            )
        return out

    def current_run(self) -> _Run:
        """State of the call in progress; a block of another stage cannot run outside one."""
        if self.run is None:
            raise PlanError(
                f"a block of another stage was called outside stage {self.stage_index}: its weights are not here. Run "
                "the pipeline, not the cut model."
            )
        return self.run

    def _collect(self, run: _Run) -> tuple[Tensor, ...]:
        missing = [k for k in self.keys_out if k not in run.tensors]
        if missing:
            raise PlanError(self._strayed(f"no tensor at {missing[0]}"))
        return tuple(run.tensors[key] for key in self.keys_out)

    def _strayed(self, what: str) -> str:
        return (
            f"{self.plan.model_name} took another path on stage {self.stage_index} than in discovery ({what}); discover "
            f"with the inputs you train on (discovered with {sorted(self.plan.input_names)})."
        )

    def _intercept(self, index: int, block: nn.Module) -> None:
        if index < self.lo:
            keys = [k for k in self.keys_in if k.block == index]
            block.forward = _PassThrough(self, block, index, keys)
        elif index < self.hi and not self.is_last:
            keys = [k for k in self.keys_out if k.block == index]
            for name in dict.fromkeys(k.module for k in keys if k.kind == "hook"):
                inner = [k for k in keys if k.module == name and k.kind == "hook"]
                block.get_submodule(name).register_forward_hook(_InnerHook(self, name, inner))
            block.register_forward_pre_hook(_Enter(self, index))
            block.register_forward_hook(_Leave(self, keys, index == self.hi - 1), with_kwargs=True)


def _check_bounds(plan: PipelinePlan, bounds: Sequence[int], stage_index: int) -> None:
    """Every stage needs at least one block and every block one stage."""
    num_stages = len(bounds) - 1
    rising = all(lo < hi for lo, hi in itertools.pairwise(bounds))
    if num_stages < 1 or bounds[0] != 0 or bounds[-1] != plan.num_blocks or not rising:
        raise PlanError(
            f"bounds={list(bounds)} do not partition the {plan.num_blocks} blocks of '{plan.stack}': they must rise from "
            f"0 to {plan.num_blocks}, at least one block a stage."
        )
    if not 0 <= stage_index < num_stages:
        raise PlanError(f"stage_index={stage_index} is outside 0 .. {num_stages - 1} (bounds={list(bounds)}).")
