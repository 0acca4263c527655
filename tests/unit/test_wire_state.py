"""Residuals in checkpoints: a debt that any number of replicas can take over, and that is never taken for another."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_parallel.errors import CheckpointError
from hf_parallel.gradient_compression.feedback import ErrorFeedback
from hf_parallel.mesh import Mesh, MeshShape
from hf_parallel.replica_sections import GradientCompressionConfig
from hf_parallel.wire_state import load_wire, save_wire, wire_file


ALONE = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))
TOPK = GradientCompressionConfig(method="topk")


def mesh(dp_size: int, dp_rank: int) -> Mesh:
    return dataclasses.replace(ALONE, shape=MeshShape(dp_size, 1, 1), rank=dp_rank)


def wire(residuals: dict[str, torch.Tensor] | None = None) -> Any:
    """The part of a wire that a checkpoint sees."""
    feedback = ErrorFeedback()
    if residuals is not None:
        feedback.load(residuals)

    def load(state: dict[str, dict[str, torch.Tensor]]) -> None:
        feedback.load(state["residual"])

    return SimpleNamespace(state=lambda: {"residual": feedback.state()}, load=load, feedback=feedback)


def saved(folder: Path, replicas: int) -> list[dict[str, torch.Tensor]]:
    debts = [{"a": torch.randn(3, 4), "b": torch.randn(5)} for _ in range(replicas)]
    for rank, debt in enumerate(debts):
        save_wire(folder, wire(debt), TOPK, mesh(replicas, rank))
    return debts


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_other_replicas_owe_the_same_in_all(replicas: int, tmp_path: Path) -> None:
    debts = saved(tmp_path, 4)
    loaded = []
    for rank in range(replicas):
        target = wire()
        load_wire(tmp_path, target, TOPK, mesh(replicas, rank))
        loaded.append(target.feedback.state())
    for name in ("a", "b"):
        before = torch.stack([debt[name] for debt in debts]).sum(0)
        torch.testing.assert_close(torch.stack([debt[name] for debt in loaded]).sum(0), before)
        if replicas == 4:
            assert all(torch.equal(new[name], old[name]) for new, old in zip(loaded, debts, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GradientCompressionConfig(method="onebit"), r"residuals of a run with \{'method': 'topk'.*'onebit'"),
        (GradientCompressionConfig(method="topk", density=0.02), r"'density': 0\.01\}, this run has .*0\.02"),
    ],
)
def test_another_method_or_density_is_refused(
    settings: GradientCompressionConfig, message: str, tmp_path: Path
) -> None:
    saved(tmp_path, 2)
    with pytest.raises(CheckpointError, match=message):
        load_wire(tmp_path, wire(), settings, mesh(2, 0))


def test_another_layout_a_missing_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    other = dataclasses.replace(ALONE, shape=MeshShape(1, 1, 2), rank=0)
    with pytest.raises(CheckpointError, match=r"'tp_size': 1\}, this run has \{'pp_size': 1, 'tp_size': 2\}"):
        load_wire(tmp_path, wire(), TOPK, other)
    wire_file(tmp_path, mesh(2, 1), 1).write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_wire(tmp_path, wire(), TOPK, mesh(2, 1))
    with pytest.raises(CheckpointError, match=r"no residuals .*save_residual to false"):
        load_wire(tmp_path / "nowhere", wire(), TOPK, mesh(2, 0))


def test_nothing_is_written_or_asked_for_without_a_debt(tmp_path: Path) -> None:
    for settings in (
        GradientCompressionConfig(method="int8"),
        GradientCompressionConfig(method="topk", save_residual=False),
    ):
        save_wire(tmp_path, wire({"a": torch.ones(2)}), settings, mesh(2, 0))
        load_wire(tmp_path, wire(), settings, mesh(2, 0))
    assert list(tmp_path.iterdir()) == []
