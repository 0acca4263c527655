"""The compressed reduce-scatter under torch's `fully_shard`: half of a compressed all-reduce, nothing fed back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from hf_parallel.data_parallel.compression.build_wire import make_codec
from hf_parallel.data_parallel.compression.exchange import CompressedAllReduce, Meter, Steps
from hf_parallel.errors import UnsupportedError
from hf_parallel.settings.replica_sections import GradientCompressionConfig


class CompressedReduceScatter:
    """Reduce-scatter of compressed gradients, for `FSDPModule.set_custom_reduce_scatter`.

    Args:
        settings: With a method that feeds nothing back: fp16, bf16 or int8.

    Attributes:
        meter: Bytes and codec time.
    """

    def __init__(self, settings: GradientCompressionConfig) -> None:
        codec = make_codec(settings)
        if codec is None or settings.feeds_back:
            raise UnsupportedError(
                f"gradient_compression.method={settings.method} under fully_shard: error feedback keeps a residual of every "
                "element on every rank, which is more than sharding saves. Use int8, bf16 or fp16."
            )
        self._codec = codec
        self.meter = Meter()

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum or average f[N n] over the group into this rank's f[n].

        Raises:
            UnsupportedError: Another operation.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise UnsupportedError(
                f"a compressed reduce-scatter sums or averages, {op} does neither. Use ReduceOp.SUM or AVG, or send uncompressed "
                "gradients (gradient_compression.method: none)."
            )
        ranks = group.size()
        rows = input_tensor.float().view(ranks, -1)
        padded = F.pad(rows, (0, -rows.shape[1] % self._codec.block)).contiguous()
        exchange = CompressedAllReduce(self._codec, group, "reduce_scatter", self.meter)
        self.meter.dense_bytes += (ranks - 1) * input_tensor.nbytes // ranks
        steps = exchange.part_of(padded.view(-1))
        total = _finished(self.meter.timed(steps))[: output_tensor.numel()]
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


def _finished(steps: Steps) -> Tensor:
    """Run all steps, one after the other, and return their result."""
    while True:
        try:
            work = next(steps)
        except StopIteration as end:
            total: Tensor = end.value
            return total
        if work is not None:
            work.wait()


def compress_fsdp2(model: nn.Module, settings: GradientCompressionConfig) -> CompressedReduceScatter:
    """Compress the gradients of a model that `fully_shard` was applied to, in all of its parts.

    Raises:
        UnsupportedError: No module is sharded, or the method feeds errors back.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        raise UnsupportedError(f"{type(model).__name__} has no part that fully_shard was applied to. Shard it first.")
    comm = CompressedReduceScatter(settings)
    for part in parts:
        part.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # an interface that torch does not export
    return comm
