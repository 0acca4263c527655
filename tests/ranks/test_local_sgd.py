"""Local steps: replicas walk alone between synchronisations and are one model whenever anybody looks.

If these fail, replicas drift apart for good, or a run with local steps is not what its settings say.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import nn
from trainer_cases import ENV, NO_NOISE, Case, make_trainer, run_cases

from hf_parallel.data_parallel.local_sgd import LocalSteps


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

BASE = Case("base", model="llama_tied", steps=6, variable_length=True, arguments=NO_NOISE)


def local(name: str, every: int, mesh: dict[str, Any] | None = None, **settings: Any) -> Case:
    return dataclasses.replace(
        BASE, name=name, parallel={"local_sgd": {"sync_every": every, **settings}, **(mesh or {})}
    )


def steps_rank(rank: int, world_size: int) -> None:
    """Against the algorithm written out: local SGD, an outer Nesterov step on the mean of the ways."""
    for momentum, every in ((0.0, 1), (0.0, 3), (0.9, 2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        copies = [[p.detach().clone() for p in model.parameters()] for _ in range(world_size)]
        common = [p.detach().clone() for p in model.parameters()]
        buffers = [torch.zeros_like(p) for p in common]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = LocalSteps(
            list(model.named_parameters()), dist.group.WORLD, sync_every=every, outer_lr=0.7, outer_momentum=momentum
        )
        inner.register_step_post_hook(steps.after_step)
        for step in range(1, 7):
            for r, replica in enumerate(copies):
                generator = torch.Generator().manual_seed(100 * step + r)
                for index, value in enumerate(replica):
                    gradient = torch.randn(value.shape, generator=generator)
                    if r == rank:
                        list(model.parameters())[index].grad = gradient.clone()
                    value -= 0.1 * gradient
            inner.step()
            if step % every == 0:
                for index, value in enumerate(common):
                    way = torch.stack([value - replica[index] for replica in copies]).mean(0)
                    buffers[index] = momentum * buffers[index] + way if step > every else way.clone()
                    value -= 0.7 * (way + momentum * buffers[index] if momentum else way)
                    for replica in copies:
                        replica[index].copy_(value)
            for param, value in zip(model.parameters(), copies[rank], strict=True):
                torch.testing.assert_close(param, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_local_steps_are_the_algorithm(world_size: int, tmp_path: Path) -> None:
    run_ranks(steps_rank, world_size, tmp_path=tmp_path)


CASES = [
    (local("h3", 3), 2),
    (local("h3_momentum", 3, outer_lr=0.7, outer_momentum=0.9), 2),
    (local("h3_int4", 3, compression={"method": "int4"}), 2),
    (local("h4_evaluated", 4), 2),
    (local("h2_pp2", 2, {"pp_size": 2, "num_microbatches": 2}), 4),
    (local("h2_tp2_topk", 2, {"tp_size": 2}, compression={"method": "topk", "density": 0.25}), 4),
]


def train_rank(rank: int, world_size: int, cases: list[Case], folder: str) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        chosen = dataclasses.replace(case, evaluate="evaluated" in case.name, eval_count=16)
        trainer = make_trainer(chosen, Path(folder) / case.name, world_size)
        trainer.train()
        session = trainer.accelerator.hf_parallel
        gradients, mesh = session.engine.gradients, session.mesh
        weights = [p.detach().double().sum() for p in session.engine.attachment.parameters.values()]
        wire = gradients.replicas.wire
        found.append(
            {
                "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
                "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
                "weights": float(torch.stack(weights).sum()),
                "place": (mesh.pp_rank, mesh.tp_rank),
                "collectives": gradients.replicas.local._wire.counters.collectives,
                "buckets": len(gradients.replicas.local._buckets),
                "ratio": wire.meter.dense_bytes / wire.meter.wire_bytes if wire is not None else 1.0,
            }
        )
        session.watchdog.stop()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for world_size in (2, 4):
        folder = tmp_path_factory.mktemp(f"world{world_size}")
        cases = [case for case, size in CASES if size == world_size]
        results = run_ranks(train_rank, world_size, cases, str(folder), tmp_path=folder, timeout=300, env=ENV)
        found |= {case.name: [ranks[i] for ranks in results] for i, case in enumerate(cases)}
    return found


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    history = run_cases([dataclasses.replace(BASE, parallel=None)], 1, tmp_path_factory.mktemp("one"))["base"][
        "history"
    ]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize(("case", "world_size"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_replicas_end_as_one_model_and_talk_only_when_they_should(
    case: Case, world_size: int, runs: dict[str, list[dict[str, Any]]], synchronous: list[float]
) -> None:
    results = runs[case.name]
    every = int(case.name[1])
    # Six steps; a run that is evaluated every second step is brought together then, and at its end.
    synchronisations = 3 if "evaluated" in case.name else 6 // every
    for result in results:
        copies = [other["weights"] for other in results if other["place"] == result["place"]]
        assert set(copies) == {result["weights"]}, "replicas differ"
        assert result["collectives"] == synchronisations * result["buckets"]
        assert result["losses"] == pytest.approx(synchronous, rel=2e-2)
    assert results[0]["losses"][0] == pytest.approx(synchronous[0], rel=1e-5)
    assert results[0]["losses"] != synchronous
    if "int4" in case.name or "topk" in case.name:
        assert results[0]["ratio"] > 1.5


@pytest.mark.parametrize("compression", [{}, {"method": "int4"}, {"method": "topk", "density": 0.1}])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(compression: dict[str, Any], tmp_path: Path) -> None:
    settings = {"outer_lr": 0.7, "outer_momentum": 0.9, "compression": compression}
    case = dataclasses.replace(local("run", 2, **settings), steps=4, save=True)
    whole = run_cases([case], 2, tmp_path)["run"]
    resumed = run_cases([dataclasses.replace(case, resume_at=2)], 2, tmp_path)["run"]
    assert resumed["history"] == whole["history"]
