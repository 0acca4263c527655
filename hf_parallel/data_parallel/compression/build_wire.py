"""Builds a wire from settings: which codec, which exchange, what stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist

from hf_parallel.data_parallel.compression.codecs import (
    BlockQuantizer,
    CastCompressor,
    GradientCompressor,
    OneBitCompressor,
    TopKCompressor,
)
from hf_parallel.data_parallel.compression.compressed_wire import CompressedWire
from hf_parallel.data_parallel.compression.exchange import CompressedAllReduce, HierarchicalAllReduce, Meter, Schedule
from hf_parallel.data_parallel.compression.feedback import ErrorFeedback
from hf_parallel.data_parallel.compression.lane import Lane
from hf_parallel.data_parallel.compression.powersgd import PowerSGD
from hf_parallel.errors import UnsupportedError
from hf_parallel.settings.replica_sections import BLOCK_SIZES, GradientCompressionConfig


MANY = 10**9  # elements of residuals above which they are kept in bf16


def make_codec(settings: GradientCompressionConfig) -> GradientCompressor | None:
    """The codec of the method; None for powersgd, which has none."""
    block = BLOCK_SIZES.get(settings.method, 0) if settings.block_size == "auto" else settings.block_size
    if settings.method in ("fp16", "bf16"):
        return CastCompressor(torch.float16 if settings.method == "fp16" else torch.bfloat16)
    if settings.method in ("int8", "int4"):
        return BlockQuantizer(int(settings.method[3:]), block)
    if settings.method == "topk":
        return TopKCompressor(settings.density, block, settings.value_dtype)
    return OneBitCompressor(block) if settings.method == "onebit" else None


def make_wire(
    settings: GradientCompressionConfig,
    shapes: Mapping[str, torch.Size],
    group: dist.ProcessGroup,
    nodes: tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
    device: torch.device,
    exact: frozenset[str] = frozenset(),
) -> CompressedWire:
    """The wire that `settings` describe; every rank of `group` makes one.

    Args:
        settings: Settings with a compression method.
        shapes: Trained parameter -> shape on this rank.
        group: The replicas; a group that nothing else uses.
        nodes: The replicas of this rank's node, and those with its place in other nodes; None for a flat topology.
        device: Device of the gradients.
        exact: Parameters that are never compressed.

    Raises:
        UnsupportedError: The settings leave nothing to compress.
    """
    dense = _dense_rule(settings, exact)
    sent = [name for name, shape in shapes.items() if not dense(name, shape)]
    if shapes and not sent:
        widest = max(shapes, key=lambda name: shapes[name].numel())
        raise UnsupportedError(
            f"gradient_compression.method={settings.method} compresses none of the {len(shapes)} parameters: the largest "
            f"is {widest} of shape {tuple(shapes[widest])}, exclude={list(settings.excluded)}"
            + (
                f", matrix_approximation_rank={settings.matrix_approximation_rank}, which must be below a quarter of the "
                "smaller side to save half the bytes or more. Lower it"
                if settings.method == "powersgd"
                else ". Exclude less"
            )
            + ", or set gradient_compression.method to int8."
        )
    meter = Meter()
    elements = sum(shapes[name].numel() for name in sent)
    half = settings.residual_dtype == "bf16" or (settings.residual_dtype == "auto" and elements > MANY)
    feedback = ErrorFeedback(torch.bfloat16 if half else torch.float32) if settings.feeds_back else None
    return CompressedWire(group, Lane(device), _method(settings, group, nodes, meter), dense, feedback, meter)


def _method(
    settings: GradientCompressionConfig,
    group: dist.ProcessGroup,
    nodes: tuple[dist.ProcessGroup, dist.ProcessGroup] | None,
    meter: Meter,
) -> CompressedAllReduce | HierarchicalAllReduce | PowerSGD:
    codec = make_codec(settings)
    if codec is None:
        return PowerSGD(settings.matrix_approximation_rank, group, meter)
    codec = _compiled(codec) if settings.compile else codec
    if nodes is None:
        return CompressedAllReduce(codec, group, _schedule(settings, group.size()), meter)
    inside, across = nodes
    between = CompressedAllReduce(codec, across, _schedule(settings, across.size()), meter)
    return HierarchicalAllReduce(inside, across, between, meter)


def _schedule(settings: GradientCompressionConfig, ranks: int) -> Schedule:
    """Choose the exchange: two ranks send the same bytes either way, and all_gather loses nothing a second time."""
    if settings.collective != "auto":
        return settings.collective
    return "all_gather" if ranks == 2 else "reduce_scatter"


def _compiled(codec: GradientCompressor) -> GradientCompressor:
    """The codec with encode and decode as fused kernels."""
    codec.encode = torch.compile(codec.encode, dynamic=True)  # type: ignore[method-assign]
    codec.decode = torch.compile(codec.decode, dynamic=True)  # type: ignore[method-assign]
    return codec


def _dense_rule(settings: GradientCompressionConfig, exact: frozenset[str]) -> Callable[[str, torch.Size], bool]:
    vectors = "1d" in settings.excluded
    patterns = [pattern for pattern in settings.excluded if pattern != "1d"]
    rank = settings.matrix_approximation_rank if settings.method == "powersgd" else None

    def dense(name: str, shape: torch.Size) -> bool:
        if name in exact or (vectors and len(shape) < 2):
            return True
        if rank is not None and (len(shape) < 2 or not PowerSGD.saves(shape, rank)):
            return True
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return dense
