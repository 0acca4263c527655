"""The compressed wire under DDP and under fully_shard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_parallel.data_parallel.compression.ddp_hook import compress_ddp
from hf_parallel.data_parallel.compression.fsdp2 import compress_fsdp2
from hf_parallel.errors import UnsupportedError
from hf_parallel.settings.replica_sections import GradientCompressionConfig


pytestmark = pytest.mark.long


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def gradients(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).pow(2).mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in found]


def ddp_rank(rank: int, world_size: int) -> None:
    plain = DistributedDataParallel(network())
    for method, error in (("fp16", 1e-3), ("int8", 0.02), ("int4", 0.3), ("powersgd", 1.0), ("topk", 1.0)):
        settings = GradientCompressionConfig(method=method, warmup_ratio=0.0)  # type: ignore[arg-type]
        ddp = DistributedDataParallel(network(), bucket_cap_mb=0.02)
        wire = compress_ddp(ddp, settings)
        names = [name for name, _ in ddp.module.named_parameters()]
        applied = [torch.zeros(p.shape) for p in ddp.module.parameters()]
        wanted = [torch.zeros(p.shape) for p in ddp.module.parameters()]
        for step in range(4):  # DDP lays its buckets out anew after the first
            mine, exact = gradients(ddp, rank, step), gradients(plain, rank, step)
            for index, (here, there) in enumerate(zip(mine, exact, strict=True)):
                applied[index] += here
                wanted[index] += there
                if here.ndim < 2 and method != "fp16":  # a cast takes vectors too
                    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-7)
                elif step == 0:
                    assert float((here - there).norm() / there.norm()) <= error, (method, names[index])
        if wire.feedback is not None:
            for name, got, true in zip(names, applied, wanted, strict=True):
                left = wire.feedback.state().get(name, torch.zeros(got.shape)).clone()
                dist.all_reduce(left)
                torch.testing.assert_close(got + left, true, rtol=1e-4, atol=1e-6)
        if method != "fp16":  # its blocks are longer than these buckets
            assert wire.meter.dense_bytes > 1.5 * wire.meter.wire_bytes
        with pytest.raises(UnsupportedError, match="hook already"):
            compress_ddp(ddp, settings)
        wire.lane.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_takes_the_wire_as_its_hook(world_size: int, tmp_path: Path) -> None:
    run_ranks(ddp_rank, world_size, tmp_path=tmp_path)


def fsdp_rank(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    settings = GradientCompressionConfig(method="int8")

    def sharded() -> nn.Sequential:
        model = network()
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    plain, model = sharded(), sharded()
    comm = compress_fsdp2(model, settings)
    for step in range(2):
        for here, there in zip(gradients(model, rank, step), gradients(plain, rank, step), strict=True):
            assert float((here - there).norm() / there.norm()) <= 0.02
    assert comm.meter.dense_bytes > 3 * comm.meter.wire_bytes
    with pytest.raises(UnsupportedError, match="topk under fully_shard"):
        compress_fsdp2(model, GradientCompressionConfig(method="topk"))
    with pytest.raises(UnsupportedError, match="Shard it first"):
        compress_fsdp2(network(), settings)


def test_fully_shard_takes_the_wire_as_its_reduce_scatter(tmp_path: Path) -> None:
    run_ranks(fsdp_rank, 2, tmp_path=tmp_path)
