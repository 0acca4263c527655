"""A stock Trainer with the callback on a mesh trains exactly as one process does.

If a row fails, users' training is silently different from what they had: loss normalisation, gradient reduction,
clipping, data sharding or saving is wrong for that row's settings.
"""

from __future__ import annotations

from typing import Any

import pytest
from trainer_cases import NO_NOISE, Case, compare, run_cases, stock, wanted_cases


# All runs happen in the set-up of the first test.
pytestmark = pytest.mark.timeout(900)


PP2 = {"pp_size": 2, "num_microbatches": 4}
PP2_TP2 = {"pp_size": 2, "tp_size": 2, "num_microbatches": 3}

TWO_RANKS = [
    Case("pp2", parallel=PP2, steps=5),
    Case("pp2_no_clip", parallel=PP2, clip=0.0, steps=3),
    Case("pp2_gpipe", parallel={**PP2, "schedule": "gpipe"}, steps=3),
    Case("pp2_accumulation", parallel=PP2, accumulation=4, steps=3),
    Case("pp2_measured", parallel={**PP2, "costs": "measured"}, steps=3),
    Case("pp2_host_transport", parallel={**PP2, "transport": "host"}, steps=3),
    Case("pp2_variable_tied", model="llama_tied", parallel=PP2, accumulation=2, variable_length=True, steps=4),
    Case("pp2_short_last_batch", parallel=PP2, count=29, steps=5),  # four steps an epoch
    Case("pp2_incomplete_window", parallel=PP2, count=40, accumulation=3, steps=4, variable_length=True),
    Case(
        "pp2_local_counts",
        parallel=PP2,
        accumulation=3,
        variable_length=True,
        steps=3,
        arguments={"average_tokens_across_devices": False},
    ),
    Case("pp2_smoothing", parallel=PP2, variable_length=True, steps=3, arguments={"label_smoothing_factor": 0.1}),
    Case(
        "pp2_smoothing_router",  # stock goes through the outputs of an evaluation that uses the loss alone
        model="mixtral",
        parallel=PP2,
        steps=3,
        evaluate=True,
        arguments={"label_smoothing_factor": 0.1},
    ),
    Case("pp2_loss_func", parallel=PP2, accumulation=2, variable_length=True, loss="func", steps=3),
    Case("pp2_mean_loss_func", parallel=PP2, accumulation=2, variable_length=True, loss="func_mean", steps=3),
    Case("pp2_loss_subclass", parallel=PP2, accumulation=2, variable_length=True, loss="subclass", steps=3),
    Case("pp2_checkpointing", parallel=PP2, arguments={"gradient_checkpointing": True}, steps=3),
    Case("pp2_user_optimizer", parallel=PP2, steps=3, user_optimizer=True),
    Case("pp2_eval_metrics", parallel=PP2, steps=4, evaluate=True, metrics=True, variable_length=True),
    Case("pp2_eval_loss_only", parallel=PP2, evaluate=True, steps=4),
    Case("pp2_gpt2", model="gpt2", parallel=PP2, variable_length=True, steps=3, arguments=NO_NOISE),
    Case("pp2_qwen3", model="qwen3", parallel={**PP2, "split": [1, 3]}, variable_length=True, steps=3),
    Case("pp2_mixtral", model="mixtral", parallel={"pp_size": 2, "num_microbatches": 1}, steps=3),
    Case("tp2_tied", model="llama_tied", parallel={"tp_size": 2}, accumulation=2, variable_length=True, steps=3),
    Case("tp2_gpt2", model="gpt2", parallel={"tp_size": 2}, steps=3, arguments=NO_NOISE),
    Case("tp2_user_optimizer", parallel={"tp_size": 2}, steps=3, user_optimizer=True),
    Case("tp2_qwen3", model="qwen3", parallel={"tp_size": 2}, accumulation=2, evaluate=True, metrics=True, steps=4),
    Case(
        "tp2_smoothing",
        parallel={"tp_size": 2},
        variable_length=True,
        steps=3,
        arguments={"label_smoothing_factor": 0.1, **NO_NOISE},
    ),
    Case("tp2_loss_func", parallel={"tp_size": 2}, accumulation=2, variable_length=True, loss="func", steps=3),
    Case("dp2", parallel={}, steps=5),
    Case("dp2_variable", accumulation=2, variable_length=True, steps=3),
    Case("dp2_eval", evaluate=True, metrics=True, eval_count=40, steps=4),
    # Ragged tails: accelerate fills the last batch with repeated rows, so one process is no reference but stock DDP is.
    Case(
        "dp2_ragged", accumulation=3, count=45, steps=3, variable_length=True, evaluate=True, metrics=True, reference=2
    ),
]
FOUR_RANKS = [
    Case("pp2_dp2", model="llama_tied", parallel=PP2, accumulation=2, variable_length=True, steps=3),
    Case("pp2_dp2_subclass", parallel=PP2, accumulation=2, variable_length=True, loss="subclass", steps=3),
    Case("pp2_dp2_eval", parallel=PP2, evaluate=True, metrics=True, eval_count=40, steps=4),
    Case(
        "pp2_dp2_ragged",
        parallel=PP2,
        accumulation=3,
        count=45,
        steps=3,
        variable_length=True,
        evaluate=True,
        metrics=True,
        reference=2,
    ),
    Case("pp2_tp2", model="llama_tied", parallel=PP2_TP2, accumulation=2, variable_length=True, steps=3),
    Case("pp2_tp2_gpt2", model="gpt2", parallel=PP2_TP2, evaluate=True, metrics=True, steps=4, arguments=NO_NOISE),
    Case("pp2_tp2_untied", parallel=PP2_TP2, accumulation=2, variable_length=True, steps=3),
    Case(
        "pp2_tp2_smoothing",
        model="llama_tied",
        parallel=PP2_TP2,
        variable_length=True,
        steps=3,
        arguments={"label_smoothing_factor": 0.1, **NO_NOISE},
    ),
    Case("pp2_tp2_qwen3", model="qwen3", parallel=PP2_TP2, accumulation=2, steps=3),
    Case("tp2_dp2", model="llama_tied", parallel={"tp_size": 2}, accumulation=2, variable_length=True, steps=3),
    Case(
        "pp4",
        model="gpt2",
        parallel={"pp_size": 4, "num_microbatches": 3},
        steps=3,
        variable_length=True,
        arguments=NO_NOISE,
    ),
]


# The auxiliary loss of a router is not a sum over rows, so microbatches change it a little; once for each would be plain.
MOE_MICROBATCHES = Case("pp2_mixtral_microbatches", model="mixtral", parallel=PP2, steps=3)


# Variations of what the other rows show.
LONG = (
    "pp2_accumulation",
    "pp2_incomplete_window",
    "pp2_user_optimizer",
    "pp2_gpt2",
    "pp2_dp2_eval",
    "pp2_tp2_gpt2",
    "pp2_measured",
    "pp2_host_transport",
    "pp2_local_counts",
    "pp2_mean_loss_func",
    "pp2_smoothing_router",
    "tp2_qwen3",
    "pp2_dp2_ragged",
)
# Slow: of those that the other long rows show on another or on several axes; schedules are in test_schedule_parity.py.
REST = (
    "pp2_gpipe",
    "pp2_no_clip",
    "pp2_smoothing",
    "pp2_checkpointing",
    "pp2_mixtral",
    "pp2_qwen3",
    "tp2_loss_func",
    "tp2_user_optimizer",
    "pp2_tp2_smoothing",
    "dp2_ragged",
    "pp2_eval_loss_only",
    "tp2_gpt2",
    "tp2_smoothing",
    "dp2",
    "pp2_dp2_subclass",
    "pp2_tp2_untied",
    "pp2_tp2_qwen3",
)


def marked(case: Case) -> Any:
    marks = [pytest.mark.long] if case.name in LONG + REST else []
    return pytest.param(case, marks=[*marks, *([pytest.mark.slow] if case.name in REST else [])], id=case.name)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The runs of the chosen tests: one launch a world size, all its cases in it."""
    two, four = wanted_cases(request, [*TWO_RANKS, MOE_MICROBATCHES]), wanted_cases(request, FOUR_RANKS)
    found: dict[str, dict[str, Any]] = {}
    for world_size, chosen in (
        (1, [stock(case) for case in two + four if case.reference == 1]),
        (2, two + [stock(case) for case in two + four if case.reference == 2]),
        (4, four),
    ):
        found |= run_cases(chosen, world_size, tmp_path_factory.mktemp(f"world{world_size}"))
    return found


@pytest.mark.parametrize("case", [marked(case) for case in TWO_RANKS + FOUR_RANKS])
def test_a_mesh_trains_as_the_stock_trainer_does(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    compare(runs[case.name], runs[f"stock_{case.name}"])


@pytest.mark.parametrize("case", [MOE_MICROBATCHES], ids=["pp2"])
def test_microbatches_average_a_router_loss(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    pairs = zip(runs[case.name]["history"], runs[f"stock_{case.name}"]["history"], strict=False)
    losses = [(here["loss"], there["loss"]) for here, there in pairs if "loss" in here and "loss" in there]
    assert len(losses) == 3
    for here, there in losses:
        assert here == pytest.approx(there, abs=0.05)
