"""Rules on settings of several sections together, and on settings that others make useless.

Each function gives the problems of one kind, one a line: key and value, rule, fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hf_parallel.settings.asynchronous_rules import asynchronous_problems
from hf_parallel.settings.expert_rules import expert_problems
from hf_parallel.settings.sequence_rules import attention_problems, sequence_problems
from hf_parallel.settings.values import Section, spelled
from hf_parallel.settings.zero_rules import compression_problems, deepspeed_problems, partition_problems


if TYPE_CHECKING:
    from hf_parallel.settings.config import HFParallelConfig

# Settings that nothing reads without stages.
PIPELINE_ONLY = (
    "schedule",
    "schedule_file",
    "stages_per_rank",
    "num_microbatches",
    "split",
    "costs",
    "rank_speed",
    "rank_memory_gb",
    "transport",
)
# Settings that nothing reads when no layer is shared.
TENSOR_ONLY = ("plan", "experts", "sequence_parallel", "vocab_parallel_loss", "reduce_dtype", "on_fallback")

# What may stand beside `layout: auto`; all else is for the plan to say.
BESIDE_AUTO = ("layout", "topology", "checkpoint", "monitor")


def problems_together(config: HFParallelConfig) -> list[str]:
    """Everything that is wrong with settings that are right one by one."""
    problems = [*config.pipeline.problems(config.pp_size), *config.monitor.problems()]
    recompute = config.activation_checkpointing
    if recompute.every is None:
        problems += [
            f"activation_checkpointing.{name}={spelled(value)} without activation_checkpointing.every has no effect. Set "
            f"activation_checkpointing.every to 1 or more, or remove the {name}."
            for name, value in recompute.model_dump(exclude_defaults=True).items()
        ]
    problems += [
        *_beside_auto(config),
        *_accumulated_twice(config),
        *_uncompiled(config),
        *_without_effect(config),
        *asynchronous_problems(
            *(config.pipeline, config.pp_size),
            zero=config.zero,
            compression=config.gradient_compression,
            local_sgd=config.local_sgd,
            accumulation=config.gradient_accumulation_steps,
        ),
        *_loss_problems(config),
        *expert_problems(
            *(
                config.ep_size,
                config.tp_size,
                config.pipeline,
                config.zero,
                config.gradient_compression,
                config.local_sgd,
            )
        ),
        *attention_problems(config.sp_size, config.sp_attention),
        *sequence_problems(
            *(config.sp_size, config.ep_size, config.tensor_parallel, config.pipeline, config.zero),
            *(config.gradient_compression, config.local_sgd, config.chunked_loss),
        ),
        *config.gradient_compression.problems("gradient_compression"),
        *_between_replicas(config),
        *config.topology.problems(
            *(config.tp_size, config.pp_size), planned=config.layout == "auto", sums=other_sums(config)
        ),
    ]
    return problems


def _beside_auto(config: HFParallelConfig) -> list[str]:
    """Settings that a plan would replace."""
    if config.layout != "auto":
        return []
    return [
        f"{name}={spelled(value)} with layout=auto: the plan says it. Leave {name} out, or set layout to given."
        for name, value in config.model_dump(exclude_defaults=True).items()
        if name not in BESIDE_AUTO
    ]


def _accumulated_twice(config: HFParallelConfig) -> list[str]:
    """Two settings that say how many batches a step has."""
    if config.global_batch_size is None or config.gradient_accumulation_steps == "auto":
        return []
    return [
        f"global_batch_size={config.global_batch_size} with gradient_accumulation_steps={config.gradient_accumulation_steps}: the first "
        "follows the number of replicas, the second does not. Remove one of them."
    ]


def _without_effect(config: HFParallelConfig) -> list[str]:
    """Settings of an axis that nothing reads because the axis has one rank."""
    return [
        *_unread(config.pipeline, "pipeline", PIPELINE_ONLY, "pp", config.pp_size, "there is one stage"),
        *_unread(config.tensor_parallel, "tensor_parallel", TENSOR_ONLY, "tp", config.tp_size, "no layer is shared"),
    ]


def _loss_problems(config: HFParallelConfig) -> list[str]:
    """A loss without logits that cannot be, or that nobody would compute otherwise."""
    wanted = config.chunked_loss
    if wanted is True and config.model_parallel_size == 1:
        return [
            "chunked_loss=true with tp_size=1 and pp_size=1 is not available: outputs of replicas are watched, which makes "
            "the logits. Set chunked_loss to false, or pp_size to 2."
        ]
    if wanted is True and config.zero.engine == "deepspeed":
        return [
            "chunked_loss=true with zero.engine=deepspeed has no effect: DeepSpeed runs the model. Set it to false."
        ]
    if wanted is True and config.zero.shards_parameters:
        return [
            f"chunked_loss=true with zero.stage={config.zero.stage}: the head's weight is gathered while the head runs, and the "
            "loss would need it later. Set chunked_loss to auto, or zero.stage to 1."
        ]
    return []


def _uncompiled(config: HFParallelConfig) -> list[str]:
    """Layouts that watch every operation of a block: torch runs blocks eager then, without a word."""
    backend, recompute = config.pipeline.compile_blocks, config.activation_checkpointing
    if backend == "none":
        return []
    others = []
    if config.tp_size > 1:
        others.append((f"tp_size={config.tp_size}", "tp_size to 1"))
    if recompute.every is not None and recompute.mode == "selective":
        others.append(
            ("activation_checkpointing.mode=selective", "activation_checkpointing.mode to block or alternate")
        )
    return [
        f"pipeline.compile_blocks={backend} with {what} is not available: single operations of a block are watched there, and "
        f"torch compiles none of them. Set pipeline.compile_blocks to none, or {fix}."
        for what, fix in others
    ]


def other_sums(config: HFParallelConfig) -> list[str]:
    """Settings, as `key=value`, with which the gradients of replicas are not summed whole and as they are."""
    method, every, stage = config.gradient_compression.method, config.local_sgd.sync_every, config.zero.stage
    given = {
        f"gradient_compression.method={method}": method != "none",
        f"local_sgd.sync_every={every}": every > 1,
        f"zero.stage={stage}": stage > 0,
    }
    return [setting for setting, is_given in given.items() if is_given]


def _between_replicas(config: HFParallelConfig) -> list[str]:
    """Problems of settings about the messages between replicas, some of which DeepSpeed handles itself."""
    method, every = config.gradient_compression.method, config.local_sgd.sync_every
    dtype_problems = config.data_parallel.problems({
        "zero.engine=deepspeed": config.zero.engine == "deepspeed",
        f"gradient_compression.method={method}": method != "none",
        f"local_sgd.sync_every={every}": every > 1,
    })  # fmt: skip
    if config.zero.engine == "deepspeed":
        given = config.model_dump(exclude_defaults=True)
        return [*dtype_problems, *deepspeed_problems(config.zero, config.pp_size, config.tp_size, given)]
    return [
        *dtype_problems,
        *partition_problems(config.zero, config.pp_size, config.data_parallel),
        *compression_problems(config.zero, config.gradient_compression),
        *_local_steps(config),
    ]


def _local_steps(config: HFParallelConfig) -> list[str]:
    """Local steps with what expects equal replicas after every step."""
    found, every = config.local_sgd.problems(), config.local_sgd.sync_every
    if every > 1 and config.zero.stage:
        found.append(
            f"local_sgd.sync_every={every} with zero.stage={config.zero.stage}: replicas differ between "
            "synchronisations, so they cannot share one optimizer. Set zero.stage to 0, or local_sgd.sync_every to 1."
        )
    if every > 1 and config.gradient_compression.method != "none":
        found.append(
            f"local_sgd.sync_every={every} with gradient_compression.method={config.gradient_compression.method}: no "
            "gradient travels between synchronisations. Move the settings to local_sgd.compression."
        )
    return found


def _unread(settings: Section, section: str, names: Iterable[str], axis: str, size: int, why: str) -> list[str]:
    if size > 1:
        return []
    problems = []
    for name in names:
        value, default = getattr(settings, name), type(settings).model_fields[name].default
        if value != default:
            shown = spelled(value)
            problems.append(
                f"{section}.{name}={shown} with {axis}_size=1 has no effect: {why}. Set {axis}_size to 2 or more, or "
                f"{section}.{name} to {spelled(default)}."
            )
    return problems
