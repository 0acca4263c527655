"""The effect of each setting where one process trains alone: it shares work with nobody, and yet some settings act on it.

Pure, as `config`. A setting that acts has the engine run in one process too; without one, the Trainer stays stock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.values import Section, spelled


Effect = Literal["acts", "acts if offloaded", "is stock", "none"]

# By setting, or by section where all settings of it do the same, so that a new setting is decided upon. "acts": on the model or the
# run of one rank, by the engine alone. "acts if offloaded": it says how ZeRO offloads; one rank has all parts. "is stock": a stock
# Trainer in one process does it. "none": it is about several ranks, and one rank trains the same without.
IN_ONE_PROCESS: Final[Mapping[str, Effect]] = {
    "tp_size": "none",
    "pp_size": "none",
    "ep_size": "none",
    "sp_size": "none",
    "sp_attention": "none",
    "layout": "none",
    "gradient_accumulation_steps": "is stock",
    "global_batch_size": "is stock",
    "chunked_loss": "is stock",  # false: true is refused without stages and shards
    "pipeline.schedule": "none",
    "pipeline.schedule_file": "none",
    "pipeline.stages_per_rank": "none",
    "pipeline.num_microbatches": "none",
    "pipeline.vertical_sync": "none",
    "pipeline.split": "none",
    "pipeline.compile_blocks": "acts",
    "pipeline.costs": "none",
    "pipeline.rank_speed": "none",
    "pipeline.rank_memory_gb": "none",
    "pipeline.self_check": "none",
    "pipeline.transport": "none",
    "tensor_parallel": "none",
    "data_parallel.bucket_cap_mb": "acts if offloaded",
    "data_parallel.overlap": "acts if offloaded",
    "data_parallel.reduce_dtype": "none",
    "zero.stage": "acts if offloaded",
    "zero.engine": "acts if offloaded",
    "zero.dp_shard_size": "none",
    "zero.overlap_gather": "none",
    "zero.offload_optimizer": "acts",
    "zero.offload_param": "acts",
    "zero.pin_memory": "acts if offloaded",
    "zero.nvme_path": "acts if offloaded",
    "activation_checkpointing": "acts",
    "gradient_compression": "none",
    "local_sgd": "none",
    "topology": "none",
    "checkpoint": "is stock",
    "monitor.hang_timeout_s": "none",
    "monitor.hang_floor_s": "none",
    "monitor.batch_check_steps": "none",
    "monitor.metrics": "is stock",  # true is the default; false measures nothing, as stock
    "monitor.slow_rank_factor": "none",
    "monitor.trace_steps": "acts",
    "monitor.report": "acts",
}


@dataclass(frozen=True)
class Alone:
    """Settings of a process that trains alone.

    Args:
        config: Without what has no effect there.
        acting: Settings, as `key=value`, for which the engine runs.
        idle: Settings, as `key=value`, that have no effect.
    """

    config: HFParallelConfig
    acting: list[str]
    idle: list[str]

    @property
    def words(self) -> str:
        """Both lists for the start-up line; "" if both are empty."""
        found = f"; in effect: {', '.join(self.acting)}" if self.acting else ""
        return found + (f"; without effect in one process: {', '.join(self.idle)}" if self.idle else "")


def in_one_process(config: HFParallelConfig) -> Alone:
    """Sort the settings that are given (that are not the defaults) by what they do in one process.

    Raises:
        ConfigError: DeepSpeed is to offload, which it does in launched processes alone.
    """
    zero = config.zero
    if zero.engine == "deepspeed" and zero.offloads:
        given = {"zero.offload_optimizer": zero.offload_optimizer, "zero.offload_param": zero.offload_param}
        moved = ", ".join(f"{name}={value}" for name, value in given.items() if value != "none")
        raise ConfigError(
            f"{moved} with zero.engine=deepspeed in one process that no launcher started has no effect: DeepSpeed drives launched "
            "processes. Start it with `torchrun --nproc_per_node 1`, or set zero.engine to auto."
        )
    acting, idle, kept = list[str](), list[str](), dict[str, Any]()
    for path, value in _given(config.model_dump(exclude_defaults=True)):
        effect = effect_of(path)
        if effect == "acts if offloaded":
            effect = "acts" if zero.offloads else "none"
        text = f"{path}={value if isinstance(value, str) else spelled(value)}"
        if effect == "none":
            idle.append(text)
            continue
        if effect == "acts":
            acting.append(text)
        home = kept
        *sections, leaf = path.split(".")
        for section in sections:
            home = home.setdefault(section, {})
        home[leaf] = value
    return Alone(HFParallelConfig(**kept), acting, idle)


def effect_of(path: str) -> Effect:
    """Look up the effect of a setting by its dotted name.

    Raises:
        KeyError: The table does not say it.
    """
    names = path.split(".")
    known = (".".join(names[:count]) for count in range(len(names), 0, -1))
    found = next((IN_ONE_PROCESS[name] for name in known if name in IN_ONE_PROCESS), None)
    if found is None:
        raise KeyError(path)
    return found


def _given(
    values: Mapping[str, Any], model: type[Section] = HFParallelConfig, before: str = ""
) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each setting; a mapping that is a value (a plan of layers) is one."""
    for name, value in values.items():
        inner = model.model_fields[name].default
        if isinstance(inner, Section):
            yield from _given(value, type(inner), f"{before}{name}.")
        else:
            yield f"{before}{name}", value
