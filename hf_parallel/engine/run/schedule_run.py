"""Runs batches through the stages of a pipeline: forward alone, or forward and backward in the order of its schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hf_parallel.engine.run.autograd_nodes import loss_node
from hf_parallel.engine.run.engine import Attachment
from hf_parallel.engine.run.last_stage import LastStage
from hf_parallel.engine.run.microbatch_loss import MicrobatchLoss, Share
from hf_parallel.engine.run.other_outputs import Caught
from hf_parallel.engine.run.pipeline_guards import PipelineGuards
from hf_parallel.guards.calls.outputs import PipelineTrainingOutput
from hf_parallel.guards.gradients.aside import Made, apart
from hf_parallel.guards.weights.buffers import MovingBuffers
from hf_parallel.model.random_streams import StepSeeds
from hf_parallel.pipeline_parallel.run.cut import Running
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.schedule.programs import Programs


Microbatches: TypeAlias = list[dict[str, Any]]


class ScheduleRun:
    """Runs batches as the microbatches of one schedule; building it is collective.

    Args:
        attachment: Model, mesh, gradients.
        runtime: Executor of this rank's stages.
        programs: This rank's actions, by number of microbatches.
        loss: Cuts batches, and computes the loss of a microbatch.
        guards: Guards of the engine.
        buffers: Buffers that forward passes write to.
        running: Counts the calls of the model that are under way.
        end_pass_later: Called in each backward pass of the caller's that brings gradients.

    Attributes:
        seeds: Seeds of the random numbers of microbatches.
        last_stage: Sends what the last stage computes.
        anchor: Leaf from which losses and outputs have their graph.
        aside: Entered around forward passes that train nothing.
    """

    def __init__(
        self,
        attachment: Attachment,
        runtime: PipelineRuntime,
        programs: Programs,
        *,
        loss: MicrobatchLoss,
        guards: PipelineGuards,
        buffers: MovingBuffers,
        running: Running,
        end_pass_later: Callable[[], None],
    ) -> None:
        self.attachment, self.runtime, self.programs = attachment, runtime, programs
        self.loss, self.guards, self.buffers, self.running = loss, guards, buffers, running
        self._end_pass_later = end_pass_later
        self.seeds = StepSeeds(runtime.stages, _common_seed(attachment))
        runtime.before = self.seeds.set
        self.last_stage = LastStage(
            *(attachment.mesh, runtime, attachment.device, attachment.watchdog),
            digests=guards.digests,
            freezing=guards.freezing,
        )
        # A graph needs a leaf, and no parameter is on every stage. On the device: a copy there would wait for it.
        self.anchor = torch.zeros((), requires_grad=True, device=attachment.device)
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext

    # -- forward alone -------------------------------------------------------------------------------------------

    def outputs_of(self, microbatches: Microbatches) -> list[Any]:
        """Forward of all microbatches without autograd; the outputs on the last stage, else empty."""
        with self.buffers.beside(), self.aside():
            return self.runtime.run(microbatches, self.programs.forwards(len(microbatches)), backward=False)

    def loss_of(self, outputs: Sequence[Any], shares: Sequence[Share], batch: dict[str, Any]) -> torch.Tensor:
        """The loss (0-d) of a batch on every rank, from what `outputs_of` gave; collective over the model copy."""
        losses = [self.loss.of(output, share) for output, share in zip(outputs, shares, strict=False)]
        return self.last_stage.share_losses(losses, shares, [batch])[0]

    # -- forward and backward ------------------------------------------------------------------------------------

    def cut(self, batches: Sequence[dict[str, Any]]) -> tuple[Microbatches, list[Share]]:
        """Microbatches of batches with labels, and what each contributes to the loss of its batch."""
        parts = [part for index, batch in enumerate(batches) for part in self.loss.cut(index, batch)]
        return [microbatch for microbatch, _ in parts], [share for _, share in parts]

    def begin_step(self, batches: Sequence[dict[str, Any]]) -> tuple[Microbatches, list[Share]]:
        """Prepare a training step before its first forward pass; gives microbatches and shares."""
        self.attachment.batch_check.check(batches)
        self.loss.check()
        parts = self.cut(batches)
        self.begin_forward()
        return parts

    def begin_forward(self) -> None:
        """Prepare a training forward pass: stages meet, and draw new random numbers."""
        if self.guards.follow_freezing():
            self.runtime.forget_headers()
        self.seeds.next_step()
        self.guards.direct.stop()
        self.attachment.gradients.hooks.check()
        self.attachment.gradients.begin_forward()

    def train(
        self, batches: Sequence[dict[str, Any]], seed: float, *, arms: bool, caught: Caught | None = None
    ) -> list[torch.Tensor]:
        """Forward and backward of all batches in one schedule; one loss a batch, equal on all stages.

        Args:
            batches: The batches.
            seed: Factor of the losses that are backpropagated.
            arms: Whether these are the only gradients of their step, so that they may leave in the last backward.
            caught: Takes the last stage's outputs.
        """
        microbatches, shares = self.begin_step(batches)
        gradients = self.attachment.gradients
        # The factor that upstream code applies is not known before its backward.
        self.runtime.at_last_backward = (lambda: gradients.arm(None, last=True)) if arms else None

        def loss_of(output: Any, index: int) -> torch.Tensor:
            loss = self.loss.of(output, shares[index])
            if caught is not None:
                caught.note(index, output, loss)
            return loss

        if arms:
            gradients.begin_backward(is_first=True)
        with self.buffers.watching(len(microbatches) // len(batches), batches), self.guards.hooks.held():
            losses = self.runtime.run(
                microbatches,
                self.programs.training(len(microbatches)),
                backward=True,
                loss_of=loss_of,
                seed=seed,
            )
        if arms:
            gradients.end_schedule()
        with self.attachment.recorder.span("loss"):
            return self.last_stage.share_losses(losses, shares, batches)

    def train_apart(self, batch: dict[str, Any], seed: float, caught: Caught) -> tuple[PipelineTrainingOutput, Made]:
        """Forward and backward of one batch, whose gradients are held until the returned loss is backpropagated.

        Args:
            batch: The batch.
            seed: Factor of the loss that is backpropagated.
            caught: Takes the last stage's outputs.
        """
        with apart(list(self.attachment.parameters.values())) as made:
            loss = self.train([batch], seed, arms=False, caught=caught)[0]
        self.guards.direct.watch()
        finish = functools.partial(self.backpropagated, made, seed)
        with made.noticing():
            return PipelineTrainingOutput(loss=loss_node(self.anchor, loss, finish, keeps_graph=True)), made

    # -- in the caller's backward pass ---------------------------------------------------------------------------

    def backpropagated(self, made: Made, seed: float, gradient: torch.Tensor) -> None:
        """Note that the caller backpropagates a loss whose schedule has run.

        Args:
            made: Gradients of the schedule.
            seed: Factor of the loss that they are of.
            gradient: Factor that upstream code multiplied the loss with (0-d).
        """
        self.guards.late_hooks.check_factor(gradient / seed)
        self.guards.callers.backpropagated(made, gradient / seed)
        self._end_pass_later()

    @contextmanager
    def callers_backward(self) -> Iterator[None]:
        """Inside a backward pass of the caller's: stages run theirs, whose gradients are those of the loss."""
        self._end_pass_later()
        # No bucket leaves early: the loss may still give a parameter a gradient itself.
        self.runtime.at_last_backward = None
        with self.guards.direct.resting(), self.running.inside(), self.guards.callers.runs_schedule():
            yield
        self.attachment.watchdog.runs()


def _common_seed(attachment: Attachment) -> int:
    """The seed of dropout: the same on all ranks of a model copy, another on each copy and each part of a sequence."""
    mesh = attachment.mesh
    seed = torch.tensor(torch.initial_seed() % 2**63, device=attachment.device)
    dist.broadcast(seed, src=mesh.shape.rank_at(mesh.dp_rank, 0, 0), group=mesh.mp_group)
    return int(seed) + mesh.copy_rank
