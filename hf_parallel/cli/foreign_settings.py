"""Maps settings of DeepSpeed, FSDP and Megatron-LM to ours; pure. A line tells of each that has no place here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.settings.recipes import KEY, SECTION
from hf_parallel.settings.values import number, spelled


@dataclass
class Taken:
    """Settings that were read.

    Args:
        section: Our section, nested.
        accelerate: Keys of the file around it.
        notes: One line for each setting that has no place in either, with what to do instead.
    """

    section: dict[str, Any] = field(default_factory=dict)
    accelerate: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """Set a key of our section by its dotted path."""
        *sections, leaf = path.split(".")
        home = self.section
        for name in sections:
            home = home.setdefault(name, {})
        home[leaf] = value


TRAINERS: Final[Mapping[str, str]] = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer": "optim and learning_rate",
    "scheduler": "lr_scheduler_type and warmup_steps",
    "steps_per_print": "logging_steps",
    "seed": "seed",
}
# What some keys that have no place here are for, and where it is decided; others tune buffers and messages.
INSTEAD: Final[Mapping[str, str]] = {
    "train_batch_size": "give TrainingArguments(per_device_train_batch_size), or set global_batch_size, which keeps the rows of a step",
    "activation_checkpointing": "functions of DeepSpeed's own, which models of transformers do not call; activation_checkpointing.every "
    "computes blocks again",
    "zero_quantized_gradients": "gradient_compression compresses gradients, of replicas without ZeRO 3",
    "zero_quantized_weights": "there is no such setting here: weights are gathered as they are",
    "zero_hpz_partition_size": "there is no such setting here; zero.dp_shard_size keeps all parts inside a group of ranks",
    "mics_shard_size": "set zero.dp_shard_size",
}
OWN: Final = "chosen by hf_parallel itself"
OFFLOADS: Final = {"offload_optimizer": "zero.offload_optimizer", "offload_param": "zero.offload_param"}
SHARDING: Final[Mapping[str, int]] = {
    **{"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0},
    **{"1": 3, "2": 2, "3": 0, "4": 3, "5": 2},
}
# Keys of FSDP that say how a module is wrapped and saved, which follows from the model here.
FSDP_OWN: Final = ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "state_dict_type", "version")


def from_deepspeed(config: Mapping[str, Any]) -> Taken:
    """Read a DeepSpeed JSON.

    Args:
        config: Its content.
    """
    taken = Taken()
    zero = _mapping(config, "zero_optimization")
    _zero_of_deepspeed(taken, zero)
    for precision in ("bf16", "fp16"):
        enabled = _mapping(config, precision).get("enabled")
        if enabled is True:
            taken.accelerate["mixed_precision"] = precision
    size = _mapping(config, "tensor_parallel").get("autotp_size")
    if size:
        taken.put("tp_size", number(size))
    _accumulation(taken, config)
    known = ("zero_optimization", "bf16", "fp16", "tensor_parallel", "gradient_accumulation_steps")
    for key, value in config.items():
        if key in known or value == "auto":
            continue
        near = get_close_matches(key, known, n=1, cutoff=0.8)
        meant = (
            f"DeepSpeed does not know it either. Did you mean {near[0]}?" if near else "there is no such setting here"
        )
        taken.notes.append(f"{key}={spelled(value)}: {_instead(key, meant)}")
    return taken


def _instead(key: str, otherwise: str) -> str:
    """Name a replacement for a key that has no place in our settings."""
    return INSTEAD.get(key) or (f"give TrainingArguments({TRAINERS[key]})" if key in TRAINERS else otherwise)


def _zero_of_deepspeed(taken: Taken, zero: Mapping[str, Any]) -> None:
    taken.put("zero.stage", number(zero.get("stage", 0)))
    for key, ours in OFFLOADS.items():
        part = _mapping(zero, key)
        device = part.get("device", "none")
        if device != "none":
            taken.put(ours, device)
        if device == "nvme":
            taken.put("zero.nvme_path", part.get("nvme_path"))
    taken.notes += [
        f"zero_optimization.{key}={spelled(value)}: {_instead(key, OWN)}"
        for key, value in zero.items()
        if key not in ("stage", "offload_optimizer", "offload_param") and value != "auto"
    ]


def from_accelerate(file: Mapping[str, Any]) -> Taken:
    """Read an accelerate file whose engine is FSDP, DeepSpeed or Megatron-LM, or none.

    Args:
        file: Its content.

    Raises:
        ConfigError: The engine is another one.
    """
    kind = str(file.get("distributed_type", "NO"))
    readers = {
        "FSDP": ("fsdp_config", _of_fsdp),
        "DEEPSPEED": ("deepspeed_config", _of_deepspeed_section),
        "MEGATRON_LM": ("megatron_lm_config", _of_megatron),
    }
    if KEY in _mapping(file, SECTION):
        raise ConfigError(
            f"{SECTION}.{KEY}: the file has settings of hf_parallel already, so there is nothing to import. Use it as it is."
        )
    taken = Taken()
    if kind in readers:
        name, read = readers[kind]
        read(taken, _mapping(file, name), file)
    elif kind not in ("NO", "MULTI_GPU"):
        raise ConfigError(
            f"distributed_type={kind!r}: FSDP, DEEPSPEED, MEGATRON_LM and MULTI_GPU can be read. Name such a file."
        )
    engines = [name for name, _ in readers.values()]
    kept = {key: value for key, value in file.items() if key not in (*engines, "parallelism_config")}
    taken.accelerate = kept | {"distributed_type": "MULTI_GPU"} | taken.accelerate
    for key, value in _mapping(file, "parallelism_config").items():
        if str(key).endswith("_tp_size") and value not in (None, 1):
            taken.put("tp_size", value)
        elif value not in (None, 1):
            taken.notes.append(f"parallelism_config.{key}={spelled(value)}: the data parallel size is derived here")
    return taken


def _of_deepspeed_section(taken: Taken, block: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    if block.get("deepspeed_config_file"):
        raise ConfigError(
            f"deepspeed_config.deepspeed_config_file={spelled(block['deepspeed_config_file'])}: the settings are in that file. "
            "Import it instead."
        )
    taken.put("zero.stage", number(block.get("zero_stage", 2)))
    for key, ours in OFFLOADS.items():
        device = block.get(f"{key}_device", "none")
        if device not in (None, "none"):
            taken.put(ours, device)
    _accumulation(taken, block)
    known = ("zero_stage", "gradient_accumulation_steps", "offload_optimizer_device", "offload_param_device")
    _note_rest(taken, "deepspeed_config", block, known)


def _of_fsdp(taken: Taken, block: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    given = {str(key).removeprefix("fsdp_"): value for key, value in block.items()}
    if str(given.get("version", 1)) == "2":
        stage = 3 if _true(given.get("reshard_after_forward", True)) else 2
    else:
        strategy = str(given.get("sharding_strategy", "FULL_SHARD"))
        if strategy not in SHARDING:
            raise ConfigError(
                f"fsdp_config.fsdp_sharding_strategy={strategy!r}: expected one of {', '.join(SHARDING)}. Correct the file."
            )
        stage = SHARDING[strategy]
        if "HYBRID" in strategy or strategy in ("4", "5"):
            taken.put("zero.dp_shard_size", file.get("num_processes", 1) // file.get("num_machines", 1))
    taken.put("zero.stage", stage)
    if _true(given.get("offload_params")):
        taken.put("zero.offload_param", "cpu")
        taken.put("zero.offload_optimizer", "cpu")
    if _true(given.get("activation_checkpointing")):
        taken.put("activation_checkpointing.every", 1)
    if _true(given.get("cpu_ram_efficient_loading")):
        taken.notes.append("fsdp_config.fsdp_cpu_ram_efficient_loading=true: load with hf_parallel.from_pretrained")
    known = ("sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing")
    _note_rest(taken, "fsdp_config", given, (*known, *FSDP_OWN, "cpu_ram_efficient_loading"))


def _of_megatron(taken: Taken, block: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    given = {str(key).removeprefix("megatron_lm_"): value for key, value in block.items()}
    taken.put("tp_size", number(given.get("tp_degree", 1)))
    taken.put("pp_size", number(given.get("pp_degree", 1)))
    if taken.section["pp_size"] != 1 and given.get("num_micro_batches"):
        taken.put("pipeline.num_microbatches", number(given["num_micro_batches"]))
    if _true(given.get("sequence_parallelism")) and taken.section["tp_size"] != 1:
        taken.put("tensor_parallel.sequence_parallel", True)
    if _true(given.get("recompute_activations")):
        taken.put("activation_checkpointing", {"every": 1, "mode": "selective"})
    if _true(given.get("use_distributed_optimizer")):
        taken.put("zero.stage", 1)
    known = ("tp_degree", "pp_degree", "num_micro_batches", "sequence_parallelism", "recompute_activations")
    _note_rest(taken, "megatron_lm_config", given, (*known, "use_distributed_optimizer"))


def _accumulation(taken: Taken, block: Mapping[str, Any]) -> None:
    steps = block.get("gradient_accumulation_steps", "auto")
    if steps not in ("auto", 1, None):
        taken.put("gradient_accumulation_steps", number(steps))


def _note_rest(taken: Taken, section: str, block: Mapping[str, Any], known: tuple[str, ...]) -> None:
    taken.notes += [
        f"{section}.{key}={spelled(value)}: {_instead(key, OWN)}" for key, value in block.items() if key not in known
    ]


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key}={spelled(found)}: expected a mapping. Correct the file.")
    return found


def _true(value: object) -> bool:
    return str(value).lower() == "true"
