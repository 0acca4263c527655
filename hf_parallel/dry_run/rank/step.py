"""The step of a Trainer on a parallelized model, with a meter that says what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor

from hf_parallel.engine.gradients.optimizer_guard import OptimizerGuard
from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.memory.meter import Meter
from hf_parallel.memory.terms import Work


LEARNING_RATE, MAX_NORM = 1e-4, 1.0
STEPS = 1000  # of a run, in whose middle the metered one is: gradients are compressed there, as its warm-up is over


@dataclass
class Training:
    """A model in training, driven as a stock Trainer drives it.

    Args:
        engine: Engine of the parallelized model.
        optimizer: Optimizer of its parameters, guarded.
        begin: Called when the optimizer's step begins.
        meter: Told what runs.
    """

    engine: Engine
    optimizer: torch.optim.Optimizer
    begin: Callable[[], None]
    meter: Meter

    @classmethod
    def of(cls, engine: Engine, meter: Meter) -> Training:
        """Train with AdamW, as a Trainer does by default: fused on a GPU.

        Args:
            engine: Engine of the parallelized model.
            meter: Told what runs.
        """
        fused = engine.attachment.device.type == "cuda"
        parameters = [p for p in engine.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused)
        guard = OptimizerGuard(optimizer, engine.gradients, engine.model)
        engine.gradients.replicas.plan_steps(STEPS, STEPS // 2)
        return cls(engine, optimizer, guard.own_hooks.begin, meter)

    def step(self, batches: Sequence[dict[str, Any]]) -> None:
        """Run one optimizer step.

        Args:
            batches: Batches over which its gradients are accumulated.
        """
        engine, meter = self.engine, self.meter
        if isinstance(engine, PipelineEngine):
            engine.begin_window(list(batches))
        for index, batch in enumerate(batches, 1):
            with _ending_step(index == len(batches)):
                self._pass(batch, len(batches))
        meter.phase = "clipping"
        if engine.gradients.replicas.sharded is not None:
            engine.gradients.replicas.sharded.reshard()
        engine.gradients.clip(MAX_NORM)
        meter.phase = "optimizer temporaries"
        self.begin()
        self.optimizer.step()
        self.mark_state()
        self.optimizer.zero_grad()
        engine.model.zero_grad()

    def _pass(self, batch: dict[str, Any], num_batches: int) -> None:
        engine, meter = self.engine, self.meter
        meter.phase = "activations"
        output = engine.model(**batch, use_cache=False)
        meter.phase = "backward temporaries"
        loss = output["loss"] / num_batches
        del output
        engine.check_installed()
        engine.backpropagates(loss.detach())
        loss.backward()
        self.mark_gradients()

    def mark_gradients(self) -> None:
        """Say which memory is that of gradients."""
        zero = self.engine.gradients.replicas.zero
        shards = zero.shards if zero is not None else ()
        for owner in (*self.engine.model.parameters(), *(shard.master for shard in shards)):
            self.meter.mark(owner.grad, "gradients", "")

    def mark_state(self) -> None:
        """Say which memory is the optimizer's."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.meter.mark(value, "optimizer state", "")
        zero = self.engine.gradients.replicas.zero
        for shard in zero.shards if zero is not None else ():
            self.meter.mark(shard.master, "optimizer state", "")
        for parameter in self.engine.model.parameters():  # of which masters in fp32 are views
            self.meter.mark(parameter, "weights", "")


@contextmanager
def _ending_step(ends: bool) -> Iterator[None]:
    state: Any = GradientState()
    state.sync_gradients = ends
    try:
        yield
    finally:
        state.sync_gradients = True


def batches_of(work: Work, *, mask: bool, new: Callable[..., Tensor]) -> list[dict[str, Any]]:
    """The batches of one optimizer step of one model copy.

    Args:
        work: Rows, length and batches.
        mask: Whether they come with an attention mask.
        new: Makes the tensors, from shape and dtype.
    """
    shape = (work.rows, work.length)
    names = ["input_ids", "labels", *(["attention_mask"] if mask else [])]
    count = new((), torch.int64)
    return [
        {**{name: new(shape, torch.int64) for name in names}, "num_items_in_batch": count}
        for _ in range(work.accumulation)
    ]
