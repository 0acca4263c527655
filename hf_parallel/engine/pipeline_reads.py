"""The engine of several stages with a model's outputs beside loss and logits: log-probabilities, an entropy.

The backward pass needs dL/d(output), which user code gives when it backpropagates its loss. A training forward with labels
runs the fused step of the model's own loss. What follows depends on what user code does then:

1. It reads outputs and backpropagates the model's loss: they are sent to all stages, and that is all.
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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_parallel.engine.autograd_nodes import outputs_node
from hf_parallel.engine.other_outputs import CallKind, Caught, OtherOutputs, Reading, refuse_moving
from hf_parallel.engine.pipeline import PipelineEngine
from hf_parallel.engine.window import COUNTS
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.batches import Announced
from hf_parallel.guards.outputs import More, PipelineOutput, PipelineTrainingOutput
from hf_parallel.model.dropout import NoDropout


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


class ReadingPipelineEngine(PipelineEngine):
    """Runs the schedule; arguments are those of `PipelineEngine`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._others = OtherOutputs(self.mesh, self._last_stage, self._loss, self._dtypes)

    def _dtypes(self) -> set[torch.dtype]:
        """In which the model computes."""
        found = {p.dtype for p in self.attachment.parameters.values() if p.is_floating_point()}
        kind = self.attachment.device.type
        with self.autocast():
            return found | ({torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set())

    # -- reading -------------------------------------------------------------------------------------------------

    def _fused_batch(self, batch: dict[str, Any]) -> PipelineTrainingOutput:
        kind = self._others.known(batch)
        if kind is not None and kind.in_two_passes:
            return self._two_passes(batch, kind)
        caught = Caught(looks_at_loss=kind is None or kind.is_read)
        output, made = self._run_fused(batch, caught)
        if kind is None:
            kind = self._others.learn(batch, caught)
        announced, step = Announced(batch), self.seeds.step
        self._add_others(output, Reading(kind, announced, step, self._loss.num_parts(batch), caught, made, self._seed))
        return self._with_logits(output, kind, announced)

    def _with_logits(
        self, output: PipelineTrainingOutput, kind: CallKind, announced: Announced
    ) -> PipelineTrainingOutput:
        """`output`, which makes its logits when they are read, if the model gives some."""
        if kind.has_logits:
            output.runs_again(functools.partial(self._logits_again, announced, self.seeds.step))
        return output

    def _evaluated(self, batch: dict[str, Any], output: PipelineOutput, outputs: list[Any]) -> PipelineOutput:
        caught = Caught()
        for index, one in enumerate(outputs):
            caught.note(index, one)
        kind = self._others.known(batch) or self._others.learn(batch, caught)
        self._add_others(
            output, Reading(kind, Announced(batch), self.seeds.step, self._loss.num_parts(batch), caught, None)
        )
        return output

    def _add_others(self, output: PipelineOutput | PipelineTrainingOutput, reading: Reading) -> None:
        """Give `output` what else the model's forward returned; sent at once where user code has read some before."""
        kind = reading.kind
        if not (kind.gives or kind.absent):
            return
        found = self._values(reading) if kind.is_read else None

        def read() -> More:
            nonlocal found
            if found is None:
                self.gathers.meet(f"one of the outputs {', '.join(kind.gives)}")
                kind.is_read = True
                with self._again(reading.step):
                    found = self._values(reading)
            return found

        output.has_more(list(kind.gives), kind.absent, read)

    def _values(self, reading: Reading, loss: torch.Tensor | None = None) -> More:
        """Other outputs as user code gets them, or why it does not; with a graph where the model's own have one."""
        kind = reading.kind
        if kind.refused is None and reading.count > 1:
            with NoDropout():
                self._others.judge_rows(kind, reading.announced.batch, self._outputs_of)
        found = self._others.send(reading)
        trained = {n: value for n, value in found.items() if kind.gives[n] and isinstance(value, torch.Tensor)}
        if loss is not None:
            trained["loss"] = loss
        with torch.enable_grad():
            nodes = outputs_node(self._anchor, trained, functools.partial(self._backward_outputs, reading))
        return {**found, **nodes}

    @contextmanager
    def _again(self, step: int) -> Iterator[None]:
        """Inside, a batch whose step has begun runs once more, with the same random numbers."""
        before, self.seeds.step = self.seeds.step, step
        try:
            with self._engaged():
                yield
        finally:
            self.seeds.step = before

    # -- two passes ----------------------------------------------------------------------------------------------

    def _two_passes(self, batch: dict[str, Any], kind: CallKind) -> PipelineTrainingOutput:
        """The first pass: forward without a graph. Each of the outputs may be backpropagated, the loss too."""
        microbatches, shares = self._begin_step([batch])
        with self._buffers.watching(len(microbatches) + 1, [batch]):
            outputs = self._outputs_of(microbatches)
        losses = [self._loss.of(output, share) for output, share in zip(outputs, shares, strict=False)]
        loss = self._last_stage.share_losses(losses, shares, [batch])[0]
        caught = Caught()
        for index, one in enumerate(outputs):
            caught.note(index, one)
        announced = Announced(batch)
        found = self._values(Reading(kind, announced, self.seeds.step, len(microbatches), caught, None), loss)
        self._direct.watch()
        output = PipelineTrainingOutput(loss=found.pop("loss"))  # type: ignore[arg-type]
        output.has_more(list(kind.gives), kind.absent, lambda: found)
        return self._with_logits(output, kind, announced)

    def _backward_outputs(self, reading: Reading, gradients: dict[str, torch.Tensor]) -> None:
        """Backward of other outputs: dL/d(output) [B ...] is known now."""
        ratio = self._others.ratio(reading, gradients)
        if ratio is not None:
            self._tell_once(reading.kind, ONE_PASS.format(name=next(iter(gradients))))
            self._finish_backward(reading.made, reading.seed, ratio)
            return
        self._tell_once(reading.kind, TWO_PASSES.format(names=", ".join(gradients)))
        reading.kind.in_two_passes = True
        batch = reading.announced.batch
        if not reading.announced.is_in(batch, COUNTS):
            raise UnsupportedError(
                "a loss on outputs is backpropagated after the batch was changed in place: a pipeline runs the batch again. "
                "Backpropagate before, or change a copy."
            )
        refuse_moving(self._buffers.moving)
        for gradient in gradients.values():
            self._backwards.arrived(gradient) if gradient.ndim else self._backwards.scaled(gradient)
        microbatches, shares = self._cut([batch])
        self._others.begin_second_pass()
        with self._callers_backward(), self._again(reading.step):
            self.runtime.run(
                microbatches,
                self._programs.training(len(microbatches)),
                backward=True,
                loss_of=self._others.loss_with(reading, gradients, shares),
            )

    def compare_step(self) -> None:
        """As of a pipeline; second passes must have had the outputs of the first."""
        self._others.judge()
        super().compare_step()

    def _tell_once(self, kind: CallKind, what: str) -> None:
        if what != kind.told and self.mesh.rank == 0:
            logger.info(what)
        kind.told = what
