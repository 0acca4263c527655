"""Rules on settings beside `ep_size`; pure. Problems are one line each: key and value, rule, fix."""

from __future__ import annotations

from collections.abc import Iterator

from hf_parallel.settings.replica_sections import GradientCompressionConfig, LocalSgdConfig, ZeroConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.settings.sections import PipelineConfig


def expert_problems(
    ep_size: int,
    tp_size: int,
    pipeline: PipelineConfig,
    zero: ZeroConfig,
    compression: GradientCompressionConfig,
    local_sgd: LocalSgdConfig,
) -> Iterator[str]:
    """Settings that experts on several replicas cannot be combined with."""
    if ep_size == 1:
        return
    name, instead = f"ep_size={ep_size}", "or ep_size to 1"
    if tp_size > 1:
        yield (
            f"{name} with tp_size={tp_size} is not available: tensor parallelism distributes experts over its own ranks "
            f"(tensor_parallel.experts). Set tp_size to 1, {instead}."
        )
    if pipeline.schedule in ASYNCHRONOUS:
        yield (
            f"{name} with pipeline.schedule={pipeline.schedule} is not available: replicas that share experts would have to be at "
            f"the same update. Set pipeline.schedule to 1f1b, {instead}."
        )
    if pipeline.compile_blocks != "none":
        yield (
            f"{name} with pipeline.compile_blocks={pipeline.compile_blocks} is not available: how many tokens travel is known "
            f"in the middle of a block only. Set pipeline.compile_blocks to none, {instead}."
        )
    if zero.engine == "deepspeed":
        yield (
            f"{name} with zero.engine=deepspeed has no effect: DeepSpeed runs the model. Set zero.engine to auto, {instead}."
        )
    if zero.stage > 1:
        yield (
            f"{name} with zero.stage={zero.stage} is not available: the experts are in parts already. Set zero.stage to 1, "
            f"{instead}."
        )
    elif zero.dp_shard_size != "auto":
        yield (
            f"{name} with zero.dp_shard_size={zero.dp_shard_size} is not available: groups of replicas share the experts, "
            f"other groups the optimizer. Set zero.dp_shard_size to auto, {instead}."
        )
    elif zero.overlap_gather:
        yield (
            f"{name} with zero.overlap_gather=true is not available: parameters arrive when the step returns. Set "
            f"zero.overlap_gather to false, {instead}."
        )
    if compression.method != "none":
        yield (
            f"{name} with gradient_compression.method={compression.method} is not available: gradients of experts and of the "
            f"rest are summed over different replicas. Set gradient_compression.method to none, {instead}."
        )
    if local_sgd.sync_every > 1:
        yield (
            f"{name} with local_sgd.sync_every={local_sgd.sync_every} is not available: replicas that share experts train one "
            f"model together. Set local_sgd.sync_every to 1, {instead}."
        )
