"""The compressed sum: nothing is lost for good, all ranks get the same bits, and it never deadlocks.

If these fail, training with gradient compression diverges between replicas, or slowly and silently goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import Tensor, nn

from hf_parallel.data_parallel.buckets import Bucket, lay_out
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
from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.wire import Traffic


pytestmark = pytest.mark.long

SHAPES = [(40, 30), (30,), (64, 16), (7, 9), (128, 20)]
CODECS: dict[str, Callable[[], GradientCompressor]] = {
    "fp16": lambda: CastCompressor(torch.float16),
    "bf16": lambda: CastCompressor(torch.bfloat16),
    "int8": lambda: BlockQuantizer(8, 256),
    "int4": lambda: BlockQuantizer(4, 128),
    "onebit": lambda: OneBitCompressor(256),
    "topk": lambda: TopKCompressor(0.02, 256),
    "topk_int8": lambda: TopKCompressor(0.02, 256, "int8"),
}


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(SHAPES)]


def gradient(step: int, rank: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(SHAPES[index], generator=generator)


def make_wire(name: str, schedule: Schedule, group: dist.ProcessGroup) -> CompressedWire:
    meter = Meter()
    method: CompressedAllReduce | HierarchicalAllReduce | PowerSGD
    if name == "powersgd":
        method = PowerSGD(4, group, meter)
    elif name.startswith("hierarchical"):
        nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        inside, across = nodes[rank // 2], pairs[rank % 2]
        codec = None if name == "hierarchical" else CODECS[name.removeprefix("hierarchical_")]()
        between = None if codec is None else CompressedAllReduce(codec, across, schedule, meter)
        method = HierarchicalAllReduce(inside, across, between, meter)
    else:
        method = CompressedAllReduce(CODECS[name](), group, schedule, meter)

    def dense(_: str, shape: torch.Size) -> bool:
        return len(shape) < 2 or (name == "powersgd" and not PowerSGD.saves(shape, 4))

    return CompressedWire(group, Lane(torch.device("cpu")), method, dense, ErrorFeedback(), meter)


def traffic(wire: CompressedWire, bucket_bytes: int = 25 * 2**20) -> Traffic:
    return Traffic(bucket_bytes, kind=lambda name, p: wire.keeps_dense(name, p.shape), wire=wire)


def conservation_rank(rank: int, world_size: int, names: list[tuple[str, Schedule]]) -> None:
    for name, schedule in names:
        named = parameters()
        wire = make_wire(name, schedule, dist.group.WORLD)
        reducer = GradientReducer(named, dist.group.WORLD, traffic(wire, 6000))
        assert len(reducer._buckets) > 2
        applied = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        wanted = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(12):
            for index, (_, param) in enumerate(named):
                param.grad = gradient(step, rank, index)
                wanted[index] += sum(gradient(step, r, index).double() for r in range(world_size)) / world_size
            reducer.reduce(1.0 / world_size)
            for index, (_, param) in enumerate(named):
                assert param.grad is not None
                applied[index] += param.grad.double()
                same = param.grad.clone()
                dist.broadcast(same, 0)
                assert torch.equal(same, param.grad), (name, index)
        residual = wire.feedback.state() if wire.feedback is not None else {}
        for index, (key, param) in enumerate(named):
            left = residual.get(key, torch.zeros(SHAPES[index])).double()
            dist.all_reduce(left)
            torch.testing.assert_close(applied[index] + left, wanted[index], rtol=0, atol=3e-5, msg=f"{name} {key}")
            if param.ndim == 1 or (name == "powersgd" and index == 3):
                assert not left.any(), "kept dense, yet something was left out"
        lossy = name not in ("hierarchical",)
        assert any(residual[key].abs().max() > 0 for key in residual) == lossy
        wire.lane.close()


ALL = [(name, schedule) for name in CODECS for schedule in ("all_gather", "reduce_scatter")]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_was_applied_and_what_is_left_is_the_sum_of_the_gradients(world_size: int, tmp_path: Path) -> None:
    names: list[tuple[str, str]] = [*ALL, ("powersgd", "all_gather")]
    if world_size == 4:
        names += [
            ("hierarchical", "all_gather"),
            ("hierarchical_int8", "all_gather"),
            ("hierarchical_topk", "all_gather"),
        ]
    run_ranks(conservation_rank, world_size, names, tmp_path=tmp_path, timeout=120)


def infinite_rank(rank: int, world_size: int) -> None:
    """An inf on one rank is seen by all, and neither residuals nor thin matrices know of it."""
    for name in ("int8", "int4", "onebit", "topk", "fp16", "bf16", "powersgd"):
        named = parameters()
        wire = make_wire(name, "reduce_scatter", dist.group.WORLD)
        reducer = GradientReducer(named, dist.group.WORLD, traffic(wire))
        kept = {}
        for step in range(3):
            for index, (_, param) in enumerate(named):
                param.grad = gradient(step, rank, index)
            if step == 1:
                assert wire.feedback is not None
                kept = {key: value.clone() for key, value in wire.feedback.state().items()}
                right = (
                    {k: v.clone() for k, v in wire.method.state().items()} if isinstance(wire.method, PowerSGD) else {}
                )
                if rank == world_size - 1:
                    assert named[0][1].grad is not None
                    named[0][1].grad[3, 3] = float("inf")
            reducer.reduce(1.0)
            total = torch.stack([p.grad.sum() for _, p in named if p.grad is not None])
            assert bool(torch.isfinite(total).all()) == (step != 1), (name, step)
            if step == 1:
                assert wire.feedback is not None
                bucket = next(key[0] for key in wire.feedback._flat if "p0" in key[0])
                for key, value in wire.feedback.state().items():
                    if key in bucket:
                        assert torch.equal(value, kept[key]), (name, key)
                if isinstance(wire.method, PowerSGD):
                    assert torch.equal(wire.method.state()["p0"], right["p0"])
                assert wire.meter.skipped is not None
                assert int(wire.meter.skipped) == 1
        wire.lane.close()


def test_an_infinite_gradient_reaches_every_rank_and_no_residual(tmp_path: Path) -> None:
    run_ranks(infinite_rank, 2, tmp_path=tmp_path, timeout=120)


def many_buckets_rank(rank: int, world_size: int) -> None:
    """Torch's own PowerSGD hook deadlocks here."""
    for name in ("powersgd", "int8"):
        named = [(f"p{i}", nn.Parameter(torch.zeros(24, 24))) for i in range(60)]
        wire = make_wire(name, "reduce_scatter", dist.group.WORLD)
        reducer = GradientReducer(named, dist.group.WORLD, traffic(wire, 1))
        assert len(reducer._buckets) == 60
        for _ in range(5):
            for index, (_, param) in enumerate(named):
                param.grad = torch.full((24, 24), float(rank + index))
            reducer.reduce(1.0 / world_size)
        for index, (_, param) in enumerate(named):
            torch.testing.assert_close(
                param.grad, torch.full((24, 24), index + (world_size - 1) / 2), rtol=0.02, atol=0.3
            )
        wire.lane.close()


def test_many_small_buckets_never_deadlock(tmp_path: Path) -> None:
    run_ranks(many_buckets_rank, 3, tmp_path=tmp_path, timeout=120)


def order_rank(rank: int, world_size: int) -> list[str]:
    """Two more buckets are encoded, and their collectives started, before one is finished."""
    events: list[str] = []
    codec = BlockQuantizer(8, 256)
    encode, decode = codec.encode, codec.decode
    codec.encode = lambda x: (events.append("encode"), encode(x))[1]  # type: ignore[method-assign]
    codec.decode = lambda x: (events.append("decode"), decode(x))[1]  # type: ignore[method-assign]
    meter = Meter()
    method = CompressedAllReduce(codec, dist.group.WORLD, "all_gather", meter)
    wire = CompressedWire(dist.group.WORLD, Lane(torch.device("cpu")), method, lambda n, s: False, None, meter)
    buckets: list[Bucket] = lay_out([(f"p{i}", nn.Parameter(torch.zeros(512))) for i in range(4)], 1)
    waits = [wire.all_reduce(torch.ones(512), bucket) for bucket in buckets]
    wire.flush()
    for wait in waits:
        wait()
    wire.lane.close()
    return events


def test_encoding_a_bucket_overlaps_the_transfer_of_those_before(tmp_path: Path) -> None:
    for events in run_ranks(order_rank, 2, tmp_path=tmp_path):
        assert events == ["encode", "encode", "encode", "decode", "encode", "decode", "decode", "decode"]


def layout_rank(rank: int, world_size: int) -> None:
    """Residuals follow their parameter into other buckets, and survive state() and load()."""
    named = parameters()
    wire = make_wire("topk", "all_gather", dist.group.WORLD)
    for index, (_, param) in enumerate(named):
        param.grad = gradient(0, rank, index)
    GradientReducer(named, dist.group.WORLD, traffic(wire, 6000)).reduce(1.0)
    assert wire.feedback is not None
    before = {key: value.clone() for key, value in wire.feedback.state().items()}
    assert set(before) == {"p0", "p2", "p3", "p4"}
    one = lay_out(named, kind=lambda name, p: p.ndim < 2)
    for bucket in one:
        if len(bucket.shapes[0]) > 1:
            wire.feedback.residual(bucket, 0, bucket.numel, torch.device("cpu"))
    after = wire.feedback.state()
    assert all(torch.equal(after[key], before[key]) for key in before)
    other = ErrorFeedback()
    other.load(after)
    assert all(torch.equal(other.state()[key], before[key]) for key in before)
    wire.lane.close()


def test_residuals_belong_to_parameters_not_to_buckets(tmp_path: Path) -> None:
    run_ranks(layout_rank, 2, tmp_path=tmp_path)


def scale_rank(rank: int, world_size: int) -> None:
    """With a loss scale the same gradients leave the same residual, and a changed scale changes nothing applied."""
    results = []
    for scales in ((1.0, 1.0, 1.0), (1024.0, 1024.0, 512.0)):
        named = parameters()
        wire = make_wire("topk", "all_gather", dist.group.WORLD)
        current = torch.tensor(scales[0])
        wire.loss_scale = lambda current=current: current  # type: ignore[misc]
        reducer = GradientReducer(named, dist.group.WORLD, traffic(wire))
        applied = []
        for step, scale in enumerate(scales):
            current.fill_(scale)
            for index, (_, param) in enumerate(named):
                param.grad = gradient(step, rank, index) * scale
            reducer.reduce(1.0)
            applied.append([p.grad / scale for _, p in named if p.grad is not None])
        results.append(applied)
        wire.lane.close()
    for plain, scaled in zip(*results, strict=True):
        for here, there in zip(plain, scaled, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def test_residuals_do_not_depend_on_the_loss_scale(tmp_path: Path) -> None:
    run_ranks(scale_rank, 2, tmp_path=tmp_path)


def exact_hierarchy_rank(rank: int, world_size: int) -> None:
    """What is sent as it is goes through the hierarchy too: a rank sends its part of a node's sum, not of a ring of all."""
    named = [("p0", nn.Parameter(torch.zeros(64, 64)))]
    wire = make_wire("hierarchical_int8", "all_gather", dist.group.WORLD)
    wire.warm = False
    named[0][1].grad = torch.full((64, 64), float(rank + 1))
    GradientReducer(named, dist.group.WORLD, traffic(wire)).reduce(1.0)
    torch.testing.assert_close(named[0][1].grad, torch.full((64, 64), 10.0), rtol=0, atol=0)
    flags = 2 * 3 * 4 // 4
    assert wire.meter.wire_bytes - flags == 64 * 64 * 4 // 2
    assert wire.meter.dense_bytes - flags == 2 * 3 * 64 * 64 * 4 // 4
    wire.warm = True
    GradientReducer(named, dist.group.WORLD, traffic(wire)).reduce(1.0)
    assert wire.meter.codec_seconds > 0.0
    wire.lane.close()


def test_exact_sums_follow_the_hierarchy(tmp_path: Path) -> None:
    run_ranks(exact_hierarchy_rank, 4, tmp_path=tmp_path)
