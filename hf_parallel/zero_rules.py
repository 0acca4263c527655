"""What settings of ZeRO mean together with the rest of the config; pure.

Each function returns problems, one line each: key and value, rule, fix.
"""

from __future__ import annotations

from hf_parallel.replica_sections import DataParallelConfig, GradientCompressionConfig, ZeroConfig
from hf_parallel.sections import spelled


def partition_problems(
    zero: ZeroConfig,
    pp_size: int,
    data_parallel: DataParallelConfig,
) -> list[str]:
    """The partition with itself, with stages and messages."""
    if zero.stage == 0:
        return _without_partition(zero)
    problems = [*_engine_problems(zero), *_offload_problems(zero)]
    if not zero.shards_parameters:
        return problems
    name = _name(zero)
    if pp_size > 1:
        problems.append(
            f"{name} with pp_size={pp_size}: parameters in parts would be gathered anew for every microbatch. Set "
            "zero.engine to auto and zero.stage to 1, or pp_size to 1."
        )
    if zero.overlap_gather:
        problems.append(
            f"zero.overlap_gather=true with {name} has no effect: each block is gathered when it runs. Set "
            "zero.overlap_gather to false."
        )
    problems += [
        f"data_parallel.{key}={spelled(value)} with {name} has no effect: a message holds the gradients of a block and "
        f"leaves when its backward pass ends. Remove data_parallel.{key}."
        for key, value in data_parallel.model_dump(exclude_defaults=True).items()
    ]
    return problems


def _name(zero: ZeroConfig) -> str:
    return f"zero.engine={zero.engine}" if zero.engine == "fsdp2" else f"zero.stage={zero.stage}"


def _without_partition(zero: ZeroConfig) -> list[str]:
    """Settings that nothing reads because nothing is partitioned."""
    return [
        f"zero.{name}={spelled(value)} with zero.stage=0 has no effect: nothing is partitioned. Set zero.stage to 1, 2 or 3, "
        f"or zero.{name} to {spelled(type(zero).model_fields[name].default)}."
        for name, value in zero.model_dump(exclude_defaults=True).items()
    ]


def _engine_problems(zero: ZeroConfig) -> list[str]:
    if zero.engine == "native" and zero.stage == 3:
        return [
            "zero.engine=native with zero.stage=3: it partitions optimizer and gradients, not parameters. Set zero.engine to "
            "auto or fsdp2, or zero.stage to 2."
        ]
    if zero.engine == "fsdp2" and zero.stage == 1:
        return [
            "zero.engine=fsdp2 with zero.stage=1: it shares out parameters and gradients too, which is stage 2 or 3. Set "
            "zero.stage to 2 or 3, or zero.engine to auto."
        ]
    return []


def _offload_problems(zero: ZeroConfig) -> list[str]:
    """The native engine moves the optimizer; torch's offload policy moves everything or nothing."""
    chosen = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
    moved = [f"zero.{name}={value}" for name, value in chosen.items() if value != "none"]
    if not moved and zero.pin_memory != "auto":
        return [
            f"zero.pin_memory={spelled(zero.pin_memory)} has no effect: nothing is offloaded. Set zero.offload_optimizer to cpu, "
            "or remove zero.pin_memory."
        ]
    if zero.offload_param != "none" and not zero.shards_parameters:
        return [
            f"zero.offload_param={zero.offload_param} with zero.stage={zero.stage} of the native engine: only parts of "
            "parameters are offloaded. Set zero.stage to 3, or zero.engine to fsdp2, with zero.offload_optimizer: cpu; or "
            "zero.offload_param to none."
        ]
    if len(moved) == 1 and zero.shards_parameters:
        return [
            f"{moved[0]} without the other: fully_shard offloads parameters, gradients and optimizer state together or none "
            "of them. Set zero.offload_param and zero.offload_optimizer both to cpu, or both to none."
        ]
    return []


def compression_problems(zero: ZeroConfig, compression: GradientCompressionConfig) -> list[str]:
    """Compression that would need what ZeRO takes away."""
    found: list[str] = []
    if not zero.stage or compression.method == "none":
        return found
    if zero.dp_shard_size != "auto":
        found.append(
            f"gradient_compression.method={compression.method} with zero.dp_shard_size={zero.dp_shard_size} is not "
            "available yet: only sums over all replicas are compressed. Set zero.dp_shard_size to 'auto'."
        )
    if compression.topology == "hierarchical":
        found.append(
            f"gradient_compression.topology=hierarchical with zero.stage={zero.stage}: each rank needs its part of "
            "the sum only, which is sent in one step. Set gradient_compression.topology to auto."
        )
    if compression.feeds_back:
        return [
            *found,
            f"gradient_compression.method={compression.method} with zero.stage={zero.stage}: error feedback keeps a "
            "residual of every element on every rank, which is more than ZeRO saves. Set gradient_compression.method to "
            "int8, or zero.stage to 0.",
        ]
    return [*found, *(_of_whole_blocks(zero, compression) if zero.shards_parameters else [])]


def _of_whole_blocks(zero: ZeroConfig, compression: GradientCompressionConfig) -> list[str]:
    """Settings that the compressed reduce-scatter of `fully_shard` does not read."""
    if compression.method not in ("fp16", "bf16", "int8"):
        return [
            f"gradient_compression.method={compression.method} with {_name(zero)}: its reduce-scatter carries fp16, bf16 or "
            "int8. Set gradient_compression.method to int8."
        ]
    fields = type(compression).model_fields
    names = ("exclude", "warmup_ratio", "collective", "compile", "link_gbit_s")
    return [
        f"gradient_compression.{name}={spelled(value)} with {_name(zero)} has no effect: gradients of a block are one message, "
        f"a reduce-scatter that is compressed from the first step. Remove gradient_compression.{name}."
        for name in names
        if (value := getattr(compression, name)) != fields[name].default
    ]
