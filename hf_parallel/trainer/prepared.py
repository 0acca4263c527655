"""The optimizer and the scheduler that `Accelerator.prepare` returns."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.distributed import ProcessGroup

from hf_parallel.compat.private_optimizers import count_step, steps_counted
from hf_parallel.engine.gradients.sync import GradientSync
from hf_parallel.guards.optimizers.parts import refuse_groups
from hf_parallel.guards.optimizers.stepping import OwnHooks
from hf_parallel.guards.weights.state_dicts import marked_state, plain_state
from hf_parallel.hangs.watchdog import Watchdog


class HFParallelOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A prepared optimizer that takes over what user code made of the gradients before a loss scaler looks at them."""

    gradients: GradientSync
    own_hooks: OwnHooks
    is_part: bool
    watchdog: Watchdog
    replicas: ProcessGroup | None

    @property
    def param_groups(self) -> Any:
        """Groups of the model's parameters, also where the optimizer itself has flat parts of them."""
        parts = self.gradients.states.shown_parts(self.optimizer)
        return self.optimizer.param_groups if parts is None else parts.groups()

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        if self.gradients.states.shown_parts(self.optimizer) is not None:
            refuse_groups()
        self.optimizer.param_groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that are in flat parts already, which torch does not notice."""
        parts, given = self.gradients.states.shown_parts(self.optimizer), param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        if parts is not None and any(map(parts.has, given)):
            raise ValueError("some parameters appear in more than one parameter group")
        super().add_param_group({**param_group, "params": given})

    @property
    def state(self) -> Any:
        """State of each parameter; a number computed over the elements of a part is refused when it is read."""
        return self.gradients.states.shown(self.optimizer)

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """State of the parameters that this rank updates."""
        self.gradients.states.settle()
        state: dict[str, Any] = super().state_dict()
        return marked_state(state) if self.is_part else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on this rank."""
        self.gradients.states.settle()
        super().load_state_dict(plain_state(state_dict))

    def step(self, closure: Any = None) -> None:
        """Step; a closure's losses are averaged over the replicas, as gradients are, so that all take the same step."""
        self.own_hooks.begin()
        if closure is not None and self.replicas is not None:
            closure = functools.partial(_averaged, closure, self.replicas)
        if self.gradient_state.sync_gradients and self.scaler is not None:
            self.gradients.before_update()
        if not self.gradient_state.sync_gradients:
            super().step(closure)
            return
        with self.gradients.recorder.span("optimizer"):
            super().step(closure)
        self.watchdog.ends_step()


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer without accelerate's wrapper; one of the user's around another stays, since it has state of its own."""
    while isinstance(optimizer, AcceleratedOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _averaged(closure: Any, replicas: ProcessGroup) -> Any:
    loss = closure()
    if loss is None:
        return None
    mean = torch.as_tensor(loss).detach().to(torch.float64, copy=True)
    dist.all_reduce(mean, group=replicas)
    mean /= replicas.size()
    return mean.to(loss.dtype) if isinstance(loss, torch.Tensor) else float(mean)


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
