"""Translates a recipe's ZeRO and precision settings for use without hf_parallel: by DeepSpeed, by FSDP2, by accelerate.

Values that the Trainer owns are 'auto'. What an engine cannot express is an error that names the key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal

from hf_parallel.deepspeed.emit import deepspeed_settings
from hf_parallel.deepspeed.keys import ZeroKeys
from hf_parallel.deepspeed.rules import inline_problems, json_problems, leaves
from hf_parallel.dry_run.accelerate_file import ENGINE_SECTIONS, file_problems
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import SECTION
from hf_parallel.settings.values import spelled


Target = Literal["deepspeed", "fsdp", "accelerate"]

ZERO: Final = ("zero.stage", "zero.engine", "zero.offload_optimizer", "zero.offload_param")
OFFLOAD: Final = ("zero.nvme_path", "zero.pin_memory")
TRAINERS: Final = ("gradient_accumulation_steps", "activation_checkpointing.every", "activation_checkpointing.mode")
MESSAGES: Final = ("data_parallel.bucket_cap_mb", "data_parallel.overlap")
WAYS: Final[Mapping[str, str]] = {
    "pp_size": "Keep hf_parallel for pipelines, or set pp_size to 1.",
    "tp_size": "Keep hf_parallel for tensor parallelism, or set tp_size to 1.",
    "activation_checkpointing": "Give TrainingArguments(activation_checkpointing=True), and remove it.",
    "gradient_accumulation_steps": "Give it to TrainingArguments, and remove it.",
}
HALF: Final[Mapping[str, str]] = {"bf16": "bfloat16", "fp16": "float16"}


def to_deepspeed(config: HFParallelConfig, keys: ZeroKeys | None) -> dict[str, Any]:
    """A DeepSpeed config, for `TrainingArguments(deepspeed=...)` or `deepspeed_config_file`.

    Args:
        config: The settings.
        keys: Keys that `zero_optimization` takes, if known; the result is checked against them.

    Raises:
        ConfigError: With every setting that DeepSpeed cannot express.
    """
    _refuse(config, (*ZERO, *OFFLOAD, *MESSAGES, *TRAINERS), "DeepSpeed")
    found = deepspeed_settings(config)
    _check(json_problems(found, keys, None))
    return found


def arguments_for(config: HFParallelConfig) -> list[str]:
    """List the TrainingArguments to give with a DeepSpeed config, because DeepSpeed does not do it itself."""
    every, found = config.activation_checkpointing.every, []
    if config.gradient_accumulation_steps != "auto":
        found.append(
            f"give TrainingArguments(gradient_accumulation_steps={config.gradient_accumulation_steps}) as well"
        )
    if every is not None:
        found.append(
            f"activation_checkpointing.every={every} is not in it: give TrainingArguments(activation_checkpointing=True), which "
            "recomputes every block"
        )
    return found


def to_fsdp(config: HFParallelConfig, accelerate: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `torch.distributed.fsdp.fully_shard`, dtypes and policies as names.

    Raises:
        ConfigError: With every setting that FSDP2 cannot express.
    """
    _refuse(config, (*ZERO, "zero.dp_shard_size", "zero.pin_memory"), "FSDP2")
    _check(_not_fsdp(config))
    precision = str(accelerate.get("mixed_precision", "no")).lower()
    half = HALF.get(precision)
    pins = accelerate.get("use_cpu") is not True and config.zero.pin_memory is not False
    return {
        "fully_shard": {
            "reshard_after_forward": config.zero.stage == 3,
            "mp_policy": {"param_dtype": half, "reduce_dtype": half and "float32"},
            "offload_policy": {"pin_memory": pins} if _offloads(config) else None,
        },
        "mesh": _mesh(config, accelerate),
        "apply_to": ["each block", "the model"],
    }


def to_accelerate(config: HFParallelConfig, accelerate: Mapping[str, Any], keys: ZeroKeys | None) -> dict[str, Any]:
    """An accelerate file without our section: plain data parallelism, DeepSpeed (stage 1, 2) or FSDP2 (stage 3).

    Raises:
        ConfigError: With every setting that this file cannot express.
    """
    zero = config.zero
    found = {key: value for key, value in accelerate.items() if key not in (SECTION, *ENGINE_SECTIONS)}
    if zero.stage == 0:
        _refuse(config, ("zero.stage",), "plain data parallelism")
        return found
    if zero.engine == "fsdp2" or (zero.engine == "auto" and zero.stage == 3 and zero.offload_param != "nvme"):
        _refuse(config, (*ZERO, "zero.dp_shard_size", "activation_checkpointing.every"), "accelerate's FSDP section")
        _check(_not_fsdp(config))
        found |= {"distributed_type": "FSDP", "fsdp_config": _fsdp_section(config)}
        sizes = _mesh(config, accelerate)
        if sizes["dp_replicate"] > 1:
            found[SECTION] = {f"{SECTION}_{axis}_size": size for axis, size in sizes.items()}
    else:
        _refuse(
            config,
            (*ZERO, *TRAINERS),
            "accelerate's DeepSpeed section",
            "Use --to deepspeed and name its file in deepspeed_config_file.",
        )
        block = _deepspeed_section(config)
        _check(inline_problems(block, accelerate.get("mixed_precision"), keys))
        found |= {"distributed_type": "DEEPSPEED", "deepspeed_config": block}
    _check(file_problems(found))
    return found


def _deepspeed_section(config: HFParallelConfig) -> dict[str, Any]:
    zero = config.zero
    return {
        "zero_stage": zero.stage,
        "offload_optimizer_device": zero.offload_optimizer,
        "offload_param_device": zero.offload_param,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": "auto",
        "zero3_init_flag": zero.stage == 3,
        "zero3_save_16bit_model": zero.stage == 3,
    }


def _fsdp_section(config: HFParallelConfig) -> dict[str, Any]:
    every = config.activation_checkpointing.every
    if every not in (None, 1):
        raise ConfigError(
            f"activation_checkpointing.every={every}: accelerate's FSDP section recomputes every block by itself. Set it to 1."
        )
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": config.zero.stage == 3,
        "fsdp_offload_params": _offloads(config),
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": every == 1,
    }


def _offloads(config: HFParallelConfig) -> bool:
    return config.zero.offload_param == "cpu"


def _not_fsdp(config: HFParallelConfig) -> list[str]:
    """Settings of ZeRO that FSDP2 has no counterpart of."""
    zero, found = config.zero, []
    if zero.stage < 2:
        found.append(
            f"zero.stage={zero.stage}: FSDP2 shares out parameters and gradients with the optimizer, which is stage 2 or 3. "
            "Set zero.stage to 2 or 3, or keep hf_parallel."
        )
    if "nvme" in (zero.offload_optimizer, zero.offload_param):
        found.append("zero.offload_param=nvme: FSDP2 offloads to host memory only. Use --to deepspeed.")
    elif zero.offload_optimizer != zero.offload_param:
        found.append(
            f"zero.offload_optimizer={zero.offload_optimizer} with zero.offload_param={zero.offload_param}: FSDP2 offloads all "
            "or nothing. Set both to cpu or both to none."
        )
    return found


def _mesh(config: HFParallelConfig, accelerate: Mapping[str, Any]) -> dict[str, int]:
    """Copies and the ranks that share one.

    Raises:
        ConfigError: The number of processes is not known.
    """
    processes, shards = accelerate.get("num_processes"), config.zero.dp_shard_size
    if not isinstance(processes, int) or processes < 1:
        raise ConfigError("num_processes: a mesh has a number of ranks. Set num_processes in the file.")
    config.dp_size(processes)
    size = processes if shards == "auto" else shards
    return {"dp_replicate": processes // size, "dp_shard": size}


def _refuse(config: HFParallelConfig, known: Collection[str], engine: str, way: str = "") -> None:
    """Name every setting that is not its default and not among `known`."""
    _check(
        f"{key}={spelled(value)}: {engine} cannot express it. "
        f"{WAYS.get(key) or WAYS.get(key.split('.')[0]) or way or 'Keep hf_parallel for it, or remove it.'}"
        for key, value in leaves(config.model_dump(mode="json", exclude_defaults=True))
        if key not in known
    )


def _check(problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError("\n".join(found))
