"""The metrics of a run from what its ranks told: for the logs, and for the page at the end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_parallel.engine.run.expected import Expected
from hf_parallel.errors import ScheduleError
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.monitor.recorder import Axis
from hf_parallel.monitor.report.told import Stage, Told, axes_in_use, total_sent
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.simulate import Simulation, simulate


MOST_SIMULATED = 5000  # actions of a schedule that is timed anew for the logs
MOST_LISTED = 8  # stages and pipeline ranks that have a metric of their own


@dataclass(frozen=True)
class Job:
    """The figures that the ranks told each other, and the mesh that they are of.

    Args:
        shape: Shape of the mesh.
        choice: The schedule.
        expected: Expectations of the plans.
        told: Means that each rank told.
        stages: Seconds that each rank told: stage -> seconds.
    """

    shape: MeshShape
    choice: ScheduleChoice
    expected: Expected
    told: Sequence[Told]
    stages: Sequence[Mapping[int, Stage]]

    @property
    def sizes(self) -> dict[Axis, int]:
        """Ranks on each axis; gradients travel between all copies of the weights, those of one sequence included."""
        shape = self.shape
        return {
            "dp": shape.num_copies,
            "pp": shape.pp_size,
            "tp": shape.tp_size,
            "sp": shape.sp_size,
            "ep": shape.ep_size,
        }

    @property
    def wall_s(self) -> float:
        """Seconds of a step on the slowest rank."""
        return max(one.wall_s for one in self.told)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job. The ranks of a model copy read the same tokens."""
        read = sum(self.told[self.shape.rank_at(replica, 0, 0)].tokens for replica in range(self.shape.dp_size))
        return read / self.wall_s if self.wall_s else 0.0

    def of_stages(self) -> dict[int, Stage]:
        """Seconds of each stage: the mean of the ranks that hold it."""
        found: dict[int, list[Stage]] = {}
        for own in self.stages:
            for stage, seconds in own.items():
                found.setdefault(stage, []).append(seconds)
        return {
            stage: Stage(*(statistics.fmean(values) for values in zip(*((s.forward, s.backward, s.weight) for s in all_), strict=True)))
            for stage, all_ in sorted(found.items())
        }  # fmt: skip

    def simulated(self) -> Simulation | None:
        """The step's schedule with the measured seconds of stages and no messages.

        None without stages, if it is long, or if steps run into each other.
        """
        stages, count = self.of_stages(), round(self.told[0].microbatches)
        if self.shape.pp_size == 1 or not self.choice.drains or not count or 2 * count * len(stages) > MOST_SIMULATED:
            return None
        forward, weight = ([getattr(s, part) for s in stages.values()] for part in ("forward", "weight"))
        backward = [s.backward + s.weight for s in stages.values()]
        try:
            return simulate(self.choice.training(count), forward, backward, weight_costs=weight)
        except ScheduleError:  # split forwards and backwards ran, which another schedule has
            return None


def metrics_of(job: Job) -> dict[str, float]:
    """Metrics by name, seconds and bytes of a step; those that are not known are left out."""
    found = {"tokens_per_s": job.tokens_per_s, "step_s": job.wall_s, **_rates(job), **_bubbles(job)}
    for stage, seconds in list(job.of_stages().items())[:MOST_LISTED]:
        found[f"forward_ms/stage_{stage}"] = 1e3 * seconds.forward
        found[f"backward_ms/stage_{stage}"] = 1e3 * seconds.backward
        if seconds.weight:
            found[f"weight_ms/stage_{stage}"] = 1e3 * seconds.weight
    exposed = exposed_s(job)
    for axis in axes_in_use(job.sizes):
        if axis in exposed:
            found[f"exposed_s/{axis}"] = exposed[axis]
        found[f"sent_mb/{axis}"] = total_sent(job.told, axis) / 1e6
    found["data_wait_s"] = statistics.fmean(one.data_s for one in job.told)
    found["optimizer_s"] = statistics.fmean(one.optimizer_s for one in job.told)
    found["memory_gb"] = max(one.memory_bytes for one in job.told) / 1e9
    found["memory_expected_gb"] = max(one.expected_bytes for one in job.told) / 1e9
    return {f"monitor/{name}": float(f"{value:.5g}") for name, value in found.items()}


def exposed_s(job: Job) -> dict[Axis, float]:
    """Seconds of a step that messages of an axis add, the mean of the ranks.

    Of a pipeline it is what the schedule took beyond its time with the same stages and no messages.
    """
    found: dict[Axis, float] = {
        "dp": statistics.fmean(one.reduced_s for one in job.told),
        "tp": statistics.fmean(one.layers_s for one in job.told),
        "sp": statistics.fmean(one.sequence_s for one in job.told),
        "ep": statistics.fmean(one.experts_s for one in job.told),
    }
    timed = job.simulated()
    if timed is not None:
        window = statistics.fmean(one.window_s for one in job.told)
        found["pp"] = max(0.0, window - timed.makespan) + statistics.fmean(one.shared_s for one in job.told)
    return found


def _rates(job: Job) -> dict[str, float]:
    """FLOP/s of the model and of the hardware, of one rank, and their share of the peak."""
    first, ranks = job.told[0], len(job.told)
    if not first.flops:
        return {}
    model, hardware = (job.tokens_per_s * flops / ranks for flops in (first.flops, first.hardware_flops))
    found = {"tflops": model / 1e12, "hardware_tflops": hardware / 1e12}
    peak = min(one.peak for one in job.told)
    return found | ({"mfu": model / peak, "hfu": hardware / peak} if peak else {})


def _bubbles(job: Job) -> dict[str, float]:
    """Idle shares: as planned, with the stages' measured seconds, and as measured."""
    if job.shape.pp_size == 1:
        return {}
    found = {"bubble": statistics.fmean(one.bubble for one in job.told)}
    if job.expected.bubble is not None and job.choice.drains:
        found["bubble_planned"] = job.expected.bubble
    timed = job.simulated()
    if timed is not None:
        found["bubble_of_stages"] = timed.bubble_fraction
    for pp_rank, bubble in list(enumerate(bubbles_of_ranks(job)))[:MOST_LISTED]:
        found[f"bubble/pp_{pp_rank}"] = bubble
    return found


def bubbles_of_ranks(job: Job) -> list[float]:
    """Idle share of each pipeline rank: the mean of its replicas and shards."""
    own: list[list[float]] = [[] for _ in range(job.shape.pp_size)]
    for rank, one in enumerate(job.told):
        own[job.shape.coordinates(rank)[1]].append(one.bubble)
    return [statistics.fmean(bubbles) for bubbles in own]
