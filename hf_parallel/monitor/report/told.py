"""Encodes what each rank tells the others about its last steps: one short vector, in one collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from hf_parallel.monitor.recorder import AXES, Axis
from hf_parallel.monitor.sums import Sums, idle_share


REDUCED = ("wait reduce", "gather")
MESSAGES = ("receive F", "receive B", "drain", "send F", "send B")


@dataclass(frozen=True)
class Told:
    """Means that one rank tells the others; seconds and bytes are those of a step.

    Attributes:
        steps: Number of optimizer steps in the means.
        wall_s: Seconds of a step.
        tokens: Tokens of a step, in the batches that this rank has read.
        microbatches: Number of forwards of its first stage.
        busy_s: Seconds of computing per step.
        window_s: Seconds per step in which schedules ran.
        typical_s: Lower quartile of the seconds that it computed itself, over the last steps.
        data_s: Seconds of waits for the data loader.
        optimizer_s: Seconds of updates.
        messages_s: Seconds of waits for neighbouring stages, those that a schedule has anyway included.
        reduced_s: Seconds of waits for replicas.
        shared_s: Seconds of sums of gradients that stages share.
        layers_s: Seconds of waits in sharded layers.
        sequence_s: Seconds of waits for the ranks that share rows.
        experts_s: Seconds of waits for the ranks that share experts.
        sent_dp: Bytes handed to collectives over replicas.
        sent_pp: Bytes sent to neighbours and other stages.
        sent_tp: Bytes sent in sharded layers.
        sent_sp: Bytes sent for parts of rows.
        sent_ep: Bytes sent for tokens that go to experts.
        memory_bytes: Largest number of bytes so far.
        expected_bytes: Bytes expected for states and activations.
        flops: FLOPs of a token, by the model; 0 if not known.
        hardware_flops: FLOPs of a token with what is computed again.
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
        return idle_share(self.busy_s, self.window_s)


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
        sums: Sums over the steps.
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
    """The message of a rank as numbers: the fields, then three for each stage that any rank has.

    Args:
        told: Facts to tell.
        sums: Sums over the same steps.
        stages: Stages of this rank.
        most: Stages of the rank with most.
    """
    values = [float(value) for value in asdict(told).values()]
    for stage in stages:
        values += [sums.seconds(stage, "F"), sums.seconds(stage, "BI"), sums.seconds(stage, "W")]
    return values + [0.0] * (OF_STAGE * (most - len(stages)))


def decoded(values: Sequence[float], stages: Sequence[int]) -> tuple[Told, Mapping[int, Stage]]:
    """Undo `encoded`; `stages` are those of the rank that told the numbers."""
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
