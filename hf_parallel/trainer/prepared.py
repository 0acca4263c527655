"""What `Accelerator.prepare` returns for an optimizer and for a scheduler."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from hf_parallel.compat.private_optimizers import count_step, steps_counted
from hf_parallel.engine.gradients import GradientSync
from hf_parallel.guards.parts import marked_state, plain_state
from hf_parallel.guards.stepping import OwnHooks


class HFParallelOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A prepared optimizer that takes over what user code made of the gradients before a loss scaler looks at them."""

    gradients: GradientSync
    own_hooks: OwnHooks
    is_part: bool

    @property
    def state(self) -> Any:
        """As stock; numbers over the elements of a part are refused."""
        return self.gradients.shown_states(self.optimizer)

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """As stock: of the parameters that this rank updates."""
        state: dict[str, Any] = super().state_dict()
        return marked_state(state) if self.is_part else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As stock."""
        super().load_state_dict(plain_state(state_dict))

    def step(self, closure: Any = None) -> None:
        """As stock."""
        self.own_hooks.begin()
        if self.gradient_state.sync_gradients and self.scaler is not None:
            self.gradients.before_update()
        super().step(closure)


class HFParallelScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A prepared scheduler that steps once a replica and update, where stock counts every process."""

    steps_per_update: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizer did."""
        if not self.step_with_optimizer or self.split_batches:
            super().step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                count_step(self.scheduler)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.steps_per_update):
            # OneCycleLR raises beyond its total_steps, which an incomplete last batch that is not dropped leads to.
            if (
                not hasattr(self.scheduler, "total_steps")
                or steps_counted(self.scheduler) <= self.scheduler.total_steps
            ):
                self.scheduler.step(*args, **kwargs)
