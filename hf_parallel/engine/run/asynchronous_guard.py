"""Refuses what user code must not do while a pipeline that does not drain holds microbatches of later steps.

Those microbatches have run with the weights, the hooks and the settings of modules of their time. What changes afterwards would
count for some passes of a microbatch and not for others, and one process that trains with older weights has no such run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_parallel.compat.private_transformers import AFTER_DATA
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.weights.module_settings import changed_setting, settings_of
from hf_parallel.pipeline_parallel.run.still import StillWeights
from hf_parallel.pipeline_parallel.run.versions import WeightVersions


_REQUIRES_GRAD: Any = Tensor.requires_grad  # the descriptor, which `map` calls without a loop of Python
NOT_ANNOUNCED = (
    "a training forward that no data loader announced, with pipeline.schedule={name}: batches of the next steps enter the pipeline "
    "before their call, so stock code alone may stand between the data loader and the model. Leave {methods}, callbacks "
    "between batches and hooks on the model as the Trainer has them, compute_loss_func a sum over labels divided by "
    "num_items_in_batch, and gradient_accumulation_steps as it is within an epoch, or set pipeline.schedule to 1f1b."
)
CUT_SHORT = (
    "a stream of training batches ended after {found} of {asked} batches of a step (gradient_accumulation_steps), with "
    "pipeline.schedule={name}: stock Trainer takes no step after them and keeps their gradients, but the next batches are in the "
    "pipeline already. Give the dataset a length or a multiple of the rows of a step, set gradient_accumulation_steps to 1, or "
    "pipeline.schedule to 1f1b."
)


class AsynchronousGuard:
    """Compares weights and modules with those that microbatches of later steps have met.

    Args:
        model: This rank's part of the model.
        parameters: Ledger name -> this rank's parameter.
        versions: The versions of the trained weights.
        name: Name of the schedule.
        delay: Number of steps that may be under way beside the present one.

    Attributes:
        watches_modules: Whether user code runs between steps, which may change what modules compute.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        versions: WeightVersions,
        *,
        name: str,
        delay: int,
    ) -> None:
        self._model, self._parameters, self._versions = model, parameters, versions
        self.name, self.delay = name, delay
        self._values = list(parameters.values())
        self._still = StillWeights(model, {n: p for n, p in parameters.items() if not p.requires_grad})
        self._trained = self._now_trained()
        self._is_due = False  # gradients of a step are there, and no optimizer has used them
        self._settings: dict[str, Any] | None = None  # of the modules, when the last forward pass was over
        self._written: list[int] = []
        self.watches_modules = False

    # -- before the microbatches of a step -----------------------------------------------------------------------

    def refuse_unused_gradients(self) -> None:
        """Refuse a second batch before the optimizer has used the gradients of the first.

        Raises:
            UnsupportedError: It has not.
        """
        if self._is_due:
            raise UnsupportedError(
                f"no optimizer.step() followed the batches before, with pipeline.schedule={self.name}: their gradients would be lost. "
                "Leave gradient_accumulation_steps as it is within an epoch, or set pipeline.schedule to 1f1b."
            )

    def refuse_changes(self, *, under_way: bool) -> None:
        """Refuse what was changed of the weights and modules since the last step.

        Args:
            under_way: Whether microbatches of this step have run before it.

        Raises:
            UnsupportedError: A parameter was frozen or unfrozen. Or, while microbatches are under way, a frozen weight was changed, or
                a number, a switch or a hook of a module.
        """
        now = self._now_trained()
        if now != self._trained:
            pairs = zip(self._parameters, self._trained, now, strict=True)
            name = next(name for name, was_trained, is_trained in pairs if was_trained != is_trained)
            raise UnsupportedError(
                f"{name} was frozen or unfrozen with pipeline.schedule={self.name}: microbatches of the next steps are under "
                "way. Set requires_grad before training starts, or pipeline.schedule to 1f1b."
            )
        if not under_way:
            return
        moved = self._still.changed()
        if moved is not None:
            raise UnsupportedError(
                f"{moved}, which is frozen, was changed with pipeline.schedule={self.name}: of weights that are not trained there is one "
                "version, and microbatches of the next steps are under way with it. Change trained weights only, or set "
                "pipeline.schedule to 1f1b."
            )
        changed = None if self._settings is None else changed_setting(self._settings, settings_of(self._model))
        if changed:
            raise UnsupportedError(
                f"{changed} was changed during training with pipeline.schedule={self.name}: microbatches of the next "
                f"{self.delay} steps have run with the value before. Change modules before training starts, or set pipeline.schedule "
                "to 1f1b."
            )

    def _now_trained(self) -> list[bool]:
        return list(map(_REQUIRES_GRAD.__get__, self._values))

    def refuse_hooks(self, hooked: Sequence[nn.Parameter], *, needs_scale: bool) -> None:
        """Refuse hooks on parameters, and user code that needs more of a backward pass than one microbatch has.

        Raises:
            UnsupportedError: There are some.
        """
        if hooked:
            raise UnsupportedError(
                f"hooks on {len(hooked)} parameters (register_hook, an optimizer that steps in the backward pass) with "
                f"pipeline.schedule={self.name}: gradients of several steps are made at a time. Remove them, or set "
                "pipeline.schedule to 1f1b."
            )
        if needs_scale:
            raise UnsupportedError(
                f"users' code in backward passes (a backward hook, an autograd.Function) with pipeline.schedule={self.name}: it may need "
                "the gradient that the loss has in the loop, and gradients of several steps are made before that. Remove it, or set "
                "pipeline.schedule to 1f1b."
            )

    def refuse_gradients(self, there_are: bool) -> None:
        """Refuse gradients that user code gave parameters before the step's own: their norm is summed without them.

        Raises:
            UnsupportedError: `there_are` some.
        """
        if there_are:
            raise UnsupportedError(
                f"parameters had gradients when a step began (p.grad assigned, or backward() in a callback), with "
                f"pipeline.schedule={self.name}: the norm that clips them is summed while microbatches run. Add to p.grad in "
                "TrainerCallback.on_pre_optimizer_step, or set pipeline.schedule to 1f1b."
            )

    def refuse_short(self, found: int, asked: int) -> None:
        """Refuse a stream that gave some of the batches of a step, but not all.

        Raises:
            UnsupportedError: `found` is above 0 and below `asked`.
        """
        if 0 < found < asked:
            raise UnsupportedError(CUT_SHORT.format(found=found, asked=asked, name=self.name))

    @property
    def not_announced(self) -> str:
        """The message about a training forward that was not announced."""
        return NOT_ANNOUNCED.format(name=self.name, methods=", ".join(AFTER_DATA[:4]))

    # -- while they run, and after them --------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the microbatches of a training step: what changes after it is the doing of user code."""
        self._still.put(back=False)
        try:
            yield
        finally:
            self._still.put(back=True)
        self._settings = settings_of(self._model) if self.watches_modules else None
        self._still.note()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around forward passes that train nothing: what they write to modules is not the doing of user code."""
        before = settings_of(self._model) if self._settings is not None else {}
        yield
        if self._settings is not None:
            now = settings_of(self._model)
            self._settings |= {name: value for name, value in now.items() if before.get(name) != value}

    def gradients_are_due(self) -> None:
        """Note that the gradients of a step are in `p.grad`, and that an optimizer must use them next."""
        self._is_due, self._written = True, self._versions.written

    def before_write(self) -> None:
        """Refuse, before an optimizer writes to the parameters, what would make another version of the weights.

        Raises:
            UnsupportedError: It has done so already since the last batch, or user code changed weights after the backward pass.
        """
        if not self._is_due:
            raise UnsupportedError(
                f"a second optimizer.step() for one batch with pipeline.schedule={self.name}: each update makes one version of "
                "the weights. Use one optimizer, which steps once, or set pipeline.schedule to 1f1b."
            )
        if self._versions.written != self._written:
            raise UnsupportedError(
                f"weights were changed between the backward pass and optimizer.step() with pipeline.schedule={self.name}: microbatches "
                "of the next steps run with them. Change them after the step (on_step_end), or set pipeline.schedule to 1f1b."
            )
        self._is_due = False
