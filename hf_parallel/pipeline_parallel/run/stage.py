"""Pipeline stages: the model's own forward, intercepted at block boundaries.

    received tensors          own blocks               tensors to send
         |                   +-----------+                   |
    [0] pass [1] pass  ...   | [lo..hi)  |  --> stage exit --+      (last stage: the genuine tail and loss run)

Blocks before `lo` do not compute: they put the received tensors where they would have left their own (in the return
value, in a shared container, in the output of a hooked module). The last own block ends the forward by a private
exception. Everything else, masks, position tables, tail and loss, is the model's own code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.errors import PlanError
from hf_parallel.model.random_streams import Streams, generators_of
from hf_parallel.pipeline_parallel.run.cut import Running, Uncopyable, cut_parameters
from hf_parallel.pipeline_parallel.run.intercept import Calls, Part, Run, StageExit, intercept
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, Span, spans_of


class Stage(Uncopyable):
    """The part of a cut model that runs blocks [lo, hi); made by `cut_stages`.

    Nothing is kept between calls, so any number of microbatches may be alive at once. Batch size and sequence length
    are free.

    Attributes:
        model: the cut model, shared by all stages that were cut from it together.
        stage_index: which of the stages of the bounds this is, from 0.
        is_first: whether it takes no payload.
        is_last: whether it runs the tail and returns the model's own output.
        seed: set before each call by the caller; None leaves the random state alone. Otherwise, in training mode, what
            the call draws depends on the seed and the place in the model only, not on the cut (see `seeds`), and the
            random state afterwards is the one from before.
        held: names of the parameters that `model` still holds, those of the other stages on it included.
        running: whether weights that were dropped may be looked at; shared by all stages that were cut together.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PipelinePlan,
        part: Part,
        forward: Callable[..., Any],
        calls: Calls,
        held: frozenset[str],
        running: Running,
    ) -> None:
        self.model, self.plan, self.part, self.forward, self.held = model, plan, part, forward, held
        self.running = running
        self.stage_index = part.index
        self.lo, self.hi, self.is_last = part.span
        self.is_first = part.index == 0
        self.num_blocks_before = sum(j < self.lo for j in plan.blocks)
        self.seed: int | None = None
        self._calls = calls
        self._generators: list[torch.Generator] = []

    @property
    def num_payload_in(self) -> int:
        """Number of tensors that a call takes from the stage before; 0 on the first stage."""
        return len(self.part.keys_in)

    def __call__(self, payload: tuple[Tensor, ...] = (), **inputs: Any) -> Any:
        """Run this stage on one microbatch.

        Args:
            payload: what the previous stage returned, in the order of `plan.crossings(lo)`; empty on the first stage.
            inputs: the model's keyword arguments, the same on every stage.

        Returns:
            The tensors to send, in the order of `plan.crossings(hi)`; on the last stage the model's own output.

        Raises:
            PlanError: The payload does not fit, the plan does not cover these inputs, or the model took another path
                than the plan's.
        """
        if len(payload) != self.num_payload_in:
            raise PlanError(
                f"stage {self.stage_index} of {self.plan.model_name} takes {self.num_payload_in} tensors, got "
                f"{len(payload)}: pass what the previous stage returned."
            )
        self.plan.inputs.check(self.model, inputs)
        self._calls.stay_last()
        run = self._begin(payload)
        try:
            with self._calls.as_cut(self.stage_index):
                out = self.forward(**inputs)
        except StageExit as stop:
            # The traceback holds every frame of the forward, and the frames hold the activations.
            stop.__traceback__ = stop.__context__ = None
            return self._collect(run)
        finally:
            self._calls.run = None
            if run.streams is not None:
                run.streams.close()
        if not self.is_last or run.passed != self.num_blocks_before:
            raise PlanError(
                self._strayed(
                    f"{run.passed} of {self.num_blocks_before} earlier blocks and not all of [{self.lo}, {self.hi})"
                )
            )
        return out

    def _begin(self, payload: tuple[Tensor, ...]) -> Run:
        running = self._calls.run
        if running is not None:
            raise PlanError(
                f"stage {self.stage_index} was called while stage {running.part.index} of the same model runs: give it "
                "the model's genuine forward, and run the stages of one model one after the other."
            )
        streams = None
        if self.seed is not None and self.model.training:
            if not self._generators:  # once: a later stage has no parameter before its first block
                self._generators = generators_of(self.model)
            streams = Streams(self._generators, self.seed)
            streams.enter(0)
        self._calls.run = Run(self.part, dict(zip(self.part.keys_in, payload, strict=True)), streams)
        return self._calls.run

    def _collect(self, run: Run) -> tuple[Tensor, ...]:
        missing = [k for k in self.part.keys_out if k not in run.tensors]
        if missing:
            raise PlanError(self._strayed(f"no tensor at {missing[0]}"))
        return tuple(run.tensors[key] for key in self.part.keys_out)

    def _strayed(self, what: str) -> str:
        return (
            f"{self.plan.model_name} took another path on stage {self.stage_index} than in discovery ({what}); discover "
            f"with the inputs you train on (discovered with {sorted(self.plan.input_names)}), and set a layerdrop of the model's "
            "config to 0: blocks are left out by one process's random numbers."
        )


def cut_stages(
    model: nn.Module,
    plan: PipelinePlan,
    bounds: Sequence[int],
    indices: Collection[int],
    forward: Callable[..., Any],
) -> dict[int, Stage]:
    """Cut a model in place to one or several of its stages.

    The stages share the model, so two of them never run at the same time; payload between two of them is handed over by
    the caller like any other. The model must already be on its device: placeholders of dropped weights remember it.

    Args:
        model: the whole model; afterwards it holds only what these stages need, under unchanged names.
        plan: from `discover_stages`, made on this model or on an equal one.
        bounds: block ranges of all stages, [0, ..., num_blocks]. The last stage may have no block, only the tail.
        indices: which stages to keep, each 0 .. len(bounds) - 2, e.g. (0, 3).
        forward: the model's genuine forward. Never the model itself when its forward is replaced by one that runs
            these stages.

    Returns:
        The stages by index.

    Raises:
        PlanError: Bounds that do not fit the plan, or a cut that cannot be made. Nothing is changed then.
    """
    check_bounds(plan, bounds)
    _check_indices(bounds, indices)
    parts = [_part(plan, bounds, index) for index in sorted(indices)]
    running = Running()
    held = cut_parameters(model, plan, [part.span for part in parts], running)
    calls = intercept(model, plan, parts)
    return {part.index: Stage(model, plan, part, forward, calls, held, running) for part in parts}


def own_modules(model: nn.Module, plan: PipelinePlan, stages: Iterable[Stage]) -> list[nn.Module]:
    """The modules of a cut model, without those in blocks of other stages."""
    own = {block for stage in stages for block in range(stage.lo, stage.hi)}
    others = tuple(f"{plan.stack}.{block}." for block in range(plan.num_blocks) if block not in own)
    return [module for name, module in model.named_modules() if not f"{name}.".startswith(others)]


def around_blocks(model: nn.Module, plan: PipelinePlan) -> list[nn.Module]:
    """The model, and its modules down to the list of its blocks."""
    names = plan.stack.split(".")
    return [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]


def _part(plan: PipelinePlan, bounds: Sequence[int], index: int) -> Part:
    span = spans_of(bounds)[index]
    return Part(
        index=index,
        span=span,
        keys_in=plan.crossings(span.lo) if index else (),
        keys_out=() if span.is_last else plan.crossings(span.hi),
        exit_block=None if span.is_last else plan.last_block(span),
    )


def check_bounds(plan: PipelinePlan, bounds: Sequence[int]) -> None:
    """Check that every block belongs to one stage, and that every stage but the last has one.

    Raises:
        PlanError: Bounds that do not fit the plan.
    """
    num_stages = len(bounds) - 1
    rising = all(lo < hi for lo, hi in itertools.pairwise(bounds[:-1])) and all(b < bounds[-1] for b in bounds[:-2])
    if num_stages < 1 or bounds[0] != 0 or bounds[-1] != plan.num_blocks or not rising:
        raise PlanError(
            f"bounds={list(bounds)} do not partition the {plan.num_blocks} blocks of '{plan.stack}': they must rise from "
            f"0 to {plan.num_blocks}, at least one block a stage (the last of several may have none)."
        )
    for index, span in enumerate(spans_of(bounds)):
        if not span.is_last and plan.last_block(span) is None:
            raise PlanError(_runs_nothing(plan, index, span))


def _check_indices(bounds: Sequence[int], indices: Collection[int]) -> None:
    num_stages = len(bounds) - 1
    inside = all(0 <= index < num_stages for index in indices)
    if not indices or not inside or len(set(indices)) != len(indices):
        raise PlanError(
            f"stage indices {list(indices)} must be distinct, at least one, and lie in 0 .. {num_stages - 1} "
            f"(bounds={list(bounds)})."
        )


def _runs_nothing(plan: PipelinePlan, index: int, span: Span) -> str:
    allowed = [b for b in plan.allowed_cuts() if b - 1 in plan.blocks]
    return (
        f"stage {index} would run nothing: none of the blocks {span.lo} to {span.hi - 1} of '{plan.stack}' runs on this "
        f"input (blocks that run: {sorted(plan.blocks)}); allowed cuts: {allowed}, each after a block that runs."
    )
