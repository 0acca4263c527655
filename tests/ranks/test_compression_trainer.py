"""Gradient compression inside a stock Trainer: close to exact training, equal on all replicas, resumable bit for bit.

If these fail, a compressed run drifts apart between replicas, loses what it owes on resume, or is not compressed at all.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from trainer_cases import ENV, NO_NOISE, Case, make_trainer, run_cases

from hf_parallel.checkpoints.state.training_state import read_description
from hf_parallel.errors import CheckpointError


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

BASE = Case("base", model="llama_tied", steps=6, accumulation=2, variable_length=True, arguments=NO_NOISE)
SMALL = {"bucket_cap_mb": 0.02}
PP2 = {"pp_size": 2, "num_microbatches": 3}


def compressed(name: str, method: str, *, steps: int = 6, mesh: dict[str, Any] | None = None, **settings: Any) -> Case:
    compression = {"method": method, "warmup_ratio": 0.0, **settings}
    parallel = {"gradient_compression": compression, "data_parallel": SMALL, **(mesh or {})}
    return dataclasses.replace(BASE, name=name, steps=steps, parallel=parallel)


# Largest relative difference of a loss from the exact run: tiny vectors, six steps.
CLOSE = [
    (compressed("fp16", "fp16"), 2, 1e-5),
    (compressed("bf16", "bf16"), 2, 2e-4),
    (compressed("int8", "int8"), 2, 1e-3),
    (compressed("int4", "int4"), 2, 5e-3),
    (compressed("powersgd", "powersgd", matrix_approximation_rank=2), 2, 3e-2),
    (compressed("topk", "topk", density=0.1, block_size=64), 2, 3e-2),
    (compressed("onebit", "onebit", block_size=64), 2, 3e-2),
    (compressed("int8_zero1", "int8", mesh={"zero": {"stage": 1}}), 2, 1e-3),
    (compressed("int8_zero2", "int8", mesh={"zero": {"stage": 2}}), 2, 1e-3),
    (compressed("int8_dp4", "int8"), 4, 1e-3),
    (compressed("int8_pp2", "int8", mesh=PP2), 4, 1e-3),
    (compressed("int8_tp2", "int8", mesh={"tp_size": 2}), 4, 1e-3),
    (compressed("int4_hierarchical", "int4"), 4, 5e-3),
]


def train_rank(rank: int, world_size: int, cases: list[Case], folder: str) -> list[dict[str, Any]]:
    """Losses, a fingerprint of this rank's parameters, and what the wire counted."""
    found = []
    for case in cases:
        trainer = make_trainer(case, Path(folder) / case.name, world_size)
        trainer.train()
        session = trainer.accelerator.hf_parallel
        wire = session.engine.gradients.replicas.wire
        weights = [parameter.detach().double().sum() for parameter in session.engine.attachment.parameters.values()]
        found.append(
            {
                "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
                "logged": sorted(key for key in trainer.state.log_history[0] if key.startswith("compression/")),
                "weights": float(torch.stack(weights).sum()),
                "place": (session.mesh.pp_rank, session.mesh.tp_rank),
                "ratio": wire.meter.dense_bytes / max(1, wire.meter.wire_bytes),
                "method": type(wire.method).__name__,
            }
        )
        session.watchdog.stop()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size, per_node in ((2, 2), (4, 4), (4, 2)):
        folder = tmp_path_factory.mktemp(f"world{world_size}-{per_node}")
        cases = [case for case, size, _ in CLOSE if size == world_size]
        cases = [case for case in cases if (per_node < world_size) == ("hierarchical" in case.name)]
        if not cases:
            continue
        env = {**ENV, "LOCAL_WORLD_SIZE": str(per_node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
        results = run_ranks(train_rank, world_size, cases, str(folder), tmp_path=folder, timeout=300, env=env)
        found |= {case.name: [ranks[i] for ranks in results] for i, case in enumerate(cases)}
    return found


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    case = dataclasses.replace(BASE, name="exact", parallel=None)
    history = run_cases([case], 1, tmp_path_factory.mktemp("exact"))["exact"]["history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize(("case", "world_size", "tolerance"), CLOSE, ids=lambda value: getattr(value, "name", ""))
def test_a_compressed_run_stays_close_and_replicas_stay_equal(
    case: Case, world_size: int, tolerance: float, runs: dict[str, list[dict[str, Any]]], exact: list[float]
) -> None:
    results = runs[case.name]
    assert len(results) == world_size
    for result in results:
        assert result["losses"] == pytest.approx(exact, rel=tolerance)
        assert result["losses"] == results[0]["losses"]
        copies = [other["weights"] for other in results if other["place"] == result["place"]]
        assert set(copies) == {result["weights"]}, "replicas differ"
        assert result["ratio"] > 1.4  # tiny buckets are padded to whole blocks
        assert result["logged"] == [f"compression/{key}" for key in ("codec_ms", "ratio", "residual_norm", "wire_mb")]
    assert results[0]["losses"] != exact, "nothing was compressed"
    assert results[0]["method"] == (
        "HierarchicalAllReduce"
        if "hierarchical" in case.name
        else "PowerSGD"
        if case.name == "powersgd"
        else "CompressedAllReduce"
    )


@pytest.mark.parametrize("method", ["int4", "topk", "powersgd", "onebit"])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(method: str, tmp_path: Path) -> None:
    case = dataclasses.replace(compressed("run", method, steps=4), save=True)
    whole = run_cases([case], 2, tmp_path)["run"]
    assert read_description(tmp_path / "run" / "checkpoint-2")["wire"]["dp_size"] == 2
    resumed = run_cases([dataclasses.replace(case, resume_at=2)], 2, tmp_path)["run"]
    assert resumed["history"] == whole["history"]


def test_residuals_of_another_method_are_refused_and_other_replicas_share_the_debt(tmp_path: Path) -> None:
    case = dataclasses.replace(compressed("run", "topk", steps=4), save=True)
    run_cases([case], 4, tmp_path)
    resumed = run_cases([dataclasses.replace(case, resume_at=2, save=False)], 2, tmp_path)["run"]
    assert sum("loss" in entry for entry in resumed["history"]) == 4
    other = dataclasses.replace(compressed("run", "int4", steps=4), resume_at=2)
    with pytest.raises(Exception, match=r"residuals of a run with \{'method': 'topk', 'density': 0\.01\}"):
        run_cases([other], 2, tmp_path)
    assert CheckpointError.__name__


def test_the_warm_up_is_exact(tmp_path: Path, exact: list[float]) -> None:
    case = compressed("warm", "topk", warmup_ratio=0.5)
    losses = [e["loss"] for e in run_cases([case], 2, tmp_path)["warm"]["history"] if "loss" in e]
    assert losses[:4] == pytest.approx(exact[:4], abs=1e-5)  # the third step is the last exact one
    assert all(abs(here - there) > 1e-5 for here, there in zip(losses[4:], exact[4:], strict=True))


def common_rank(rank: int, world_size: int, cases: list[Case], folder: str) -> None:
    """What several ranks of one model copy hold in common stays equal bit for bit."""
    for case in cases:
        trainer = make_trainer(case, Path(folder) / case.name, world_size)
        trainer.train()
        session = trainer.accelerator.hf_parallel
        attachment, mesh = session.engine.attachment, session.mesh
        compared = 0
        for name, parameter in attachment.parameters.items():
            entry = attachment.ledger.entries[name]
            if mesh.tp_group is not None:
                parts = [parameter.detach()] if entry.spec is None else []
                if entry.spec is not None:
                    lengths = entry.spec.local_sections(mesh.shape.tp_size, mesh.tp_rank)
                    sections = zip(parameter.detach().split(lengths, entry.spec.dim), entry.spec.sections, strict=True)
                    parts = [part for part, section in sections if not section.sharded]
                for part in parts:
                    first = part.clone()
                    dist.broadcast(first, dist.get_global_rank(mesh.tp_group, 0), group=mesh.tp_group)
                    assert torch.equal(first, part), f"{case.name}: {name} differs between tp ranks"
                    compared += 1
        for holders in attachment.ledger.shared_holders():
            shared = [n for n in attachment.parameters if attachment.ledger.entries[n].holders == holders]
            for name in shared:
                first = attachment.parameters[name].detach().clone()
                source = mesh.shape.rank_at(mesh.dp_rank, holders[0], mesh.tp_rank)
                dist.broadcast(first, source, group=mesh.pp_group)
                assert torch.equal(first, attachment.parameters[name].detach()), f"{case.name}: {name} differs"
                compared += 1
        assert compared, f"{case.name} holds nothing in common"
        session.watchdog.stop()


def test_what_ranks_hold_in_common_is_compressed_alike(tmp_path: Path) -> None:
    """A code whose block also holds a shard would differ from rank to rank, and so would what is decoded from it."""
    cases = [
        compressed("common_tp_int8", "int8", mesh={"tp_size": 2}, exclude=[]),
        compressed("common_tp_topk", "topk", mesh={"tp_size": 2}, exclude=[], density=0.05),
        compressed("common_tp_powersgd", "powersgd", mesh={"tp_size": 2}, exclude=[], matrix_approximation_rank=2),
        compressed("common_pp_int4", "int4", mesh=PP2, exclude=[]),
    ]
    cases = [
        dataclasses.replace(case, model="llama_tied" if "pp" in case.name else "qwen3", steps=3) for case in cases
    ]
    run_ranks(common_rank, 4, cases, str(tmp_path), tmp_path=tmp_path, timeout=200, env=ENV)
