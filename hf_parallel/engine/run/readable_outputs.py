"""What a pipeline's model call with labels returns, and what user code reads of it beside the loss.

The fused step of the model's own loss has run then. Logits are made by a second forward, with a graph of their own. Other
outputs (log-probabilities, an entropy) are kept by the last stage and sent. The backward pass needs dL/d(output), which user
code gives when it backpropagates its loss. What follows depends on what it does:

1. It backpropagates the model's loss: nothing.
2. Its loss is computed from the one output that the model's own loss is computed from, and what it gives to this output is
   a multiple of what the own loss gives (both are the same sum over tokens, divided by other counts): the gradients are
   made already, and are multiplied by that number.
3. Any other loss: the schedule runs again, with sum(output * dL/d(output)) as the loss of a microbatch. From then on a call
   of this kind runs in two passes: forward alone, without a graph, and that schedule.

Memory is that of the schedule in all cases. The third costs one more forward pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hf_parallel.engine.run.autograd_nodes import outputs_node
from hf_parallel.engine.run.last_stage import logits_in
from hf_parallel.engine.run.other_outputs import CallKind, Caught, OtherOutputs, Reading
from hf_parallel.engine.run.schedule_run import ScheduleRun
from hf_parallel.engine.run.split import SplitRun
from hf_parallel.engine.run.window import COUNTS
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.batches import Announced
from hf_parallel.guards.calls.branches import refuse_hooks
from hf_parallel.guards.calls.outputs import More, PipelineOutput, PipelineTrainingOutput
from hf_parallel.guards.meeting import Meeting
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.noise import without_noise


logger = logging.getLogger(__name__)

ONE_PASS = (
    "hf_parallel: the loss is computed from outputs.{name} and is a multiple of the model's own: it trains in one pass of the "
    "pipeline's schedule, at its usual cost."
)
TWO_PASSES = (
    "hf_parallel: the loss is computed from outputs.{names}, which are known when the forward pass has ended: from now on a "
    "batch runs forward without a graph first, and then the pipeline's schedule. Memory is that of the schedule; the cost is "
    "one more forward pass (about a third more computation)."
)


class ReadableOutputs:
    """Runs batches with labels whose outputs user code may read: a training step of one batch, or an evaluation.

    Args:
        schedule: Runs the schedule.
        split: Runs the schedule for a loss on logits.
        gathers: Meeting of the ranks of a model copy, when one reads what it has to ask the others for.
        loss_scale: Gives the factor of losses whose backward passes run before upstream code has scaled them; None if no such
            pass may run.
        dtypes: Gives the types that the model computes in.
        in_model: Entered when stages run outside of a call of the model.

    Attributes:
        needs_logits: Whether logits of an evaluation are sent to the other stages: somebody reads them.
        unlisted: Outputs that nobody looks for by place; None where nobody goes through them.
    """

    def __init__(
        self,
        schedule: ScheduleRun,
        split: SplitRun,
        gathers: Meeting,
        *,
        loss_scale: Callable[[], float] | None,
        dtypes: Callable[[], set[torch.dtype]],
        in_model: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._schedule, self._split, self._gathers = schedule, split, gathers
        self._loss_scale, self._in_model = loss_scale, in_model
        self._model, self._mesh = schedule.attachment.model, schedule.attachment.mesh
        self._others = OtherOutputs(self._mesh, schedule.last_stage, schedule.loss, dtypes)
        self._warned_of_rerun = False
        self.needs_logits = True
        self.unlisted: Collection[str] | None = ()

    @contextmanager
    def predicting(self, *, loss_only: bool, needs_logits: bool, ignored: Collection[str]) -> Iterator[None]:
        """Inside, a Trainer evaluates a batch.

        Args:
            loss_only: Whether it goes through all outputs and uses the loss alone.
            needs_logits: Whether anybody reads logits; if not, they are not sent to the other stages.
            ignored: Outputs that it passes over.
        """
        before = self.needs_logits, self.unlisted
        self.needs_logits, self.unlisted = needs_logits, None if loss_only else ignored
        try:
            yield
        finally:
            self.needs_logits, self.unlisted = before

    def judge(self) -> None:
        """Judge whether second passes had the outputs of the first; collective if there were any.

        Raises:
            RankMismatchError: On every rank.
        """
        self._others.judge()

    # -- calls of the model --------------------------------------------------------------------------------------

    def evaluate(self, batch: dict[str, Any]) -> PipelineOutput:
        """The outputs of a batch with labels, without a graph."""
        schedule = self._schedule
        schedule.loss.check()
        microbatches, shares = schedule.cut([batch])
        outputs = schedule.outputs_of(microbatches)
        output = PipelineOutput(loss=schedule.loss_of(outputs, shares, batch))
        if self.needs_logits:  # the digest of the batch went with the loss
            output = PipelineOutput(
                loss=output.loss, logits=schedule.last_stage.broadcast_logits(logits_in(outputs), {})
            )
        caught = Caught.of(outputs)
        kind = self._others.known(batch) or self._others.learn(batch, caught)
        self._add_others(output, Reading(kind, Announced(batch), schedule.seeds.step, len(microbatches), caught, None))
        return output

    def train(self, batch: dict[str, Any]) -> PipelineTrainingOutput:
        """The outputs of a batch that trains; its schedule runs now, or in two passes in the caller's backward pass."""
        kind = self._others.known(batch)
        if self._loss_scale is None or (kind is not None and kind.in_two_passes):
            return self._two_passes(batch, kind)
        caught, seed = Caught(looks_at_loss=kind is None or kind.is_read), self._loss_scale()
        output, made = self._schedule.train_apart(batch, seed, caught)
        if kind is None:
            kind = self._others.learn(batch, caught)
        announced, step, count = Announced(batch), self._schedule.seeds.step, self._schedule.loss.num_parts(batch)
        self._add_others(output, Reading(kind, announced, step, count, caught, made, seed))
        return self._with_logits(output, kind, announced)

    def _two_passes(self, batch: dict[str, Any], kind: CallKind | None) -> PipelineTrainingOutput:
        """The first pass: forward without a graph. Each of the outputs may be backpropagated, the loss too."""
        schedule = self._schedule
        microbatches, shares = schedule.begin_step([batch])
        with schedule.buffers.watching(len(microbatches) + 1, [batch]):
            outputs = schedule.outputs_of(microbatches)
        loss, caught = schedule.loss_of(outputs, shares, batch), Caught.of(outputs)
        kind = self._others.learn(batch, caught) if kind is None else kind
        announced = Announced(batch)
        found = self._values(Reading(kind, announced, schedule.seeds.step, len(microbatches), caught, None), loss)
        schedule.guards.direct.watch()
        output = PipelineTrainingOutput(loss=found.pop("loss"))  # type: ignore[arg-type]
        output.has_more(list(kind.gives), kind.absent, lambda: found)
        self._list(output, kind)
        return self._with_logits(output, kind, announced)

    # -- reading -------------------------------------------------------------------------------------------------

    def _add_others(self, output: PipelineOutput | PipelineTrainingOutput, reading: Reading) -> None:
        """Give `output` what else the model's forward returned; sent at once where user code has read some before."""
        kind = reading.kind
        self._list(output, kind)
        if not (kind.gives or kind.absent):
            return
        found = self._values(reading) if kind.is_read else None

        def read() -> More:
            nonlocal found
            if found is None:
                self._gathers.meet(f"one of the outputs {', '.join(kind.gives)}")
                kind.is_read = True
                with self._again(reading.step):
                    found = self._values(reading)
            return found

        output.has_more(list(kind.gives), kind.absent, read)

    def _list(self, output: PipelineOutput | PipelineTrainingOutput, kind: CallKind) -> None:
        """Give `output` the places of the model's own."""
        if kind.names and self.unlisted is not None:
            output.lists([name for name in kind.names if name not in self.unlisted])

    def _values(self, reading: Reading, loss: torch.Tensor | None = None) -> More:
        """Other outputs as user code gets them, or why it does not; with a graph where the model's own have one."""
        kind = reading.kind
        if kind.refused is None and reading.count > 1:
            with NoDropout(), without_noise(self._model):
                self._others.judge_rows(kind, reading.announced.batch, self._schedule.outputs_of)
        found = self._others.send(reading)
        trained = {n: value for n, value in found.items() if kind.gives.get(n) and isinstance(value, torch.Tensor)}
        if loss is not None:
            trained["loss"] = loss
        with torch.enable_grad():
            nodes = outputs_node(self._schedule.anchor, trained, functools.partial(self._backward_outputs, reading))
        refuse_hooks(
            {name: node for name, node in nodes.items() if name != "loss"}, f"pp_size={self._mesh.shape.pp_size}"
        )
        return {**found, **nodes}

    @contextmanager
    def _again(self, step: int) -> Iterator[None]:
        """Inside, the stages run outside of a call of the model: a batch whose step has begun, with its random numbers."""
        seeds = self._schedule.seeds
        before, seeds.step = seeds.step, step
        try:
            with self._in_model(), self._schedule.running.inside():
                yield
        finally:
            seeds.step = before

    def _refuse_changed(self, announced: Announced, what: str) -> None:
        """Refuse to run a batch again that is another one by now, or that moves buffers a second time."""
        if not announced.is_in(announced.batch, COUNTS):
            raise UnsupportedError(
                f"{what} after the batch was changed in place: a pipeline runs the batch again for it. Do it before, or "
                "change a copy."
            )
        moving = self._schedule.buffers.moving
        if moving:
            raise UnsupportedError(
                f"{what}, for which a pipeline runs the batch again, and the forward pass writes to {len(moving)} buffers in "
                f"training (first: {moving[0]}): they would be written to twice. Set pp_size to 1."
            )

    # -- logits --------------------------------------------------------------------------------------------------

    def _with_logits(
        self, output: PipelineTrainingOutput, kind: CallKind, announced: Announced
    ) -> PipelineTrainingOutput:
        """`output`, which makes its logits when they are read, if the model gives some."""
        if kind.has_logits:
            begun = self._schedule.seeds.step, self._schedule.attachment.gradients.updates
            output.runs_again(functools.partial(self._logits_again, kind, announced, *begun))
        return output

    def _logits_again(self, kind: CallKind, announced: Announced, step: int, updates: int) -> torch.Tensor | None:
        """Logits f[B S V] of a batch whose fused step has run: its forward again, with the same random numbers.

        Where gradients are recorded, what a loss does to them goes back through the stages beside what is made already.
        """
        schedule, pp_size = self._schedule, self._mesh.shape.pp_size
        self._refuse_changed(announced, "outputs.logits is read")
        if schedule.attachment.gradients.updates != updates:
            raise UnsupportedError(
                f"outputs.logits of a training forward with labels was read after optimizer.step() with pp_size={pp_size}: "
                "a pipeline makes them by running the batch again, which has other weights by now. Read them on every rank before the "
                "step (logits = outputs.logits.detach()), or call the model without labels."
            )
        self._gathers.meet("outputs.logits of a training forward with labels")
        self._warn_of_rerun()
        batch = {
            name: value for name, value in announced.batch.items() if name not in ("labels", "num_items_in_batch")
        }
        if kind.gives and self._mesh.tp_group is None:  # a forward that makes more of the labels may need them
            microbatches, _ = schedule.cut([announced.batch])
        else:
            microbatches = [batch] if schedule.loss.takes_whole_batches else schedule.loss.split(batch)
        with self._again(step):
            if torch.is_grad_enabled():
                logits = self._split.logits_of(self._split.forward(microbatches), batch)
                refuse_hooks({"logits": logits}, f"pp_size={pp_size}")
                return logits
            return schedule.last_stage.broadcast_logits(logits_in(schedule.outputs_of(microbatches)), batch)

    def _warn_of_rerun(self) -> None:
        if not self._warned_of_rerun and self._mesh.rank == 0:
            logger.warning(
                "hf_parallel: outputs.logits is read in training steps with labels, where a pipeline has run the backward pass "
                "already: each such batch runs forward twice, and backward twice if the loss depends on them. Cheaper: call the "
                "model without labels and compute the whole loss from the logits."
            )
        self._warned_of_rerun = True

    # -- backward ------------------------------------------------------------------------------------------------

    def _backward_outputs(self, reading: Reading, gradients: dict[str, torch.Tensor]) -> None:
        """Backpropagate other outputs: dL/d(output) [B ...] is known now."""
        schedule = self._schedule
        ratio = self._others.ratio(reading, gradients)
        if ratio is not None and reading.made is not None:
            self._tell_once(reading.kind, ONE_PASS.format(name=next(iter(gradients))))
            schedule.backpropagated(reading.made, reading.seed, ratio)
            return
        self._tell_once(reading.kind, TWO_PASSES.format(names=", ".join(gradients)))
        reading.kind.in_two_passes = reading.caught.looks_at_loss or reading.made is None
        self._refuse_changed(reading.announced, "a loss on outputs is backpropagated")
        backwards = schedule.guards.backwards
        for gradient in gradients.values():
            backwards.arrived(gradient) if gradient.ndim else backwards.scaled(gradient)
        microbatches, shares = schedule.cut([reading.announced.batch])
        self._others.begin_second_pass()
        with schedule.callers_backward(), self._again(reading.step):
            schedule.runtime.run(
                microbatches,
                schedule.programs.training(len(microbatches)),
                backward=True,
                loss_of=self._others.loss_with(reading, gradients, shares),
            )

    def _tell_once(self, kind: CallKind, what: str) -> None:
        if what != kind.told and self._mesh.rank == 0:
            logger.info(what)
        kind.told = what
