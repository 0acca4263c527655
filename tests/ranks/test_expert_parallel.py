"""Experts on several replicas train as one stock process does.

If a row fails, a token reached another expert than it was routed to, the gradient of an expert was divided by the number of
its copies instead of that of the replicas, counted twice in the norm, or saved under the experts of another rank.
"""

from __future__ import annotations

from typing import Any

import pytest
from trainer_cases import NO_NOISE, Case, compare, run_cases, wanted_cases


pytestmark = [pytest.mark.timeout(300)]

def case_of(name: str, model: str, world: int = 2, **settings: Any) -> tuple[int, Case]:
    """A run of a model: settings of the run and of hf_parallel."""
    own = {key: settings.pop(key) for key in list(settings) if key in ("batch", "accumulation", "variable_length")}
    arguments = NO_NOISE if model == "gpt_oss" or own.get("variable_length") else {}
    # Mixtral's auxiliary loss is that of each replica's tokens, as with plain replicas, so it must equal those.
    reference = world // settings.get("pp_size", 1) if model == "mixtral" else 1
    parallel = {"ep_size": 2, **settings}
    return world, Case(name, model=model, steps=3, arguments=arguments, parallel=parallel, reference=reference, **own)


WINDOWS = {"batch": 4, "accumulation": 3, "variable_length": True}
MATRIX = [
    case_of("dp2_ep2_mixtral", "mixtral"),
    case_of("dp2_ep2_gpt_oss", "gpt_oss"),
    case_of("dp2_ep2_windows_deepseek_v3", "deepseek_v3", **WINDOWS),
    case_of("dp2_ep2_zero1_deepseek_v3", "deepseek_v3", **{"zero.stage": 1}),
    case_of("dp2_ep2_recompute_gpt_oss", "gpt_oss", every=1),
    case_of("dp2_ep2_selective_deepseek_v3", "deepseek_v3", every=1, **{"activation_checkpointing.mode": "selective"}),
    case_of("dp4_ep2_mixtral", "mixtral", 4),
    case_of("dp4_ep4_deepseek_v3", "deepseek_v3", 4, ep_size=4),
    case_of("dp4_ep2_zero1_windows_gpt_oss", "gpt_oss", 4, **{"zero.stage": 1}, **WINDOWS),
    case_of("pp2_ep2_deepseek_v3", "deepseek_v3", 4, pp_size=2, num_microbatches=2),
    case_of("pp2_ep2_zero1_windows_mixtral", "gpt_oss", 4, pp_size=2, **{"zero.stage": 1}, **WINDOWS),
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    wanted = {case.name for case in wanted_cases(request, [case for _, case in MATRIX])}
    found: dict[str, dict[str, Any]] = {}
    for world in sorted({world for world, _ in MATRIX}):
        cases = [case for size, case in MATRIX if size == world and case.name in wanted]
        if cases:
            found |= run_cases(cases, world, tmp_path_factory.mktemp(f"ranks{world}"))
    return found


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for _, case in MATRIX])
def test_experts_on_several_replicas_train_as_one_process(
    case: Case, runs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    import dataclasses

    stock = dataclasses.replace(case, name="stock", parallel=None)
    reference = run_cases([stock], case.reference, tmp_path_factory.mktemp("stock"))["stock"]
    compare(runs[case.name], reference)
