"""The sections of the config: one class each, with the type and the rule of every setting.

Pure (pydantic only, no torch).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from hf_parallel.settings.schedule_names import ASYNCHRONOUS, STAGES_PER_RANK, ScheduleName, full_name
from hf_parallel.settings.values import (
    MAX_SIZE,
    Count,
    Factor,
    NonNegative,
    Positive,
    Seconds,
    Section,
    Size,
    as_tuple,
    number,
    on_off,
    shown,
    spelled,
)


MAX_TRACED = 100  # steps of a trace
Treatment = Literal["pair", "gather", "replicate"]  # what a user wants of a module in tensor parallelism

ExpertSharing = Literal["split", "whole"]


def known_treatments(value: object) -> object:
    """Refuse a mapping of patterns with a word that means nothing, by that pattern."""
    if not isinstance(value, Mapping):
        return value
    if not value:
        raise PydanticCustomError("problem", "={}: an empty mapping has no effect. Write 'auto' or patterns.")
    words = get_args(Treatment)
    for pattern, word in value.items():
        if not isinstance(pattern, str):
            raise PydanticCustomError(
                "problem", "{text}", {"text": f"[{shown(pattern)}]: patterns are strings. Quote it."}
            )
        if not isinstance(word, str) or word not in words:
            near = difflib.get_close_matches(spelled(word), words, 1, 0.0)[0]
            text = f"[{shown(pattern)}]={shown(word)}: expected {', '.join(map(repr, words))}. Did you mean {near!r}?"
            raise PydanticCustomError("problem", "{text}", {"text": text})
    return dict(value)


Offload = Literal["none", "cpu", "nvme"]

SelfCheck = Annotated[
    Literal["auto", "on", "full", "off"],
    BeforeValidator(on_off),
    Field(
        description="'auto' (on where memory suffices), 'on', 'full' (on, with all blocks even where some show what all do) or "
        "'off'"
    ),
]


Backend: TypeAlias = Literal["none", "inductor", "aot_eager"]  # of torch.compile


class PipelineConfig(Section):
    """Cuts the stack of blocks into stages, and orders the work of the stages."""

    schedule: Annotated[
        ScheduleName,
        BeforeValidator(full_name),
        Field(description=f"the order of forward and backward passes, one of {', '.join(get_args(ScheduleName))}"),
    ] = "1f1b"
    schedule_file: Annotated[
        str | None, Field(description="the file of a 'csv' schedule, one line of actions a rank, or null")
    ] = None
    stages_per_rank: Annotated[
        Literal["auto"] | Size,
        BeforeValidator(number),
        Field(description="virtual stages of each rank, an integer of 1 or more, or 'auto' (what the schedule needs)"),
    ] = "auto"
    num_microbatches: Annotated[
        Literal["auto"] | Size,
        BeforeValidator(number),
        Field(
            description="an integer of 1 or more, or 'auto' (2 * pp_size, at most the rows of the batch; 1 with 'pipedream')"
        ),
    ] = "auto"
    vertical_sync: Annotated[
        bool,
        Field(
            description="of 'pipedream': true, a microbatch meets the weights of one update in all stages; false, each stage uses the "
            "newest weights that it has"
        ),
    ] = True
    split: Annotated[
        Literal["balanced", "even"] | tuple[NonNegative, ...],
        BeforeValidator(as_tuple),
        Field(description="'balanced' (by cost), 'even' (by count), or a list of integers: blocks of each stage"),
    ] = "balanced"
    compile_blocks: Annotated[
        Backend,
        Field(description="backend of torch.compile for each block: 'none', 'inductor' or 'aot_eager'"),
    ] = "none"
    costs: Annotated[
        Literal["analytic", "measured"],
        Field(description="what 'balanced' weighs blocks by: 'analytic' (counted) or 'measured' (timed at the start)"),
    ] = "analytic"
    rank_speed: Annotated[
        Literal["auto"] | tuple[Positive, ...] | None,
        BeforeValidator(as_tuple),
        Field(
            description="speed of each pipeline rank in any unit, a list of numbers above 0, 'auto' (measured at the start), or "
            "null (all alike)"
        ),
    ] = None
    rank_memory_gb: Annotated[
        Literal["auto"] | tuple[Positive, ...] | None,
        BeforeValidator(as_tuple),
        Field(
            description="GB that each pipeline rank may hold, a list of numbers above 0, 'auto' (what its device has), or null "
            "(no limit)"
        ),
    ] = None
    self_check: SelfCheck = "auto"
    transport: Annotated[
        Literal["auto", "direct", "host"],
        Field(description="'direct' (device to device), 'host' (staged through host memory) or 'auto'"),
    ] = "auto"

    @property
    def tries_fewer(self) -> bool:
        """Whether few blocks may be tried in place of all of which it is known that they run alike."""
        return self.self_check != "full"

    def parts_of_batch(self, pp_size: int) -> int:
        """Microbatches that a batch is cut into, at most its rows; "auto" is twice the ranks."""
        if self.num_microbatches != "auto":
            return self.num_microbatches
        return 1 if self.schedule == "pipedream" else 2 * pp_size

    def stages_on_a_rank(self) -> int | None:
        """Stages on each rank; None for a schedule file, which says it itself."""
        if self.schedule == "csv":
            return None
        if self.stages_per_rank != "auto":
            return self.stages_per_rank
        return 1 if self.schedule in ASYNCHRONOUS else STAGES_PER_RANK[self.schedule][0]

    def problems(self, pp_size: int) -> list[str]:
        """Settings that contradict each other or do not fit `pp_size` pipeline ranks, one line each."""
        return [*self._schedule_problems(pp_size), *self._split_problems(pp_size), *self._rank_problems(pp_size)]

    def _schedule_problems(self, pp_size: int) -> list[str]:
        """Settings of the schedule that contradict each other."""
        name, count, file = self.schedule, self.stages_per_rank, self.schedule_file
        if name == "csv":
            problems = (
                [] if file else ["pipeline.schedule=csv needs pipeline.schedule_file. Set it to the file's path."]
            )
            if count != "auto":
                problems.append(
                    f"pipeline.stages_per_rank={count} with pipeline.schedule=csv has no effect: the file says where "
                    "each stage runs. Set pipeline.stages_per_rank to 'auto'."
                )
            return problems
        problems = []
        if file is not None:
            problems.append(
                f"pipeline.schedule_file={file!r} with pipeline.schedule={name} has no effect. Set pipeline.schedule to "
                "csv, or pipeline.schedule_file to null."
            )
        stages = pp_size * (self.stages_on_a_rank() or 1)
        if stages > MAX_SIZE:
            problems.append(
                f"pipeline.stages_per_rank={spelled(count)} with pp_size={pp_size}: that makes {stages} stages, and "
                f"at most {MAX_SIZE} can be planned. Lower pp_size or pipeline.stages_per_rank."
            )
        needed, only = (1, True) if name in ASYNCHRONOUS else STAGES_PER_RANK[name]
        if count != "auto" and (count != needed if only else count < needed):
            problems.append(
                f"pipeline.stages_per_rank={count} with pipeline.schedule={name}: the schedule runs "
                f"{'exactly' if only else 'at least'} {needed} stages on a rank. Set pipeline.stages_per_rank to {needed} "
                "or 'auto'."
            )
        return problems

    def _split_problems(self, pp_size: int) -> list[str]:
        """A list of block counts that does not fit the number of stages."""
        split, per_rank = self.split, self.stages_on_a_rank()
        if isinstance(split, str):
            return []
        problems = []
        if 0 in split[:-1]:
            problems.append(
                f"pipeline.split={list(split)}: only the last stage may have no block (the head alone). Give every other "
                "stage at least 1."
            )
        if per_rank is not None and len(split) != pp_size * per_rank:
            times = f" * {per_rank} stages per rank = {pp_size * per_rank}" if per_rank > 1 else ""
            problems.append(
                f"pipeline.split={list(split)} has {len(split)} entries for pp_size={pp_size}{times}: it holds the "
                f"number of blocks of each stage. Give {pp_size * per_rank} integers"
                f"{'' if len(split) % per_rank else f', or set pp_size to {len(split) // per_rank}'}."
            )
        return problems

    def _rank_problems(self, pp_size: int) -> list[str]:
        """Problems of settings that list the pipeline ranks: another number of ranks, or a cut that does not use them."""
        problems = []
        for name, value in (("rank_speed", self.rank_speed), ("rank_memory_gb", self.rank_memory_gb)):
            if value is None or pp_size == 1:  # without stages it has no effect, which is said elsewhere
                continue
            if self.split != "balanced":
                problems.append(
                    f"pipeline.{name}={spelled(value)} with pipeline.split={spelled(self.split)} has no effect: only the "
                    f"balanced cut weighs its stages. Set pipeline.split to balanced, or pipeline.{name} to null."
                )
            if value != "auto" and len(value) != pp_size:
                problems.append(
                    f"pipeline.{name}={spelled(value)} has {len(value)} entries for pp_size={pp_size}: it holds one number for "
                    f"each rank of a pipeline, that of the slowest or smallest of its replicas. Give {pp_size} numbers."
                )
        return problems


class TensorParallelConfig(Section):
    """Sharding of each layer over the `tp` axis."""

    plan: Annotated[
        Literal["auto"] | dict[str, Treatment],
        BeforeValidator(known_treatments),
        Field(
            description="'auto' (proposed from the module tree and verified), or a mapping: pattern of module names -> "
            "'pair' (or refuse), 'gather' or 'replicate'; the last pattern that matches counts, the rest is 'auto'"
        ),
    ] = "auto"
    experts: Annotated[
        ExpertSharing,
        Field(
            description="'split' (each rank has a part of every expert) or 'whole' (each rank has some whole experts)"
        ),
    ] = "split"
    sequence_parallel: Annotated[
        bool,
        Field(description="true or false: share the sequence between the sharded layers over the tp ranks"),
    ] = False
    vocab_parallel_loss: Annotated[
        Literal["auto"] | bool,
        Field(description="'auto' (where it verifies), true or false: loss on logits sharded over the vocabulary"),
    ] = "auto"
    reduce_dtype: Annotated[
        Literal["compute", "float32"],
        Field(
            description="dtype of partial sums over the tp ranks: 'compute' (that of the products) or 'float32' (not rounded "
            "before the sum; twice the bytes in half precision)"
        ),
    ] = "compute"
    self_check: SelfCheck = "auto"
    on_fallback: Annotated[
        Literal["warn", "error", "ignore"],
        Field(description="what to do when a layer cannot be sharded: 'warn', 'error' or 'ignore'"),
    ] = "warn"

    @property
    def tries_fewer(self) -> bool:
        """Whether few blocks may be tried in place of all of which it is known that they run alike."""
        return self.self_check != "full"

    @property
    def reduces_in_fp32(self) -> bool:
        """Whether half-precision partial sums are made and summed over the ranks in fp32."""
        return self.reduce_dtype == "float32"


class ActivationCheckpointingConfig(Section):
    """Recomputation of activations in the backward pass."""

    every: Annotated[
        Count | None,
        BeforeValidator(number),
        Field(description="an integer of 1 or more (see mode), or null"),
    ] = None
    mode: Annotated[
        Literal["block", "alternate", "selective"],
        Field(
            description="'block' (one checkpoint per `every` blocks), 'alternate' (one block in `every`) or 'selective' (every "
            "block, but for attention and one matrix product in `every`)"
        ),
    ] = "block"
    offload: Annotated[
        bool,
        Field(description="true or false: the inputs of checkpointed blocks wait in host memory for the backward"),
    ] = False

    @property
    def products(self) -> int | None:
        """Number of matrix products of which one is kept; None if all are computed again."""
        return self.every if self.mode == "selective" else None


class CheckpointConfig(Section):
    """Time, place and form of checkpoints."""

    async_save: Annotated[
        bool,
        Field(
            description="true or false: whether the training state is written while training goes on, from a copy in RAM"
        ),
    ] = False
    auto_resume: Annotated[
        bool,
        Field(
            description="true or false: whether a run that its launcher starts again (--max_restarts) goes on from its newest complete "
            "checkpoint"
        ),
    ] = True
    memory_steps: Annotated[
        NonNegative,
        Field(
            description="an integer of 0 or more: every so many steps a checkpoint in the memory of the machine, from which a restart "
            "goes on (0: none)"
        ),
    ] = 0


class MonitorConfig(Section):
    """Guards that watch a run, and what is measured of it."""

    hang_timeout_s: Annotated[
        Seconds,
        Field(description="seconds above 0 that a rank may wait for another before the run ends (.inf: never)"),
    ] = 600.0
    hang_floor_s: Annotated[
        Seconds,
        Field(
            description="least limit, in seconds above 0, of a wait for a rank that is in the middle of a step; the limit is ten times "
            "the longest of the last steps where that is more, and at most hang_timeout_s (.inf: hang_timeout_s alone)"
        ),
    ] = 15.0
    batch_check_steps: Annotated[
        NonNegative,
        Field(
            description="an integer of 0 or more: first steps on which ranks of a model copy compare batches and random states"
        ),
    ] = 3
    metrics: Annotated[
        bool,
        Field(description="true or false: what the run reaches and where its time goes, in the Trainer's logs"),
    ] = True
    slow_rank_factor: Annotated[
        Factor,
        Field(
            description="a number above 1: a rank that computes so many times as long as its peers is named (.inf: never)"
        ),
    ] = 1.2
    trace_steps: Annotated[
        tuple[Count, ...],
        BeforeValidator(as_tuple),
        Field(description="a list of optimizer steps, from 1 on, that are written as one trace of all ranks"),
    ] = ()
    report: Annotated[
        bool,
        Field(description="true or false: a page and a JSON file in output_dir when training ends"),
    ] = False

    @property
    def records(self) -> bool:
        """Whether anything is measured."""
        return self.metrics or self.report or len(self.trace_steps) > 0

    @property
    def asked(self) -> list[str]:
        """Settings that only the monitor of a Trainer reads and that are set, as `key=value`."""
        default = type(self).model_fields["slow_rank_factor"].default
        given = {
            f"monitor.trace_steps={list(self.trace_steps)}": len(self.trace_steps) > 0,
            f"monitor.report={spelled(self.report)}": self.report,
            f"monitor.slow_rank_factor={spelled(self.slow_rank_factor)}": self.slow_rank_factor != default,
        }
        return [text for text, chosen in given.items() if chosen]

    def problems(self) -> list[str]:
        """Settings that contradict each other, one line each."""
        steps, found = self.trace_steps, []
        if any(after <= before for before, after in pairwise(steps)):
            found.append(
                f"monitor.trace_steps={list(steps)}: steps are traced in their order, each once. Write them in ascending order."
            )
        if len(steps) > MAX_TRACED:
            found.append(
                f"monitor.trace_steps has {len(steps)} entries: a trace is kept in memory until its last step, {MAX_TRACED} steps at "
                "most. Name fewer steps."
            )
        factor, default = self.slow_rank_factor, type(self).model_fields["slow_rank_factor"].default
        if factor != default and not self.metrics:
            found.append(
                f"monitor.slow_rank_factor={spelled(factor)} with monitor.metrics=false has no effect: ranks are compared by what "
                f"is measured for the logs. Set monitor.metrics to true, or monitor.slow_rank_factor to {default}."
            )
        return found
