"""Drives the measurements of a run: begins and ends steps, lets ranks tell each other, warns, traces, reports."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from hf_parallel.compat.private_collectives import all_gather_flat
from hf_parallel.engine.run.engine import Engine
from hf_parallel.mesh.groups import backend_for
from hf_parallel.monitor.recorder import AXES, StepRecord
from hf_parallel.monitor.report.facts import (
    Flops,
    PeakMemory,
    expected_bytes,
    flops_of,
    peak_of,
    sent_bytes,
    states_bytes,
)
from hf_parallel.monitor.report.metrics import Job, metrics_of
from hf_parallel.monitor.report.page import write_report
from hf_parallel.monitor.report.scaling import planned_scaling
from hf_parallel.monitor.report.slow import slow_ranks, words
from hf_parallel.monitor.report.told import Told, decoded, encoded, summed
from hf_parallel.monitor.report.trace import Offset, chrome_trace, clock_offsets
from hf_parallel.monitor.report.write import write_whole
from hf_parallel.monitor.sums import Sums
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig


logger = logging.getLogger(__name__)

EVERY: Final = 10  # steps after which ranks compare; one that is slow twice in a row is named
WARM_UP: Final = 2  # steps that the report leaves out, if there are more
TRACE: Final = "hf_parallel_trace.json"
MOST_POINTS: Final = 2000  # logged steps that the report keeps


class Monitor:
    """Monitor of one rank; all ranks call its methods at the same steps.

    Args:
        engine: Engine whose recorder is read.
        config: The settings.
        choice: The schedule.
        folder: Folder for trace and report.
    """

    def __init__(self, engine: Engine, config: HFParallelConfig, choice: ScheduleChoice, folder: Path) -> None:
        self.engine, self.config, self.choice, self.folder = engine, config, choice, folder
        self.settings, self.recorder = config.monitor, engine.recorder
        self._mesh, self._device = engine.mesh, engine.attachment.device
        self._window, self._total = Sums(), Sums()
        self._recent: deque[float] = deque(maxlen=EVERY)
        self._tokens = self._all_tokens = 0
        self._sent = self._first_sent = sent_bytes(engine)
        self._memory = PeakMemory(self._device, states_bytes(engine, config)[0])
        self._seq_len = 0
        self._flops: Flops | None = None
        self._metrics: dict[str, float] = {}
        self._history: list[dict[str, float]] = []
        self._suspects: set[int] = set()
        self._named: set[int] = set()
        self._underway: tuple[torch.Tensor, Any] | None = None
        self._compares = False  # whether what is under way is for comparing ranks
        # Whether there is a trace to be written: the same on every rank, unlike what has been read.
        self._traces = False
        self._traced: list[StepRecord] = []
        self._offsets: list[Offset] = []
        self._group: dist.ProcessGroup | None = None
        self._last: StepRecord | None = None
        self._steps = 0
        self._first_counted = 0  # step from which on the report counts

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, number: int) -> None:
        """Begin an optimizer step, with the wait for its first batch."""
        self._metrics = {}
        traces = number in self.settings.trace_steps
        if traces and not self._traces:
            self._traces, self._offsets = True, self._clocks()
        if self._steps == WARM_UP:
            self._total, self._all_tokens, self._first_sent = Sums(), 0, sent_bytes(self.engine)
            self._first_counted = number
        self.recorder.begin_step(number, waits=traces)

    def read(self, batches: list[Any]) -> None:
        """Count the tokens of a step's batches."""
        for batch in batches:
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
            if isinstance(ids, torch.Tensor):
                self._tokens += ids.numel()
                self._all_tokens += ids.numel()
                self._seq_len = ids.shape[-1]

    def end_step(self, number: int, *, logs: bool) -> None:
        """End the step; collective where it logs, and every few steps.

        Args:
            number: Number of the step.
            logs: Whether the Trainer logs it.
        """
        if not self.recorder.is_open:
            return
        self.recorder.end_step()
        self._steps += 1
        self._metrics = {}
        self._take(waits=logs)
        if self.settings.metrics:
            self._hear(waits=False)
            compares = number % EVERY == 0
            if logs or compares:
                self._tell(compares)
                if logs or self._device.type == "cpu":
                    self._hear(waits=True, number=number, logs=logs)
        if self._traces and number == self.settings.trace_steps[-1]:
            self._write_trace()

    def end_epoch(self, number: int) -> None:
        """Log the steps since the last line, where some Trainers log the end of an epoch; collective.

        Args:
            number: Number of the epoch's last step.
        """
        self._metrics = {}
        self._take(waits=True)
        if self.settings.metrics and self._window.steps:
            self._tell(compares=False)
            self._hear(waits=True, number=number, logs=True)

    def logged(self) -> dict[str, float]:
        """The metrics of the step that has just ended, if it is one that is logged."""
        return dict(self._metrics)

    def _take(self, *, waits: bool) -> None:
        """Add up the steps that are over; `waits` for the device where the Trainer reads the loss anyway, so that all are."""
        if waits:
            self.recorder.settle()
        for record in self.recorder.finished():
            self._window.add(record)
            self._recent.append(self._window.computing)
            if self.settings.report and record.number >= self._first_counted:
                self._total.add(record)
            if record.number in self.settings.trace_steps:
                self._traced.append(record)
            self._last = record

    # -- what ranks tell each other --------------------------------------------------------------------------------

    def _stages(self, rank: int) -> tuple[int, ...]:
        return tuple(self.choice.stages_of_ranks[self._mesh.shape.coordinates(rank)[1]])

    def _told(self, sums: Sums, tokens: int, since: Mapping[Any, float]) -> Told:
        steps, sent = max(1, sums.steps), sent_bytes(self.engine)
        if self._flops is None:
            is_first = self._mesh.rank == 0  # whose FLOPs count
            self._flops = flops_of(self.engine, self.config, self._seq_len) if is_first else Flops()
        counts = summed(sums, 0.0).microbatches
        # The lower quartile: other work on a machine makes some steps of a rank slow, a slow rank is slow in all.
        typical = sorted(self._recent)[len(self._recent) // 4] if self._recent else 0.0
        return summed(
            sums,
            typical,
            tokens=tokens / steps,
            **{f"sent_{axis}": max(0.0, sent[axis] - since[axis]) / steps for axis in AXES},
            memory_bytes=self._memory.bytes,
            expected_bytes=expected_bytes(self.engine, self.config, tokens / steps / max(1.0, counts)),
            flops=self._flops.model,
            hardware_flops=self._flops.hardware,
            peak=peak_of(self.engine),
        )

    def _gather(self, told: Told, sums: Sums) -> torch.Tensor:
        """Gather what every rank tells, f[world, numbers]; on a GPU it is still on its way."""
        most = max(map(len, self.choice.stages_of_ranks))
        values = encoded(told, sums, self._stages(self._mesh.rank), most)
        mine = torch.tensor(values, dtype=torch.float64).to(self._device)
        everyone = mine.new_empty(self._mesh.shape.world_size * len(values))
        world = dist.group.WORLD
        if world is None or self._mesh.shape.world_size == 1:
            return mine.view(1, -1)
        with self.engine.attachment.watchdog.waiting("waits for what the other ranks have measured"):
            work = all_gather_flat(everyone, mine, world)
            if work is not None:
                work.wait()
        return everyone.view(-1, len(values))

    def _tell(self, compares: bool) -> None:
        told = self._told(self._window, self._tokens, self._sent)
        everyone = self._gather(told, self._window).to("cpu", non_blocking=True)
        arrived = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        self._underway = everyone, arrived
        self._compares = compares

    def _hear(self, *, waits: bool, number: int = 0, logs: bool = False) -> None:
        """Read what was told, once it has arrived."""
        if self._underway is None:
            return
        everyone, arrived = self._underway
        if arrived is not None:
            if not waits and not arrived.query():
                return
            arrived.synchronize()
        self._underway = None
        job = self._job(everyone)
        if self._compares:
            self._compare(job)
        if logs:
            self._window, self._tokens, self._sent = Sums(), 0, sent_bytes(self.engine)
            self._metrics = metrics_of(job)
            if len(self._history) < MOST_POINTS:
                self._history.append({"step": float(number), **self._metrics})

    def _job(self, everyone: torch.Tensor) -> Job:
        rows = [decoded(row, self._stages(rank)) for rank, row in enumerate(everyone.tolist())]
        told, stages = [one for one, _ in rows], [of_stages for _, of_stages in rows]
        return Job(self._mesh.shape, self.choice, self.engine.expected, told, stages)

    def _compare(self, job: Job) -> None:
        """Name ranks that were slow twice in a row, each once."""
        shape, expected = job.shape, self.engine.expected
        costs = [f + b for f, b in zip(expected.forward, expected.backward, strict=True)]
        shares = [sum(costs[stage] for stage in own) for own in self.choice.stages_of_ranks] if costs else [1.0]
        seconds = [one.typical_s for one in job.told]
        found = slow_ranks(seconds, shares, shape, self.settings.slow_rank_factor)
        for slow in found:
            if slow.rank in self._suspects and slow.rank not in self._named:
                self._named.add(slow.rank)
                if self._mesh.rank == 0:
                    logger.warning("hf_parallel: %s", words(slow, shape, seconds))
        self._suspects = {slow.rank for slow in found}

    # -- trace and report ------------------------------------------------------------------------------------------

    def _gloo(self) -> dist.ProcessGroup:
        """A group of all ranks that takes what is in host memory; made once, collective."""
        world = dist.group.WORLD
        if self._group is None and world is not None:
            takes = backend_for(world, "cpu") == "gloo"
            self._group = world if takes else dist.new_group(backend="gloo")
        if self._group is None:
            raise RuntimeError("no process group")
        return self._group

    def _clocks(self) -> list[Offset]:
        if self._mesh.shape.world_size == 1:
            return [Offset(0.0, 0.0)]
        with self.engine.attachment.watchdog.waiting("waits for the other ranks to compare clocks"):
            return clock_offsets(self._gloo())

    def _collected(self, mine: Any) -> list[Any]:
        """Gather the objects of every rank on rank 0."""
        if self._mesh.shape.world_size == 1:
            return [mine]
        everyone: list[Any] | None = [None] * self._mesh.shape.world_size if self._mesh.rank == 0 else None
        with self.engine.attachment.watchdog.waiting("waits for the records of the other ranks"):
            dist.gather_object(mine, everyone, group=self._gloo(), group_dst=0)
        return everyone or []

    def _write_trace(self) -> None:
        self._take(waits=True)
        everyone, self._traced, self._traces = self._collected(self._traced), [], False
        if self._mesh.rank == 0:
            found = chrome_trace(everyone, self._offsets, self._mesh.shape, self.choice.placement)
            with going_on("monitor.trace_steps"):
                path = write_whole(self.folder / TRACE, json.dumps(found))
                logger.info("hf_parallel: trace of steps %s: %s", list(self.settings.trace_steps), path)

    def end(self) -> None:
        """Write what is still to be written, as training is over; collective."""
        steps = self.settings.trace_steps
        if self._traces:
            self._write_trace()
        elif steps and not self._offsets and self._mesh.rank == 0:
            logger.warning(
                "hf_parallel: monitor.trace_steps=%s: no such step ran, so there is no trace. Name steps of this run.",
                list(steps),
            )
        if self.settings.report and self._steps:
            self._report()

    def _report(self) -> None:
        self._take(waits=True)
        sums, tokens, since = self._total, self._all_tokens, self._first_sent
        everyone = self._gather(self._told(sums, tokens, since), sums)
        offsets, records = self._clocks(), self._collected(self._last)
        if self._mesh.rank == 0:
            job = self._job(everyone.cpu())
            settings = self.config.to_yaml_section()
            logger.info("hf_parallel: measured: %s", beside(job))
            planned = planned_scaling(self.engine, job, self._seq_len)
            with going_on("monitor.report"):
                path = write_report(self.folder, job, records, offsets, self._history, settings, planned)
                logger.info("hf_parallel: report: %s", path)


def beside(job: Job) -> str:
    """Planned and measured in a line."""
    found = metrics_of(job)
    parts = [f"{found['monitor/tokens_per_s']:.4g} tokens/s in steps of {found['monitor/step_s']:.3g} s"]
    if "monitor/bubble_planned" in found:
        parts.append(
            f"idle for {found['monitor/bubble']:.0%} of a schedule, planned {found['monitor/bubble_planned']:.0%}"
        )
    if "monitor/bubble_of_stages" in found:
        parts[-1] += f", {found['monitor/bubble_of_stages']:.0%} at the measured times of stages"
    memory, expected = found["monitor/memory_gb"], found["monitor/memory_expected_gb"]
    return "; ".join([*parts, f"memory {memory:.3g} GB, expected {expected:.3g} GB"])


@contextmanager
def going_on(key: str) -> Iterator[None]:
    """Inside, a file that cannot be written costs a warning, not the weights that were trained.

    Args:
        key: The setting that asks for it.
    """
    try:
        yield
    except OSError as error:
        logger.warning(
            "hf_parallel: %s: nothing was written (%s). Training is not affected. Choose an output_dir that takes files.",
            key,
            error,
        )
