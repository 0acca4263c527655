"""State of an execution of a schedule: its inputs, and the microbatches between their forward and their backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge

from hf_parallel.pipeline_parallel.run.transport import TensorSpec
from hf_parallel.pipeline_parallel.run.weight_gradients import Pending
from hf_parallel.pipeline_parallel.schedule.actions import Action


Inputs: TypeAlias = Mapping[str, Any]
LossFunction: TypeAlias = Callable[[Any, int], Tensor]
OutputFunction: TypeAlias = Callable[[Any, int], tuple[Tensor, ...]]


@dataclass(slots=True)
class Live:
    """A microbatch between its forward and the end of its backward on one stage.

    Attributes:
        leaves: The received tensors that require a gradient.
        roots: Where the backward starts, None for a tensor that requires no gradient. Edges of the graph, not tensors,
            so that a payload's memory is free once it has been sent.
        specs: Specs of the gradients that come back for the payload; empty on the last stage.
        pending: Weight gradients that the input backward deferred.
    """

    leaves: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...]
    specs: tuple[TensorSpec, ...]
    pending: Pending | None = None


@dataclass(slots=True)
class PhaseState:
    """State that `forward_phase` leaves for `backward_phase`.

    Attributes:
        outputs: On the rank of the last stage the detached output tensors of each microbatch, elsewhere empty.
    """

    num_microbatches: int
    live: dict[tuple[int, int], Live] = field(default_factory=dict)
    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """One execution of a program: what it works on, and what it does on the last stage."""

    microbatches: Sequence[Inputs] | Mapping[int, Inputs]
    finish: OutputFunction
    seeds: Callable[[int], Sequence[Tensor | None]]
    live: dict[tuple[int, int], Live]
    keeps: bool = True


@dataclass(slots=True)
class Stream:
    """Microbatches that enter and leave a pipeline which does not drain, under numbers of their own.

    Attributes:
        inputs: Model inputs of each that is under way, the same on all stages.
        losses: Losses of the microbatches that have passed the last stage, on ranks that hold it (0-d).
        loss_of: ``loss_of(output, number)`` gives the normalised scalar loss on the last stage.
        before: Called before every forward and backward.
        after: Called after every backward.
    """

    loss_of: LossFunction
    before: Callable[[Action], None]
    after: Callable[[Action], None]
    inputs: dict[int, Inputs] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    live: dict[tuple[int, int], Live] = field(default_factory=dict)

    def forget(self, number: int) -> None:
        """Drop a microbatch that has left the pipeline."""
        self.inputs.pop(number, None)
        self.losses.pop(number, None)
