"""Layouts and settings: what a config means to the planner, and the settings that run a plan."""

from __future__ import annotations

from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.planner.layout import ONLY, LayoutSpec
from hf_parallel.planner.own import recomputed_of
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.values import spelled


REDUCED: Final = {"float32": "fp32", "bfloat16": "bf16"}
PRECISIONS: Final = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}  # mixed_precision of accelerate


def mapping_of(config: HFParallelConfig, num_processes: int, rows: int, dtype: str = "bf16") -> dict[str, Any]:
    """The mapping that a config stands for.

    Args:
        config: The settings.
        num_processes: Processes of the run.
        rows: Rows of a replica's batch, of which a pipeline makes its microbatches.
        dtype: Dtype of the products.

    Raises:
        ConfigError: The processes do not divide into whole model copies, or the schedule comes from a file.
    """
    stages, accumulated = config.pipeline.stages_on_a_rank(), config.gradient_accumulation_steps
    if config.pp_size > 1 and stages is None:
        raise ConfigError("pipeline.schedule=csv: a schedule from a file is not predicted. Choose a named schedule.")
    parts = 1 if config.pp_size == 1 else min(rows, config.pipeline.parts_of_batch(config.pp_size))
    recompute = config.activation_checkpointing
    whole_block = "selective" if recompute.mode == "selective" else "full"
    zero = config.zero
    engine = "native" if zero.engine == "auto" and zero.stage < 3 else zero.engine
    return {
        "tp": config.tp_size,
        "pp": config.pp_size,
        "sp": config.sp_size,
        "ep": config.ep_size,
        "dp": config.dp_size(num_processes),
        "zero": zero.stage,
        "engine": zero.engine,
        "micro_batch": -(-rows // parts),
        "num_microbatches": parts * (1 if accumulated == "auto" else accumulated),
        "schedule": config.pipeline.schedule if config.pp_size > 1 else "1f1b",
        "stages_per_rank": stages if config.pp_size > 1 else 1,
        "split": "auto" if config.pp_size == 1 or config.pipeline.split == "balanced" else config.pipeline.split,
        "recompute": "none" if recompute.every is None else whole_block,
        "recompute_share": 1 / (recompute.every or 1) if recompute.mode == "alternate" else 1.0,
        "sequence_parallel": config.tensor_parallel.sequence_parallel,
        "chunked_loss": config.chunks_loss,
        "dtype": dtype,
        "kernels": "compiled" if config.pipeline.compile_blocks == "inductor" else "eager",
        "reduce_dtype": REDUCED[config.data_parallel.reduce_dtype],
        "overlap_dp": config.data_parallel.overlap,
        "overlap_gather": zero.overlap_gather or not LayoutSpec(zero=zero.stage, engine=engine).gathers_once,
        "offload_param": zero.offload_param,
        "offload_optimizer": zero.offload_optimizer,
        "compression": config.gradient_compression.method,
        "local_steps": config.local_sgd.sync_every,
        "dp_inside": config.topology.dp_inside,
    }


def settings_of(spec: LayoutSpec) -> HFParallelConfig:
    """The settings that run a layout; `rows_of` is what the training arguments need besides.

    Raises:
        ConfigError: This package has no setting for something in the layout; all problems at once.
    """
    problems = [
        f"{key}={spelled(getattr(spec, key))}: this package has no setting for it. Leave {key} out."
        for key, value in ONLY.items()
        if key != "sp" and getattr(spec, key) != value
    ]
    if spec.dtype not in PRECISIONS:
        problems.append(f"dtype={spec.dtype}: this package has no setting for it. Set dtype to bf16.")
    if spec.recompute_every is None:
        problems.append(
            f"recompute_share={spec.recompute_share:g}: this package computes one block in so many again. Set it to 1, 0.5, 0.333 or less."
        )
    if spec.kernels in ("fused", "norms"):
        problems.append(f"kernels={spec.kernels}: this package has no such kernels. Set kernels to compiled or eager.")
    if problems:
        raise ConfigError("\n".join(problems))
    settings: dict[str, Any] = {"tp_size": spec.tp, "pp_size": spec.pp, "zero": _partition(spec)}
    settings |= {f"{axis}_size": size for axis, size in (("sp", spec.sp), ("ep", spec.ep)) if size > 1}
    settings["pipeline"] = {"compile_blocks": "inductor"} if spec.kernels == "compiled" else {}
    if spec.pp > 1:
        settings["pipeline"] |= {"schedule": spec.schedule, "num_microbatches": spec.num_microbatches}
        settings["pipeline"] |= {"stages_per_rank": spec.stages_per_rank} if spec.stages_per_rank > 1 else {}
        settings["pipeline"] |= {"split": spec.split} if spec.split not in ("auto", "balanced") else {}
    settings["gradient_accumulation_steps"] = 1 if spec.pp > 1 else spec.num_microbatches
    if spec.recompute != "none":
        settings["activation_checkpointing"] = recomputed_of(spec).model_dump(exclude_defaults=True)
    settings["tensor_parallel"] = {"sequence_parallel": True} if spec.sequence_parallel else {}
    settings["data_parallel"] = {} if spec.overlap_dp else {"overlap": False}
    settings["data_parallel"] |= {} if spec.reduce_dtype == "fp32" else {"reduce_dtype": "bfloat16"}
    settings["gradient_compression"] = {} if spec.compression == "none" else {"method": spec.compression}
    settings["local_sgd"] = {} if spec.local_steps == 1 else {"sync_every": spec.local_steps}
    settings["topology"] = {"dp_inside": spec.dp_inside} if spec.dp_inside else {}
    if spec.chunked_loss != spec.chunks_by_itself:
        settings["chunked_loss"] = spec.chunked_loss
    return HFParallelConfig.from_mapping(settings, source="plan")


def _partition(spec: LayoutSpec) -> dict[str, Any]:
    usual = "fsdp2" if spec.zero == 3 else "native"
    found: dict[str, Any] = {"stage": spec.zero}
    found |= {} if spec.engine == usual else {"engine": spec.engine}
    if spec.gathers_late and spec.gathers_once:
        found["overlap_gather"] = True
    offloaded = {"offload_param": spec.offload_param, "offload_optimizer": spec.offload_optimizer}
    return found | {key: value for key, value in offloaded.items() if value != "none"}


def rows_of(spec: LayoutSpec) -> int:
    """Rows of a batch of a model copy: `per_device_train_batch_size`."""
    return spec.micro_batch * (spec.num_microbatches if spec.pp > 1 else 1)
