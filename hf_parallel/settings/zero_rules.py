"""Rules on settings of ZeRO beside the rest of the config; pure.

Each function returns problems, one line each: key and value, rule, fix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_parallel.settings.replica_sections import DataParallelConfig, GradientCompressionConfig, ZeroConfig
from hf_parallel.settings.values import spelled


# What DeepSpeed reads of our settings, and what to do about the rest.
READ_BY_DEEPSPEED: Final = ("zero", "data_parallel", "gradient_accumulation_steps")
INSTEAD: Final[Mapping[str, str]] = {
    "activation_checkpointing": "Remove it, and give TrainingArguments(activation_checkpointing=True)",
    "gradient_compression": "Set gradient_compression.method to none, or zero.engine to auto",
    "local_sgd": "Set local_sgd.sync_every to 1, or zero.stage to 0 without zero.engine",
    "monitor": "Remove it: TrainingArguments(ddp_timeout=...) is how long a rank waits",
    "dp_shard_size": "Set zero.dp_shard_size to auto",
    "overlap_gather": "Set zero.overlap_gather to false, or zero.engine to native",
}


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
            f"{'' if zero.engine == 'auto' else 'zero.engine to auto and '}zero.stage to 1, or pp_size to 1."
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


def deepspeed_problems(zero: ZeroConfig, pp_size: int, tp_size: int, given: Mapping[str, Any]) -> list[str]:
    """Settings beside `zero.engine: deepspeed`, which hands model, optimizer and gradients to DeepSpeed.

    Args:
        zero: The section.
        pp_size: Pipeline stages.
        tp_size: Ranks that share each layer.
        given: All settings that are not their defaults, as nested mappings.
    """
    if zero.stage == 0:
        return _without_partition(zero)
    return [
        *_sizes_beside_deepspeed(pp_size, tp_size),
        *_unread_by_deepspeed(given),
        *_deepspeed_offload(zero),
    ]


def _sizes_beside_deepspeed(pp_size: int, tp_size: int) -> Iterator[str]:
    for name, size in (("pp_size", pp_size), ("tp_size", tp_size)):
        if size > 1:
            yield (
                f"zero.engine=deepspeed with {name}={size}: DeepSpeed wraps whole models, one a process. Set {name} to 1, or "
                "zero.engine to auto."
            )


def _unread_by_deepspeed(given: Mapping[str, Any]) -> Iterator[str]:
    """Settings of others that would have no effect."""
    others = [name for name in given if name not in ("tp_size", "pp_size", *READ_BY_DEEPSPEED)]
    for section in others:
        for key, value in given[section].items() if isinstance(given[section], Mapping) else ():
            yield _unread(f"{section}.{key}", value, INSTEAD.get(section, f"Remove {section}.{key}"))
    if given.get("global_batch_size") is not None:
        yield _unread("global_batch_size", given["global_batch_size"], "Set gradient_accumulation_steps instead")
    for key in ("dp_shard_size", "overlap_gather"):
        if key in given.get("zero", {}):
            yield _unread(f"zero.{key}", given["zero"][key], INSTEAD[key])


def _unread(path: str, value: object, fix: str) -> str:
    shown = value if isinstance(value, str) else spelled(value)
    return f"{path}={shown} with zero.engine=deepspeed has no effect: DeepSpeed does not read it. {fix}."


def _deepspeed_offload(zero: ZeroConfig) -> Iterator[str]:
    devices = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    if zero.offload_param != "none" and zero.stage < 3:
        yield (
            f"zero.offload_param={zero.offload_param} with zero.stage={zero.stage}: parameters are whole on every rank below "
            "stage 3. Set zero.stage to 3, or zero.offload_param to none."
        )
    if zero.offload_optimizer == "nvme" and zero.stage < 3:
        yield (
            f"zero.offload_optimizer=nvme with zero.stage={zero.stage}: DeepSpeed has files at stage 3 only. Set zero.stage to "
            "3, or zero.offload_optimizer to cpu."
        )
    nvme = [f"zero.{name}=nvme" for name, device in devices.items() if device == "nvme"]
    if nvme and (zero.nvme_path is None or not Path(zero.nvme_path).is_absolute()):
        yield (
            f"zero.nvme_path={spelled(zero.nvme_path)} with {' and '.join(nvme)}: expected the absolute path of a folder on the "
            "NVMe disk. Set zero.nvme_path to one."
        )
    if zero.nvme_path is not None and not nvme:
        yield (
            f"zero.nvme_path={spelled(zero.nvme_path)} has no effect: nothing is offloaded to files. Set zero.offload_optimizer "
            "to nvme, or zero.nvme_path to null."
        )
    yield from _nothing_to_pin(zero)


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
    theirs = _only_deepspeed(zero)
    if theirs:
        return theirs
    chosen = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
    moved = [f"zero.{name}={value}" for name, value in chosen.items() if value != "none"]
    unpinned = _nothing_to_pin(zero)
    if unpinned:
        return unpinned
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


def _nothing_to_pin(zero: ZeroConfig) -> list[str]:
    if zero.pin_memory == "auto" or zero.offload_optimizer != "none" or zero.offload_param != "none":
        return []
    return [
        f"zero.pin_memory={spelled(zero.pin_memory)} has no effect: nothing is offloaded. Set zero.offload_optimizer to cpu, "
        "or remove zero.pin_memory."
    ]


def _only_deepspeed(zero: ZeroConfig) -> list[str]:
    """Settings that the other engines do not have."""
    devices = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
    found = [
        f"zero.{name}=nvme with zero.engine={zero.engine}: only DeepSpeed offloads to files. Set zero.engine to deepspeed, or "
        f"zero.{name} to cpu."
        for name, device in devices.items()
        if device == "nvme"
    ]
    if zero.nvme_path is not None and not found:
        found = [
            f"zero.nvme_path={spelled(zero.nvme_path)} with zero.engine={zero.engine} has no effect: only DeepSpeed reads it. "
            "Set zero.nvme_path to null, or zero.engine to deepspeed."
        ]
    return found


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
