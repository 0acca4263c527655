"""The one schema of every setting: the `hf_parallel:` section of a YAML file, the Python API and the command line.

Pure (pydantic only, no torch): a bad config dies in milliseconds, with every problem in one message, before any process
group exists. The sections are in `sections`; what they mean together is checked here.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from hf_parallel.errors import ConfigError
from hf_parallel.sections import (
    DEFAULT_RANK_ORDER,
    STAGES_PER_RANK,
    ActivationCheckpointingConfig,
    Axis,
    CheckpointConfig,
    Count,
    GradientCompressionConfig,
    LocalSgdConfig,
    MonitorConfig,
    PipelineConfig,
    Section,
    TensorParallelConfig,
    ZeroConfig,
    as_tuple,
)


# Settings that nothing reads without stages.
PIPELINE_ONLY = (
    "schedule",
    "schedule_file",
    "stages_per_rank",
    "num_microbatches",
    "split",
    "costs",
    "compile_blocks",
    "transport",
)


def _section(model: type[Section]) -> Any:
    return Field(description=f"a mapping with the keys {', '.join(model.model_fields) or '(none yet)'}")


class HFParallelConfig(Section):
    """Every setting of hf_parallel.

    Args:
        tp_size: Ranks that share each layer, 1 or more.
        pp_size: Pipeline stages, 1 or more. The rest of the world is data parallel: `dp = world / (tp * pp)`.
        rank_order: Mesh axes, outermost first; a permutation of dp_replicate, dp_shard, pp, tp. None is that order.
        pipeline: Stages, microbatches and schedule.
        tensor_parallel: Sharding of the layers.
        zero: Partition over the data-parallel ranks.
        activation_checkpointing: Recomputation of activations.
        gradient_compression: Wire format of the gradients.
        local_sgd: Synchronisation interval of the replicas.
        checkpoint: Checkpoint options.
        monitor: Hang and batch guards.

    Raises:
        ConfigError: With every problem, one a line: key and value, rule, fix.
    """

    tp_size: Annotated[Count, Field(description="ranks that share each layer, an integer of 1 or more")] = 1
    pp_size: Annotated[Count, Field(description="pipeline stages, an integer of 1 or more")] = 1
    rank_order: Annotated[
        tuple[Axis, ...] | None,
        BeforeValidator(as_tuple),
        Field(description=f"a permutation of {list(DEFAULT_RANK_ORDER)}, outermost first, or null"),
    ] = None
    pipeline: Annotated[PipelineConfig, _section(PipelineConfig)] = PipelineConfig()
    tensor_parallel: Annotated[TensorParallelConfig, _section(TensorParallelConfig)] = TensorParallelConfig()
    zero: Annotated[ZeroConfig, _section(ZeroConfig)] = ZeroConfig()
    activation_checkpointing: Annotated[ActivationCheckpointingConfig, _section(ActivationCheckpointingConfig)] = (
        ActivationCheckpointingConfig()
    )
    gradient_compression: Annotated[GradientCompressionConfig, _section(GradientCompressionConfig)] = (
        GradientCompressionConfig()
    )
    local_sgd: Annotated[LocalSgdConfig, _section(LocalSgdConfig)] = LocalSgdConfig()
    checkpoint: Annotated[CheckpointConfig, _section(CheckpointConfig)] = CheckpointConfig()
    monitor: Annotated[MonitorConfig, _section(MonitorConfig)] = MonitorConfig()

    if not TYPE_CHECKING:  # type checkers keep the generated signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError("\n".join(_problems(error, values))) from None

    @model_validator(mode="before")
    @classmethod
    def _null_section_is_default(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`accelerate config update` turns an empty section into null."""
        return {key: value for key, value in values.items() if value is not None or key not in _SECTIONS}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        problems = [*self._schedule_problems(), *self._split_problems()]
        if self.pipeline.compile_blocks != "none" and self.tp_size > 1:
            problems.append(
                f"pipeline.compile_blocks={self.pipeline.compile_blocks} with tp_size={self.tp_size} is not available "
                "yet: the collectives inside a block are not compiled. Set pipeline.compile_blocks to none."
            )
        if self.tensor_parallel.sequence_parallel and self.tp_size == 1:
            problems.append(
                "tensor_parallel.sequence_parallel=true with tp_size=1 has no effect: one rank has the whole sequence. Set "
                "tp_size to 2 or more, or tensor_parallel.sequence_parallel to false."
            )
        recompute = self.activation_checkpointing
        if recompute.every is None and recompute.mode != "block":
            problems.append(
                f"activation_checkpointing.mode={recompute.mode} without activation_checkpointing.every has no effect. Set "
                "activation_checkpointing.every to 1 or more, or remove the mode."
            )
        if recompute.every is not None and self.pipeline.compile_blocks != "none":
            problems.append(
                f"pipeline.compile_blocks={self.pipeline.compile_blocks} with activation_checkpointing.every="
                f"{recompute.every} is not available yet. Set one of them to its default."
            )
        if self.rank_order is not None and sorted(self.rank_order) != sorted(DEFAULT_RANK_ORDER):
            problems.append(
                f"rank_order={list(self.rank_order)}: expected every axis of {list(DEFAULT_RANK_ORDER)} exactly once. "
                f"Set rank_order to {list(DEFAULT_RANK_ORDER)} or leave it out."
            )
        elif self.rank_order not in (None, DEFAULT_RANK_ORDER):
            problems.append(
                f"rank_order={list(self.rank_order)} is not available yet: ranks are laid out in the order "
                f"{list(DEFAULT_RANK_ORDER)}. Set rank_order to null."
            )
        problems += self._without_stages()
        if problems:
            raise PydanticCustomError("together", "{text}", {"text": "\n".join(problems)})
        return self

    def _schedule_problems(self) -> list[str]:
        """Settings of the schedule that contradict each other."""
        settings = self.pipeline
        name, count, file = settings.schedule, settings.stages_per_rank, settings.schedule_file
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
        needed, only = STAGES_PER_RANK[name]
        if count != "auto" and (count != needed if only else count < needed):
            problems.append(
                f"pipeline.stages_per_rank={count} with pipeline.schedule={name}: the schedule runs "
                f"{'exactly' if only else 'at least'} {needed} stages on a rank. Set pipeline.stages_per_rank to {needed} "
                "or 'auto'."
            )
        return problems

    def _split_problems(self) -> list[str]:
        """A list of block counts that does not fit the number of stages."""
        split, per_rank = self.pipeline.split, self.pipeline.stages_on_a_rank()
        if isinstance(split, str):
            return []
        problems = []
        if 0 in split[:-1]:
            problems.append(
                f"pipeline.split={list(split)}: only the last stage may have no block (the head alone). Give every other "
                "stage at least 1."
            )
        if per_rank is not None and len(split) != self.pp_size * per_rank:
            times = f" * {per_rank} stages per rank = {self.pp_size * per_rank}" if per_rank > 1 else ""
            problems.append(
                f"pipeline.split={list(split)} has {len(split)} entries for pp_size={self.pp_size}{times}: it holds the "
                f"number of blocks of each stage. Give {self.pp_size * per_rank} integers"
                f"{'' if len(split) % per_rank else f', or set pp_size to {len(split) // per_rank}'}."
            )
        return problems

    def _without_stages(self) -> list[str]:
        """Settings of the pipeline that nothing reads because there is one stage."""
        if self.pp_size > 1:
            return []
        defaults = PipelineConfig()
        return [
            f"pipeline.{name}={_yaml(list(value) if isinstance(value, tuple) else value)} with pp_size=1 has no effect: there is one stage. Set pp_size to 2 or "
            f"more, or pipeline.{name} to {_yaml(getattr(defaults, name))}."
            for name in PIPELINE_ONLY
            if (value := getattr(self.pipeline, name)) != getattr(defaults, name)
        ]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | None, source: str = "config") -> Self:
        """Return the config that `values` (the content of the `hf_parallel:` section; null is empty) describes.

        Args:
            values: Keys as in the YAML file.
            source: Where the values come from, named in the error.

        Raises:
            ConfigError: With every problem of the mapping.
        """
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(
                f"{source}: hf_parallel={values!r}: expected a mapping. Write its keys on lines below it."
            )
        unnamed = [key for key in values or {} if not isinstance(key, str)]
        if unnamed:
            raise ConfigError(f"{source}: {unnamed!r}: keys are words. Quote or remove them.")
        try:
            return cls(**(values or {}))
        except ConfigError as error:
            raise ConfigError(f"{source}:\n{error}") from None

    def with_overrides(self, **overrides: Any) -> Self:
        """Return a copy with some settings replaced.

        Args:
            overrides: `pp_size=2`; a setting of a section by its own name (`num_microbatches=8`) or dotted
                (`**{"pipeline.split": "even"}`); or a section as a mapping, which is merged, or as its class.

        Raises:
            ConfigError: For an unknown name, or if the result is not valid.
        """
        values = self.model_dump()
        for key, value in overrides.items():
            section, leaf = _locate(key)
            plain = value.model_dump() if isinstance(value, BaseModel) else value
            if section:
                values[section][leaf] = plain
            elif leaf in values and isinstance(values[leaf], dict) and isinstance(plain, Mapping):
                values[leaf] = {**values[leaf], **plain}
            else:
                values[leaf] = plain
        return type(self).from_mapping(values, source=f"overrides {', '.join(overrides)}" if overrides else "config")

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal for equal configs, on every rank and in every process."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model: tp_size * pp_size."""
        return self.tp_size * self.pp_size

    def dp_size(self, world_size: int) -> int:
        """Return the number of model copies in `world_size` ranks, 1 or more.

        Raises:
            ConfigError: If the world does not divide into whole copies.
        """
        copy = self.model_parallel_size
        if world_size >= copy and world_size % copy == 0:
            return world_size // copy
        below, above = world_size // copy * copy, (world_size // copy + 1) * copy
        valid = f"{below} or {above}" if below else f"{above}"
        relation = "is not a multiple of" if below else "is below"
        raise ConfigError(
            f"num_processes={world_size} {relation} tp_size * pp_size = {self.tp_size} * {self.pp_size} = {copy}: every "
            f"model copy needs {copy} processes. Set num_processes to {valid}, or lower tp_size or pp_size."
        )

    def to_yaml_section(self) -> dict[str, Any]:
        """Return the plain mapping to write under `hf_parallel:`; settings at their defaults are left out."""
        sizes = {"tp_size": self.tp_size, "pp_size": self.pp_size}
        plain: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True)
        return sizes | plain


def _locate(key: str) -> tuple[str, str]:
    """Return (section, leaf) of an override name; the section of a top-level name is ''."""
    fields = HFParallelConfig.model_fields
    section, _, leaf = key.rpartition(".")
    if section in _SECTIONS or (not section and leaf in fields):
        return section, leaf
    homes = [name for name, model in _SECTIONS.items() if leaf in model.model_fields] if not section else []
    if len(homes) == 1:
        return homes[0], leaf
    if homes:
        raise ConfigError(f"{key}: found in {', '.join(homes)}. Write it with its section: {homes[0]}.{key}.")
    raise ConfigError(_unknown_key(key, section=""))


def _unknown_key(key: str, section: str) -> str:
    home = _SECTIONS.get(section)
    path = f"{section}.{key}" if section else key
    if home is CheckpointConfig:
        return f"{path} is not available yet: the checkpoint section has no options. Remove it."
    known = [*(home or HFParallelConfig).model_fields]
    elsewhere = [f"{name}.{key}" for name, model in _SECTIONS.items() if key in model.model_fields]
    if key in HFParallelConfig.model_fields:
        elsewhere.append(f"{key} at the top level")
    if elsewhere:
        return f"{path}: unknown key here. Move it to {' or '.join(elsewhere)}."
    leaves = {leaf: f"{name}.{leaf}" for name, model in _SECTIONS.items() for leaf in model.model_fields}
    nearest = difflib.get_close_matches(key, [*known, *leaves], n=1, cutoff=0.6)
    hint = f"Did you mean {nearest[0] if nearest[0] in known else leaves[nearest[0]]}?" if nearest else "Remove it."
    return f"{path}: unknown key. {hint} Known keys{f' of {section}' if section else ''}: {', '.join(known)}."


def _problems(error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """Rewrite pydantic's errors, one line a setting (a union reports once for each of its members)."""
    lines: dict[str, str] = {}
    for detail in error.errors():
        path = _setting_path(detail["loc"])
        lines.setdefault(path, _problem(path, detail, values))
    return list(lines.values())


def _yaml(value: object) -> str:
    """Return a value as one would type it in the YAML file."""
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def _setting_path(loc: Iterable[int | str]) -> str:
    """Return the part of a pydantic location that names a setting, without union members and list positions."""
    section, *rest = [str(part) for part in loc] or [""]
    return f"{section}.{rest[0]}" if section in _SECTIONS and rest else section


def _problem(path: str, detail: ErrorDetails, values: Mapping[str, Any]) -> str:
    section, _, leaf = path.rpartition(".")
    if detail["type"] == "together":
        return detail["msg"]
    if detail["type"] == "extra_forbidden":
        return _unknown_key(leaf, section)
    inner = values[section] if section else values
    given = inner[leaf] if isinstance(inner, Mapping) else getattr(inner, leaf)
    if detail["type"] == "not_available":
        neutral = detail["ctx"]["neutral"]
        return f"{path}={_yaml(given)} is not available yet: {detail['msg']}. Set {path} to {_yaml(neutral)}."
    field = (_SECTIONS[section] if section else HFParallelConfig).model_fields[leaf]
    if leaf in _SECTIONS and not section:
        return f"{path}={_yaml(given)}: expected {field.description}. Write those keys on lines below it, or leave it out."
    return f"{path}={_yaml(given)}: expected {field.description}. Set {path} to {_yaml(field.default)}."


_SECTIONS: Mapping[str, type[Section]] = {
    name: type(field.default)
    for name, field in HFParallelConfig.model_fields.items()
    if isinstance(field.default, Section)
}
