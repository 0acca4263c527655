"""Residuals in checkpoints: a debt that any number of replicas can take over, and that is never taken for another."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_parallel.checkpoints.state.dcp import TensorIndex, save_pieces
from hf_parallel.checkpoints.state.optimizer import Place
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.checkpoints.state.residuals import method_of, restore_wire, wire_pieces
from hf_parallel.data_parallel.compression.feedback import ErrorFeedback
from hf_parallel.errors import CheckpointError
from hf_parallel.ledger import build_ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.settings.replica_sections import GradientCompressionConfig
from hf_parallel.tensor_parallel.layout import ShardSpec


ALONE = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))
TOPK = GradientCompressionConfig(method="topk")
NAMES = ("a", "b")


def place(dp_size: int, dp_rank: int, tp_size: int = 1, tp_rank: int = 0) -> Place:
    whole = nn.ParameterDict({"a": nn.Parameter(torch.zeros(3, 4)), "b": nn.Parameter(torch.zeros(5))})
    specs = {"a": ShardSpec.contiguous(1, 4)} if tp_size > 1 else {}
    shape = MeshShape(dp_size, 1, tp_size)
    mesh = dataclasses.replace(ALONE, shape=shape, rank=shape.rank_at(dp_rank, 0, tp_rank))
    return Place(build_ledger(whole, pp_size=1, holds=lambda stage, name: True, specs=specs), mesh)


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
    pieces: list[Piece] = []
    for rank, debt in enumerate(debts):
        pieces += wire_pieces(wire(debt), place(replicas, rank))
    save_pieces(folder, pieces)
    return debts


def restored(
    folder: Path, replicas: int, here: Place, settings: GradientCompressionConfig = TOPK
) -> dict[str, torch.Tensor]:
    target, said = wire(), {"method": method_of(TOPK), "dp_size": replicas}
    restore_wire(target, TensorIndex(folder), said, settings, NAMES, here)
    return target.feedback.state()


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_other_replicas_owe_the_same_in_all(replicas: int, tmp_path: Path) -> None:
    debts = saved(tmp_path, 4)
    loaded = [restored(tmp_path, 4, place(replicas, rank)) for rank in range(replicas)]
    for name in NAMES:
        before = torch.stack([debt[name] for debt in debts]).sum(0)
        torch.testing.assert_close(torch.stack([debt[name] for debt in loaded]).sum(0), before)
        if replicas == 4:
            assert all(torch.equal(new[name], old[name]) for new, old in zip(loaded, debts, strict=True))


def test_other_tensor_parallel_shards_owe_the_same(tmp_path: Path) -> None:
    debts = saved(tmp_path, 2)
    for dp_rank, debt in enumerate(debts):
        parts = [restored(tmp_path, 2, place(2, dp_rank, 2, tp_rank)) for tp_rank in range(2)]
        assert torch.equal(torch.cat([part["a"] for part in parts], dim=1), debt["a"])
        assert all(torch.equal(part["b"], debt["b"]) for part in parts)


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
        restored(tmp_path, 2, place(2, 0), settings)


def test_a_missing_debt_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"no residuals .*save_residual to false"):
        restore_wire(wire(), TensorIndex(tmp_path), None, TOPK, NAMES, place(2, 0))
    next(tmp_path.glob("*.distcp")).write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match="It is damaged"):
        restored(tmp_path, 2, place(2, 0))
