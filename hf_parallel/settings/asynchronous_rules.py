"""Rules on settings beside a schedule that does not drain the pipeline between optimizer steps; pure.

Each function returns problems, one line each: key and value, rule, fix.
"""

from __future__ import annotations

from hf_parallel.settings.replica_sections import GradientCompressionConfig, LocalSgdConfig, ZeroConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.settings.sections import PipelineConfig


TWO_VERSIONS = "pipedream_2bw"


def asynchronous_problems(
    pipeline: PipelineConfig,
    pp_size: int,
    *,
    zero: ZeroConfig,
    compression: GradientCompressionConfig,
    local_sgd: LocalSgdConfig,
    accumulation: object,
) -> list[str]:
    """Problems of settings that cannot be combined with an asynchronous schedule.

    Args:
        pipeline: Pipeline settings, with the schedule.
        pp_size: Ranks of the pipeline.
        zero: Partition over the replicas.
        compression: Compression of gradients.
        local_sgd: Local steps.
        accumulation: Batches of an optimizer step, or "auto".
    """
    name = pipeline.schedule
    if name not in ASYNCHRONOUS:
        return _vertical_sync(pipeline)
    with_it = f"with pipeline.schedule={name} is not available"
    back = "or pipeline.schedule to 1f1b"
    problems = [*_vertical_sync(pipeline), *_counts(pipeline, pp_size, accumulation)]
    refused = _refused(pipeline, zero, compression, local_sgd)
    return problems + [f"{what} {with_it}: {why}. Set {fix}, {back}." for given, what, why, fix in refused if given]


def _refused(
    pipeline: PipelineConfig, zero: ZeroConfig, compression: GradientCompressionConfig, local_sgd: LocalSgdConfig
) -> list[tuple[bool, str, str, str]]:
    """Whether each refused setting is given, the setting, why it is refused and what to set instead."""
    return [
        (
            zero.engine == "deepspeed",
            "zero.engine=deepspeed",
            "the weights of several updates are in memory at a time, and its buffers hold those of one",
            "zero.engine to auto",
        ),
        (
            zero.stage == 2,
            "zero.stage=2",
            "gradients of microbatches are whole until their step is complete, so that stage 2 would keep what stage 1 keeps",
            "zero.stage to 1",
        ),
        (
            zero.stage == 3,
            "zero.stage=3",
            "the weights of several updates are in memory at a time, and its parts are those of one",
            "zero.stage to 1",
        ),
        (
            zero.overlap_gather,
            "zero.overlap_gather=true",
            "parts of the new weights would arrive while microbatches with older ones run",
            "zero.overlap_gather to false",
        ),
        (
            local_sgd.sync_every > 1,
            f"local_sgd.sync_every={local_sgd.sync_every}",
            "replicas would average weights while microbatches with others are under way",
            "local_sgd.sync_every to 1",
        ),
        (
            compression.method != "none",
            f"gradient_compression.method={compression.method}",
            "gradients that are late and lossy at once were not tested",
            "gradient_compression.method to none",
        ),
        (
            pipeline.compile_blocks != "none",
            f"pipeline.compile_blocks={pipeline.compile_blocks}",
            "a compiled block keeps the weights it was compiled with",
            "pipeline.compile_blocks to none",
        ),
    ]


def _vertical_sync(pipeline: PipelineConfig) -> list[str]:
    if pipeline.vertical_sync or pipeline.schedule == "pipedream":
        return []
    return [
        f"pipeline.vertical_sync=false with pipeline.schedule={pipeline.schedule} has no effect: only pipedream asks. Remove "
        "pipeline.vertical_sync."
    ]


def clipped_alone(pipeline: PipelineConfig, max_grad_norm: float) -> list[str]:
    """The problem of a norm of all gradients where stages step at different times, if both are asked for.

    Args:
        pipeline: Pipeline settings, with the schedule.
        max_grad_norm: Norm to clip to, from TrainingArguments; 0 clips nothing.
    """
    if pipeline.vertical_sync or not max_grad_norm:
        return []
    return [
        f"max_grad_norm={max_grad_norm:g} with pipeline.vertical_sync=false is not available: a stage steps before the stages before it "
        "have their gradients, so that the norm of all of them does not exist yet. Set max_grad_norm to 0, or "
        "pipeline.vertical_sync to true."
    ]


def _counts(pipeline: PipelineConfig, pp_size: int, accumulation: object) -> list[str]:
    """Microbatches of an optimizer step that the schedule cannot have."""
    given = pipeline.num_microbatches
    if pipeline.schedule != TWO_VERSIONS:
        found = [("pipeline.num_microbatches", given), ("gradient_accumulation_steps", accumulation)]
        return [
            f"{key}={value} with pipeline.schedule=pipedream: it updates the weights after every microbatch. Set {key} to 1, or "
            "pipeline.schedule to pipedream_2bw."
            for key, value in found
            if value not in ("auto", 1)
        ]
    batches = accumulation if isinstance(accumulation, int) else 1
    count = pipeline.parts_of_batch(pp_size) * batches
    return [] if accumulation == "auto" else too_few(count, pp_size)


def too_few(count: int, pp_size: int) -> list[str]:
    """The problem of PipeDream-2BW with fewer than `pp_size - 1` microbatches in an optimizer step."""
    if count >= pp_size - 1:
        return []
    return [
        f"pipeline.schedule=pipedream_2bw with pp_size={pp_size} and {count} microbatches in an optimizer step: two versions of the "
        f"weights keep the pipeline full from pp_size - 1 = {pp_size - 1} on. Raise pipeline.num_microbatches or "
        "gradient_accumulation_steps, or lower pp_size."
    ]


def fp16_ahead(schedule: str, precision: object, asked: str, fix: str) -> list[str]:
    """The problem of a loss scale with an asynchronous schedule, if both are asked for.

    Args:
        schedule: Name of the schedule.
        precision: Precision that is asked for; 'fp16' in any case of letters.
        asked: Beginning of the message: where and how fp16 is asked for.
        fix: Thing to do instead.
    """
    if schedule not in ASYNCHRONOUS or str(precision).lower() != "fp16":
        return []
    return [
        f"{asked} with pipeline.schedule={schedule} is not available: when a gradient overflows, the forward passes of the next steps, "
        f"which have begun, would have to be taken back. Set {fix}, or pipeline.schedule to 1f1b."
    ]
