"""What may differ is derived from runs of one process that rounding alone drives apart, choices of experts included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_parallel.proof.compare import EXACT, MARGIN, _numbers
from hf_parallel.proof.job import Job
from hf_parallel.proof.watch import EPS, Ties, perturb


def test_near_ties_of_a_choice_go_either_way_and_others_stay() -> None:
    near = 0.5 * (1 + 0.2 * EPS["bf16"])
    rows = torch.tensor([[0.5, near, float("-inf")], [0.6, 0.3, 0.1]]).repeat(64, 1)
    scores = rows.clone().requires_grad_()
    with Ties(EPS["bf16"], 1):
        values, chosen = torch.topk(scores, 1, dim=-1)
    assert set(chosen[::2, 0].tolist()) == {0, 1}
    assert set(chosen[1::2, 0].tolist()) == {0}
    assert values.equal(scores.gather(-1, chosen))  # what is chosen keeps its score
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.sum() == 128
    with Ties(EPS["fp32"], 1):
        assert torch.topk(rows, 1).indices[::2, 0].eq(1).all()


def test_a_run_with_an_even_seed_turns_every_near_tie() -> None:
    near = 0.5 * (1 + 0.2 * EPS["bf16"])
    rows = torch.tensor([[0.5, near, 0.1], [0.6, 0.3, 0.1]])
    with Ties(EPS["bf16"], 2):
        assert rows.topk(k=1).indices[:, 0].tolist() == [0, 0]
        assert rows.topk(2, dim=-1).indices.sort().values.tolist() == [[0, 1], [0, 1]]
        assert torch.topk(-rows, 1, -1, False).indices[:, 0].tolist() == [0, 0]
        assert torch.topk(rows.T, 1, 0).indices[0].tolist() == [0, 0]
        assert torch.topk(torch.arange(3), 1).indices.item() == 2


def test_only_a_perturbed_run_moves_anything() -> None:
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    assert perturb(model, EPS["bf16"], 0) is None
    assert model.weight.equal(before)
    assert isinstance(perturb(model, EPS["bf16"], 1), Ties)
    moved = (model.weight - before).abs() / before.abs()
    assert 0 < moved.max() <= EPS["bf16"] / 2 * 1.001


def run(folder: Path, losses: list[float]) -> None:
    folder.mkdir()
    logged: list[dict[str, Any]] = [{"loss": loss} for loss in losses]
    (folder / "run.json").write_text(json.dumps({"logged": logged}))


def test_what_a_number_may_differ_by_is_its_spread_over_all_steps(tmp_path: Path) -> None:
    run(tmp_path / "reference", [2.0, 2.0])
    run(tmp_path / "perturbed1", [2.0, 2.002])  # by chance no difference in the first step
    run(tmp_path / "perturbed2", [2.0, 1.999])
    run(tmp_path / "rank0", [2.001, 2.1])
    first, second = _numbers(Job("", steps=2), tmp_path)
    assert first.allowed == second.allowed == pytest.approx(MARGIN * 1e-3)
    assert (first.excess <= 1, second.excess > 1) == (True, True)
    run(tmp_path / "rank1", [2.001, 2.1])
    for place in ("perturbed1", "perturbed2"):
        (tmp_path / place / "run.json").write_text((tmp_path / "reference" / "run.json").read_text())
    assert {each.allowed for each in _numbers(Job("", steps=2), tmp_path)} == {EXACT}
