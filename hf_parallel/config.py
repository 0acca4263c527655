"""The one schema of every setting: the `hf_parallel:` section of a YAML file, the Python API and the command line.

Pure (pydantic only, no torch): a bad config dies in milliseconds, with every problem in one message, before any process
group exists. Settings of features that do not exist yet are part of the schema, so that a file may spell out their
neutral values; any other value is refused by name instead of having no effect.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from hf_parallel.errors import ConfigError


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

Axis = Literal["dp_replicate", "dp_shard", "pp", "tp"]
DEFAULT_RANK_ORDER: tuple[Axis, ...] = get_args(Axis)


def _number(value: object) -> object:
    """YAML 1.1 reads `5e8` as a string; give the field the number that was meant."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        return int(value) if value == int(value) else value
    return value


def _tuple(value: object) -> object:
    return tuple(_number(item) for item in value) if isinstance(value, list) else _number(value)


def _on_off(value: object) -> object:
    """YAML 1.1 reads the words `on` and `off` as booleans; give them back."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _available(*neutral: object, reason: str) -> AfterValidator:
    """Refuse every value that is legal in the schema but whose feature does not exist."""

    def check(value: object) -> object:
        if any(value is legal or (value == legal and type(value) is type(legal)) for legal in neutral):
            return value
        raise PydanticCustomError("not_available", "{reason}", {"reason": reason, "neutral": neutral[0]})

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1), BeforeValidator(_number)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(_number)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=True), BeforeValidator(_number)]
Offload = Annotated[Literal["none", "cpu", "nvme"], _available("none", reason="nothing is offloaded")]

SelfCheck = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(_on_off),
    Field(description="'on', 'off' or 'auto' (on when the model is small enough to compare with one process)"),
]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


ScheduleName = Literal[
    "1f1b", "gpipe", "naive", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev", "csv"
]
# Stages on each rank: the default, and whether that is the only number that the schedule is made for.
STAGES_PER_RANK: Mapping[str, tuple[int, bool]] = {
    "naive": (1, True),
    "gpipe": (1, True),
    "1f1b": (1, True),
    "interleaved_1f1b": (2, False),
    "interleaved_zero_bubble": (2, False),
    "zbv_zero_bubble": (2, True),
    "dualpipev": (2, True),
}


class PipelineConfig(_Section):
    """How the stack of blocks is cut into stages, and in which order the stages work."""

    schedule: Annotated[
        ScheduleName,
        Field(description=f"the order of forward and backward passes, one of {', '.join(get_args(ScheduleName))}"),
    ] = "1f1b"
    schedule_file: Annotated[
        str | None, Field(description="the file of a 'csv' schedule, one line of actions a rank, or null")
    ] = None
    stages_per_rank: Annotated[
        Literal["auto"] | Count,
        BeforeValidator(_number),
        Field(description="virtual stages of each rank, an integer of 1 or more, or 'auto' (what the schedule needs)"),
    ] = "auto"
    num_microbatches: Annotated[
        Literal["auto"] | Count,
        BeforeValidator(_number),
        Field(description="an integer of 1 or more, or 'auto' (2 * pp_size, at most the rows of the batch)"),
    ] = "auto"
    split: Annotated[
        Literal["balanced", "even"] | tuple[NonNegative, ...],
        BeforeValidator(_tuple),
        Field(description="'balanced' (by cost), 'even' (by count), or a list of integers: blocks of each stage"),
    ] = "balanced"
    self_check: SelfCheck = "auto"
    transport: Annotated[
        Literal["auto", "direct", "host"],
        Field(description="'direct' (device to device), 'host' (staged through host memory) or 'auto'"),
    ] = "auto"

    def stages_on_a_rank(self) -> int | None:
        """Stages on each rank; None for a schedule file, which says it itself."""
        if self.schedule == "csv":
            return None
        return STAGES_PER_RANK[self.schedule][0] if self.stages_per_rank == "auto" else self.stages_per_rank


class TensorParallelConfig(_Section):
    """How each layer is sharded over the `tp` axis."""

    plan: Annotated[Literal["auto"], Field(description="'auto' (proposed from the module tree and verified)")] = "auto"
    sequence_parallel: Annotated[
        bool,
        _available(False, reason="activations between the sharded layers are replicated"),
        Field(description="true or false"),
    ] = False
    vocab_parallel_loss: Annotated[
        Literal["auto"] | bool,
        _available("auto", False, reason="the loss is computed on full logits, 'auto' means off"),
        Field(description="'auto', true or false"),
    ] = "auto"
    self_check: SelfCheck = "auto"
    on_fallback: Annotated[
        Literal["warn", "error", "ignore"],
        Field(description="what to do when a layer cannot be sharded: 'warn', 'error' or 'ignore'"),
    ] = "warn"


class ZeroConfig(_Section):
    """Partition of optimizer state, gradients and parameters over the data-parallel ranks."""

    stage: Annotated[
        NonNegative,
        Field(le=3, description="an integer from 0 to 3"),
        _available(0, reason="every data-parallel rank keeps full optimizer state"),
    ] = 0
    engine: Annotated[
        Literal["auto", "native", "fsdp2", "deepspeed"],
        _available("auto", reason="there is no ZeRO engine"),
        Field(description="'auto', 'native', 'fsdp2' or 'deepspeed'"),
    ] = "auto"
    offload_optimizer: Annotated[Offload, Field(description="'none', 'cpu' or 'nvme'")] = "none"
    offload_param: Annotated[Offload, Field(description="'none', 'cpu' or 'nvme'")] = "none"
    nvme_path: Annotated[
        str | None, _available(None, reason="nothing is offloaded"), Field(description="a folder, or null")
    ] = None


class ActivationCheckpointingConfig(_Section):
    """Recomputation of activations in the backward pass."""

    every: Annotated[
        Count | None,
        BeforeValidator(_number),
        _available(None, reason="use TrainingArguments(gradient_checkpointing=True) for every block"),
        Field(description="an integer of 1 or more (blocks per checkpoint), or null"),
    ] = None
    mode: Annotated[
        Literal["block", "alternate"],
        _available("block", reason="use TrainingArguments(gradient_checkpointing=True) for every block"),
        Field(description="'block' or 'alternate'"),
    ] = "block"


class GradientCompressionConfig(_Section):
    """What travels in the data-parallel gradient reduction."""

    method: Annotated[
        Literal["none", "fp16", "bf16", "int8", "int4", "powersgd", "topk", "onebit"],
        _available("none", reason="gradients are reduced uncompressed"),
        Field(description="'none' or a codec: 'fp16', 'bf16', 'int8', 'int4', 'powersgd', 'topk', 'onebit'"),
    ] = "none"


class LocalSgdConfig(_Section):
    """How often the data-parallel replicas are averaged."""

    sync_every: Annotated[
        Count,
        _available(1, reason="replicas synchronise at every optimizer step"),
        Field(description="an integer of 1 or more (optimizer steps between synchronisations)"),
    ] = 1


class CheckpointConfig(_Section):
    """How checkpoints are written; there is nothing to choose yet."""


class MonitorConfig(_Section):
    """Guards that watch a run."""

    hang_timeout_s: Annotated[
        Seconds,
        Field(description="seconds above 0 that a rank may wait for another before the run ends (.inf: never)"),
    ] = 600.0
    batch_check_steps: Annotated[
        NonNegative,
        Field(description="an integer of 0 or more: first steps on which the ranks of a model copy compare batches"),
    ] = 3


def _section(model: type[_Section]) -> Any:
    return Field(description=f"a mapping with the keys {', '.join(model.model_fields) or '(none yet)'}")


class HFParallelConfig(_Section):
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
        BeforeValidator(_tuple),
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
                f"number of blocks of each stage. Give {self.pp_size * per_rank} integers, or change pp_size."
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
            for name in ("schedule", "schedule_file", "stages_per_rank", "num_microbatches", "split", "transport")
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


_SECTIONS: Mapping[str, type[_Section]] = {
    name: type(field.default)
    for name, field in HFParallelConfig.model_fields.items()
    if isinstance(field.default, _Section)
}
