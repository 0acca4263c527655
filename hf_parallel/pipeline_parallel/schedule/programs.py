"""All programs that one rank of a pipeline may be asked to run, by number of microbatches, each made once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from hf_parallel.errors import ScheduleError
from hf_parallel.pipeline_parallel.schedule.actions import Schedule, placement_of, read_schedule, required_send_window
from hf_parallel.pipeline_parallel.schedule.program import Program, program_of
from hf_parallel.pipeline_parallel.schedule.schedules import (
    SCHEDULES,
    all_backwards,
    all_forwards,
    build_schedule,
    stages_of_ranks,
)
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.settings.sections import PipelineConfig


Kind: TypeAlias = Literal["training", "forwards", "backwards"]


class ScheduleChoice:
    """The schedule that `pipeline.schedule`, `schedule_file` and `stages_per_rank` ask for on `pp_size` ranks.

    Attributes:
        stages_of_ranks: Stages of each rank, ascending.
        order: The schedule whose order ranks follow within a step.

    Raises:
        ScheduleError: The schedule file cannot be read, is no schedule, or is for another number of ranks, or the
            schedule contradicts another setting.
    """

    def __init__(self, settings: PipelineConfig, pp_size: int) -> None:
        self.settings, self.pp_size = settings, pp_size
        # Planned, evaluated and drawn as the schedule whose order its ranks follow.
        self.order = "1f1b" if settings.schedule in ASYNCHRONOUS else settings.schedule
        self._file = _read(settings.schedule_file, pp_size) if settings.schedule == "csv" else None
        self.stages_of_ranks = (
            _stages(self._file)
            if self._file is not None
            else stages_of_ranks(self.order, pp_size, settings.stages_on_a_rank())
        )
        self._check()

    def _check(self) -> None:
        split, count = self.settings.split, len(self.placement)
        if not isinstance(split, str) and len(split) != count:
            raise ScheduleError(
                f"pipeline.split={list(split)} has {len(split)} entries, but pipeline.schedule={self.settings.schedule} "
                f"has {count} stages. Give {count} integers."
            )
        if self.settings.compile_blocks != "none" and self.splits_backward:
            raise ScheduleError(
                f"pipeline.compile_blocks={self.settings.compile_blocks} with pipeline.schedule="
                f"{self.settings.schedule}: a compiled block computes its weight gradients in its backward, so they "
                "cannot be deferred. Set pipeline.compile_blocks to none, or pipeline.schedule to interleaved_1f1b."
            )

    @property
    def splits_backward(self) -> bool:
        """Whether a training step defers weight gradients."""
        if self._file is None:
            return SCHEDULES[self.order].splits_backward
        return any(action.kind == "W" for actions in self._file for action in actions)

    @property
    def num_microbatches(self) -> int:
        """Parts that a batch is cut into, at most its rows; "auto" is twice the ranks."""
        return self.settings.parts_of_batch(self.pp_size)

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of each stage."""
        pairs = sorted((stage, rank) for rank, stages in enumerate(self.stages_of_ranks) for stage in stages)
        return tuple(rank for _, rank in pairs)

    def training(self, num_microbatches: int) -> Schedule:
        """The schedule of a training step.

        Raises:
            ScheduleError: A schedule file is for fewer microbatches.
        """
        if self._file is None:
            return build_schedule(
                self.order,
                self.pp_size,
                num_microbatches,
                stages_per_rank=self.settings.stages_on_a_rank(),
            )
        made_for = self._made_for(num_microbatches)
        if num_microbatches > made_for:
            raise ScheduleError(
                f"pipeline.schedule_file={self.settings.schedule_file!r} is for {made_for} microbatches, but a step has "
                f"{num_microbatches} (num_microbatches times gradient_accumulation_steps). Write the schedule for "
                f"{num_microbatches}, or lower pipeline.num_microbatches."
            )
        return [[a for a in actions if a.microbatch < num_microbatches] for actions in self._file]

    @property
    def drains(self) -> bool:
        """Whether a step ends with an empty pipeline, so that its schedule tells how long ranks are idle."""
        return self.settings.schedule not in ASYNCHRONOUS

    def typical(self) -> Schedule:
        """The schedule of a step whose batch is not known yet, to plan with: for `num_microbatches`.

        A schedule file is never asked for more than it has.
        """
        return self.training(min(self.num_microbatches, self._made_for(self.num_microbatches)))

    def _made_for(self, num_microbatches: int) -> int:
        """Most microbatches of the schedule file; any number without one."""
        if self._file is None:
            return num_microbatches
        return 1 + max(action.microbatch for actions in self._file for action in actions)


class Programs:
    """The programs of one rank.

    Args:
        choice: The schedule.
        rank: Rank in the pipeline.
    """

    def __init__(self, choice: ScheduleChoice, rank: int) -> None:
        self._choice, self._rank = choice, rank
        self._made: dict[tuple[Kind, int], Program] = {}

    def training(self, num_microbatches: int) -> Program:
        """Forwards and backwards of a step."""
        return self._get("training", num_microbatches)

    def forwards(self, num_microbatches: int) -> Program:
        """All forwards: an evaluation, or the first half of a step whose loss the caller computes."""
        return self._get("forwards", num_microbatches)

    def backwards(self, num_microbatches: int) -> Program:
        """All backwards, in an order that fits `forwards`."""
        return self._get("backwards", num_microbatches)

    def _get(self, kind: Kind, num_microbatches: int) -> Program:
        key = (kind, num_microbatches)
        if key not in self._made:
            self._made[key] = self._make(kind, num_microbatches)
        return self._made[key]

    def _make(self, kind: Kind, num_microbatches: int) -> Program:
        stages = self._choice.stages_of_ranks
        if kind == "training":
            schedule = self._choice.training(num_microbatches)
        elif kind == "forwards":
            schedule = all_forwards(stages, num_microbatches)
        else:
            schedule = all_backwards(stages, num_microbatches)
        window = required_send_window(
            schedule,
            len(self._choice.placement),
            num_microbatches,
            forward=kind != "backwards",
            backward=kind != "forwards",
        )
        return program_of(schedule, self._rank, window)


def _read(file: str | None, pp_size: int) -> Schedule:
    schedule = read_schedule(Path(str(file)))
    if len(schedule) != pp_size:
        raise ScheduleError(
            f"pipeline.schedule_file={file!r} has {len(schedule)} lines for pp_size={pp_size}: one line a rank. Set "
            f"pp_size to {len(schedule)}, or write a schedule for {pp_size} ranks."
        )
    return schedule


def _stages(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    placement = placement_of(schedule)
    return tuple(tuple(s for s, rank in enumerate(placement) if rank == r) for r in range(len(schedule)))
