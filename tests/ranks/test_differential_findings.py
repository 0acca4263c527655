"""What `make differential` has found, as the fewest features that show it; see benchmarks/differential_cases.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from thinning import rest_runs, slow_if


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from differential import Runner  # noqa: E402
from differential_cases import Setup  # noqa: E402


pytestmark = pytest.mark.long


PP2: dict[str, Any] = {"num_microbatches": 2, "schedule": "1f1b"}
TO_PP2 = {"tp_size": 1, "pp_size": 2, **PP2}
TO_TP2, TO_DP2 = {"tp_size": 2, "pp_size": 1}, {"tp_size": 1, "pp_size": 1}


def resumed(seed: int, resume: dict[str, Any], optimizer: str, **changes: Any) -> Setup:
    """A run that goes on from step 2; rates rise until then, so that a wrong one is seen."""
    return Setup(seed=seed, steps=4, resume=resume, optimizer=optimizer, scheduler="warmup", **changes)


GROUPS = {
    "a group a parameter, stages": resumed(1, TO_PP2, "RatesByAttribute", pp=2, settings=PP2, model="stablelm"),
    "a group a parameter, stages to shards": resumed(2, TO_TP2, "RatesByName", pp=2, settings=PP2),
    "a group a parameter, copies to stages": resumed(3, TO_PP2, "RatesByName", dp=2, model="llama_tied"),
    "a group a parameter, stages to copies": resumed(4, TO_DP2, "RatesByName", pp=2, settings=PP2, model="llama_tied"),
    "a group a parameter, stages to ZeRO": resumed(
        5, {**TO_DP2, "zero": {"stage": 1}}, "RatesByAttribute", pp=2, settings=PP2, model="gpt2"
    ),
}
FORWARDS = {
    "loss and entropy, stages": Setup(seed=11, loss="LossAndEntropy", pp=2, settings=PP2, accumulation=2),
    "loss and entropy, shards": Setup(seed=12, loss="LossAndEntropy", tp=2, variable=True),
    "loss and entropy, stages and shards": Setup(seed=13, loss="LossAndEntropy", tp=2, pp=2, settings=PP2),
    "two forwards, stages": Setup(seed=14, loss="TwoForwards", pp=2, settings=PP2, accumulation=2, model="qwen3"),
    "a loss backpropagated twice, stages": Setup(seed=15, driver="half_twice", pp=2, settings=PP2, model="llama_tied"),
}
HOOKS = {
    "a hook on a block, two stages": Setup(seed=21, before="louder_block", pp=2, settings=PP2, model="gpt2_untied"),
    "a hook on a block, two stages a rank": Setup(
        seed=22, before="louder_block", pp=2, settings={**PP2, "schedule": "interleaved_1f1b"}, model="bloom"
    ),
}
GRADIENTS = {
    "scaled gradients of parts": Setup(seed=31, callback="ScaleGradients", dp=2, settings={"zero": {"stage": 1}}),
    "dropped gradients of parts": Setup(seed=32, callback="DropGradients", dp=2, settings={"zero": {"stage": 1}}),
}
FREEZING = {
    "frozen parts": Setup(seed=41, callback="FreezeLater", dp=2, settings={"zero": {"stage": 1}}, accumulation=2),
}
PENALTY = {
    "a penalty over all parameters, shards": Setup(seed=51, loss="Regularised", tp=2, evaluate=True, model="bloom"),
}
ZBV = {"num_microbatches": 2, "schedule": "zbv_zero_bubble"}
AGAIN = {
    "blocks run again for a loss on logits, zero bubble": Setup(
        seed=61, loss="loss_row_mean", recompute="alternate", pp=2, settings=ZBV
    ),
}
WRITES = {
    "a block that writes to a part of a sequence": Setup(
        seed=71, model="falcon", tp=2, settings={"sequence_parallel": True}, rows=3, recompute="stock"
    ),
}
RELOADED = {
    "weights kept by one callback and loaded by another, shards": Setup(
        seed=81, callback="Reload", tp=2, model="gpt2"
    ),
}
# Slow: what another set-up of the same finding shows, on one axis of several or on more stages.
REST = (
    "a group a parameter, stages",
    "a group a parameter, stages to copies",
    "loss and entropy, stages",
    "loss and entropy, shards",
    "a hook on a block, two stages",
)
SETUPS = RELOADED | WRITES | AGAIN | FREEZING | PENALTY | GROUPS | FORWARDS | HOOKS | GRADIENTS


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    setups = {name: setup for name, setup in SETUPS.items() if name not in REST or rest_runs(request)}
    places = [ROOT, ROOT / "tests", ROOT / "benchmarks"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(map(str, places)))
        found = Runner(tmp_path_factory.mktemp("findings")).verdicts(list(setups.values()))
    return {name: f"{v.word}: {v.text}" for name, v in zip(setups, found, strict=True)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name, REST)) for name in SETUPS])
def test_a_setup_trains_as_one_process(name: str, verdicts: dict[str, str]) -> None:
    assert verdicts[name].startswith("equal"), verdicts[name]
