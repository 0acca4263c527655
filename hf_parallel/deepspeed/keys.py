"""The keys of a DeepSpeed config: of the DeepSpeed that is installed, else of 0.19.8.

DeepSpeed refuses unknown keys inside `zero_optimization` but ignores unknown keys at the top level, so a misspelt
`zero_optimisation` is silently stage 0.
"""

from __future__ import annotations

import importlib
import importlib.util
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
_STAGE_3: Final = frozenset(
    [
        "allgather_sequential",
        "gather_16bit_weights_on_model_save",
        "max_live_parameters",
        "max_reuse_distance",
        "model_persistence_threshold",
        "module_granularity_threshold",
        "param_persistence_threshold",
        "prefetch_bucket_size",
        "use_all_reduce_for_fetch_params",
    ]
)
DEPRECATED: Final = frozenset(
    [
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "legacy_stage1",
        "stage3_gather_fp16_weights_on_model_save",
    ]
)
_ZERO: Final = frozenset(
    [
        "allgather_bucket_size",
        "allgather_partitions",
        "compute_grad_norm",
        "contiguous_gradients",
        "elastic_checkpoint",
        "enable_sanity_checks",
        "ignore_unused_parameters",
        "leaf_module",
        "load_from_fp32_weights",
        "log_trace_cache_warnings",
        "memory_efficient_linear",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "override_module_apply",
        "parameter_alignment",
        "pipeline_loading_checkpoint",
        "reduce_bucket_size",
        "reduce_scatter",
        "round_robin_gradients",
        "save_muon_momentum_buffer_in_memory",
        "stage",
        "sub_group_size",
        "use_multi_rank_bucket_allreduce",
        "zenflow",
        "zero_hpz_partition_size",
        "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    ]
)
_OFFLOAD: Final = frozenset({"device", "nvme_path", "buffer_count", "pin_memory"})
_OFFLOAD_OPTIMIZER: Final = frozenset(
    {"pipeline_read", "pipeline_write", "fast_init", "ratio", "super_offload", "cpuadam_cores_perc"}
)


@dataclass(frozen=True)
class ZeroKeys:
    """Keys that `zero_optimization` takes, its two offload sections among them, and whose they are."""

    zero: frozenset[str]
    offload_optimizer: frozenset[str]
    offload_param: frozenset[str]
    source: str


def tabled_keys() -> ZeroKeys:
    """The keys of DeepSpeed 0.19.8."""
    return ZeroKeys(
        _ZERO | _STAGE_3 | {f"stage3_{name}" for name in _STAGE_3} | DEPRECATED,
        _OFFLOAD | _OFFLOAD_OPTIMIZER,
        _OFFLOAD | {"buffer_size", "max_in_cpu"},
        "DeepSpeed 0.19.8",
    )


def zero_keys() -> ZeroKeys:
    """The keys of the DeepSpeed that is installed, else of 0.19.8."""
    if importlib.util.find_spec("deepspeed") is None:
        return tabled_keys()
    zero: Any = importlib.import_module("deepspeed.runtime.zero.config")
    offload: Any = importlib.import_module("deepspeed.runtime.zero.offload_config")
    version = importlib.import_module("deepspeed").__version__
    return ZeroKeys(
        _names(zero.DeepSpeedZeroConfig),
        _names(offload.DeepSpeedZeroOffloadOptimizerConfig),
        _names(offload.DeepSpeedZeroOffloadParamConfig),
        f"DeepSpeed {version}",
    )


def _names(model: Any) -> frozenset[str]:
    """Names and aliases of a pydantic model's fields; both are accepted."""
    fields = model.model_fields
    return frozenset(fields) | {field.alias for field in fields.values() if field.alias}
