"""The sections of the config that say what data-parallel replicas do with each other.

Pure, as `sections`, and read only through the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hf_parallel.settings.sections import Offload
from hf_parallel.settings.values import Count, NonNegative, Section, as_tuple, number, spelled


class DataParallelConfig(Section):
    """Settings of the messages in which data-parallel replicas average their gradients."""

    bucket_cap_mb: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            allow_inf_nan=False,
            description="MiB of gradients at which a message leaves, a number above 0",
        ),
        BeforeValidator(number),
    ] = 25.0
    overlap: Annotated[bool, Field(description="true or false: messages leave while the backward pass still runs")] = (
        True
    )
    reduce_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Field(
            description="dtype in which gradients travel and are summed: 'float32' or 'bfloat16' (half the bytes, rounded after "
            "every sum); those of fp64 parameters keep theirs"
        ),
    ] = "float32"

    def problems(self, others: Mapping[str, bool]) -> list[str]:
        """Settings beside which one of this section has no effect.

        Args:
            others: Setting with its value, in words -> whether it is set.
        """
        if self.reduce_dtype == "float32":
            return []
        return [
            f"data_parallel.reduce_dtype={self.reduce_dtype} with {other} has no effect: that decides what is sent. Remove "
            "data_parallel.reduce_dtype."
            for other, is_set in others.items()
            if is_set
        ]


class ZeroConfig(Section):
    """Partition of optimizer state, gradients and parameters over the data-parallel ranks."""

    stage: Annotated[
        NonNegative,
        Field(le=3, description="an integer from 0 to 3"),
    ] = 0
    engine: Annotated[
        Literal["auto", "native", "fsdp2", "deepspeed"],
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
    pin_memory: Annotated[
        Literal["auto"] | bool,
        Field(description="true, false or 'auto' (where there is a GPU): pin the host memory of what is offloaded"),
    ] = "auto"
    nvme_path: Annotated[str | None, Field(description="the absolute path of a folder on a fast disk, or null")] = None

    @property
    def offloads(self) -> bool:
        """Whether anything lives in host memory or in files."""
        return self.offload_optimizer != "none" or self.offload_param != "none"

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are shared out too, by `fully_shard`."""
        return self.engine != "deepspeed" and (self.stage == 3 or (self.stage > 0 and self.engine == "fsdp2"))


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
    """Compresses the gradients that data-parallel replicas send each other."""

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
        Field(
            gt=0,
            le=0.25,
            allow_inf_nan=False,
            description="share of the elements that 'topk' sends, above 0 up to 0.25",
        ),
        BeforeValidator(number),
    ] = 0.01
    value_dtype: Annotated[Literal["bf16", "int8"], Field(description="how 'topk' sends values: 'bf16' or 'int8'")] = (
        "bf16"
    )
    matrix_approximation_rank: Annotated[
        Count, Field(description="rank of the matrices of 'powersgd', an integer of 1 or more")
    ] = 4
    warmup_ratio: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)],
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
            description="what is sent uncompressed: a list of '1d' (vectors) and patterns of parameter names, or 'auto' "
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
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None,
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
        """Parameters whose gradients are sent uncompressed. A cast loses the same of a vector as of a matrix; the others share scales in blocks."""
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
    """Lets data-parallel replicas train by themselves for some steps, and averages their weights after them (local SGD)."""

    sync_every: Annotated[
        Count, Field(description="an integer of 1 or more (optimizer steps between synchronisations)")
    ] = 1
    outer_lr: Annotated[
        float,
        BeforeValidator(number),
        Field(gt=0, allow_inf_nan=False, description="learning rate of the outer optimizer, a number above 0"),
    ] = 1.0
    outer_momentum: Annotated[
        float,
        BeforeValidator(number),
        Field(
            ge=0, lt=1, allow_inf_nan=False, description="Nesterov momentum of the outer optimizer, from 0 to below 1"
        ),
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
