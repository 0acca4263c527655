"""Sums up the spans of steps: seconds of every stage, of waits by cause, and the share of a step that a rank computes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hf_parallel.monitor.recorder import COMPUTED, IN_LAYERS, StepRecord


@dataclass
class Sums:
    """Sums over some steps of one rank.

    Attributes:
        steps: Number of steps.
        wall_s: Seconds of all of them.
        window_s: Seconds in which schedules ran, up to the loss of the last stage.
        busy_s: Seconds of `window_s` in which the rank computed.
        stages: Stage -> kind of action -> seconds and number.
        waits: Kind of a wait or work beside the schedule -> seconds.
        computing: Seconds of the last of them in which the rank computed, without what its layers waited for.
    """

    steps: int = 0
    wall_s: float = 0.0
    window_s: float = 0.0
    busy_s: float = 0.0
    stages: dict[int, dict[str, tuple[float, int]]] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    computing: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self.steps += 1
        self.wall_s += record.end - record.start
        computed = inside = 0.0
        for kind, index, _, start, end in record.spans:
            seconds = end - start
            if kind in COMPUTED:
                of_stage = self.stages.setdefault(index, {})
                total, count = of_stage.get(kind, (0.0, 0))
                of_stage[kind] = total + seconds, count + 1
                computed += seconds
            else:
                self.waits[kind] += seconds
                if kind in IN_LAYERS:
                    inside += seconds
        self.busy_s += computed
        self.window_s = self.waits["schedule"] + self.waits["loss"]
        self.computing = max(0.0, computed - inside)

    @property
    def bubble(self) -> float:
        """Share of the schedules' time in which the rank did not compute."""
        return idle_share(self.busy_s, self.window_s)

    def seconds(self, stage: int, kinds: str) -> float:
        """Mean of one microbatch in a stage, of some kinds of actions together."""
        own = self.stages.get(stage, {})
        return sum(own[kind][0] / own[kind][1] for kind in kinds if kind in own)


def idle_share(busy_s: float, window_s: float) -> float:
    """The bubble: share of a schedule's time in which a rank did not compute, in [0, 1]; 0 without a schedule."""
    return min(1.0, max(0.0, 1.0 - busy_s / window_s)) if window_s else 0.0
