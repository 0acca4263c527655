"""The engine of several stages: `model(...)` becomes one run of a schedule.

Three modes. *Fused* (training with labels): forward and backward of the whole schedule happen inside the forward call;
the loss it returns carries an autograd node whose backward only checks and finishes the step. *Split* (training
without labels, for losses computed by the user on logits): all forwards in the forward call, all backwards when the
user's loss is backpropagated (see `split.py`). *Forward only* (evaluation).

The Trainer multiplies the loss it gets by factors of its own (accumulation, replicas, loss scale). Fused backwards run
before those are known, so they are seeded with 1 (or the fp16 loss scale). Where stock code alone stands between the
data loader and the model (an announced window), one factor is applied once, to the summed gradients. Where user code
does, the gradients of each forward are held apart until its loss is backpropagated, and take the factor then.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.compat.private_transformers import loss_shifts_labels
from hf_parallel.engine.run.asynchronous import AsynchronousRun
from hf_parallel.engine.run.autograd_nodes import loss_node
from hf_parallel.engine.run.direct import Attachment, Engine
from hf_parallel.engine.run.last_stage import LastStage, logits_in
from hf_parallel.engine.run.microbatch_loss import LossFunction, MicrobatchLoss, Share
from hf_parallel.engine.run.other_outputs import Caught
from hf_parallel.engine.run.pipeline_guards import PipelineGuards
from hf_parallel.engine.run.pipeline_inputs import keeps_cache, refuse_inputs, refuse_merged, unserved_outputs
from hf_parallel.engine.run.split import SplitRun
from hf_parallel.engine.run.window import STEP_IN_WINDOW, Window, WindowFactors
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.outputs import PipelineOutput, PipelineTrainingOutput
from hf_parallel.guards.gradients.aside import Made, apart
from hf_parallel.model.random_streams import StepSeeds
from hf_parallel.pipeline_parallel.plan.backward_kind import BackwardKind
from hf_parallel.pipeline_parallel.plan.loss_kind import LossKind
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.stage import Stage
from hf_parallel.pipeline_parallel.schedule.programs import Programs
from hf_parallel.settings.schedule_names import ASYNCHRONOUS


class PipelineEngine(Engine):
    """Runs the schedule.

    Args:
        attachment: Model, mesh, ledger, gradients.
        runtime: Executor of this rank's stages.
        programs: This rank's actions, by number of microbatches.
        num_microbatches: Parts a batch is cut into, at most its rows.
        loss_kind: Way in which the model's own loss may be computed (see `loss_kind.judge_loss`).
        backward_kind: Needs of users' code in backward passes (see `backward_kind.judge_backward`).
        schedule: Its name; one that does not drain the pipeline has windows of several steps in it.
        vertical_sync: Whether the stages of such a one step together.

    Attributes:
        generated: Whether `model.generate()` ran.
        asynchronous: Runs the windows of a pipeline that does not drain; None of one that does.
    """

    def __init__(
        self,
        attachment: Attachment,
        runtime: PipelineRuntime,
        *,
        programs: Programs,
        num_microbatches: int,
        loss_kind: LossKind,
        backward_kind: BackwardKind,
        schedule: str = "1f1b",
        vertical_sync: bool = True,
    ) -> None:
        super().__init__(attachment)
        self.runtime = runtime
        stages: list[Stage] = list(runtime.stages.values())  # type: ignore[arg-type]
        self._running, self._plan = stages[0].running, stages[0].plan
        self.seeds = StepSeeds(runtime.stages, self._common_seed())
        runtime.before = self.seeds.set
        runtime.stages = {index: self.under_autocast(stage) for index, stage in runtime.stages.items()}
        self._guards = PipelineGuards(attachment, stages, self.end_pass_later)
        self._programs = programs
        shifted, fills_up = loss_shifts_labels(self.model), attachment.mesh.shape.ep_size > 1
        if backward_kind.rows:
            num_microbatches = 1
        self._loss = MicrobatchLoss(self.model, loss_kind, num_microbatches, shifted=shifted, fills_up=fills_up)
        self._window: Window | None = None
        self._factors = WindowFactors()
        self._seed = 1.0
        self._last_stage = LastStage(
            *(self.mesh, runtime, attachment.device, attachment.watchdog),
            digests=self._guards.digests,
            freezing=self._guards.freezing,
        )
        self._needs_scale = bool(backward_kind.scale)
        self.asynchronous: AsynchronousRun | None = None
        if schedule in ASYNCHRONOUS:
            parts = attachment, runtime, self._last_stage, self._loss, self.seeds
            self.asynchronous = AsynchronousRun(*parts, name=schedule, vertical_sync=vertical_sync)
        # A graph needs a leaf, and no parameter is on every stage. On the device: a copy there would wait for it.
        self._anchor = torch.zeros((), requires_grad=True, device=attachment.device)
        self._split_run = self._make_split_run()
        self._adapter = next(iter(tuner_layers(self.model).values()), None)
        self.generated = False
        self._needs_logits = True
        self._unlisted: Collection[str] | None = ()  # outputs that nobody looks for; None: nobody goes through them

    def _make_split_run(self) -> SplitRun:
        return SplitRun(
            *(self.runtime, self._programs, self._last_stage),
            backwards=self._guards.backwards,
            recorder=self.recorder,
            anchor=self._anchor,
            callers_backward=self._callers_backward,
        )

    def _common_seed(self) -> int:
        """The seed of dropout: the same on all ranks of a model copy, another on each copy and each part of a sequence."""
        seed = torch.tensor(torch.initial_seed() % 2**63, device=self.attachment.device)
        first = self.mesh.shape.rank_at(self.mesh.dp_rank, 0, 0)
        dist.broadcast(seed, src=first, group=self.mesh.mp_group)
        return int(seed) + self.mesh.copy_rank

    # -- what the Trainer side sets ------------------------------------------------------------------------------

    def begin_window(
        self, batches: list[dict[str, Any]], following: Sequence[tuple[list[dict[str, Any]], Any]] = ()
    ) -> None:
        """Announce that the next training forwards are these batches: run them as the microbatches of one schedule.

        Only where stock code alone stands between here and the model: the first call runs all of them as they are then.

        Args:
            batches: Batches of this optimizer step.
            following: Batches of the next steps, as far as they may be in the pipeline with these, and what each is
                divided by.
        """
        if self.asynchronous is not None:
            self.asynchronous.following = list(following)
        self._factors.forget()  # a window that training broke off leaves nothing behind
        self._window = Window(batches)

    @contextmanager
    def loss_function(self, function: LossFunction, *, shifted: bool = True) -> Iterator[None]:
        """Inside, the last stage uses `function(outputs, labels, num_items_in_batch=n)` instead of the model's loss.

        Args:
            function: A sum over label positions divided by `num_items_in_batch`.
            shifted: Whether the first label of a row is none of them; counts where nobody gave a number.
        """
        with self._loss.replaced_by(function, shifted=shifted):
            yield

    @contextmanager
    def predicting(self, *, loss_only: bool, needs_logits: bool, ignored: Collection[str]) -> Iterator[None]:
        """Inside, a Trainer evaluates a batch.

        Args:
            loss_only: Whether it goes through all outputs and uses the loss alone.
            needs_logits: Whether anybody reads logits; if not, they are not sent to the other stages.
            ignored: Outputs that it passes over.
        """
        before = self._needs_logits, self._unlisted
        self._needs_logits, self._unlisted = needs_logits, None if loss_only else ignored
        try:
            yield
        finally:
            self._needs_logits, self._unlisted = before

    @property
    def is_running(self) -> bool:
        """Whether a call of the model is under way."""
        return self._running.depth > 0

    def install(self) -> None:
        """Install as every engine does; user code has the model, which is not whole, from here on."""
        super().install()
        self._running.depth = 0
        self._guards.direct.watch()

    def in_callback(self) -> AbstractContextManager[None]:
        """Inside, a Trainer's callbacks run."""
        return self._guards.direct.in_callback()

    # -- model(...) ----------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of `model(...)`: fused, split or forward only."""
        with self._running.inside(), self._guards.late_hooks.watching() if self.trains else nullcontext():
            output = self._run(args, kwargs)
        output.lacks(unserved_outputs(self.model))
        if self._unlisted is None:
            output.lists_own()
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipelineOutput | PipelineTrainingOutput:
        batch = self.bound(args, kwargs)
        refuse_inputs(batch, self._plan, self.mesh.shape.pp_size, keeps_cache(self.model))
        batch["use_cache"] = False
        if not torch.is_grad_enabled():
            return self._forward_only(batch)
        if self.trains:
            refuse_merged(self._adapter, self.mesh.shape.pp_size)
        if self.trains and "labels" in batch:
            return self._fused(batch)
        if "labels" in batch:  # whether a backward follows is not known, and a fused step has already run it
            raise UnsupportedError(
                f"labels in a batch with pp_size={self.mesh.shape.pp_size} while gradients are recorded and the model is in "
                "evaluation mode (from_pretrained leaves it there). Call model.train() before a training loop, or evaluate "
                "under torch.no_grad()."
            )
        return self._split(batch)

    # -- fused ---------------------------------------------------------------------------------------------------

    def _fused(self, batch: dict[str, Any]) -> PipelineTrainingOutput:
        if self.asynchronous is not None:
            return self._fused_asynchronous(self.asynchronous, batch)
        begun = self._window is not None and self._window.has_begun
        # A hook sees the gradient of one batch, and may update what the next one uses.
        hooked = not begun and self._guards.ask_for_hooks()
        is_apart = hooked or self._needs_scale  # which is not known before the backward of each loss
        if self._window is not None and not is_apart and self._window.holds(batch):
            # The gradients are those of the whole window: the last backward of its losses gives them their factor.
            loss = self._window.next_loss(batch, functools.partial(self._run_schedule, arms=True))
            return PipelineTrainingOutput(loss=self._computed(loss, None))
        self._window = None
        return self._fused_batch(batch)

    def _fused_asynchronous(self, asynchronous: AsynchronousRun, batch: dict[str, Any]) -> PipelineTrainingOutput:
        """A batch of a window in a pipeline that does not drain."""
        asynchronous.guard.refuse_hooks(self._guards.hooks.hooked, needs_scale=self._needs_scale)
        if self._window is None or not self._window.holds(batch):
            raise UnsupportedError(asynchronous.guard.not_announced)

        def run(batches: list[dict[str, Any]]) -> list[torch.Tensor]:
            self._guards.direct.stop()
            self.gradients.begin_forward()
            self.gradients.begin_backward(is_first=True)
            asynchronous.guard.refuse_gradients(self.gradients.arrivals.has_assigned)
            count = sum(map(self._loss.num_parts, batches)) // len(batches)
            with self._buffers.watching(count, batches):
                losses = asynchronous.run(batches)
            self.gradients.end_schedule()
            return losses

        self._seed = 1.0
        return PipelineTrainingOutput(loss=self._computed(self._window.next_loss(batch, run), None))

    def _fused_batch(self, batch: dict[str, Any]) -> PipelineTrainingOutput:
        """A batch that user code has handled, and whose outputs it may read."""
        return self._run_fused(batch, None)[0]

    def _run_fused(self, batch: dict[str, Any], caught: Caught | None) -> tuple[PipelineTrainingOutput, Made]:
        """The schedule of one batch, whose gradients are held.

        Args:
            batch: The batch.
            caught: Takes the last stage's outputs.
        """
        with apart(list(self.attachment.parameters.values())) as made:
            loss = self._run_schedule([batch], arms=False, caught=caught)[0]
        self._guards.direct.watch()
        with made.noticing():
            computed = self._computed(loss, made)
        return PipelineTrainingOutput(loss=computed), made

    def _computed(self, loss: torch.Tensor, made: Made | None) -> torch.Tensor:
        """The loss (0-d) as the caller gets it, with a graph that ends here."""
        finish = functools.partial(self._finish_backward, made, self._seed)
        return loss_node(self._anchor, loss, finish, keeps_graph=made is not None)

    def _cut(self, batches: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Share]]:
        """Microbatches of batches with labels, and what each contributes to the loss of its batch."""
        parts = [part for index, batch in enumerate(batches) for part in self._loss.cut(index, batch)]
        return [microbatch for microbatch, _ in parts], [share for _, share in parts]

    def _begin_step(self, batches: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Share]]:
        """Prepare a training step before its first forward pass; gives microbatches and shares."""
        self.attachment.batch_check.check(batches)
        self._loss.check()
        parts = self._cut(batches)
        self._follow_freezing()
        self.seeds.next_step()
        self._guards.direct.stop()
        self.gradients.begin_forward()
        return parts

    def _run_schedule(
        self, batches: list[dict[str, Any]], *, arms: bool, caught: Caught | None = None
    ) -> list[torch.Tensor]:
        """Forward and backward of all batches in one schedule; one loss a batch, equal on all stages.

        Args:
            batches: The batches.
            arms: Whether these are the only gradients of their step, so that they may leave in the last backward.
            caught: Takes the last stage's outputs.
        """
        microbatches, shares = self._begin_step(batches)
        self._seed = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        # The factor that upstream code applies is not known before its backward.
        self.runtime.at_last_backward = (lambda: self.gradients.arm(None, last=True)) if arms else None

        def loss_of(output: Any, index: int) -> torch.Tensor:
            loss = self._loss.of(output, shares[index])
            if caught is not None:
                caught.note(index, output, loss)
            return loss

        if arms:
            self.gradients.begin_backward(is_first=True)
        with self._buffers.watching(len(microbatches) // len(batches), batches), self._guards.hooks.held():
            losses = self.runtime.run(
                microbatches,
                self._programs.training(len(microbatches)),
                backward=True,
                loss_of=loss_of,
                seed=self._seed,
            )
        if arms:
            self.gradients.end_schedule()
        with self.recorder.span("loss"):
            return self._last_stage.share_losses(losses, shares, batches)

    def _follow_freezing(self) -> None:
        if self._guards.follow_freezing():
            self.runtime.forget_headers()

    def _finish_backward(self, made: Made | None, seed: float, gradient: torch.Tensor) -> None:
        """Finish the backward of a returned loss: the factor of upstream code is known now.

        Args:
            made: Gradients of this forward; None if they are those of a window, which one factor is applied to.
            seed: Factor that the schedule's losses were multiplied with.
            gradient: Factor that upstream code multiplied the loss with (0-d).
        """
        self._guards.late_hooks.check_factor(gradient / seed)
        if made is not None:
            self._guards.callers.backpropagated(made, gradient / seed)
            self.end_pass_later()
            return
        self.gradients.begin_callers_backward()
        self._guards.digests.judge()
        self._factors.add(gradient / seed)
        if self.ends_step:
            if self._window is not None and self._window.has_begun:
                raise UnsupportedError(STEP_IN_WINDOW)
            self._window = None
            # One schedule, whose batches are compared above and whose factors are compared here.
            self.end_pass(self._factors.take(), lambda: None)
            self._guards.callers.drop_frozen()  # last: some of their gradients were reduced while the schedule ran

    def before_end(self) -> None:
        """Add up what schedules have made of the losses that were backpropagated in this pass."""
        self._guards.callers.add_up(ends_step=self.ends_step)

    def compare_step(self) -> None:
        """Compare what the ranks backpropagated, and which batches they have read."""
        self._guards.compare_step(tolerates_nan=self.scaler is not None)

    # -- split ---------------------------------------------------------------------------------------------------

    def _split(self, batch: dict[str, Any]) -> PipelineOutput:
        if self.asynchronous is not None:
            raise UnsupportedError(self.asynchronous.guard.not_announced)
        self.attachment.batch_check.check([batch])
        batch.pop("labels", None)
        batch.pop("num_items_in_batch", None)
        microbatches = self._loss.split(batch)
        self._guards.ask_for_hooks()
        self._follow_freezing()
        self.seeds.next_step()
        self._guards.direct.stop()
        self.gradients.begin_forward()
        with self._buffers.watching(len(microbatches), [batch]) if self.trains else self._buffers.beside():
            state = self._split_run.forward(microbatches)
        logits = self._split_run.logits_of(state, batch)
        self._guards.direct.watch()
        return PipelineOutput(logits=logits)

    @contextmanager
    def _callers_backward(self) -> Iterator[None]:
        """Inside a backward pass of the caller's: stages run theirs, whose gradients are those of the loss."""
        self.end_pass_later()
        # No bucket leaves early: the loss may still give a parameter a gradient itself.
        self.runtime.at_last_backward = None
        with self._guards.direct.resting(), self._running.inside(), self._guards.callers.runs_schedule():
            yield
        self.attachment.watchdog.runs()

    # -- forward only --------------------------------------------------------------------------------------------

    def _forward_only(self, batch: dict[str, Any]) -> PipelineOutput:
        if not isinstance(batch.get("labels"), torch.Tensor):
            found = logits_in(self._outputs_of(self._loss.split(batch)))
            return PipelineOutput(logits=self._last_stage.broadcast_logits(found, batch))
        self._loss.check()
        parts = list(self._loss.cut(0, batch))
        shares = [share for _, share in parts]
        outputs = self._outputs_of([microbatch for microbatch, _ in parts])
        losses = [self._loss.of(output, share) for output, share in zip(outputs, shares, strict=False)]
        loss = self._last_stage.share_losses(losses, shares, [batch])[0]
        output = PipelineOutput(loss=loss)
        if self._needs_logits:  # the digest of the batch went with the loss
            output = PipelineOutput(loss=loss, logits=self._last_stage.broadcast_logits(logits_in(outputs), {}))
        return self._evaluated(batch, output, outputs)

    def _evaluated(self, batch: dict[str, Any], output: PipelineOutput, outputs: list[Any]) -> PipelineOutput:
        """The result of a forward pass with labels and without a graph; `outputs` are those of the last stage."""
        return output

    def _outputs_of(self, microbatches: list[dict[str, Any]]) -> list[Any]:
        """Forward of all microbatches without autograd; the outputs on the last stage, else empty."""
        with self._buffers.beside(), nullcontext() if self.asynchronous is None else self.asynchronous.aside():
            return self.runtime.run(microbatches, self._programs.forwards(len(microbatches)), backward=False)
