"""ZeRO trains exactly as one process does, on every layout, and its checkpoints fit any number of replicas.

If these fail, partitioned runs drift from unpartitioned ones, lose optimizer state on resume, or hold more than they say.
"""

from __future__ import annotations

import copy
import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from thinning import slow_if
from torch import nn
from trainer_cases import NO_NOISE, Case, compare, run_cases, stock, wanted_cases

from hf_parallel.checkpoints.state.dcp import TensorIndex, save_pieces
from hf_parallel.checkpoints.state.optimizer import OptimizerView, Place, state_pieces
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.checkpoints.state.restore import SavedState, restore
from hf_parallel.data_parallel.host import FusedOnHost, HostMemory, pins
from hf_parallel.data_parallel.wire import Traffic
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import UnsupportedError
from hf_parallel.ledger import build_ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.settings.replica_sections import ZeroConfig


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# A few gradient elements of this run are nearly zero; AdamW makes steps of their rounding, partitioned or not.
PLAIN = Case("plain", model="llama_tied", steps=4, variable_length=True, arguments=NO_NOISE)
ACCUMULATED = dataclasses.replace(PLAIN, name="accumulated", accumulation=3, steps=3)
GPT2 = Case("gpt2", model="gpt2", steps=3, accumulation=2, arguments=NO_NOISE)
USER = Case("user", steps=3, user_optimizer=True, clip=0.0)
REFERENCES = (PLAIN, ACCUMULATED, GPT2, USER)
PP2 = {"pp_size": 2, "num_microbatches": 3}
SMALL = {"bucket_cap_mb": 0.02}  # several buckets


def zero(
    base: Case,
    name: str,
    stage: int,
    shard: int | str = "auto",
    late: bool = False,
    offload: str = "none",
    **parallel: Any,
) -> tuple[Case, Case]:
    partition = {"stage": stage, "dp_shard_size": shard, "overlap_gather": late, "offload_optimizer": offload}
    settings = {"zero": partition, "data_parallel": SMALL, **parallel}
    return dataclasses.replace(base, name=name, parallel=settings), base


TWO_RANKS = [
    zero(PLAIN, "dp2_stage1", 1),
    zero(ACCUMULATED, "dp2_stage1_accumulated", 1, data_parallel={}),
    zero(ACCUMULATED, "dp2_stage2_accumulated", 2),
    zero(ACCUMULATED, "dp2_stage2_at_the_end", 2, data_parallel={**SMALL, "overlap": False}),
    zero(GPT2, "dp2_stage2_gpt2", 2),
    zero(USER, "dp2_stage1_user_optimizer", 1),
    zero(ACCUMULATED, "dp2_stage1_late", 1, late=True),
    zero(GPT2, "dp2_stage2_late", 2, late=True),
    zero(PLAIN, "dp2_stage1_offloaded", 1, offload="cpu"),
    zero(ACCUMULATED, "dp2_stage2_offloaded", 2, offload="cpu"),
    zero(USER, "dp2_stage1_offloaded_user_optimizer", 1, offload="cpu", late=True),
]
FOUR_RANKS = [
    zero(ACCUMULATED, "dp4_stage1", 1),
    zero(ACCUMULATED, "dp4_stage2", 2),
    zero(ACCUMULATED, "dp4_hybrid_stage1", 1, shard=2),
    zero(GPT2, "dp4_hybrid_stage2", 2, shard=2),
    zero(ACCUMULATED, "pp2_dp2_stage1", 1, **PP2),
    zero(PLAIN, "pp2_dp2_stage2", 2, **PP2),
    zero(PLAIN, "pp2_dp2_zero_bubble_stage1", 1, **PP2, schedule="zbv_zero_bubble"),
    zero(ACCUMULATED, "tp2_dp2_stage1", 1, tp_size=2),
    zero(GPT2, "tp2_dp2_stage2", 2, tp_size=2),
    zero(PLAIN, "pp2_dp2_stage1_late", 1, **PP2, late=True),
    zero(ACCUMULATED, "dp4_hybrid_stage2_offloaded", 2, shard=2, offload="cpu"),
    zero(PLAIN, "pp2_dp2_stage1_offloaded", 1, **PP2, offload="cpu"),
    zero(GPT2, "tp2_dp2_stage2_offloaded", 2, tp_size=2, offload="cpu"),
]
# Slow: what other rows show on two replicas, or with the other stage, parts or engine of the step.
REST = (
    "dp4_stage1",
    "dp4_hybrid_stage2",
    "pp2_dp2_stage1_late",
    "pp2_dp2_stage2",
    "tp2_dp2_stage2_offloaded",
    "dp2_stage2_at_the_end",
    "dp2_stage1_accumulated",
    "dp2_stage1_user_optimizer",
    "dp2_stage2_gpt2",
    "dp2_stage2_offloaded",
    "pp2_dp2_stage1_offloaded",
)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    two, four = (wanted_cases(request, [case for case, _ in rows]) for rows in (TWO_RANKS, FOUR_RANKS))
    for world_size, cases in ((1, list(map(stock, REFERENCES))), (2, two), (4, four)):
        found |= run_cases(cases, world_size, tmp_path_factory.mktemp(f"world{world_size}"))
    return found


@pytest.mark.parametrize(
    ("case", "base"),
    [pytest.param(*row, marks=slow_if(row[0].name, REST)) for row in TWO_RANKS + FOUR_RANKS],
    ids=lambda value: value.name,
)
def test_zero_trains_as_one_process_does(case: Case, base: Case, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[case.name], runs[f"stock_{base.name}"])


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param((4, 1), (2, 2), marks=pytest.mark.slow),  # fewer replicas, where another row has more
        ((2, -2), (4, 1)),
        ((2, 1), (2, 0)),
        ((2, 0), (2, -1)),
    ],
)
def test_a_checkpoint_resumes_on_other_replicas_and_stages(
    saved: tuple[int, int], resumed: tuple[int, int], tmp_path: Path, runs: dict[str, dict[str, Any]]
) -> None:
    """A negative stage has its optimizer in host memory."""

    def case(stage: int, **changes: Any) -> Case:
        parallel = {"zero": {"stage": abs(stage)}, "data_parallel": SMALL}
        if stage < 0:
            parallel["zero"]["offload_optimizer"] = "cpu"
        return dataclasses.replace(PLAIN, name="run", parallel=parallel, **changes)

    run_cases([case(saved[1], save=True, steps=4)], saved[0], tmp_path)
    (tmp_path / "run" / "parameters.safetensors").unlink()
    finished = run_cases([case(resumed[1], resume_at=2)], resumed[0], tmp_path)["run"]
    expected = runs["stock_plain"]["history"]
    here = [entry["loss"] for entry in finished["history"] if "loss" in entry]
    assert here == pytest.approx([entry["loss"] for entry in expected if "loss" in entry], abs=1e-5)


def resume_rank(rank: int, world_size: int) -> None:
    """Bytes of what is held, and bit-equal results, with bf16 parameters and fp32 copies of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))).to(torch.bfloat16)
    masters = [p.detach().float() for p in model.parameters()]
    reference = [nn.Parameter(p.clone()) for p in masters]
    expected = torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.1, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)  # fused, as nobody says otherwise
    part = ZeroPartition(
        optimizer, list(model.named_parameters()), dist.group.WORLD, stage=1, traffic=Traffic(bucket_bytes=40000)
    )
    for step in range(3):
        grads = []
        for other in range(world_size):
            generator = torch.Generator().manual_seed(100 * step + other)
            grads.append([torch.randn(p.shape, generator=generator).bfloat16() for p in reference])
        for param, gradient in zip(model.parameters(), grads[rank], strict=True):
            param.grad = gradient.clone()
        for param, *parts in zip(reference, *grads, strict=True):
            param.grad = torch.stack([g.float() for g in parts]).sum(0) / world_size
        part.reduce(1.0 / world_size)
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        for param, wanted in zip(model.parameters(), reference, strict=True):
            torch.testing.assert_close(param, wanted.bfloat16(), rtol=0, atol=0)
    count = sum(p.numel() for p in model.parameters())
    held = {shard.master.untyped_storage().data_ptr(): shard.master.nbytes for shard in part.shards}
    states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    optimizer_bytes = sum(held.values()) + sum(v.nbytes for v in states)
    assert optimizer_bytes == pytest.approx(12 * count / world_size, rel=0.05)
    assert sum(shard.flat.nbytes for shard in part.shards) == pytest.approx(2 * count, rel=0.05)
    part.reduce(1.0)  # no gradient anywhere
    assert sum(shard.master.grad.nbytes for shard in part.shards) == pytest.approx(4 * count / world_size, rel=0.05)
    before = [param.clone() for param in model.parameters()]
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)  # neither decayed nor moved


@pytest.mark.parametrize("world_size", [2, 4])
def test_half_precision_parameters_have_fp32_copies_and_the_bytes_of_the_table(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(resume_rank, world_size, tmp_path=tmp_path)


def kernel_rank(rank: int, world_size: int) -> list[tuple[bool | None, bool | None]]:
    """Whether AdamW is fused while it steps, and after; of one whose user says nothing and of one who chose."""
    found = []
    for options in ({}, {"fused": False}, {"foreach": True}):
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        part = ZeroPartition(optimizer, list(model.named_parameters()), dist.group.WORLD)
        stepping: list[bool | None] = []
        optimizer.register_step_pre_hook(lambda own, *args, seen=stepping: seen.append(own.param_groups[0]["fused"]))
        model(torch.ones(1, 8)).sum().backward()
        part.reduce(1.0 / world_size)
        optimizer.step()
        found.append((stepping[0], optimizer.param_groups[0]["fused"]))
    return found


def test_parts_in_host_memory_are_stepped_on_by_the_fused_kernel_unless_another_was_chosen(tmp_path: Path) -> None:
    assert run_ranks(kernel_rank, 2, tmp_path=tmp_path)[0] == [(True, None), (False, False), (None, None)]


def raising_rank(rank: int, world_size: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    part = ZeroPartition(optimizer, list(model.named_parameters()), dist.group.WORLD)

    def closure() -> float:
        raise ValueError

    for saved in (False, True):
        with pytest.raises(ValueError):  # noqa: PT011 - the closure's own
            optimizer.step(closure)
        if saved:
            assert optimizer.state_dict()["param_groups"][0]["fused"] is None
        model(torch.ones(1, 8)).sum().backward()
        part.reduce(1.0 / world_size)
        optimizer.step()
        assert optimizer.param_groups[0]["fused"] is None


def test_a_step_that_raises_leaves_the_kernel_to_its_user(tmp_path: Path) -> None:
    run_ranks(raising_rank, 2, tmp_path=tmp_path)


class Borrower(nn.Module):
    """A module that computes with a parameter of another one, which it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(8, 8, bias=False)
        self.plain = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x + self.owner.weight.dtype.itemsize) @ self.owner.weight


def late_rank(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Borrower()
    reference = copy.deepcopy(model)
    part = ZeroPartition(
        torch.optim.AdamW(model.parameters(), lr=0.1),
        list(model.named_parameters()),
        dist.group.WORLD,
        traffic=Traffic(1),
    )
    part.gather_late(model)
    assert part.late is not None
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        with part.late.forward():
            foreign = [part.shards[index].bucket.names for index in sorted(part.late._foreign)]
            assert foreign == ([] if step == 0 else [("owner.weight",)])
            loss = model(x).pow(2).mean()
        expected = reference(x).pow(2).mean()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        part.reduce(1.0 / world_size)
        part.optimizer.step()
        assert step < 2 or len(part.late._works) == 3
        optimizer.step()
        part.zero_grad()
        optimizer.zero_grad()


def test_a_parameter_that_others_read_is_there_before_they_do(tmp_path: Path) -> None:
    run_ranks(late_rank, 2, tmp_path=tmp_path)


def exchange_states(parts: list[ZeroPartition], models: list[nn.Module], world_size: int) -> None:
    """Save both optimizers, compare what was saved, and read each from the folder of the other."""
    mesh = Mesh.build(MeshShape(world_size, 1, 1), timeout=timedelta(seconds=30))
    saved, views = [], []
    for index, (part, model) in enumerate(zip(parts, models, strict=True)):
        ledger = build_ledger(model, pp_size=1, holds=lambda stage, name: True, specs={})
        place, folder = Place(ledger, mesh), Path(f"state-{index}")
        views.append(OptimizerView(part.optimizer, dict(model.named_parameters()), part))
        pieces, numbers = state_pieces(views[-1], place)
        save_pieces(folder, pieces)
        saved.append(SavedState(TensorIndex(folder), numbers, place))
    one, other = (whole_tensors(state.index) for state in saved)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[label]) for label, tensor in one.items())
    settings = [
        {key: value for key, value in group.items() if key != "params"} for group in parts[0].optimizer.param_groups
    ]
    for view, state in zip(views, reversed(saved), strict=True):
        restore(
            view, state, [{**each, "params": names} for each, names in zip(settings, view.group_names, strict=True)]
        )


def whole_tensors(index: TensorIndex) -> dict[str, torch.Tensor]:
    whole = {label: torch.zeros(shape, dtype=dtype) for label, (shape, dtype) in index.tensors.items()}
    index.read([Piece(label, tuple(tensor.shape), (0,) * tensor.ndim, tensor) for label, tensor in whole.items()])
    return whole


def host_rank(rank: int, world_size: int, dtype: torch.dtype, stage: int) -> None:
    """With the optimizer in host memory: bit for bit what it is without, the same state, in memory of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16))).to(dtype)
    optimizers, parts = [], []
    for host in (None, HostMemory(torch.device("cpu"), pinned=False)):
        reference = copy.deepcopy(model)
        # The other one chooses the same kernel by itself.
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1, fused=None if host else True)
        named = list(reference.named_parameters())
        parts.append(
            ZeroPartition(
                optimizer, named, dist.group.WORLD, stage=stage, traffic=Traffic(bucket_bytes=40000), host=host
            )
        )
        optimizers.append((optimizer, reference))
    for step in range(4):
        if step == 2:  # resume each from the state of the other
            exchange_states(parts, [reference for _, reference in optimizers], world_size)
        for half in range(stage):
            for part, (_, reference) in zip(parts, optimizers, strict=True):
                generator = torch.Generator().manual_seed(100 * step + 10 * half + rank)
                for param in reference.parameters():
                    param.grad = torch.randn(param.shape, generator=generator).to(dtype)
                part.reduce(1.0 / world_size)
        for part, (optimizer, _) in zip(parts, optimizers, strict=True):
            optimizer.step()
            part.zero_grad()
        for one, other in zip(optimizers[0][1].parameters(), optimizers[1][1].parameters(), strict=True):
            assert torch.equal(one, other)
    [_, there], [_, (optimizer, reference)] = parts, optimizers
    assert optimizers[0][0].param_groups[0]["fused"] is True
    assert optimizer.param_groups[0]["fused"] is True  # as saved by the other
    states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    held = [t for shard in there.shards for t in (shard.master, shard.host_gradient)] + states
    assert {t.device.type for t in held} == {"cpu"}
    addresses = {t.untyped_storage().data_ptr() for t in held}
    assert not addresses & {t.untyped_storage().data_ptr() for t in reference.parameters()}
    count = sum(p.numel() for p in model.parameters())
    assert sum(t.untyped_storage().nbytes() for t in held) == pytest.approx(16 * count / world_size, rel=0.05)
    assert len(addresses) == len(held)


@pytest.mark.parametrize(("dtype", "stage"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_an_optimizer_in_host_memory_is_the_same_bit_for_bit(dtype: torch.dtype, stage: int, tmp_path: Path) -> None:
    run_ranks(host_rank, 2, dtype, stage, tmp_path=tmp_path)


def test_adam_takes_the_fused_kernel_for_the_step_only() -> None:
    """And only if its user chose none."""
    parameter = nn.Parameter(torch.ones(3))
    for kind, chosen, expected in (
        (torch.optim.AdamW, {}, True),
        (torch.optim.AdamW, {"foreach": True}, None),
        (torch.optim.AdamW, {"fused": False}, False),
        (torch.optim.SGD, {}, None),
    ):
        optimizer = kind([parameter], lr=0.1, **chosen)
        kernel = FusedOnHost(optimizer)
        kernel.before(optimizer.param_groups)
        assert optimizer.param_groups[0]["fused"] is expected
        kernel.after()
        assert optimizer.param_groups[0]["fused"] is chosen.get("fused")


def test_memory_is_pinned_next_to_a_gpu_only() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    zero = ZeroConfig(stage=1, offload_optimizer="cpu")
    assert (pins(zero, cpu), pins(zero, gpu)) == (False, True)
    assert not pins(zero.model_copy(update={"pin_memory": False}), gpu)
    with pytest.raises(UnsupportedError, match=r"zero\.pin_memory=true with the model on cpu: .*to auto"):
        pins(zero.model_copy(update={"pin_memory": True}), cpu)


def first_step_rank(rank: int, world_size: int, kind: str) -> list[float]:
    """A parameter without a gradient in the first step; largest difference from one process, by step."""
    build = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    }[kind]
    both = [[(name, torch.nn.Parameter(torch.ones(64))) for name in "ab"] for _ in range(2)]
    optimizer, stock = (build([param for _, param in named]) for named in both)
    partition = ZeroPartition(optimizer, both[0], dist.group.WORLD)
    found = []
    for step in range(4):
        for named in both:
            for name, param in named:
                param.grad = None if name == "b" and step == 0 else torch.linspace(1, 2, 64)
        partition.reduce(1 / world_size)
        optimizer.step()
        stock.step()
        partition.zero_grad()
        found.append(max(float((one[1] - other[1]).abs().max()) for one, other in zip(*both, strict=True)))
    return found


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "rmsprop"])
def test_what_a_first_step_left_out_has_no_momentum_of_it(kind: str, tmp_path: Path) -> None:
    for found in run_ranks(first_step_rank, 2, kind, tmp_path=tmp_path):
        assert max(found) < 1e-6
