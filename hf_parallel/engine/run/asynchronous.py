"""Runs asynchronous schedules (PipeDream, PipeDream-2BW), in which the pipeline does not drain between optimizer steps.

The batches of an optimizer step are a window. A step completes one window, and lets the stages begin those that follow, which run
with older weights than the newest: window t with the weights after update t - delay. So nothing has to wait for an update.
What the ranks must tell each other of a window (its losses, digests of its batches, what each counts of the
gradient norm) leaves a rank as soon as its last backward of the window is over, and is waited for at the end of the step.
Without vertical sync a step ends on each rank with its own last backward of the window, while other ranks are in other steps: each
has a delay of its own, there is no norm of all gradients, and the losses leave with the last forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hf_parallel.data_parallel.norms import power_sum
from hf_parallel.engine.run.asynchronous_guard import AsynchronousGuard
from hf_parallel.engine.run.engine import Attachment
from hf_parallel.engine.run.last_stage import LastStage
from hf_parallel.engine.run.microbatch_loss import MicrobatchLoss, Share
from hf_parallel.engine.run.window import COUNTS
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.optimizers.settings import Known
from hf_parallel.mesh.groups import new_group_of
from hf_parallel.model.random_streams import StepSeeds
from hf_parallel.pipeline_parallel.run.live import Stream
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.versions import WeightVersions
from hf_parallel.pipeline_parallel.schedule.actions import Action
from hf_parallel.pipeline_parallel.schedule.asynchronous import delay_of, delays_of, empty, next_slice
from hf_parallel.pipeline_parallel.schedule.program import Program


Batches: TypeAlias = list[dict[str, Any]]


@dataclass
class _Begun:
    """A window that is in the pipeline.

    Attributes:
        batches: Its batches, as the model will be called with them.
        shares: Contribution of each microbatch to the loss of its batch.
        first: Number of its first microbatch.
        step: Step whose random numbers it draws.
        known: What was known of the optimizers when it was begun: from one step on all ranks, where losses leave in
            several.
        version: Version of the weights it runs with; -1 until this rank may begin it.
        gradients: Gradients that its last backward has left; None until then.
        told: Waits for what the ranks tell each other of it.
    """

    batches: Batches
    shares: list[Share]
    first: int
    step: int
    known: Known
    version: int = -1
    gradients: list[tuple[nn.Parameter, Tensor]] | None = None
    told: Callable[[], tuple[list[Tensor], Tensor]] | None = None

    @property
    def numbers(self) -> range:
        """Numbers of its microbatches."""
        return range(self.first, self.first + len(self.shares))


@dataclass
class AsynchronousRun:
    """Completes a window in each step, and begins the next ones; building it is collective.

    Args:
        attachment: Model, mesh, gradients.
        runtime: Executor of this rank's stage.
        last_stage: Makes losses known.
        loss: Cuts batches.
        seeds: Seeds of the random numbers of microbatches.
        name: Name of the schedule.
        vertical_sync: Whether all stages step together, so that a window meets the weights of one update.

    Attributes:
        delay: Largest number of updates by which the weights of a window are older than the newest before its own.
        guard: Refuses what user code must not do while windows are under way.
    """

    attachment: Attachment
    runtime: PipelineRuntime
    last_stage: LastStage
    loss: MicrobatchLoss
    seeds: StepSeeds
    name: str
    vertical_sync: bool
    following: list[tuple[Batches, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        mesh, parameters = self.attachment.mesh, self.attachment.parameters
        self.delay = delay_of(self.name, mesh.shape.pp_size)
        delays = delays_of(self.name, mesh.shape.pp_size, vertical_sync=self.vertical_sync)
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.versions = WeightVersions(self.attachment.model, trained, delays[mesh.pp_rank])
        self.guard = AsynchronousGuard(
            self.attachment.model, parameters, self.versions, name=self.name, delay=self.delay
        )
        self._begun: deque[_Begun] = deque()
        self._done, self._next = empty(mesh.shape.pp_size), 0
        self._programs: dict[Any, tuple[Program, Any]] = {}
        self._stream = Stream(self._loss_of, self._before, self._after)
        # Of a step whose norm may be taken before replicas and stages have exchanged anything else.
        self._tells_early = (
            self.vertical_sync
            and mesh.shape.dp_size == 1 == mesh.shape.tp_size
            and not self.attachment.ledger.shared_holders()
        )
        self._group = new_group_of(mesh.shape.groups(lambda d, p, t, s: (d, s)), timeout=mesh.timeout, backend=None)
        gradients = self.attachment.gradients
        gradients.before_write = self._before_write
        gradients.replicas.partitioned = lambda zero: self.versions.lie_in(zero.shards)
        factors = gradients.shown.factors  # compared in a later step, so that no rank waits for another here
        factors.lag = 1 if self.vertical_sync else mesh.shape.pp_size
        gradients.replicas.before_reading.append(factors.judge)

    # -- one step ------------------------------------------------------------------------------------------------

    def run(self, batches: Batches) -> list[Tensor]:
        """Complete a window, and begin others; return its losses. Its gradients are in `p.grad` then.

        Args:
            batches: Batches of the window, as the model is called with the first.
        """
        self.guard.refuse_unused_gradients()
        self.loss.check()
        self.guard.refuse_changes(under_way=bool(self._begun))
        self.seeds.next_step()
        self.versions.follow()
        if not self._begun:
            self._begin(batches)
        elif not _are_same(self._begun[0].batches, batches):
            raise UnsupportedError(
                f"pipeline.schedule={self.name}: num_items_in_batch or use_cache of this call of the model is not that of the batch that was "
                "read ahead, whose microbatches are in the pipeline already. Leave both to the Trainer, or set pipeline.schedule to 1f1b."
            )
        extras = {key: value for key, value in batches[0].items() if key in COUNTS}
        for others, count in self.following[len(self._begun) - 1 : self.delay]:
            more = {k: count if k == "num_items_in_batch" else value for k, value in extras.items()}
            given = [{key: value for key, value in batch.items() if value is not None} for batch in others]
            self._begin([{**batch, **more} for batch in given])
        for window, version in zip(self._begun, self.versions.recent, strict=False):
            window.version = version if window.version < 0 else window.version
        before, self.runtime.before = self.runtime.before, self._seed
        with self.guard.running():
            try:
                self.runtime.advance(self._stream, self._program())
            finally:
                self.versions.put(None)
                self.runtime.before = before
        return self._complete(self._begun.popleft())

    def _begin(self, batches: Batches) -> None:
        self.attachment.batch_check.check(batches)
        parts = [part for index, batch in enumerate(batches) for part in self.loss.cut(index, batch)]
        place = len(self._begun)
        known = self.attachment.gradients.settings.known()
        begun = _Begun(batches, [share for _, share in parts], self._next, self.seeds.step + place, known)
        self._begun.append(begun)
        self._next += len(parts)
        self._stream.inputs.update(zip(begun.numbers, (inputs for inputs, _ in parts), strict=True))

    def _program(self) -> Program:
        counts = tuple(len(begun.shares) for begun in self._begun)
        key = self._done, counts
        if key not in self._programs:
            found = next_slice(self._done, counts, vertical_sync=self.vertical_sync)
            self._programs[key] = found.program(self.attachment.mesh.pp_rank), found.done
        program, self._done = self._programs[key]
        return program.shifted(self._begun[0].first)

    def _complete(self, window: _Begun) -> list[Tensor]:
        self._tell(window)
        losses, power = window.told()  # type: ignore[misc]
        for parameter, gradient in window.gradients or ():
            parameter.grad = gradient
        self.attachment.gradients.total_norm.foresee(power if self._tells_early else None)
        for number in window.numbers:
            self._stream.forget(number)
        self.guard.gradients_are_due()
        return losses

    # -- one microbatch ------------------------------------------------------------------------------------------

    def _window_of(self, number: int) -> _Begun:
        return next(begun for begun in self._begun if number in begun.numbers)

    def _seed(self, stage: int, number: int) -> None:
        window, step = self._window_of(number), self.seeds.step
        self.seeds.step = window.step
        self.seeds.set(stage, number - window.first)
        self.seeds.step = step

    def _loss_of(self, output: Any, number: int) -> Tensor:
        window = self._window_of(number)
        return self.loss.of(output, window.shares[number - window.first])

    def _before(self, action: Action) -> None:
        self.versions.put(self._window_of(action.microbatch).version)

    def _after(self, action: Action) -> None:
        window = self._window_of(action.microbatch)
        if action.microbatch != window.numbers[-1]:
            return
        if action.kind == "B":
            window.gradients = self.versions.take_gradients(window.version)
        if self._tells_early if action.kind == "B" else not self.vertical_sync:
            self._tell(window)

    def _tell(self, window: _Begun) -> None:
        """Send this rank's part of what the ranks tell each other of a window, once."""
        if window.told is not None:
            return
        made, nothing = self._stream.losses, torch.zeros((), device=self.attachment.device)  # if it is given up
        losses = [made.get(number, nothing) for number in window.numbers] if self.runtime.has_last_stage else []
        gradients = [gradient for _, gradient in window.gradients or ()] if self._tells_early else []
        power = power_sum(gradients, 2.0, self.attachment.device)
        window.told = self.last_stage.send_losses(
            losses, window.shares, window.batches, power, self._group, window.known
        )

    # -- beside the steps ----------------------------------------------------------------------------------------

    def _before_write(self) -> None:
        self.guard.before_write()
        self.versions.advance()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around forward passes that train nothing; collective over the pipeline."""
        with self.guard.evaluating(), self.runtime.aside() if self._begun else nullcontext():
            yield

    def give_up(self) -> None:
        """Windows that were begun will not be called for: an epoch was left early. Collective over the pipeline."""
        self.following = []
        if not self._begun:
            return
        for window in self._begun:  # some ranks may have sent their part of one, so that the others have to
            self._tell(window)
            window.told()  # type: ignore[misc]
        self.runtime.give_up(self._stream)
        for version in set(self.versions.recent):
            self.versions.take_gradients(version)
        self._begun.clear()
        self._done = empty(self.attachment.mesh.shape.pp_size)


def _are_same(begun: Sequence[dict[str, Any]], called: Sequence[dict[str, Any]]) -> bool:
    """Whether batches are those that were begun."""
    return len(begun) == len(called) and all(
        one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
        for one, other in zip(begun, called, strict=True)
    )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and one == other)
