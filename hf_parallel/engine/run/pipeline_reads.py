"""The engine of several stages with what user code reads of a call with labels beside its loss.

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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_parallel.compat.private_torch import set_aside
from hf_parallel.engine.run.autograd_nodes import outputs_node
from hf_parallel.engine.run.last_stage import logits_in
from hf_parallel.engine.run.other_outputs import CallKind, Caught, OtherOutputs, Reading
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.engine.run.window import COUNTS
from hf_parallel.engine.run.written_config import WrittenConfig
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.batches import Announced
from hf_parallel.guards.calls.branches import refuse_hooks
from hf_parallel.guards.calls.outputs import More, PipelineOutput, PipelineTrainingOutput
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.noise import without_noise
from hf_parallel.tensor_parallel.run.reads import in_lockstep


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
        self._warned_of_rerun = False
        self._config = WrittenConfig(self.model)
        self._others = OtherOutputs(self.mesh, self._last_stage, self._loss, self._dtypes)

    def _dtypes(self) -> set[torch.dtype]:
        """Dtypes in which the model computes."""
        found = {p.dtype for p in self.attachment.parameters.values() if p.is_floating_point()}
        kind = self.attachment.device.type
        with self.autocast():
            return found | ({torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set())

    def complete_config(self) -> None:
        """Take the config's written values from the last stage, which computes the loss."""
        self._config.take(self._last_stage.broadcast_named({}, self._config.written)[1])

    # -- reading -------------------------------------------------------------------------------------------------

    def _fused_batch(self, batch: dict[str, Any]) -> PipelineTrainingOutput:
        kind = self._others.known(batch)
        if self._needs_scale or (kind is not None and kind.in_two_passes):
            return self._two_passes(batch, kind)
        caught = Caught(looks_at_loss=kind is None or kind.is_read)
        output, made = self._run_fused(batch, caught)
        if kind is None:
            kind = self._others.learn(batch, caught)
        announced, step = Announced(batch), self.seeds.step
        self._add_others(output, Reading(kind, announced, step, self._loss.num_parts(batch), caught, made, self._seed))
        return self._with_logits(output, kind, announced)

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
        self._list(output, kind)
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

    def _list(self, output: PipelineOutput | PipelineTrainingOutput, kind: CallKind) -> None:
        """Give `output` the places of the model's own."""
        if kind.names and self._unlisted is not None:
            output.lists([name for name in kind.names if name not in self._unlisted])

    def _values(self, reading: Reading, loss: torch.Tensor | None = None) -> More:
        """Other outputs as user code gets them, or why it does not; with a graph where the model's own have one."""
        kind = reading.kind
        if kind.refused is None and reading.count > 1:
            with NoDropout(), without_noise(self.model):
                self._others.judge_rows(kind, reading.announced.batch, self._outputs_of)
        found = self._others.send(reading)
        trained = {n: value for n, value in found.items() if kind.gives.get(n) and isinstance(value, torch.Tensor)}
        if loss is not None:
            trained["loss"] = loss
        with torch.enable_grad():
            nodes = outputs_node(self._anchor, trained, functools.partial(self._backward_outputs, reading))
        refuse_hooks(
            {name: node for name, node in nodes.items() if name != "loss"}, f"pp_size={self.mesh.shape.pp_size}"
        )
        return {**found, **nodes}

    @contextmanager
    def _again(self, step: int) -> Iterator[None]:
        """Inside, the stages run outside of a call of the model: a batch whose step has begun, with its random numbers."""
        before, self.seeds.step = self.seeds.step, step
        try:
            with (
                set_aside(*self.watching),
                self.attachment.watchdog.engaged(),
                self.gradients.replicas.forward(),
                in_lockstep(self.model),
                self._running.inside(),
            ):
                yield
        finally:
            self.seeds.step = before

    def _refuse_changed(self, announced: Announced, what: str) -> None:
        """Refuse to run a batch again that is another one by now, or that moves buffers a second time."""
        if not announced.is_in(announced.batch, COUNTS):
            raise UnsupportedError(
                f"{what} after the batch was changed in place: a pipeline runs the batch again for it. Do it before, or "
                "change a copy."
            )
        moving = self._buffers.moving
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
            begun = self.seeds.step, self.gradients.updates
            output.runs_again(functools.partial(self._logits_again, kind, announced, *begun))
        return output

    def _logits_again(self, kind: CallKind, announced: Announced, step: int, updates: int) -> torch.Tensor | None:
        """Logits f[B S V] of a batch whose fused step has run: its forward again, with the same random numbers.

        Where gradients are recorded, what a loss does to them goes back through the stages beside what is made already.
        """
        self._refuse_changed(announced, "outputs.logits is read")
        if self.gradients.updates != updates:
            raise UnsupportedError(
                f"outputs.logits of a training forward with labels was read after optimizer.step() with pp_size={self.mesh.shape.pp_size}: "
                "a pipeline makes them by running the batch again, which has other weights by now. Read them on every rank before the "
                "step (logits = outputs.logits.detach()), or call the model without labels."
            )
        self.gathers.meet("outputs.logits of a training forward with labels")
        self._warn_of_rerun()
        batch = {
            name: value for name, value in announced.batch.items() if name not in ("labels", "num_items_in_batch")
        }
        if kind.gives and self.mesh.tp_group is None:  # a forward that makes more of the labels may need them
            microbatches, _ = self._cut([announced.batch])
        else:
            microbatches = [batch] if self._loss.takes_whole_batches else self._loss.split(batch)
        with self._again(step):
            if torch.is_grad_enabled():
                logits = self._split_run.logits_of(self._split_run.forward(microbatches), batch)
                refuse_hooks({"logits": logits}, f"pp_size={self.mesh.shape.pp_size}")
                return logits
            return self._last_stage.broadcast_logits(logits_in(self._outputs_of(microbatches)), batch)

    def _warn_of_rerun(self) -> None:
        if not self._warned_of_rerun and self.mesh.rank == 0:
            logger.warning(
                "hf_parallel: outputs.logits is read in training steps with labels, where a pipeline has run the backward pass "
                "already: each such batch runs forward twice, and backward twice if the loss depends on them. Cheaper: call the "
                "model without labels and compute the whole loss from the logits."
            )
        self._warned_of_rerun = True

    # -- two passes ----------------------------------------------------------------------------------------------

    def _two_passes(self, batch: dict[str, Any], kind: CallKind | None) -> PipelineTrainingOutput:
        """The first pass: forward without a graph. Each of the outputs may be backpropagated, the loss too."""
        microbatches, shares = self._begin_step([batch])
        with self._buffers.watching(len(microbatches) + 1, [batch]):
            outputs = self._outputs_of(microbatches)
        losses = [self._loss.of(output, share) for output, share in zip(outputs, shares, strict=False)]
        loss = self._last_stage.share_losses(losses, shares, [batch])[0]
        caught = Caught()
        for index, one in enumerate(outputs):
            caught.note(index, one)
        kind = self._others.learn(batch, caught) if kind is None else kind
        announced = Announced(batch)
        found = self._values(Reading(kind, announced, self.seeds.step, len(microbatches), caught, None), loss)
        self._guards.direct.watch()
        output = PipelineTrainingOutput(loss=found.pop("loss"))  # type: ignore[arg-type]
        output.has_more(list(kind.gives), kind.absent, lambda: found)
        self._list(output, kind)
        return self._with_logits(output, kind, announced)

    def _backward_outputs(self, reading: Reading, gradients: dict[str, torch.Tensor]) -> None:
        """Backpropagate other outputs: dL/d(output) [B ...] is known now."""
        ratio = self._others.ratio(reading, gradients)
        if ratio is not None:
            self._tell_once(reading.kind, ONE_PASS.format(name=next(iter(gradients))))
            self._finish_backward(reading.made, reading.seed, ratio)
            return
        self._tell_once(reading.kind, TWO_PASSES.format(names=", ".join(gradients)))
        reading.kind.in_two_passes = reading.caught.looks_at_loss or reading.made is None
        self._refuse_changed(reading.announced, "a loss on outputs is backpropagated")
        for gradient in gradients.values():
            self._guards.backwards.arrived(gradient) if gradient.ndim else self._guards.backwards.scaled(gradient)
        microbatches, shares = self._cut([reading.announced.batch])
        self._others.begin_second_pass()
        with self._callers_backward(), self._again(reading.step):
            self.runtime.run(
                microbatches,
                self._programs.training(len(microbatches)),
                backward=True,
                loss_of=self._others.loss_with(reading, gradients, shares),
            )

    def compare_step(self) -> None:
        """Compare a step as other engines do; before, judge whether second passes had the outputs of the first."""
        self._others.judge()
        super().compare_step()

    def _tell_once(self, kind: CallKind, what: str) -> None:
        if what != kind.told and self.mesh.rank == 0:
            logger.info(what)
        kind.told = what
