"""A penalty over all weights that a callback backpropagates by itself: on each layout as in one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from callback_runs import ENV, assert_same_state, trained_with
from rank_runner import run_ranks
from thinning import rest_runs, slow_if
from transformers import TrainerCallback


pytestmark = pytest.mark.long


MOMENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step")
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "tp2": {"tp_size": 2},
    "tp2_shared_sequence": {"tp_size": 2, "tensor_parallel": {"sequence_parallel": True}},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "sp2": {"sp_size": 2},
    "pp2_zero1": {"pp_size": 2, "num_microbatches": 2, "zero": {"stage": 1}},
    "pp2_tp2": {"pp_size": 2, "tp_size": 2, "num_microbatches": 2},
    "pp2_2bw": {"pp_size": 2, "num_microbatches": 2, "schedule": "pipedream_2bw"},
}
FOUR = ("pp2_zero1", "pp2_tp2")
ONE_STAGE = "a rank has the parameters of its own stages only"
BETWEEN = "is read or limited between two batches of a step"
REFUSED = {("pp2", "one_norm", moment): ONE_STAGE for moment in MOMENTS}
REFUSED["pp2", "by_hand", "on_substep_end"] = BETWEEN
REFUSED["pp2_zero1", "norms", "on_pre_optimizer_step"] = (
    "a callback's own backward came after those of the step were reduced"
)
REFUSED["pp2_2bw", "by_hand", "on_step_begin"] = "parameters had gradients when a step began"


def squares(model: Any) -> None:
    (0.05 * sum(p.square().sum() for p in model.parameters())).backward()


def norms(model: Any) -> None:
    (0.05 * sum(p.norm() for p in model.parameters())).backward()


def rows(model: Any) -> None:
    """What has another shape than a part of a matrix, and one matrix by itself."""
    (0.05 * sum(p.abs().amax(dim=-1).sum() for p in model.parameters())).backward()
    for name, parameter in model.named_parameters():
        if name.endswith("v_proj.weight"):
            (3 * (parameter - parameter.mean()).pow(2).mean()).backward()


def beside(model: Any) -> None:
    """A whole number, a whole vector and a part of a matrix in one product, of a block that a stage has or has not."""
    parameters = {name: p for name, p in model.named_parameters() if name.startswith("model.layers.1.")}
    if parameters:
        block = "model.layers.1."
        scaled = parameters[f"{block}self_attn.v_proj.weight"] * parameters[f"{block}input_layernorm.weight"]
        matrix = parameters[f"{block}mlp.down_proj.weight"]
        (0.3 * scaled.pow(2).sum()).backward()
        (matrix.norm(dim=0).pow(2).sum() * matrix.abs().max()).backward()


def by_hand(model: Any) -> None:
    for parameter in model.parameters():
        added = 0.1 * parameter.detach()
        parameter.grad = added if parameter.grad is None else parameter.grad + added


def one_norm(model: Any) -> None:
    """No sum over parameters."""
    (0.3 * torch.stack([p.norm() for p in model.parameters()]).norm()).backward()


PENALTIES = (squares, norms, rows, beside, by_hand, one_norm)


class Decay(TrainerCallback):
    def __init__(self, moment: str, penalty: str) -> None:
        apply = globals()[penalty]

        def event(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            apply(model)

        setattr(self, moment, event)


def trained(rank: int, world_size: int, cases: list[tuple[str, str, str]]) -> dict[str, Any]:
    found = {}
    for moment, penalty, layout in cases:
        try:
            found[f"{moment} {penalty} {layout}"] = run_of(
                moment, penalty, LAYOUTS[layout] if layout != "one" else None
            )
        except Exception as error:  # judged by the test
            found[f"{moment} {penalty} {layout}"] = f"{type(error).__name__}: {error}"
    return found


def run_of(moment: str, penalty: str, parallel: dict[str, Any] | None) -> dict[str, Any]:
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, "logging_steps": 1, "adam_epsilon": 1e-4}
    return trained_with(Decay(moment, penalty), parallel, **options)


PARTS = ("tp2", "pp2")
OTHERS = ("dp2", "zero1", "zero3", "sp2", "tp2_shared_sequence")
CASES = [(moment, penalty.__name__, layout) for layout in PARTS for moment in MOMENTS for penalty in PENALTIES]
CASES += [(moment, "norms", layout) for layout in FOUR for moment in MOMENTS]
CASES += [("on_step_begin", "norms", layout) for layout in OTHERS] + [("on_step_begin", "beside", "pp2_tp2")]
CASES += [("on_step_begin", "by_hand", layout) for layout in ("pp2_zero1", "pp2_2bw")]
NAMES, AXES = [penalty.__name__ for penalty in PENALTIES], (*PARTS, *FOUR)


def is_in_turn(moment: str, penalty: str, layout: str) -> bool:
    """A penalty is on an axis at one of the moments, on the next axis at the next one."""
    turn = (NAMES.index(penalty) + AXES.index(layout)) % len(MOMENTS)
    only_refused_there = (layout, penalty, moment) in REFUSED and penalty != "one_norm"
    return MOMENTS.index(moment) == turn or only_refused_there


# Slow: variations of what the other cases show.
REST = [
    case
    for case in CASES
    if (case[2] in PARTS or case[1:] in [("norms", layout) for layout in FOUR]) and not is_in_turn(*case)
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("penalties")
    chosen = [case for case in CASES if case not in REST or rest_runs(request)]
    alone = list(dict.fromkeys((moment, penalty, "one") for moment, penalty, _ in chosen))
    found = run_ranks(trained, 1, alone, tmp_path=folder, env=ENV, init_group=False)[0]
    for layout in LAYOUTS:
        refused = [case for case in chosen if case[2] == layout and (layout, case[1], case[0]) in REFUSED]
        mine = [case for case in chosen if case[2] == layout and case not in refused]
        for cases in [*([mine] if mine else []), *([case] for case in refused)]:
            found |= run_ranks(trained, 4 if layout in FOUR else 2, cases, tmp_path=folder, env=ENV, timeout=120.0)[0]
    return dict(found)


@pytest.mark.parametrize(
    ("moment", "penalty", "layout"), [pytest.param(*case, marks=slow_if(case, REST)) for case in CASES]
)
def test_a_penalty_of_a_callback(moment: str, penalty: str, layout: str, runs: dict[str, Any]) -> None:
    mine, alone = runs[f"{moment} {penalty} {layout}"], runs[f"{moment} {penalty} one"]
    expected = REFUSED.get((layout, penalty, moment))
    if expected is not None:
        assert isinstance(mine, str), "it trained"
        assert expected in mine
        return
    assert not isinstance(mine, str), mine
    torch.testing.assert_close(torch.tensor(mine["history"]), torch.tensor(alone["history"]), rtol=1e-5, atol=0)
    assert_same_state(mine["state"], alone["state"])
