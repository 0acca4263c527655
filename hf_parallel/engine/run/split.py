"""The split run of a pipeline's schedule: the model's call returns logits, and the loss on them is the caller's own.

All forwards run in the call. When the caller backpropagates its loss, all backwards run, from the gradient that the loss
gave the logits. The activations of every microbatch live in between.

Extents: B rows of a batch, m microbatches, S positions, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_parallel.engine.run.autograd_nodes import logits_node
from hf_parallel.engine.run.schedule_run import ScheduleRun
from hf_parallel.errors import UnsupportedError
from hf_parallel.pipeline_parallel.run.live import PhaseState


class SplitRun:
    """Runs the forwards of a schedule now, and its backwards in a backward pass of the caller's.

    Args:
        schedule: Runs the schedule.
    """

    def __init__(self, schedule: ScheduleRun) -> None:
        self._schedule = schedule

    def forward(self, microbatches: list[dict[str, Any]]) -> PhaseState:
        """Run the forwards of all microbatches; what their backwards need is kept."""
        program = self._schedule.programs.forwards(len(microbatches))
        return self._schedule.runtime.forward_phase(microbatches, program, lambda output, index: (output["logits"],))

    def logits_of(self, state: PhaseState, batch: dict[str, Any]) -> torch.Tensor:
        """The logits f[B S V] on this rank, from which a backward goes back through the stages."""
        with self._schedule.attachment.recorder.span("loss"):
            logits = self._schedule.last_stage.broadcast_logits([parts[0] for parts in state.outputs], batch)
        if logits is None:
            raise UnsupportedError("the model's forward returned no logits. Call it with labels, or set pp_size to 1.")
        return logits_node(self._schedule.anchor, logits, functools.partial(self._backward, state))

    def _backward(self, state: PhaseState, gradient: torch.Tensor) -> None:
        """Run the backwards of all microbatches from the gradient f[B S V] of the logits."""
        if state.num_microbatches and not state.live:
            raise UnsupportedError(
                "the logits of one training forward were backpropagated twice with pp_size above 1: the stages' graphs are gone "
                "after the first time. Add the losses up before one backward, or call the model again."
            )
        self._schedule.guards.backwards.arrived(gradient)
        rows = [parts[0].shape[0] for parts in state.outputs]  # B/m of each; empty on all but the last stage
        gradients = None
        if rows:  # f[B S V] -> f[B/m S V] of each microbatch, in the type that its logits had
            parts = zip(gradient.split(rows), state.outputs, strict=True)
            gradients = [(part.to(outputs[0].dtype),) for part, outputs in parts]
        with self._schedule.callers_backward():
            self._schedule.runtime.backward_phase(
                state, self._schedule.programs.backwards(state.num_microbatches), gradients
            )
