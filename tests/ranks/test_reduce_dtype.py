"""If these fail, `data_parallel.reduce_dtype` has no effect, or replicas and the optimizer's fp32 copies round with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from rank_runner import run_ranks
from torch import nn

from hf_parallel import HFParallelPlugin
from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.wire import Traffic


def rounded(rank: int, world_size: int) -> None:
    grads = [torch.randn(50, 3, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        param = nn.Parameter(torch.zeros(50, 3, dtype=dtype))
        reducer = GradientReducer([("p", param)], dist.group.WORLD, Traffic(dtype=torch.bfloat16))
        for _ in range(2):
            param.grad = grads[rank].to(dtype)
            reducer.reduce(1.0)
            assert param.grad.dtype == dtype
            if dtype == torch.float64:
                torch.testing.assert_close(param.grad, (grads[0] + grads[1]).double(), rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(param.grad, (grads[0].bfloat16() + grads[1].bfloat16()).to(dtype))
            param.grad = None
        assert reducer.counters.bytes == 2 * (8 if dtype == torch.float64 else 2) * (param.numel() + 1)


def test_gradients_travel_and_are_summed_in_bf16(tmp_path: Path) -> None:
    run_ranks(rounded, 2, tmp_path=tmp_path)


def train(settings: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int, set[torch.dtype]]:
    """Two steps with accumulation; parameters, bytes sent, and dtypes of what the optimizer updates."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **settings))
    model = tiny.llama(layers=1).to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        ids = torch.randint(1, tiny.VOCAB, (2, 8), generator=generator)
        accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
    replicas = accelerator.hf_parallel.engine.gradients.replicas
    wires = [w for w in (replicas._reducer, replicas.zero and replicas.zero.wire) if w]
    masters = {shard.master.dtype for shard in (replicas.zero.shards if replicas.zero else ())}
    return (
        {name: p.detach().clone() for name, p in model.named_parameters()},
        sum(w.counters.bytes for w in wires),
        masters,
    )


def trained(rank: int, world_size: int, stage: int, dtype: torch.dtype) -> None:
    zero = {"zero": {"stage": stage}} if stage else {}
    exact, sent, _ = train(zero, dtype)
    short, less, masters = train(zero | {"data_parallel": {"reduce_dtype": "bfloat16"}}, dtype)
    assert less < 0.55 * sent
    assert masters <= {torch.float32}
    for name, value in short.items():
        everyone = [torch.empty_like(value) for _ in range(world_size)]
        dist.all_gather(everyone, value)
        assert torch.equal(everyone[0], everyone[1]), name
        assert float((value - exact[name]).norm() / exact[name].norm()) < 2e-2, name
    # Two gradients in bf16 that are kept in bf16 are rounded once, by their sum, wherever it is made.
    rounds_alike = stage == 0 and dtype == torch.bfloat16
    assert any(not torch.equal(value, exact[name]) for name, value in short.items()) is not rounds_alike


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicas_stay_alike_and_the_optimizer_stays_in_fp32(stage: int, dtype: torch.dtype, tmp_path: Path) -> None:
    run_ranks(trained, 2, stage, dtype, tmp_path=tmp_path)
