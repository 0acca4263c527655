"""The keys of a DeepSpeed config: at the top level of 0.19.8, inside `zero_optimization` of the DeepSpeed that is installed.

DeepSpeed refuses unknown keys inside `zero_optimization` but ignores unknown keys at the top level, so a misspelt
`zero_optimisation` is silently stage 0.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


TOP: Final = frozenset(
    [
        "activation_checkpointing",
        "aio",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "checkpoint_writer",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "load_universal_checkpoint",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "scheduler",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    ]
)
REMOVED: Final = frozenset(
    [
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
        "progressive_layer_drop",
        "quantize_training",
        "sparse_attention",
        "sparse_gradients",
    ]
)


@dataclass(frozen=True)
class ZeroKeys:
    """Keys that `zero_optimization` takes, and whose they are.

    Args:
        zero: All keys.
        deprecated: Keys that will go.
        offload: Keys of its sections `offload_optimizer` and `offload_param`, by "optimizer" and "param".
        source: DeepSpeed with its version.
    """

    zero: frozenset[str]
    deprecated: frozenset[str]
    offload: Mapping[str, frozenset[str]]
    source: str


def zero_keys() -> ZeroKeys | None:
    """The keys of the DeepSpeed that is installed; None without one."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    zero: Any = importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    offload: Any = importlib.import_module("deepspeed.runtime.zero.offload_config")
    version = importlib.import_module("deepspeed").__version__
    parts = {
        "optimizer": _names(offload.DeepSpeedZeroOffloadOptimizerConfig),
        "param": _names(offload.DeepSpeedZeroOffloadParamConfig),
    }
    marked = {name for name, field in zero.model_fields.items() if (field.json_schema_extra or {}).get("deprecated")}
    return ZeroKeys(_names(zero), frozenset(marked), parts, f"DeepSpeed {version}")


def _names(model: Any) -> frozenset[str]:
    """Names and aliases of a pydantic model's fields; both are accepted."""
    fields = model.model_fields
    return frozenset(fields) | {field.alias for field in fields.values() if field.alias}
