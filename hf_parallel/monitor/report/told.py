"""What each rank tells the others about its last steps: one short vector, in one collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from hf_parallel.monitor.recorder import AXES, Axis
from hf_parallel.monitor.sums import Sums


REDUCED = ("wait reduce", "gather")
MESSAGES = ("receive F", "receive B", "drain", "send F", "send B")


@dataclass(frozen=True)
class Told:
    """Of one rank; seconds and bytes are means of a step.

    Attributes:
        steps: That it is about.
        wall_s: Of a step.
        tokens: Of a step, in the batches that this rank has read.
        microbatches: Forwards of its first stage.
        busy_s: In which it computed.
        window_s: In which schedules ran.
        typical_s: Lower quartile of what it computed itself, of the last steps.
        data_s: Waits for the data loader.
        optimizer_s: Updates.
        messages_s: Waits for neighbouring stages, those that a schedule has anyway included.
        reduced_s: Waits for replicas.
        shared_s: Sums of gradients that stages share.
        layers_s: Waits of sharded layers.
        sequence_s: For the ranks that share rows.
        experts_s: For the ranks that share experts.
        sent_dp: Bytes handed to collectives over replicas.
        sent_pp: To neighbours and other stages.
        sent_tp: In sharded layers.
        sent_sp: Of parts of rows.
        sent_ep: Of tokens for experts.
        memory_bytes: Most so far.
        expected_bytes: Of states and activations.
        flops: Of a token, by the model; 0 if not known.
        hardware_flops: With what is computed again.
        peak: FLOP/s of the device; 0 if not known.
    """

    steps: float = 0.0
    wall_s: float = 0.0
    tokens: float = 0.0
    microbatches: float = 0.0
    busy_s: float = 0.0
    window_s: float = 0.0
    typical_s: float = 0.0
    data_s: float = 0.0
    optimizer_s: float = 0.0
    messages_s: float = 0.0
    reduced_s: float = 0.0
    shared_s: float = 0.0
    layers_s: float = 0.0
    sequence_s: float = 0.0
    experts_s: float = 0.0
    sent_dp: float = 0.0
    sent_pp: float = 0.0
    sent_tp: float = 0.0
    sent_sp: float = 0.0
    sent_ep: float = 0.0
    memory_bytes: float = 0.0
    expected_bytes: float = 0.0
    flops: float = 0.0
    hardware_flops: float = 0.0
    peak: float = 0.0

    def sent(self, axis: Axis) -> float:
        """Bytes of an axis."""
        return {
            "dp": self.sent_dp,
            "pp": self.sent_pp,
            "tp": self.sent_tp,
            "sp": self.sent_sp,
            "ep": self.sent_ep,
        }[axis]

    @property
    def bubble(self) -> float:
        """Share of the schedules' time in which the rank did not compute."""
        return min(1.0, max(0.0, 1.0 - self.busy_s / self.window_s)) if self.window_s else 0.0


WIDTH = len(fields(Told))
OF_STAGE = 3  # forward, backward, weight


@dataclass(frozen=True)
class Stage:
    """Seconds of one microbatch in a stage; backward without what `weight` has apart."""

    forward: float
    backward: float
    weight: float


def summed(sums: Sums, typical_s: float, **others: float) -> Told:
    """The means of some steps.

    Args:
        sums: Of the steps.
        typical_s: See `Told`.
        **others: Fields that records do not have.
    """
    steps, waits = max(1, sums.steps), sums.waits
    first = sums.stages[min(sums.stages)] if sums.stages else {}

    def mean(*kinds: str) -> float:
        return sum(waits.get(kind, 0.0) for kind in kinds) / steps

    return Told(
        steps=sums.steps,
        wall_s=sums.wall_s / steps,
        microbatches=first.get("F", (0.0, 0))[1] / steps,
        busy_s=sums.busy_s / steps,
        window_s=sums.window_s / steps,
        typical_s=typical_s,
        data_s=mean("data"),
        optimizer_s=mean("optimizer"),
        messages_s=mean(*MESSAGES),
        reduced_s=mean(*REDUCED),
        shared_s=mean("shared"),
        layers_s=mean("tp"),
        sequence_s=mean("sp"),
        experts_s=mean("ep"),
        **others,
    )


def encoded(told: Told, sums: Sums, stages: Sequence[int], most: int) -> list[float]:
    """As numbers: the fields, then three for each stage that any rank has.

    Args:
        told: What is told.
        sums: Of the same steps.
        stages: Of this rank.
        most: Stages of the rank with most.
    """
    values = [float(value) for value in asdict(told).values()]
    for stage in stages:
        values += [sums.seconds(stage, "F"), sums.seconds(stage, "BI"), sums.seconds(stage, "W")]
    return values + [0.0] * (OF_STAGE * (most - len(stages)))


def decoded(values: Sequence[float], stages: Sequence[int]) -> tuple[Told, Mapping[int, Stage]]:
    """What `encoded` made into numbers; `stages` are those of the rank that told it."""
    of_stages = {
        stage: Stage(*values[WIDTH + OF_STAGE * place : WIDTH + OF_STAGE * (place + 1)])
        for place, stage in enumerate(stages)
    }
    return Told(*values[:WIDTH]), of_stages


def total_sent(told: Sequence[Told], axis: Axis) -> float:
    """Bytes of a step that all ranks together handed over on an axis."""
    return math.fsum(one.sent(axis) for one in told)


def axes_in_use(sizes: Mapping[Axis, int]) -> list[Axis]:
    """Axes with several ranks."""
    return [axis for axis in AXES if sizes[axis] > 1]
