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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.compat.private_transformers import loss_shifts_labels
from hf_parallel.engine.run.asynchronous import AsynchronousRun
from hf_parallel.engine.run.autograd_nodes import loss_node
from hf_parallel.engine.run.engine import Attachment, Engine
from hf_parallel.engine.run.last_stage import logits_in
from hf_parallel.engine.run.microbatch_loss import LossFunction, MicrobatchLoss
from hf_parallel.engine.run.pipeline_guards import PipelineGuards
from hf_parallel.engine.run.pipeline_inputs import keeps_cache, refuse_inputs, refuse_merged, unserved_outputs
from hf_parallel.engine.run.readable_outputs import ReadableOutputs
from hf_parallel.engine.run.schedule_run import ScheduleRun
from hf_parallel.engine.run.split import SplitRun
from hf_parallel.engine.run.window import STEP_IN_WINDOW, RunSchedule, Window, WindowFactors
from hf_parallel.engine.run.written_config import WrittenConfig
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.outputs import PipelineOutput, PipelineTrainingOutput
from hf_parallel.model.samples import taken
from hf_parallel.pipeline_parallel.plan.backward_kind import BackwardKind
from hf_parallel.pipeline_parallel.plan.loss_kind import LossKind
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.stage import Stage
from hf_parallel.pipeline_parallel.schedule.programs import Programs
from hf_parallel.settings.schedule_names import ASYNCHRONOUS


class PipelineEngine(Engine):
    """Decides how a call of the model runs the schedule.

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
        seeds: Seeds of the random numbers of microbatches.
        outputs: Serves user code that reads outputs of calls with labels.
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
        self._without_cache = taken(self._signature, {"use_cache": False})
        self.runtime = runtime
        stages: list[Stage] = list(runtime.stages.values())  # type: ignore[arg-type]
        self._running, self._plan = stages[0].running, stages[0].plan
        self._guards = PipelineGuards(attachment, stages, self.end_pass_later)
        shifted, fills_up = loss_shifts_labels(self.model), attachment.mesh.shape.ep_size > 1
        if backward_kind.rows:
            num_microbatches = 1
        self._loss = MicrobatchLoss(self.model, loss_kind, num_microbatches, shifted=shifted, fills_up=fills_up)
        self._schedule = ScheduleRun(
            *(attachment, runtime, programs),
            loss=self._loss,
            guards=self._guards,
            buffers=self._buffers,
            running=self._running,
            end_pass_later=self.end_pass_later,
        )
        self.seeds = self._schedule.seeds
        runtime.stages = {index: self.under_autocast(stage) for index, stage in runtime.stages.items()}
        self._needs_scale = bool(backward_kind.scale)
        self.asynchronous: AsynchronousRun | None = None
        if schedule in ASYNCHRONOUS:
            parts = attachment, runtime, self._schedule.last_stage, self._loss, self.seeds
            self.asynchronous = AsynchronousRun(*parts, name=schedule, vertical_sync=vertical_sync)
            self._schedule.aside = self.asynchronous.aside
        self._split_run = SplitRun(self._schedule)
        self.outputs = ReadableOutputs(
            *(self._schedule, self._split_run, self.gathers),
            loss_scale=None if self._needs_scale else self._loss_scale,
            dtypes=self._dtypes,
            in_model=self.in_model,
        )
        self._config = WrittenConfig(self.model)
        self._adapter = next(iter(tuner_layers(self.model).values()), None)
        self._window: Window | None = None
        self._factors = WindowFactors()
        self.generated = False

    @property
    def loss_kind(self) -> LossKind:
        """Way in which the model's own loss is computed now."""
        return self._loss.kind

    def _dtypes(self) -> set[torch.dtype]:
        """Dtypes in which the model computes."""
        found = {p.dtype for p in self.attachment.parameters.values() if p.is_floating_point()}
        kind = self.attachment.device.type
        with self.autocast():
            return found | ({torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set())

    def complete_config(self) -> None:
        """Take the config's written values from the last stage, which computes the loss."""
        self._config.take(self._schedule.last_stage.broadcast_named({}, self._config.written)[1])

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
            output = self._dispatch(args, kwargs)
        output.lacks(unserved_outputs(self.model))
        if self.outputs.unlisted is None:
            output.lists_own()
        return output

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PipelineOutput | PipelineTrainingOutput:
        batch = self.bound(args, kwargs)
        refuse_inputs(batch, self._plan, self.mesh.shape.pp_size, keeps_cache(self.model))
        batch |= self._without_cache
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

    def _forward_only(self, batch: dict[str, Any]) -> PipelineOutput:
        if isinstance(batch.get("labels"), torch.Tensor):
            return self.outputs.evaluate(batch)
        found = logits_in(self._schedule.outputs_of(self._loss.split(batch)))
        return PipelineOutput(logits=self._schedule.last_stage.broadcast_logits(found, batch))

    def _split(self, batch: dict[str, Any]) -> PipelineOutput:
        if self.asynchronous is not None:
            raise UnsupportedError(self.asynchronous.guard.not_announced)
        self.attachment.batch_check.check([batch])
        batch.pop("labels", None)
        batch.pop("num_items_in_batch", None)
        microbatches = self._loss.split(batch)
        self._guards.ask_for_hooks()
        self._schedule.begin_forward()
        with self._buffers.watching(len(microbatches), [batch]) if self.trains else self._buffers.beside():
            state = self._split_run.forward(microbatches)
        logits = self._split_run.logits_of(state, batch)
        self._guards.direct.watch()
        return PipelineOutput(logits=logits)

    # -- fused ---------------------------------------------------------------------------------------------------

    def _fused(self, batch: dict[str, Any]) -> PipelineTrainingOutput:
        if self.asynchronous is not None:
            return self._fused_asynchronous(self.asynchronous, batch)
        window = self._window
        begun = window is not None and window.has_begun
        # A hook sees the gradient of one batch, and may update what the next one uses.
        hooked = not begun and self._guards.ask_for_hooks()
        is_apart = hooked or self._needs_scale  # which is not known before the backward of each loss
        if window is not None and not is_apart and window.holds(batch):
            return self._next_of(window, batch, functools.partial(self._run_window, window))
        self._window = None
        return self.outputs.train(batch)

    def _run_window(self, window: Window, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
        window.seed = self._loss_scale()
        return self._schedule.train(batches, window.seed, arms=True)

    def _fused_asynchronous(self, asynchronous: AsynchronousRun, batch: dict[str, Any]) -> PipelineTrainingOutput:
        """A batch of a window in a pipeline that does not drain."""
        asynchronous.guard.refuse_hooks(self._guards.hooks.hooked, needs_scale=self._needs_scale)
        if self._window is None or not self._window.holds(batch):
            raise UnsupportedError(asynchronous.guard.not_announced)

        def run(batches: list[dict[str, Any]]) -> list[torch.Tensor]:
            self._guards.direct.stop()
            self.gradients.hooks.check()
            self.gradients.begin_forward()
            self.gradients.begin_backward(is_first=True)
            asynchronous.guard.refuse_gradients(self.gradients.arrivals.has_assigned)
            count = sum(map(self._loss.num_parts, batches)) // len(batches)
            with self._buffers.watching(count, batches):
                losses = asynchronous.run(batches)
            self.gradients.end_schedule()
            return losses

        return self._next_of(self._window, batch, run)

    def _next_of(self, window: Window, batch: dict[str, Any], run: RunSchedule) -> PipelineTrainingOutput:
        """The loss of a window's next batch. The last backward of its losses gives the gradients, which are of all, a factor."""
        loss = window.next_loss(batch, run)
        finish = functools.partial(self._finish_window, window.seed)
        return PipelineTrainingOutput(loss=loss_node(self._schedule.anchor, loss, finish, keeps_graph=False))

    def _loss_scale(self) -> float:
        """The factor of losses whose backward passes run before upstream code has scaled them."""
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def _finish_window(self, seed: float, gradient: torch.Tensor) -> None:
        """Finish the backward of a window's loss: the factor of upstream code is known now.

        Args:
            seed: Factor that the schedule's losses were multiplied with.
            gradient: Factor that upstream code multiplied the loss with (0-d).
        """
        self._guards.late_hooks.check_factor(gradient / seed)
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

    # -- the end of a pass ---------------------------------------------------------------------------------------

    def before_end(self) -> None:
        """Add up what schedules have made of the losses that were backpropagated in this pass."""
        self._guards.callers.add_up(ends_step=self.ends_step)

    def compare_step(self) -> None:
        """Compare what the ranks backpropagated, which outputs they computed twice, and which batches they have read."""
        self.outputs.judge()
        self._guards.compare_step(tolerates_nan=self.scaler is not None)
