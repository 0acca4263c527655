"""Ranks that start with different weights train as under stock DDP: with those of rank 0.

A seed with the rank in it, a random head, adapters drawn after unequal draws: if a row fails, replicas part from the first
step on, or a model is stitched together from the draws of several ranks, and no loss says so.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from trainer_cases import ENV, NO_NOISE, Case, compare, run_case


pytestmark = pytest.mark.long


def own_draw(model: Any, names: str = "") -> Any:
    """Change the tensors whose name has `names` in it, on every rank in another way; rank 0 has the reference's."""
    generator = torch.Generator().manual_seed(100 + int(os.environ.get("RANK", "0")))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if names in name and tensor.is_floating_point():
                tensor.mul_(1 + 0.1 * torch.rand(tensor.shape, generator=generator))
                tensor.add_(0.02 * torch.randn(tensor.shape, generator=generator))
    return model


def frozen_draw(model: Any) -> Any:
    """Frozen blocks that differ: no optimizer and no reduction ever touches them."""
    model.model.layers[1].requires_grad_(False)
    return own_draw(model, "layers.1")


DRAWN = {
    "drawn_llama": lambda: own_draw(tiny.llama(tied=True)),
    "drawn_gpt2": lambda: own_draw(tiny.gpt2()),
    "drawn_mixtral": lambda: own_draw(tiny.mixtral()),
    "drawn_head": lambda: own_draw(tiny.llama(), "lm_head"),
    "drawn_frozen": lambda: frozen_draw(tiny.llama()),
    "drawn_buffers": lambda: own_draw(tiny.llama(), "inv_freq"),
    "drawn_lora": lambda: own_draw(tiny.llama_lora(), "lora_"),
    "drawn_mamba": lambda: own_draw(tiny.mamba()),
}
tiny.MODELS |= DRAWN

PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}
TP2: dict[str, Any] = {"tp_size": 2}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp2": (2, "drawn_llama", {}),
    "dp2_head": (2, "drawn_head", {}),
    "dp2_frozen": (2, "drawn_frozen", {}),
    "dp2_buffers": (2, "drawn_buffers", {}),
    "dp2_lora": (2, "drawn_lora", {}),
    "dp2_zero1": (2, "drawn_llama", {"zero": {"stage": 1}}),
    "dp2_zero2_lora": (2, "drawn_lora", {"zero": {"stage": 2}}),
    "dp2_zero3": (2, "drawn_gpt2", {"zero": {"stage": 3}}),
    "dp2_zero3_buffers": (2, "drawn_buffers", {"zero": {"stage": 3}}),
    "pp2": (2, "drawn_llama", PP2),
    "pp2_frozen": (2, "drawn_frozen", PP2),
    "pp2_buffers": (2, "drawn_buffers", PP2),
    "pp2_mamba": (2, "drawn_mamba", PP2),
    "tp2": (2, "drawn_llama", TP2),
    "tp2_mixtral": (2, "drawn_mixtral", TP2),
    "tp2_buffers": (2, "drawn_buffers", TP2),
    "pp2_dp2": (4, "drawn_gpt2", PP2),
    "tp2_dp2_zero1": (4, "drawn_llama", {**TP2, "zero": {"stage": 1}}),
}
SLOW = {"dp2_head", "dp2_zero3_buffers", "pp2_frozen", "pp2_mamba", "tp2_buffers", "tp2_mixtral", "tp2_dp2_zero1"}


def drawn_main(rank: int, world_size: int, cases: list[Case], folder: str) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(run_case(case, Path(folder) / case.name, world_size))) for case in cases]


def launched(world_size: int, cases: list[Case], folder: Path) -> dict[str, dict[str, Any]]:
    results = run_ranks(
        drawn_main,
        world_size,
        cases,
        str(folder),
        tmp_path=folder,
        timeout=280,
        init_group=world_size > 1,
        env=ENV,
    )
    return {case.name: result for case, result in zip(cases, results[0], strict=True)}


def case_of(name: str, model: str, parallel: dict[str, Any]) -> Case:
    return Case(name, model, steps=3, accumulation=2, count=48, arguments=NO_NOISE, parallel=parallel)


def runs_of(names: list[str], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    models = sorted({CASES[name][1] for name in names})
    references = launched(1, [case_of(model, model, {}) for model in models], folder / "references")
    found: dict[str, Any] = {}
    for world_size in (2, 4):
        cases = [case_of(n, *CASES[n][1:]) for n in names if CASES[n][0] == world_size]
        found |= launched(world_size, cases, folder / "runs") if cases else {}
    return found, references


@pytest.fixture(scope="module")
def fast_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return runs_of([name for name in CASES if name not in SLOW], tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return runs_of(sorted(SLOW), tmp_path_factory.mktemp("start_slow"))


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_ranks_with_draws_of_their_own_train_with_those_of_rank_0(name: str, fast_runs: Any) -> None:
    found, references = fast_runs
    compare(found[name], references[CASES[name][1]])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_more_layouts_with_draws_of_their_own_train_with_those_of_rank_0(name: str, slow_runs: Any) -> None:
    found, references = slow_runs
    compare(found[name], references[CASES[name][1]])
