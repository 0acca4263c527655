"""Gradients that schedules of a pipeline have made, until the caller's backward pass through their losses ends.

A fused schedule has run before the pass, and its gradients wait until their loss is backpropagated. Others run in the pass.
Either way gradients come to `p.grad` when the pass ends: a parameter may have hooks, which see what the whole pass gives
it, or be frozen between its forward and its backward on another stage, and then they do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from hf_parallel.engine.run.engine import Attachment
from hf_parallel.guards.calls.backwards import Backwards
from hf_parallel.guards.gradients.aside import Made, accumulate, add, apart, together
from hf_parallel.guards.gradients.batch_hooks import BatchHooks
from hf_parallel.guards.weights.freezing import Freezing


class CallersBackward:
    """Gradients that wait for the end of a backward pass of the caller's.

    Args:
        freezing: Tells the other stages which parameters are frozen.
        hooks: Hooks on parameters.
        backwards: Compares the backward passes of the ranks.
        attachment: Model, gradients, watchdog.
    """

    def __init__(
        self,
        freezing: Freezing,
        hooks: BatchHooks,
        backwards: Backwards,
        attachment: Attachment,
    ) -> None:
        self._freezing, self._hooks, self._backwards = freezing, hooks, backwards
        self._gradients, self._watchdog = attachment.gradients, attachment.watchdog
        self._on_cpu = attachment.device.type == "cpu"
        self._passed: list[tuple[Made, Tensor]] = []
        # Of each schedule that ran in the pass: they count if their parameters are not frozen meanwhile.
        self._doubtful: list[list[tuple[nn.Parameter, Tensor]]] = []

    def backpropagated(self, made: Made, factor: Tensor) -> None:
        """Note that the pass has come to a loss whose schedule has run; `factor` (0-d) is for its gradients."""
        self._passed.append((made, factor))

    @contextmanager
    def runs_schedule(self) -> Iterator[None]:
        """Inside, the pass runs a schedule, which adds gradients to `p.grad` itself: those in doubt are held apart."""
        separate = list({id(p): p for p in (*self._hooks.hooked, *self._freezing.doubtful)}.values())
        with self._hooks.held(), apart(separate) as made:
            yield
        self._doubtful.append(self._hooks.keep(made.take()))

    def add_up(self, *, ends_step: bool) -> None:
        """Add the gradients of the pass, which ends, to those of the parameters, each times the factor of its loss."""
        passed, self._passed = together(self._passed), []
        doubtful, self._doubtful = self._doubtful, []
        frozen: set[int] = set()
        if ends_step or self._on_cpu:  # a GPU is waited for at the end of a step only
            frozen = self.drop_frozen(keeps=self._on_cpu)
        for gradients in doubtful:
            accumulate([(parameter, gradient) for parameter, gradient in gradients if id(parameter) not in frozen])
        for made, factor in passed:
            gradients = [(parameter, gradient) for parameter, gradient in made.take() if id(parameter) not in frozen]
            self._backwards.scaled(factor)
            add(self._hooks.keep(gradients, factor), factor)
        self._hooks.run(frozen)

    def drop_frozen(self, *, keeps: bool = False) -> set[int]:
        """Gradients of parameters that were frozen before the schedule do not count; their ids.

        Args:
            keeps: Whether `p.grad` is of earlier schedules, when the parameter was trained.
        """
        with self._watchdog.waiting("waits for what the other stages froze"):
            frozen = self._freezing.finish()
        for parameter in frozen if not keeps else ():
            parameter.grad = None
        if frozen and not keeps:
            self._gradients.buckets.follow_freezing()
        return {id(parameter) for parameter in frozen}
