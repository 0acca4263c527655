"""Whatever the schedule, the order in which ranks issue sends and receives cannot deadlock under NCCL's rules.

The real runtime of every rank runs on toy stages with transports that write down what is issued. The notes of all ranks
become one graph of what must happen before what: a GPU runs what is issued on a stream in order, the operations of a
communicator have a stream of their own that begins behind the compute stream, and a send and its receive end together.
A cycle is a deadlock. If a test fails here, training hangs on GPUs while every CPU test passes: gloo has no such order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from hf_parallel.errors import ConfigError, ScheduleError
from hf_parallel.pipeline_parallel.run.links import neighbour_pairs
from hf_parallel.pipeline_parallel.run.messages import encode_header
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.transport import TensorSpec
from hf_parallel.pipeline_parallel.run.weight_gradients import WeightGradients
from hf_parallel.pipeline_parallel.schedule.programs import Programs, ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from hf_parallel.settings.sections import PipelineConfig


HEADER = encode_header([TensorSpec((1, 1), torch.float32, requires_grad=True)])
STEPS = 2  # the first one sends headers
Pair = tuple[int, int]
Communicators = Literal["a pair and direction", "a direction"]


@dataclass
class Notes:
    """What one rank issued: ("message", pair, number of it) or ("wait", pair, number), in order."""

    items: list[tuple[str, Pair, int]] = field(default_factory=list)
    counts: dict[Pair, int] = field(default_factory=dict)

    def message(self, pair: Pair) -> int:
        self.counts[pair] = self.counts.get(pair, 0) + 1
        self.items.append(("message", pair, self.counts[pair]))
        return self.counts[pair]


@dataclass
class Noted:
    notes: Notes
    pair: Pair
    numbers: list[int]
    tensors: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        self.notes.items += [("wait", self.pair, number) for number in self.numbers]
        return self.tensors


class NotingTransport:
    """As over NCCL, but everything arrives at once."""

    device, receive_ahead, opens_late = torch.device("cpu"), 1, False

    def __init__(self, notes: Notes, pair: Pair) -> None:
        self.notes, self.pair = notes, pair

    def isend(self, tensors: Sequence[Tensor]) -> Noted:
        return Noted(self.notes, self.pair, [self.notes.message(self.pair) for _ in tensors], tuple(tensors))

    def irecv(self, specs: Sequence[TensorSpec]) -> Noted:
        def value(spec: TensorSpec) -> Tensor:
            if spec.dtype != torch.int64:
                return torch.ones(spec.shape)
            return torch.tensor([len(HEADER)] if spec.shape == (1,) else HEADER)

        numbers = [self.notes.message(self.pair) for _ in specs]
        return Noted(self.notes, self.pair, numbers, tuple(map(value, specs)))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, payload: tuple[Tensor, ...], x: Tensor) -> Any:
        return (self.linear(payload[0] if payload else x),)


def notes_of(choice: ScheduleChoice, rank: int, count: int, *, backward: bool) -> Notes:
    notes = Notes()
    own = nn.ModuleDict({str(stage): Toy() for stage in choice.stages_of_ranks[rank]})
    transports = {pair: NotingTransport(notes, pair) for pair in neighbour_pairs(choice.placement)}
    runtime = PipelineRuntime(
        {int(stage): module for stage, module in own.items()},
        choice.placement,
        rank,
        transports,
        weights=WeightGradients(own),
    )
    programs = Programs(choice, rank)
    program = programs.training(count) if backward else programs.forwards(count)
    microbatches = [{"x": torch.ones(1, 1)}] * count
    for _ in range(STEPS):
        with torch.set_grad_enabled(backward):
            runtime.run(microbatches, program, backward=backward, loss_of=lambda out, index: out[0].sum())
    return notes


def deadlock(notes: Sequence[Notes], communicators: Communicators, queues: int | None = None) -> list[Any] | None:
    """The cycle in what must happen before what, or None.

    Args:
        notes: Of every rank.
        communicators: What has one of its own: `a pair and direction`, or a whole `direction` (one group, eager init).
        queues: 1 if all streams of a GPU share one hardware queue: nothing starts before what was issued before it.
    """
    graph: TopologicalSorter[Any] = TopologicalSorter()
    for rank, own in enumerate(notes):
        computed: Any = None  # where the compute stream is
        issued: Any = None
        last: dict[Any, Any] = {}
        for place, (kind, pair, number) in enumerate(own.items):
            start, message = ("start", rank, place), ("message", pair, number)
            graph.add(start, *(before for before in (computed, issued if queues == 1 else None) if before is not None))
            issued = start
            if kind == "wait":
                graph.add(start, message)
                computed = start
                continue
            communicator = pair if communicators == "a pair and direction" else pair[0] < pair[1]
            if communicator in last:
                graph.add(start, last[communicator])
            last[communicator] = message
            graph.add(message, start)
    try:
        graph.prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


@functools.cache
def all_notes(name: str, pp_size: int, count: int, *, backward: bool = True) -> list[Notes] | None:
    """None where the schedule does not take such sizes."""
    try:
        choice = ScheduleChoice(PipelineConfig(schedule=name), pp_size)
        return [notes_of(choice, rank, count, backward=backward) for rank in range(pp_size)]
    except (ConfigError, ScheduleError):
        return None


SIZES = [(2, 1), (2, 4), (3, 2), (3, 6), (4, 5)]
MANY = [
    pytest.param(*size, marks=pytest.mark.slow) for size in itertools.product(range(2, 9), (1, 2, 3, 4, 6, 8, 11, 16))
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_deadlocks_with_a_communicator_for_each_direction_of_each_pair(name: str) -> None:
    found = {
        (size, backward): deadlock(notes, "a pair and direction")
        for size in SIZES
        for backward in (True, False)
        if (notes := all_notes(name, *size, backward=backward)) is not None
    }
    assert len(found) >= 4
    assert not [case for case, cycle in found.items() if cycle]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp_size", "count"), MANY)
def test_no_long_pipeline_deadlocks(name: str, pp_size: int, count: int) -> None:
    notes = all_notes(name, pp_size, count)
    if notes is not None:
        assert deadlock(notes, "a pair and direction") is None


def test_one_communicator_for_a_direction_would_deadlock() -> None:
    """The model tells right from wrong: this is why every pair has groups of its own."""
    notes = all_notes("interleaved_zero_bubble", 3, 6)
    assert notes is not None
    assert deadlock(notes, "a direction")
    assert deadlock(notes, "a pair and direction") is None


def test_one_hardware_queue_would_deadlock() -> None:
    """Why CUDA_DEVICE_MAX_CONNECTIONS=1 is refused with pipeline stages."""
    notes = all_notes("interleaved_1f1b", 2, 4)
    assert notes is not None
    assert deadlock(notes, "a pair and direction", queues=1)
