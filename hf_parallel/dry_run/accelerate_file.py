"""What is wrong with an accelerate file around our section: keys, processes, precision, FSDP.

A problem is one line that begins with its key path. Source: accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_parallel.deepspeed.rules import nearest
from hf_parallel.settings.accelerate_keys import file_keys, launch_keys
from hf_parallel.settings.precision import fp16_on_cpu
from hf_parallel.settings.recipes import KEY, ONE_PROCESS_TYPES, SECTION
from hf_parallel.settings.sections import shown


ENGINE_SECTIONS: Final = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
PRECISIONS: Final = ("no", "fp16", "bf16", "fp8")
FSDP1_ONLY: Final = (
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_forward_prefetch",
)


def file_problems(accelerate: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the top level of the file."""
    for key in accelerate:
        if key not in file_keys() and key != KEY:
            yield f"{key}: unknown key, which accelerate refuses. {nearest(str(key), file_keys())}"
    if "distributed_type" not in accelerate:
        yield "distributed_type: accelerate refuses a file without it. Set distributed_type to MULTI_GPU, or NO for one process."
    kind = shown(accelerate.get("distributed_type", "NO")).strip("'")
    for section, engine in ENGINE_SECTIONS.items():
        if accelerate.get(section) and kind != engine:
            yield (
                f"{section} with distributed_type={kind!r} has no effect: {engine} reads it. Set distributed_type to {engine}, "
                "or remove the section."
            )
    yield from _process_problems(accelerate)
    yield from _precision_problems(accelerate)
    yield from _size_problems(accelerate, kind)
    if kind == "FSDP":
        yield from fsdp_problems(accelerate.get("fsdp_config") or {}, on_cpu=accelerate.get("use_cpu") is True)


def _process_problems(accelerate: Mapping[str, Any]) -> Iterator[str]:
    counts = {}
    for key in ("num_processes", "num_machines"):
        value = accelerate.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{key}={shown(value)}: expected an integer. Set {key} to a number without quotes."
        elif value < 1 and not (key == "num_processes" and value == -1):
            yield f"{key}={value}: expected an integer of 1 or more. Set {key} to 1 or more."
        else:
            counts[key] = value
    processes, machines = counts.get("num_processes", -1), counts.get("num_machines", 1)
    if processes > 0 and processes % machines:
        yield (
            f"num_processes={processes} with num_machines={machines}: every machine starts num_processes / num_machines. Set "
            f"num_processes to {processes // machines * machines or machines} or {(processes // machines + 1) * machines}."
        )


def _precision_problems(accelerate: Mapping[str, Any]) -> Iterator[str]:
    precision = accelerate.get("mixed_precision")
    if precision is False:
        yield "mixed_precision=false: YAML reads the bare word no as false. Write mixed_precision: 'no', in quotes."
    elif precision is not None and str(precision).lower() not in PRECISIONS:
        yield f"mixed_precision={shown(precision)}: expected one of {', '.join(PRECISIONS)}. Set mixed_precision to 'no' or bf16."
    asked = "mixed_precision='fp16' with use_cpu=true"
    yield from fp16_on_cpu(precision, on_cpu=accelerate.get("use_cpu") is True, asked=asked)


def _size_problems(accelerate: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Accelerate's own sizes without our section; beside it they are refused elsewhere."""
    section = accelerate.get(SECTION) or {}
    sizes = [key for key, value in section.items() if key != KEY and key.endswith("_size") and value not in (None, 1)]
    version = str((accelerate.get("fsdp_config") or {}).get("fsdp_version", 1))
    if sizes and KEY not in section and not (kind == "FSDP" and version == "2"):
        yield (
            f"{SECTION}.{sizes[0]}={shown(section[sizes[0]])} with distributed_type={kind!r}: accelerate's own sizes need FSDP with "
            f"fsdp_version 2. Remove it, and set the sizes in {SECTION}.{KEY}."
        )


def fsdp_problems(block: Mapping[str, Any], *, on_cpu: bool) -> Iterator[str]:
    """Problems of the `fsdp_config` section."""
    given = {key if str(key).startswith("fsdp") else f"fsdp_{key}": value for key, value in block.items()}
    if on_cpu:
        yield (
            "distributed_type='FSDP' with use_cpu=true: accelerate silently trains with plain DDP. Set distributed_type to "
            "MULTI_GPU and zero.stage in our section, or train on GPUs."
        )
    known = launch_keys("fsdp_") | {"fsdp_ignored_modules"}  # which only a file can hold
    for key in given:
        if key not in known:
            yield f"fsdp_config.{key}: unknown key, which accelerate drops silently. {nearest(key, known)}"
    version = str(given.get("fsdp_version", 1))
    if version not in ("1", "2"):
        yield f"fsdp_config.fsdp_version={version}: expected 1 or 2. Set fsdp_config.fsdp_version to 2."
    if version == "2":
        for key in FSDP1_ONLY:
            if key in given:
                yield f"fsdp_config.{key} with fsdp_version=2 has no effect. Remove it (fsdp_reshard_after_forward says when to gather)."
        if str(given.get("fsdp_reshard_after_forward", "true")).lower() not in ("true", "false"):
            value = given["fsdp_reshard_after_forward"]
            yield f"fsdp_config.fsdp_reshard_after_forward={shown(value)} with fsdp_version=2: expected true or false. Set it to true."
    offload = str(given.get("fsdp_activation_checkpointing_offload", "false")).lower() == "true"
    if offload and (version != "2" or str(given.get("fsdp_activation_checkpointing", "false")).lower() != "true"):
        yield (
            "fsdp_config.fsdp_activation_checkpointing_offload=true needs fsdp_activation_checkpointing=true and fsdp_version=2. "
            "Set them, or remove it."
        )


def file_warnings(accelerate: Mapping[str, Any]) -> Iterator[str]:
    """What may fail or surprise at the top level of the file."""
    kind = shown(accelerate.get("distributed_type", "NO")).strip("'")
    if kind not in ONE_PROCESS_TYPES and accelerate.get("num_processes", -1) == -1:
        yield "num_processes: without it every launch needs --num_processes. Set num_processes to the number of ranks."
