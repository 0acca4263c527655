"""The sections of the config: one class each, with the type and the rule of every setting.

Pure (pydantic only, no torch). Settings of features that do not exist yet are part of the schema, so that a file may
spell out their neutral values; any other value is refused by name instead of having no effect.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

Axis = Literal["dp_replicate", "dp_shard", "pp", "tp"]
DEFAULT_RANK_ORDER: tuple[Axis, ...] = get_args(Axis)


def number(value: object) -> object:
    """YAML 1.1 reads `5e8` as a string; give the field the number that was meant."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        return int(value) if value == int(value) else value
    return value


def as_tuple(value: object) -> object:
    return tuple(number(item) for item in value) if isinstance(value, list) else number(value)


def on_off(value: object) -> object:
    """YAML 1.1 reads the words `on` and `off` as booleans; give them back."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def available(*neutral: object, reason: str) -> AfterValidator:
    """Refuse every value that is legal in the schema but whose feature does not exist."""

    def check(value: object) -> object:
        if any(value is legal or (value == legal and type(value) is type(legal)) for legal in neutral):
            return value
        raise PydanticCustomError("not_available", "{reason}", {"reason": reason, "neutral": neutral[0]})

    return AfterValidator(check)


Treatment = Literal["pair", "gather", "replicate"]  # what a user wants of a module in tensor parallelism

ExpertSharing = Literal["split", "whole"]


def known_treatments(value: object) -> object:
    """Refuse a mapping of patterns with a word that means nothing, by that pattern."""
    if not isinstance(value, Mapping):
        return value
    if not value:
        raise PydanticCustomError("told", "={}: an empty mapping has no effect. Write 'auto' or patterns.")
    words = get_args(Treatment)
    for pattern, word in value.items():
        if not isinstance(pattern, str):
            raise PydanticCustomError("told", "{text}", {"text": f"[{pattern!r}]: patterns are words. Quote it."})
        if word not in words:
            near = difflib.get_close_matches(str(word), words, 1, 0.0)[0]
            text = f"[{pattern!r}]={word!r}: expected {', '.join(map(repr, words))}. Did you mean {near!r}?"
            raise PydanticCustomError("told", "{text}", {"text": text})
    return dict(value)


Count = Annotated[int, Field(ge=1), BeforeValidator(number)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(number)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=True), BeforeValidator(number)]
Offload = Annotated[Literal["none", "cpu", "nvme"], available("none", "cpu", reason="nothing is offloaded to files")]

SelfCheck = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(on_off),
    Field(description="'on', 'off' or 'auto' (on when the model is small enough to compare with one process)"),
]


def spelled(value: object) -> str:
    """A value as one would type it in the YAML file."""
    plain = list(value) if isinstance(value, tuple) else value
    return {"None": "null", "True": "true", "False": "false"}.get(repr(plain), repr(plain))


class Section(BaseModel):
    """Settings that belong together: strict types, no unknown keys, no change after validation."""

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


class PipelineConfig(Section):
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
        BeforeValidator(number),
        Field(description="virtual stages of each rank, an integer of 1 or more, or 'auto' (what the schedule needs)"),
    ] = "auto"
    num_microbatches: Annotated[
        Literal["auto"] | Count,
        BeforeValidator(number),
        Field(description="an integer of 1 or more, or 'auto' (2 * pp_size, at most the rows of the batch)"),
    ] = "auto"
    split: Annotated[
        Literal["balanced", "even"] | tuple[NonNegative, ...],
        BeforeValidator(as_tuple),
        Field(description="'balanced' (by cost), 'even' (by count), or a list of integers: blocks of each stage"),
    ] = "balanced"
    compile_blocks: Annotated[
        Literal["none", "inductor", "aot_eager"],
        Field(description="backend of torch.compile for each block: 'none', 'inductor' or 'aot_eager'"),
    ] = "none"
    costs: Annotated[
        Literal["analytic", "measured"],
        Field(description="what 'balanced' weighs blocks by: 'analytic' (counted) or 'measured' (timed at the start)"),
    ] = "analytic"
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


class TensorParallelConfig(Section):
    """How each layer is sharded over the `tp` axis."""

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
    self_check: SelfCheck = "auto"
    on_fallback: Annotated[
        Literal["warn", "error", "ignore"],
        Field(description="what to do when a layer cannot be sharded: 'warn', 'error' or 'ignore'"),
    ] = "warn"


class DataParallelConfig(Section):
    """How gradients travel between the data-parallel replicas."""

    bucket_cap_mb: Annotated[
        float,
        Field(gt=0, description="MiB of gradients in one message, a number above 0"),
        BeforeValidator(number),
    ] = 25.0
    overlap: Annotated[bool, Field(description="true or false: messages leave while the backward pass still runs")] = (
        True
    )


class ZeroConfig(Section):
    """Partition of optimizer state, gradients and parameters over the data-parallel ranks."""

    stage: Annotated[
        NonNegative,
        Field(le=3, description="an integer from 0 to 3"),
    ] = 0
    engine: Annotated[
        Literal["auto", "native", "fsdp2", "deepspeed"],
        available("auto", "native", "fsdp2", reason="the engines are native and fsdp2"),
        Field(description="'auto', 'native', 'fsdp2' or 'deepspeed'"),
    ] = "auto"
    dp_shard_size: Annotated[
        Literal["auto"] | Count,
        BeforeValidator(number),
        Field(description="replicas that share one copy of the optimizer state, a divisor of dp, or 'auto' (all)"),
    ] = "auto"
    overlap_gather: Annotated[
        bool,
        Field(
            description="true or false: updated parameters arrive during the next forward pass; nobody may read them before"
        ),
    ] = False
    offload_optimizer: Annotated[Offload, Field(description="'none', 'cpu' or 'nvme'")] = "none"
    offload_param: Annotated[Offload, Field(description="'none', 'cpu' or 'nvme'")] = "none"
    nvme_path: Annotated[
        str | None, available(None, reason="nothing is offloaded to files"), Field(description="a folder, or null")
    ] = None

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are shared out too, by `fully_shard`."""
        return self.stage == 3 or (self.stage > 0 and self.engine == "fsdp2")


class ActivationCheckpointingConfig(Section):
    """Recomputation of activations in the backward pass."""

    every: Annotated[
        Count | None,
        BeforeValidator(number),
        Field(description="an integer of 1 or more (blocks per checkpoint), or null"),
    ] = None
    mode: Annotated[
        Literal["block", "alternate"],
        Field(description="'block' (one checkpoint per `every` blocks) or 'alternate' (one block in `every`)"),
    ] = "block"


Method = Literal["none", "fp16", "bf16", "int8", "int4", "powersgd", "topk", "onebit"]
# What each method takes beside what all take, and whether its errors are fed back unless the user says otherwise.
METHOD_SETTINGS: Mapping[str, tuple[frozenset[str], bool]] = {
    "fp16": (frozenset(), False),
    "bf16": (frozenset(), False),
    "int8": (frozenset({"block_size", "collective", "topology"}), False),
    "int4": (frozenset({"block_size", "collective", "topology"}), True),
    "topk": (frozenset({"block_size", "density", "value_dtype", "collective", "topology"}), True),
    "onebit": (frozenset({"block_size", "collective", "topology"}), True),
    "powersgd": (frozenset({"matrix_approximation_rank"}), True),
}
BLOCK_SIZES: Mapping[str, int] = {"int8": 256, "int4": 128, "topk": 1024, "onebit": 2048}
BIASED = frozenset({"topk", "onebit"})


class GradientCompressionConfig(Section):
    """What travels in the data-parallel gradient reduction."""

    method: Annotated[
        Method, Field(description="'none' or a codec: 'fp16', 'bf16', 'int8', 'int4', 'powersgd', 'topk', 'onebit'")
    ] = "none"
    error_feedback: Annotated[
        Literal["auto"] | bool,
        Field(
            description="true, false or 'auto': what a message left out is added to the next (on but for fp16, bf16, int8)"
        ),
    ] = "auto"
    allow_biased: Annotated[
        bool, Field(description="true or false: whether 'topk' and 'onebit' may run without error feedback")
    ] = False
    block_size: Annotated[
        Literal["auto"] | Count,
        BeforeValidator(number),
        Field(description="elements that share a scale or a choice, a multiple of 8 up to 65536, or 'auto'"),
    ] = "auto"
    density: Annotated[
        float,
        Field(gt=0, le=0.25, description="share of the elements that 'topk' sends, above 0 up to 0.25"),
        BeforeValidator(number),
    ] = 0.01
    value_dtype: Annotated[Literal["bf16", "int8"], Field(description="how 'topk' sends values: 'bf16' or 'int8'")] = (
        "bf16"
    )
    matrix_approximation_rank: Annotated[
        Count, Field(description="rank of the matrices of 'powersgd', an integer of 1 or more")
    ] = 4
    warmup_ratio: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=0, lt=1)],
        BeforeValidator(number),
        Field(description="share of the steps that come first and are not compressed, from 0 to below 1, or 'auto'"),
    ] = "auto"
    collective: Annotated[
        Literal["auto", "all_gather", "reduce_scatter"],
        Field(description="how codes travel: 'all_gather', 'reduce_scatter' or 'auto' (by the number of replicas)"),
    ] = "auto"
    topology: Annotated[
        Literal["auto", "flat", "hierarchical"],
        Field(description="'flat', 'hierarchical' (exact inside a node) or 'auto' (hierarchical on several nodes)"),
    ] = "auto"
    exclude: Annotated[
        Literal["auto"] | tuple[str, ...],
        BeforeValidator(as_tuple),
        Field(
            description="what is sent as it is: a list of '1d' (vectors) and patterns of parameter names, or 'auto' "
            "(['1d']; nothing with fp16 and bf16)"
        ),
    ] = "auto"
    residual_dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Field(description="dtype of what is fed back: 'fp32', 'bf16' or 'auto' (bf16 above 1e9 elements a rank)"),
    ] = "auto"
    save_residual: Annotated[
        bool, Field(description="true or false: whether checkpoints hold what is to be fed back")
    ] = True
    compile: Annotated[
        bool, Field(description="true or false: compile the codec (minutes at the start, several times faster after)")
    ] = False
    link_gbit_s: Annotated[
        Annotated[float, Field(gt=0)] | None,
        BeforeValidator(number),
        Field(description="Gbit/s that each rank can send to other nodes, a number above 0, or null (not known)"),
    ] = None

    @property
    def feeds_back(self) -> bool:
        """Whether errors are fed back."""
        if self.method == "none":
            return False
        return METHOD_SETTINGS[self.method][1] if self.error_feedback == "auto" else self.error_feedback

    @property
    def excluded(self) -> tuple[str, ...]:
        """What is sent as it is. A cast loses the same of a vector as of a matrix; the others share scales in blocks."""
        if self.exclude != "auto":
            return self.exclude
        return () if self.method in ("fp16", "bf16") else ("1d",)

    @property
    def warmup(self) -> float:
        """Share of the steps that are not compressed."""
        if self.warmup_ratio != "auto":
            return self.warmup_ratio
        return 0.1 if self.method in ("powersgd", "topk", "onebit") else 0.0

    def problems(self, path: str) -> list[str]:
        """Settings that contradict each other or have no effect, one line each; `path` is the section's."""
        if self.method == "none":
            return [
                f"{path}.{name}={spelled(value)} with {path}.method=none has no effect. Set {path}.method to a codec such as "
                f"int8, or remove {path}.{name}."
                for name, value in self.model_dump(exclude_defaults=True).items()
            ]
        found = []
        takes, _ = METHOD_SETTINGS[self.method]
        for name in ("block_size", "density", "value_dtype", "matrix_approximation_rank", "collective", "topology"):
            value = getattr(self, name)
            if name not in takes and value != type(self).model_fields[name].default:
                users = ", ".join(method for method, (names, _) in METHOD_SETTINGS.items() if name in names)
                found.append(
                    f"{path}.{name}={spelled(value)} with {path}.method={self.method} has no effect: {users} use it. Remove it."
                )
        if self.block_size != "auto" and (self.block_size > 65536 or self.block_size % 8):
            nearest = min(65536, max(8, round(self.block_size / 8) * 8))
            found.append(
                f"{path}.block_size={self.block_size}: it is a multiple of 8 up to 65536. Set it to {nearest}."
            )
        if self.method in BIASED and not self.feeds_back and not self.allow_biased:
            found.append(
                f"{path}.error_feedback=false with {path}.method={self.method}: what is left out would be lost for good, "
                f"which biases every step. Set {path}.error_feedback to auto, or {path}.allow_biased to true."
            )
        if self.allow_biased and (self.method not in BIASED or self.feeds_back):
            found.append(f"{path}.allow_biased=true has no effect here. Remove it.")
        if not self.feeds_back and self.residual_dtype != "auto":
            found.append(f"{path}.residual_dtype={self.residual_dtype} has no effect: nothing is fed back. Remove it.")
        return found


class LocalSgdConfig(Section):
    """How often the data-parallel replicas are averaged."""

    sync_every: Annotated[
        Count, Field(description="an integer of 1 or more (optimizer steps between synchronisations)")
    ] = 1
    outer_lr: Annotated[
        float,
        BeforeValidator(number),
        Field(gt=0, description="learning rate of the outer optimizer, a number above 0"),
    ] = 1.0
    outer_momentum: Annotated[
        float,
        BeforeValidator(number),
        Field(ge=0, lt=1, description="Nesterov momentum of the outer optimizer, from 0 to below 1"),
    ] = 0.0
    compression: Annotated[
        GradientCompressionConfig,
        Field(description="a mapping with the keys of gradient_compression: what travels at a synchronisation"),
    ] = GradientCompressionConfig()

    def problems(self) -> list[str]:
        """Settings that contradict each other or have no effect, one line each."""
        if self.sync_every == 1:
            return [
                f"local_sgd.{name}={spelled(value)} with local_sgd.sync_every=1 has no effect: replicas synchronise at every "
                f"step. Set local_sgd.sync_every to 2 or more, or remove local_sgd.{name}."
                for name, value in self.model_dump(exclude_defaults=True).items()
            ]
        found = self.compression.problems("local_sgd.compression")
        if self.compression.warmup_ratio != "auto":
            found.append(
                f"local_sgd.compression.warmup_ratio={self.compression.warmup_ratio} has no effect: pseudo-gradients are "
                "compressed from the start. Remove it."
            )
        return found


class CheckpointConfig(Section):
    """How checkpoints are written; there is nothing to choose yet."""


class MonitorConfig(Section):
    """Guards that watch a run."""

    hang_timeout_s: Annotated[
        Seconds,
        Field(description="seconds above 0 that a rank may wait for another before the run ends (.inf: never)"),
    ] = 600.0
    batch_check_steps: Annotated[
        NonNegative,
        Field(
            description="an integer of 0 or more: first steps on which ranks of a model copy compare batches and random states"
        ),
    ] = 3
