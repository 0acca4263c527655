"""Tensor parallelism together with pipelines, replicas and accumulation trains as one stock process does.

If a row fails, adding tensor parallelism to a working recipe trains something else: a partial gradient summed twice or
not at all, a shard clipped by its own norm, a tied weight updated on one end only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from trainer_cases import NO_NOISE, Case, compare, run_cases, wanted_cases


# All runs happen in the set-up of the first test.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


# Tied; norms per head; Conv1D; fused projections; positions as biases; sinks and experts; a router's auxiliary loss;
# latents and shared experts; a scan; three heads and one key-value head on two ranks.
KINDS = ("llama_tied", "qwen3", "gpt2", "phi3", "bloom", "gpt_oss", "mixtral", "deepseek_v3", "mamba", "uneven")

# These have key biases, whose true gradient is zero. In rows of several lengths a single element of any model may have
# a gradient of 1e-9, its rounding error; AdamW divides by that too.
KEY_BIASES = ("gpt2", "bloom", "gpt_oss")


def cases_of(model: str) -> list[Case]:
    """The three layouts of one model."""
    cut = {"pp_size": 2, "tp_size": 2, "num_microbatches": 1 if model == "mixtral" else 2}
    common: dict[str, Any] = {"model": model, "steps": 3, "arguments": NO_NOISE if model in KEY_BIASES else {}}
    windows = {**common, "arguments": NO_NOISE, "batch": 4, "accumulation": 3, "variable_length": True}
    return [
        Case(f"pp2_tp2_{model}", parallel=cut, **common),
        Case(f"tp2_dp2_{model}", parallel={"tp_size": 2}, reference=2 if model == "mixtral" else 1, **common),
        Case(f"pp2_tp2_windows_{model}", parallel=cut, **windows),
    ]


MATRIX = [case for model in KINDS for case in cases_of(model)]

# Models take turns: on stages with or without windows, or on replicas; the rest of the product is slow. The loss of a router,
# which is no sum over rows, is on both. A tied Llama on replicas is in test_trainer_parity.py.
ON_REPLICAS = ("gpt2", "bloom", "mamba", "mixtral")
ON_STAGES = ("mixtral", "uneven")


def marked(case: Case) -> Any:
    kinds = [f"tp2_dp2_{model}" for model in ON_REPLICAS] + [f"pp2_tp2_{model}" for model in ON_STAGES]
    in_windows = case.model not in (*ON_REPLICAS, *ON_STAGES) and case.accumulation > 1
    return pytest.param(case, marks=() if in_windows or case.name in kinds else pytest.mark.slow, id=case.name)


def reference_of(case: Case) -> Case:
    """The stock run it must equal; layouts that read the same batches share it."""
    name = f"stock{case.reference}_{case.model}_{case.accumulation}"
    return dataclasses.replace(case, name=name, parallel=None)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = wanted_cases(request, MATRIX)
    references = {reference_of(case).name: reference_of(case) for case in cases}
    found: dict[str, dict[str, Any]] = {}
    for world_size in (1, 2):
        chosen = [case for case in references.values() if case.reference == world_size]
        found |= run_cases(chosen, world_size, tmp_path_factory.mktemp(f"stock{world_size}"))
    return found | run_cases(cases, 4, tmp_path_factory.mktemp("world4"))


@pytest.mark.parametrize("case", [marked(case) for case in MATRIX])
def test_a_mesh_with_tp_trains_as_the_stock_trainer_does(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[case.name], runs[reference_of(case).name])
