"""If these fail, another order of the axes or a sum in two steps trains something else than one process does."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import nn
from trainer_cases import ENV, NO_NOISE, Case, compare, make_trainer, run_cases, wanted_cases
from transformers import TrainerCallback

from hf_parallel.batches import refuse_unlike
from hf_parallel.data_parallel.node_wire import NodeWire
from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.replica_wire import ReplicaSettings, make_node_wire, make_replica_wire
from hf_parallel.data_parallel.wire import PlainWire, Traffic
from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.meeting import meeting_of_copy, meeting_of_replicas
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.links import Links
from hf_parallel.mesh.ranks import links_here
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.replica_sections import GradientCompressionConfig


PP2 = {"pp_size": 2, "num_microbatches": 2}
NODES = {"nodes": 2, "gpus_per_node": 2}
SMALL = {"bucket_cap_mb": 0.02}
BASE = Case("base", model="llama_tied", steps=3, accumulation=2, variable_length=True, arguments=NO_NOISE)


def laid(name: str, topology: dict[str, Any], **settings: Any) -> Case:
    return replace(BASE, name=name, parallel={"topology": topology, "data_parallel": SMALL, **settings})


CASES = [
    laid("pp2_dp2_stages_inside", NODES | {"dp_inside": 1}, **PP2),
    replace(
        laid("pp2_dp2_replicas_inside", NODES | {"dp_inside": 2}, **PP2),
        evaluate=True,
        metrics=True,
        variable_length=False,
        eval_count=40,
    ),
    laid("pp2_dp2_chosen", {"fast": 2}, **PP2),
    laid("pp2_dp2_zero1_replicas_inside", NODES | {"dp_inside": 2}, **PP2, zero={"stage": 1}),
    laid(
        "pp2_dp2_zbv_replicas_inside",
        NODES | {"dp_inside": 2},
        pp_size=2,
        schedule="zbv_zero_bubble",
        num_microbatches=2,
    ),
    laid("tp2_dp2", NODES, tp_size=2),
    laid("sp2_dp2_nodes", NODES, sp_size=2),
    replace(laid("ep2_dp4_nodes", NODES, ep_size=2), model="deepseek_v3"),
    replace(laid("pp2_ep2_dp2_replicas_inside", NODES | {"dp_inside": 2}, **PP2, ep_size=2), model="deepseek_v3"),
    laid("dp4_nodes", NODES),
    laid("dp4_zero1_in_nodes", NODES, zero={"stage": 1, "dp_shard_size": 2}),
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    wanted = wanted_cases(request, CASES)
    return run_cases(wanted, 4, tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    stock = [replace(case, parallel=None) for case in wanted_cases(request, CASES)]
    return run_cases(stock, 1, tmp_path_factory.mktemp("one"))


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_equals_one_process_however_its_axes_lie(
    case: Case, runs: dict[str, dict[str, Any]], references: dict[str, dict[str, Any]]
) -> None:
    compare(runs[case.name], references[case.name])


def resume_rank(rank: int, world_size: int, folder: str, inside: int) -> list[float]:
    """The losses of steps 3 and 4 of a run that goes on from step 2 of one with another order."""
    case = replace(laid("run", NODES | {"dp_inside": inside}, **PP2), steps=4, resume_at=2)
    trainer = make_trainer(case, Path(folder), world_size)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    trainer.accelerator.hf_parallel.watchdog.stop()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("inside", [1, 2])
def test_a_run_goes_on_under_the_other_order(inside: int, tmp_path: Path) -> None:
    case = replace(laid("run", NODES | {"dp_inside": inside}, **PP2), steps=4, save=True)
    whole = [entry["loss"] for entry in run_cases([case], 4, tmp_path)["run"]["history"] if "loss" in entry]
    options: dict[str, Any] = {"tmp_path": tmp_path, "timeout": 200, "env": ENV}
    for losses in run_ranks(resume_rank, 4, str(tmp_path / "run"), 3 - inside, **options):
        assert losses == pytest.approx(whole, rel=1e-5)


def start_rank(rank: int, world_size: int, folder: str, case: Case) -> tuple[list[str], tuple[int, ...]]:
    """What rank 0 says of the links, and where this rank stands."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage().removeprefix("hf_parallel: "))

    logging.getLogger("hf_parallel").addHandler(Lines())
    logging.getLogger("hf_parallel").setLevel(logging.INFO)
    trainer = make_trainer(case, Path(folder), world_size)
    mesh = trainer.accelerator.hf_parallel.mesh
    trainer.accelerator.hf_parallel.watchdog.stop()
    first = next((index for index, line in enumerate(lines) if line.startswith("links: ")), len(lines))
    return [line for line in lines[first:] if line.startswith(("links: ", "  "))], mesh.shape.coordinates(rank)


def test_the_planner_chooses_and_rank_0_says_what_crosses_which_link(tmp_path: Path) -> None:
    # Two machines as the launcher says it. The model is wider than its rows are long: gradients are more than activations.
    env = ENV | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    case = replace(BASE, accumulation=1, variable_length=False, parallel=dict(PP2))
    found = run_ranks(start_rank, 4, str(tmp_path), case, tmp_path=tmp_path, env=env)
    lines, places = found[0][0], [place for _, place in found]
    assert places == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)]
    assert lines[0] == "links: 2 nodes of 2 ranks; neighbours are the replicas of a stage"
    assert [line.split(" MB")[0].rpartition(" ")[0] for line in lines[1:3]] == [
        "  pp 2: network",
        "  dp 2: links inside a node",
    ]
    assert lines[3].startswith("  sent in a step, by the planner: ")
    assert all(not said for said, _ in found[1:])


def scattered_rank(rank: int, world_size: int, places: list[int]) -> tuple[list[str], Links]:
    """What is said, and taken, where a launcher gives ranks these places on two machines."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("hf_parallel").addHandler(Lines())
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(places[rank])}
    return lines, links_here(HFParallelConfig(pp_size=2).topology.links)


def test_ranks_that_are_dealt_out_to_machines_in_turn_are_said_to_be(tmp_path: Path) -> None:
    found = run_ranks(scattered_rank, 4, [0, 0, 1, 1], tmp_path=tmp_path)
    assert [len(lines) for lines, _ in found] == [1, 0, 0, 0]
    assert found[0][0][0].startswith(
        "hf_parallel: rank 1 is number 0 of the 2 ranks of its machine: ranks of a machine are not"
    )
    assert {links for _, links in found} == {Links(1, 4, 4)}


def test_ranks_of_a_machine_may_be_numbered_in_any_order(tmp_path: Path) -> None:
    assert run_ranks(scattered_rank, 4, [1, 0, 0, 1], tmp_path=tmp_path) == [([], Links(2, 2, 2))] * 4


def test_one_machine_has_no_map(tmp_path: Path) -> None:
    case = replace(BASE, accumulation=1, parallel=dict(PP2))
    assert run_ranks(start_rank, 2, str(tmp_path), case, tmp_path=tmp_path, env=ENV)[0] == ([], (0, 0, 0, 0))


COUNTED = [
    replace(
        laid(name, NODES | {"dp_inside": 2}, **PP2, **more), model=model, variable_length=False, arguments=arguments
    )
    for name, model, arguments, more in (
        ("fp32", "llama", NO_NOISE, {}),
        ("autocast", "llama", NO_NOISE | {"bf16": True}, {}),
        ("half", "llama_half", NO_NOISE, {}),
        ("half_sums", "llama", NO_NOISE, {"data_parallel": {"reduce_dtype": "bfloat16"}}),
    )
]


def counted_rank(rank: int, world_size: int, folder: str) -> list[tuple[float, float, float, float]]:
    """Bytes to the other stage and to the other replica in a step, of each case: by the planner, and counted."""
    counts: dict[str, int] = {}

    def counting(name: str) -> Any:
        call = getattr(dist.ProcessGroup, name)

        def counted(group: Any, tensors: list[torch.Tensor], *rest: Any) -> Any:
            if group.size() == 2 or name == "send":  # a ring of two sends all that it sums
                counts[name] = counts.get(name, 0) + sum(tensor.nbytes for tensor in tensors)
            return call(group, tensors, *rest)

        return counted

    for name in ("send", "allreduce"):
        setattr(dist.ProcessGroup, name, counting(name))

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            counts.clear()  # the last step stays

    found = []
    for case in COUNTED:
        trainer = make_trainer(case, Path(folder) / case.name, world_size, [Steps()])
        trainer.train()
        session = trainer.accelerator.hf_parallel
        session.watchdog.stop()
        sent = session.placement.sent
        found.append((sent["pp"] / 2, counts["send"], sent["dp"][session.mesh.pp_rank], counts["allreduce"]))
    return found


def test_as_many_bytes_are_sent_as_the_map_says_in_each_precision(tmp_path: Path) -> None:
    found = run_ranks(counted_rank, 4, str(tmp_path), tmp_path=tmp_path, timeout=120, env=ENV)
    for ranks in zip(*found, strict=True):
        for stages, sent, replicas, summed in ranks:
            assert sent == pytest.approx(stages, rel=0.02)
            assert summed == pytest.approx(replicas, rel=0.02)
    whole, autocast, half, half_sums = found[0]
    assert autocast[1] == pytest.approx(2 * half[1], rel=0.02)  # the residual stream is as wide as the parameters
    assert whole[3] == pytest.approx(2 * half_sums[3], rel=0.02)


def sums_rank(rank: int, world_size: int) -> tuple[list[Any], list[Any], int, int]:
    """Gradients by a wire over two nodes and by one ring, bytes between nodes by the wire, bytes of the buckets."""
    mesh = Mesh.build(
        MeshShape(world_size, 1, 1), timeout=timedelta(seconds=30), links=Links(2, world_size // 2, world_size // 2)
    )
    nodes = mesh.node_groups()
    assert nodes is not None
    wire, found = NodeWire(*nodes, torch.device("cpu")), []
    for one in (wire, PlainWire(dist.group.WORLD)):
        generator = torch.Generator().manual_seed(rank)
        named = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate([(7, 5), (3,), (40, 3), (1,)])]
        reducer = GradientReducer(named, dist.group.WORLD, Traffic(300, wire=one))
        for name, param in named:
            if name != "p3" and (name != "p1" or rank == 1):  # p3 has no gradient anywhere, p1 on one rank
                param.grad = torch.randn(param.shape, generator=generator)
        reducer.reduce(0.25)
        assert named[3][1].grad is None
        found.append([param.grad.tolist() for _, param in named[:3]])
    return found[0], found[1], wire.meter.wire_bytes, wire.counters.bytes


@pytest.mark.parametrize("world_size", [4, 6])
def test_sums_inside_nodes_are_alike_on_all_ranks_and_every_element_crosses_once_a_node(
    world_size: int, tmp_path: Path
) -> None:
    ranks = run_ranks(sums_rank, world_size, tmp_path=tmp_path)
    for mine, flat, between, total in ranks:
        for one, other, first in zip(mine, flat, ranks[0][0], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-7)
            assert one == first, "replicas differ"
        # 2 * 1/2 of what a rank has a part of; one ring would send 2 * (N - 1) / N of all out of each node.
        assert total <= between * world_size // 2 <= total + 8 * world_size * 4


def uneven_rank(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether codes travel between nodes alone, and whether sums do, where nodes have one and two replicas of a stage."""
    links = Links(2, world_size // 2, world_size // 2)
    mesh = Mesh.build(MeshShape(world_size // 2, 2, 1), timeout=timedelta(seconds=30), links=links)
    parameters = {"weight": nn.Parameter(torch.ones(8, 8))}
    ledger: Any = SimpleNamespace(entries={"weight": SimpleNamespace(spec=None)})
    int8 = GradientCompressionConfig(method="int8")
    wire = make_replica_wire(ReplicaSettings(compression=int8), int8, ledger, parameters, mesh)
    assert wire is not None
    parameters["weight"].grad = torch.full((8, 8), float(mesh.dp_rank))
    GradientReducer(list(parameters.items()), mesh.dp_group, Traffic(300, wire=wire)).reduce(1.0)
    torch.testing.assert_close(parameters["weight"].grad, torch.full((8, 8), 3.0), rtol=0.02, atol=0.0)
    return mesh.node_groups() is None, make_node_wire(ReplicaSettings(), parameters, mesh) is None


def test_codes_and_sums_go_around_one_ring_where_nodes_have_different_numbers_of_replicas(tmp_path: Path) -> None:
    assert run_ranks(uneven_rank, 6, tmp_path=tmp_path) == [(True, True)] * 6


def words_rank(rank: int, world_size: int) -> tuple[str, list[int]]:
    """Whom the comparison of batches names where the last rank of this copy has another one."""
    mesh = Mesh.build(MeshShape(2, 2, 1, dp_inside=2), timeout=timedelta(seconds=30))
    meeting_of_copy(mesh).meet("a call of the copy")
    meeting_of_replicas(mesh).meet("a call of the replicas")
    mine = torch.tensor([float(rank)])
    rows = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(rows, mine, group=mesh.mp_group)
    assert [int(row) for row in rows] == mesh.copy_ranks
    assert mesh.copy_ranks[mesh.place_in_copy] == rank
    with pytest.raises(RankMismatchError) as caught:
        refuse_unlike(mesh, [1, 2])
    return str(caught.value), mesh.copy_ranks


def test_the_ranks_of_a_copy_are_named_as_they_are(tmp_path: Path) -> None:
    said = run_ranks(words_rank, 4, tmp_path=tmp_path)
    assert [ranks for _, ranks in said] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert said[1][0].startswith(
        "rank 3 (pp 1 of 2, dp 1 of 2) read a different batch than rank 1 (pp 0 of 2, dp 1 of 2)"
    )
