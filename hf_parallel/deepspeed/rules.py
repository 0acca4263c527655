"""Finds problems of DeepSpeed settings: those inside an accelerate file, and those of a DeepSpeed JSON file.

A problem is one line that begins with its key path. Source of the rules: accelerate 1.15 passes on a few keys and
drops the rest; DeepSpeed 0.19.8 was asked what it accepts.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_parallel.deepspeed.keys import REMOVED, TOP, ZeroKeys
from hf_parallel.settings.accelerate_keys import launch_keys
from hf_parallel.settings.values import number


# accelerate launch takes these, and hands the others of the section to its workers.
PARSED_ONLY: Final = ("offload_optimizer_nvme_path", "offload_param_nvme_path")
# With a JSON file accelerate refuses these in its own file.
JSON_OWNS: Final = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "zero3_save_16bit_model",
)
DEVICES: Final = ("none", "cpu", "nvme")
# The Trainer fills in 'auto' here and nowhere else.
FILLED: Final = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        *(f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")),
        *(
            f"scheduler.params.{key}"
            for key in ("warmup_min_lr", "warmup_max_lr", "total_num_steps", "warmup_num_steps")
        ),
        *(f"zero_optimization.{key}" for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size")),
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.nvme_path",
    }
)


def nearest(key: str, known: Collection[str]) -> str:
    """A question for the nearest known key, else what to do without one."""
    found = difflib.get_close_matches(str(key)[:80], sorted(known), n=1, cutoff=0.6)
    return f"Did you mean {found[0]}?" if found else "Remove it."


def section_keys() -> frozenset[str]:
    """Keys of a `deepspeed_config` section that reach the workers."""
    return launch_keys("deepspeed_", "zero", "offload_", "gradient_") - {*PARSED_ONLY}


def inline_problems(block: Mapping[str, Any], mixed_precision: object, keys: ZeroKeys | None) -> Iterator[str]:
    """Problems of the `deepspeed_config` section of an accelerate file."""
    path, passed_on = "deepspeed_config", section_keys()
    for key, value in block.items():
        if key in passed_on:
            continue
        if key in (*TOP, *(keys.zero if keys else ()), *PARSED_ONLY):
            yield (
                f"{path}.{key}={value!r}: accelerate drops it silently. Write it into a DeepSpeed JSON file and name that in "
                f"{path}.deepspeed_config_file."
            )
        else:
            yield f"{path}.{key}: unknown key, which accelerate drops silently. {nearest(str(key), passed_on)}"
    file = block.get("deepspeed_config_file")
    if file is not None:
        both = [key for key in JSON_OWNS if key in block]
        if both:
            yield (
                f"{path}.{both[0]} beside {path}.deepspeed_config_file ({', '.join(both)}): accelerate refuses settings in "
                "both places. Keep those of the JSON file."
            )
        if mixed_precision is not None:
            yield (
                f"mixed_precision={mixed_precision!r} beside {path}.deepspeed_config_file: accelerate refuses it in both "
                'places. Remove it, and write "bf16": {"enabled": "auto"} into the JSON file.'
            )
        return
    stage = number(block.get("zero_stage", 2))  # accelerate's default
    yield from _stage_problems(f"{path}.zero_stage", stage)
    for part in ("optimizer", "param"):
        name = f"{path}.offload_{part}_device"
        device = block.get(f"offload_{part}_device", "none")
        yield from _device_problems(name, part, device, stage, f"{path}.zero_stage")
        if device == "nvme":
            yield (
                f"{name}=nvme: accelerate does not pass a path on, so a folder named none would be used. Write the offload "
                f"into a DeepSpeed JSON file and name that in {path}.deepspeed_config_file."
            )


def inline_warnings(block: Mapping[str, Any]) -> Iterator[str]:
    """Warn of what may fail in the `deepspeed_config` section of an accelerate file."""
    if "deepspeed_config_file" in block:
        return
    for key, argument in (("gradient_accumulation_steps", "the same"), ("gradient_clipping", "max_grad_norm")):
        value = block.get(key, "auto")
        if value != "auto":
            yield (
                f"deepspeed_config.{key}={value!r}: training ends at the start unless TrainingArguments has the same value "
                f"({argument}). Set it to 'auto' and give the value there only."
            )
    stage = number(block.get("zero_stage", 2))
    for key in ("zero3_init_flag", "zero3_save_16bit_model"):
        if str(block.get(key, "false")).lower() == "true" and stage != 3:
            yield f"deepspeed_config.{key}=true with zero_stage={stage} has no effect. Set it to false, or zero_stage to 3."


def _stage_problems(path: str, stage: object) -> Iterator[str]:
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield f"{path}={stage!r}: expected an integer from 0 to 3. Set {path} to 2."


def _device_problems(path: str, part: str, device: object, stage: object, stage_path: str) -> Iterator[str]:
    if device not in DEVICES:
        yield f"{path}={device!r}: expected one of {', '.join(DEVICES)}. Set {path} to cpu or none."
    elif device != "none" and part == "param" and stage in (0, 1, 2):
        yield (
            f"{path}={device} with {stage_path}={stage}: parameters are whole on every GPU below stage 3, so nothing is "
            f"offloaded, silently. Set {stage_path} to 3, or {path} to none."
        )
    elif device != "none" and part == "optimizer" and stage == 0:
        yield (
            f"{path}={device} with {stage_path}=0: nothing is partitioned, so nothing is offloaded, silently. Set "
            f"{stage_path} to 1 or more, or {path} to none."
        )


def json_problems(config: Mapping[str, Any], keys: ZeroKeys | None, world_size: int | None) -> Iterator[str]:
    """Problems of a DeepSpeed JSON file.

    Args:
        config: Its content.
        keys: Keys that `zero_optimization` may hold, None if not known.
        world_size: Processes of the run, None if not known.
    """
    for key in config:
        if key in REMOVED:
            yield f"{key}: DeepSpeed 0.19.8 has removed it and refuses the file. Remove it."
        elif key not in TOP:
            yield f"{key}: unknown key, which DeepSpeed ignores silently. {nearest(str(key), TOP)}"
    for path, value in leaves(config):
        if isinstance(value, str) and isinstance(number(value), int | float):
            yield f"{path}={value!r}: DeepSpeed refuses numbers in quotes. Write {number(value)}."
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        yield 'zero_optimization: accelerate refuses a DeepSpeed file without this section. Add {"stage": 2}.'
    else:
        yield from _zero_problems(zero, keys)
    if _enabled(config, "fp16") and (_enabled(config, "bf16") or _enabled(config, "bfloat16")):
        yield "fp16.enabled=true with bf16.enabled=true: a run has one precision. Set fp16.enabled to false."
    yield from _batch_of(config, world_size)


def _zero_problems(zero: Mapping[str, Any], keys: ZeroKeys | None) -> Iterator[str]:
    path = "zero_optimization"
    if keys is not None:
        yield from _unknown(path, zero, keys.zero, keys.source)
    stage = number(zero.get("stage", 0))
    yield from _stage_problems(f"{path}.stage", stage)
    for part in ("optimizer", "param"):
        name = f"{path}.offload_{part}"
        offload = zero.get(f"offload_{part}")
        if not isinstance(offload, Mapping):
            continue
        if keys is not None:
            yield from _unknown(name, offload, keys.offload[part], keys.source)
        device = offload.get("device", "none")
        yield from _device_problems(f"{name}.device", part, device, stage, f"{path}.stage")
        if device == "nvme":
            yield from folder_problems(f"{name}.nvme_path", offload.get("nvme_path"))
        ratio = offload.get("ratio", 1.0)
        if part == "optimizer" and ratio != 1.0 and stage != 3:
            yield f"{name}.ratio={ratio} with {path}.stage={stage}: parts are offloaded at stage 3 only. Remove it."


def _unknown(path: str, section: Mapping[str, Any], known: Collection[str], source: str) -> Iterator[str]:
    for key in section:
        if key not in known:
            yield f"{path}.{key}: unknown key, which {source} refuses. {nearest(str(key), known)}"


def folder_problems(path: str, folder: object) -> Iterator[str]:
    if not isinstance(folder, str) or not Path(folder).is_absolute():
        yield f"{path}={folder!r}: expected the absolute path of a folder on the NVMe disk. Set {path} to one."
    elif not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        yield f"{path}={folder!r}: this folder does not exist or cannot be written to. Create it, or set another."


def _batch_of(config: Mapping[str, Any], world_size: int | None) -> Iterator[str]:
    sizes = [
        number(config.get(key, "auto"))
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    tensor = config.get("tensor_parallel")
    tp_size = number(tensor.get("autotp_size", 1)) if isinstance(tensor, Mapping) else 1
    if world_size is None or not isinstance(tp_size, int) or tp_size < 1:
        return
    if all(isinstance(size, int) for size in sizes):
        yield from batch_problems(sizes[0], sizes[1], sizes[2], world_size, tp_size, 1)  # type: ignore[arg-type]


def batch_problems(
    train_batch_size: int, rows: int, accumulation: int, num_processes: int, tp_size: int, pp_size: int
) -> Iterator[str]:
    """A global batch that is not the product of its factors; ranks of one model copy read the same rows."""
    copies = num_processes // (tp_size * pp_size)
    product = rows * accumulation * copies
    if product != train_batch_size:
        yield (
            f"train_batch_size={train_batch_size}: {rows} rows * {accumulation} accumulated * {copies} copies of the model "
            f"({num_processes} processes / tp {tp_size} / pp {pp_size}) = {product}. Set it to {product} or 'auto'."
        )


def json_warnings(config: Mapping[str, Any], keys: ZeroKeys | None, gpu_bytes: float | None) -> Iterator[str]:
    """Warn of what may fail or surprise in a DeepSpeed JSON file."""
    for path, value in leaves(config):
        if value == "auto" and path not in FILLED:
            yield f"{path}='auto': the Trainer does not fill this one in. Write a value or remove it."
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return
    if keys is None:
        yield "zero_optimization: its keys are not checked, because DeepSpeed is not installed here. Check on a machine that has it."
    for key in sorted(keys.deprecated & set(zero)) if keys else ():
        yield f"zero_optimization.{key}: deprecated. Use offload_optimizer, offload_param or the 16bit key instead."
    parts = [zero.get(f"offload_{part}") for part in ("optimizer", "param")]
    if "aio" not in config and any(isinstance(part, Mapping) and part.get("device") == "nvme" for part in parts):
        yield "aio: NVMe offload without this section reads and writes slowly. Add it with what ds_report advises."
    for key in ("reduce_bucket_size", "allgather_bucket_size")[: 1 if number(zero.get("stage", 0)) == 3 else 2]:
        size = number(zero.get(key, 5e8))
        if gpu_bytes is not None and gpu_bytes < 30e9 and isinstance(size, int | float) and size >= 5e8:
            yield (
                f"zero_optimization.{key}={size:g}: {2 * size / 1e9:.1f} GB in 16 bit, and as much again with overlap_comm, on "
                f"a GPU of {gpu_bytes / 1e9:.0f} GB. Set it to 50000000."
            )


def _enabled(config: Mapping[str, Any], section: str) -> bool:
    block = config.get(section)
    return isinstance(block, Mapping) and str(block.get("enabled", False)).lower() == "true"


def leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Dotted path and value of everything that is no mapping."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
