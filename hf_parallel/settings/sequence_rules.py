"""Rules on settings beside `sp_size`, and what they stand for; pure. Problems are one line each: key and value, rule, fix."""

from __future__ import annotations

from collections.abc import Iterator

from hf_parallel.settings.replica_sections import GradientCompressionConfig, LocalSgdConfig, ZeroConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.settings.sections import PipelineConfig, TensorParallelConfig


def attention_problems(sp_size: int, sp_attention: str) -> Iterator[str]:
    """A kind of attention for a sequence that nobody shares."""
    if sp_size == 1 and sp_attention != "auto":
        yield (
            f"sp_attention={sp_attention} with sp_size=1 has no effect: no ranks share a sequence. Set sp_size to 2 or more, or "
            "leave sp_attention out."
        )


def method_of(wanted: str, heads: int | None, size: int) -> str:
    """Resolve `sp_attention` to "ulysses" or "ring": "auto" is the ring where heads run out.

    Args:
        wanted: The setting.
        heads: Query heads of a rank; None where the model's config does not say, which is taken as enough.
        size: Ranks that share a sequence.
    """
    if wanted != "auto":
        return wanted
    return "ring" if heads is not None and heads < size else "ulysses"


def sequence_problems(
    sp_size: int,
    ep_size: int,
    tensor_parallel: TensorParallelConfig,
    pipeline: PipelineConfig,
    zero: ZeroConfig,
    compression: GradientCompressionConfig,
    local_sgd: LocalSgdConfig,
    chunked_loss: object,
) -> Iterator[str]:
    """Settings that a sequence shared by ranks cannot be combined with."""
    if sp_size == 1:
        return
    method, blocks = compression.method, pipeline.compile_blocks
    refused = [
        (zero.engine == "deepspeed", f"zero.engine={zero.engine}", "zero.engine to native"),
        (method != "none", f"gradient_compression.method={method}", "gradient_compression.method to none"),
        (local_sgd.sync_every > 1, f"local_sgd.sync_every={local_sgd.sync_every}", "local_sgd.sync_every to 1"),
        (
            tensor_parallel.sequence_parallel,
            "tensor_parallel.sequence_parallel=true",
            "tensor_parallel.sequence_parallel to false",
        ),
        (blocks != "none", f"pipeline.compile_blocks={blocks}", "pipeline.compile_blocks to none"),
        (chunked_loss is True, "chunked_loss=true", "chunked_loss to auto"),
        (ep_size > 1, f"ep_size={ep_size}", "ep_size to 1"),
        (pipeline.schedule in ASYNCHRONOUS, f"pipeline.schedule={pipeline.schedule}", "pipeline.schedule to 1f1b"),
    ]
    for given, what, fix in refused:
        if given:
            yield f"sp_size={sp_size} with {what} is not available: it has not been shown to be exact. Set {fix}, or sp_size to 1."
