"""Watches user code around the schedules of a pipeline, and compares over the ranks what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_parallel.engine.run.callers_backward import CallersBackward
from hf_parallel.engine.run.engine import Attachment
from hf_parallel.guards.calls.backwards import Backwards
from hf_parallel.guards.calls.batches import BatchDigests
from hf_parallel.guards.calls.late_hooks import LateHooks
from hf_parallel.guards.gradients.batch_hooks import BatchHooks
from hf_parallel.guards.gradients.direct import DirectGradients
from hf_parallel.guards.weights.freezing import Freezing
from hf_parallel.pipeline_parallel.run.stage import Stage, around_blocks, own_modules


class PipelineGuards:
    """The guards of one pipeline engine.

    Args:
        attachment: Model, mesh, ledger, gradients.
        stages: Stages of this rank.
        end_pass_later: Called in a backward pass in which a loss gives a parameter a gradient itself.

    Attributes:
        freezing: Tells the other stages which parameters are frozen.
        digests: Compares the batches of the ranks.
        backwards: Compares what the ranks backpropagate.
        late_hooks: Tests hooks that were put on modules after the model was cut.
        hooks: Runs hooks on parameters once a batch.
        callers: Keeps gradients that schedules have made until the caller's backward pass ends.
        direct: Finds gradients that reach parameters past the stages.
    """

    def __init__(
        self,
        attachment: Attachment,
        stages: Sequence[Stage],
        end_pass_later: Callable[[], None],
    ) -> None:
        model, mesh, gradients = attachment.model, attachment.mesh, attachment.gradients
        held, pp_size, plan = (attachment.ledger, attachment.parameters, mesh), mesh.shape.pp_size, stages[0].plan
        self._watchdog = attachment.watchdog
        self.freezing = Freezing(model, *held, gradients.replicas, stages[0].running.asked)
        self.digests = BatchDigests(mesh, attachment.common_weights(), gradients.settings, gradients.shown.numbers)
        self.backwards = Backwards(mesh, attachment.device, gradients.settings)
        self.late_hooks = LateHooks(own_modules(model, plan, stages), around_blocks(model, plan), pp_size)
        self.hooks = BatchHooks(
            *held,
            guard=gradients.hooks,
            holders=gradients.groups,
            group=self.freezing.group,
            take_reduced=gradients.take_reduced,
        )
        self.callers = CallersBackward(self.freezing, self.hooks, self.backwards, attachment)
        self.direct = DirectGradients(
            *(attachment.parameters, attachment.ledger.on_all(pp_size), pp_size, end_pass_later),
            summands=gradients.summands,
            compared=self.backwards.beside,
        )

    def ask_for_hooks(self) -> bool:
        """Whether any stage has hooks on parameters; collective over the pipeline."""
        with self._watchdog.waiting("waits for the other stages to say which parameters have hooks"):
            return self.hooks.ask()

    def follow_freezing(self) -> bool:
        """Whether parameters were frozen or unfrozen, so that stages send each other other gradients; collective."""
        with self._watchdog.waiting("waits for the other stages to begin the step"):
            return self.freezing.begin()

    def compare_step(self, *, tolerates_nan: bool) -> None:
        """Compare what the ranks backpropagated in a step, and which batches they have read; collective.

        Args:
            tolerates_nan: Whether a loss scaler will skip a step whose gradients are not finite.
        """
        found, self.direct.found = self.direct.found, []
        self.backwards.agree(found, tolerates_nan=tolerates_nan)
        self.digests.judge()
