"""Finds problems of an accelerate file around our section: keys, processes, precision, FSDP.

A problem is one line that begins with its key path. Source: accelerate 1.15.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeGuard, get_args

from hf_parallel.deepspeed.rules import nearest
from hf_parallel.settings.accelerate_keys import dynamo_words, file_keys, launch_keys
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.precision import fp16_on_cpu
from hf_parallel.settings.problems import nearest_word
from hf_parallel.settings.recipes import KEY, ONE_PROCESS_TYPES, SECTION
from hf_parallel.settings.sections import Backend
from hf_parallel.settings.values import number, shown, spelled


ENGINE_SECTIONS: Final = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
TYPES: Final = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU"),
    *("MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"),
)
SWITCHES: Final = ("use_cpu", "debug", "same_network", "enable_cpu_affinity")
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
            ours = str(key) in HFParallelConfig.model_fields
            fix = f"Move it to {SECTION}.{KEY}.{key}." if ours else nearest(str(key), file_keys())
            yield f"{key}: unknown key, which accelerate refuses. {fix}"
    if "distributed_type" not in accelerate:
        yield "distributed_type: accelerate refuses a file without it. Set distributed_type to MULTI_GPU, or NO for one process."
    kind = shown(accelerate.get("distributed_type", "NO")).strip("'")
    for section, engine in ENGINE_SECTIONS.items():
        if accelerate.get(section) and kind != engine:
            yield (
                f"{section} with distributed_type={kind!r} has no effect: {engine} reads it. Set distributed_type to {engine}, "
                "or remove the section."
            )
    if kind not in TYPES:
        yield f"distributed_type={kind!r}: expected one of {', '.join(TYPES)}. Set distributed_type to {_nearest_type(kind)}."
    where = accelerate.get("compute_environment", "LOCAL_MACHINE")
    if where != "LOCAL_MACHINE":
        yield (
            f"compute_environment={shown(where)}: this file is launched on machines of your own. Set compute_environment to "
            "LOCAL_MACHINE."
        )
    yield from _switch_problems(accelerate)
    gpus = accelerate.get("gpu_ids")
    if gpus is not None and not isinstance(gpus, str):
        text = ",".join(str(one) for one in gpus) if isinstance(gpus, list) else str(gpus)
        yield f"gpu_ids={shown(gpus)}: expected all, or numbers in one text. Set gpu_ids to '{text[:80]}'."
    yield from _process_problems(accelerate)
    yield from _machine_problems(accelerate)
    yield from _precision_problems(accelerate)
    yield from _dynamo_problems(accelerate)
    yield from _size_problems(accelerate, kind)
    if kind == "FSDP":
        yield from fsdp_problems(accelerate.get("fsdp_config") or {}, on_cpu=accelerate.get("use_cpu") is True)


def _nearest_type(kind: str) -> str:
    plain = {name.replace("_", ""): name for name in TYPES}
    near = difflib.get_close_matches(kind.upper().replace("_", "").replace("-", "")[:80], plain, n=1, cutoff=0.6)
    return plain[near[0]] if near else "MULTI_GPU"


def _switch_problems(accelerate: Mapping[str, Any]) -> Iterator[str]:
    """A word where a YAML boolean is read: accelerate takes every text, "no" too, for true."""
    for key in SWITCHES:
        value = accelerate.get(key)
        if value is not None and not isinstance(value, bool):
            yield f"{key}={shown(value)}: expected true or false, without quotes. Set {key} to {_meant_truth(value)}."


def _meant_truth(value: object) -> str:
    return "false" if str(value).strip().lower() in ("no", "false", "off", "0", "") else "true"


def _machine_problems(accelerate: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the settings by which the machines find each other."""
    machines, rank, port = (accelerate.get(key) for key in ("num_machines", "machine_rank", "main_process_port"))
    if port is not None and not (_is_whole(port) and 0 <= port < 1 << 16):
        yield f"main_process_port={shown(port)}: expected an integer from 0 to 65535. Set main_process_port to 29500."
    yield from _address_problems(accelerate.get("main_process_ip"), machines if _is_whole(machines) else 1)
    if not (_is_whole(machines) and machines > 1):
        if _is_whole(rank) and rank:
            yield _rank_problem(rank, 1)
        return
    if not accelerate.get("main_process_ip"):
        yield (
            f"num_machines={machines} without main_process_ip: each machine would wait for the others at its own address. Set "
            "main_process_ip to the name or address of machine 0."
        )
    if port == 0:
        yield (
            f"main_process_port=0 with num_machines={machines}: each machine would choose a port of its own. Set "
            "main_process_port to 29500, or another that is free on machine 0."
        )
    if rank is not None and not (_is_whole(rank) and 0 <= rank < machines):
        yield _rank_problem(rank, machines)


def _rank_problem(rank: object, machines: int) -> str:
    """The message for a machine_rank outside 0 .. num_machines - 1."""
    meant = number(rank)
    near = min(max(meant, 0), machines - 1) if _is_whole(meant) else 0
    counted = f"machines count from 0 to {machines - 1}" if machines > 1 else "the only machine is 0"
    return (
        f"machine_rank={shown(rank)} with num_machines={machines}: {counted}. Set machine_rank to {near}"
        f"{', without quotes' if isinstance(rank, str) else ''}{'' if machines > 1 else ', or num_machines to their number'}."
    )


def _address_problems(address: object, machines: int) -> Iterator[str]:
    """An address that accelerate would pass on as it is, and nobody finds."""
    if address is None:
        return
    if not isinstance(address, str):
        yield f"main_process_ip={spelled(address)}: expected one name or address, as text. Set main_process_ip to that of machine 0."
    elif "$" in address or "{" in address:
        yield (
            f"main_process_ip={shown(address)}: YAML replaces no variables. Write the name of machine 0, or give it, with "
            "--num_machines, to accelerate launch instead."
        )
    elif "://" in address:
        host = re.sub(r"[:/].*", "", address.partition("://")[2])
        yield (
            f"main_process_ip={shown(address)}: expected a name or address alone. Set main_process_ip to {host[:80] or 'that of machine 0'}."
        )
    elif re.fullmatch(r"[^:]+:\d+", address):
        host, _, port = address.rpartition(":")
        yield (
            f"main_process_ip={shown(address)}: the port stands in a key of its own. Set main_process_ip to {host[:80]}, and "
            f"main_process_port to {port[:5]}."
        )
    elif machines > 1 and (address == "localhost" or address.startswith("127.")):
        yield (
            f"main_process_ip={shown(address)} with num_machines={machines}: each machine would wait for itself. Set main_process_ip "
            "to the address of machine 0 in the network that joins the machines."
        )


def group_problems(accelerate: Mapping[str, Any], tp_size: int) -> Iterator[str]:
    """Groups of ranks that exchange every layer's activations and do not stand on one machine.

    Args:
        accelerate: The whole file.
        tp_size: Ranks that share each layer.
    """
    processes, machines = accelerate.get("num_processes"), accelerate.get("num_machines")
    if not (_is_whole(processes) and _is_whole(machines)) or machines < 2 or processes < 1 or processes % machines:
        return
    local = processes // machines
    if local % tp_size:
        best = max(size for size in range(1, local + 1) if local % size == 0 and size <= tp_size)
        yield (
            f"tp_size={tp_size} with num_processes={processes} on num_machines={machines}: a machine has {local} processes, so a "
            f"layer would be shared over the network, which every layer waits for. Set tp_size to {best}, and pp_size to what "
            "it lacks."
        )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _process_problems(accelerate: Mapping[str, Any]) -> Iterator[str]:
    counts = {}
    for key in ("num_processes", "num_machines"):
        value = accelerate.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{key}={spelled(value)}: expected an integer. {_as_integer(key, value)}"
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


def _as_integer(key: str, value: object) -> str:
    """Word the fix for a number that was written in another form."""
    meant = number(value)
    if isinstance(meant, int | float) and not isinstance(meant, bool) and math.isfinite(meant):
        return f"Set {key} to {max(1, round(meant))}, {'a number without quotes' if isinstance(value, str) else 'a whole number'}."
    return f"Set {key} to a number{' without quotes' if isinstance(value, str) else ''}."


def _precision_problems(accelerate: Mapping[str, Any]) -> Iterator[str]:
    precision = accelerate.get("mixed_precision")
    if precision is False:
        yield "mixed_precision=false: YAML reads the bare word no as false. Write mixed_precision: 'no', in quotes."
    elif precision is not None and str(precision).lower() not in PRECISIONS:
        near = nearest_word(str(precision), PRECISIONS[1:]) or "'no' or bf16"
        yield f"mixed_precision={shown(precision)}: expected one of {', '.join(PRECISIONS)}. Set mixed_precision to {near}."
    elif str(precision).lower() == "fp8" and KEY in (accelerate.get(SECTION) or {}):
        yield f"mixed_precision='fp8' is not available beside {SECTION}.{KEY}. Set mixed_precision to bf16."
    asked = "mixed_precision='fp16' with use_cpu=true"
    yield from fp16_on_cpu(precision, on_cpu=accelerate.get("use_cpu") is True, asked=asked)


def _dynamo_problems(accelerate: Mapping[str, Any]) -> Iterator[str]:
    """Problems of compilation settings: words that no launch takes, and keys that accelerate ignores silently."""
    section = accelerate.get("dynamo_config") or {}
    given = {(f"dynamo_config.{key}", f"dynamo_{str(key).removeprefix('dynamo_')}"): section[key] for key in section}
    if "dynamo_backend" in accelerate:
        given["dynamo_backend", "dynamo_backend"] = accelerate["dynamo_backend"]
    known, beside_ours = launch_keys("dynamo_"), KEY in (accelerate.get(SECTION) or {})
    for (path, key), value in given.items():
        if key not in known:
            yield f"{path}: unknown key, which accelerate drops silently. {nearest(key, known)}"
        elif key in dynamo_words():
            yield from _word_problems(path, key, value, beside_ours)
        elif not isinstance(value, bool):
            yield f"{path}={shown(value)}: expected true or false, without quotes. Set {path} to {_meant_truth(value)}."
        elif value and key in ("dynamo_use_fullgraph", "dynamo_use_dynamic"):
            yield from _not_of_blocks(path, value, beside_ours)


def _word_problems(path: str, key: str, value: object, beside_ours: bool) -> Iterator[str]:
    words = dynamo_words()[key]
    if value is False and "no" in words:
        yield f"{path}=false: YAML reads the bare word no as false. Write {path}: 'no', in quotes."
        return
    if key == "dynamo_backend" and beside_ours:  # what blocks are compiled with
        words = ("no", *(name for name in get_args(Backend) if name != "none"))
    if not isinstance(value, str) or (value.lower() if "no" in words else value) not in words:
        near = nearest_word(str(value), words) or words[1]
        yield f"{path}={shown(value)}: expected one of {', '.join(words)}. Set {path} to {near}."
    elif key == "dynamo_mode" and value != "default":
        yield from _not_of_blocks(path, value, beside_ours)


def _not_of_blocks(path: str, value: object, beside_ours: bool) -> Iterator[str]:
    if beside_ours:
        yield f"{path}={spelled(value)} has no effect on blocks, which are compiled with torch's defaults. Remove {path}."


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
    """Warn of settings at the top level of the file that may fail or surprise."""
    kind = shown(accelerate.get("distributed_type", "NO")).strip("'")
    if kind not in ONE_PROCESS_TYPES and accelerate.get("num_processes", -1) == -1:
        yield "num_processes: without it every launch needs --num_processes. Set num_processes to the number of ranks."
