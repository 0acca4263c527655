"""Callbacks of the user in a stock Trainer clip gradients, read them on one rank alone, and change weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_cases
from rank_runner import run_ranks
from thinning import covering, rest_runs, slow_if
from torch.nn.utils import clip_grad_norm_
from trainer_cases import Case
from transformers import TrainerCallback


pytestmark = pytest.mark.long


class Clips(TrainerCallback):
    """Clips by itself, and logs the largest gradient on the first rank."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.norms.append(float(clip_grad_norm_(model.parameters(), 0.3)))
        # Shards are read by all tensor-parallel ranks together; whatever else a rank may look at by itself.
        if state.is_world_process_zero and "tp2" not in args.output_dir:
            assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) > 0.0


class Halves(TrainerCallback):
    """Changes weights in every way, at several moments."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.03, 0.03)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.7)


class Decays(TrainerCallback):
    """Changes weights by the gradients of the step that has just been made."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-2)


ARGUMENTS = {**trainer_cases.NO_NOISE}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero1_offload": {"zero": {"stage": 1, "offload_optimizer": "cpu"}},
    "zero1_late": {"zero": {"stage": 1, "overlap_gather": True}},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2": {"tp_size": 2},
}
CALLBACKS = {"clips": Clips, "halves": Halves, "decays": Decays}


CASES = [(layout, kind, accumulation) for layout in LAYOUTS for kind in CALLBACKS for accumulation in (1, 2)]
# Slow: kinds meet the layouts whose optimizer has parts in turns, and each of the others with one of the two accumulations.
PAIRS = covering(
    [(kind, layout) for kind in CALLBACKS for layout in LAYOUTS], [("zero1", "zero2"), ("zero1_offload", "zero1_late")]
)
REST = [
    (layout, kind, accumulation)
    for layout, kind, accumulation in CASES
    if (kind, layout) not in PAIRS or PAIRS.index((kind, layout)) % 2 != accumulation - 1
]


def case(layout: str, kind: str, accumulation: int) -> Case:
    options: dict[str, Any] = {"model": "llama_tied", "steps": 5, "accumulation": accumulation, "arguments": ARGUMENTS}
    parallel = LAYOUTS.get(layout)
    return Case(f"{layout}-{kind}-{accumulation}", clip=0.0, batch=4, parallel=parallel, **options)


def main(rank: int, world_size: int, cases: list[tuple[str, str, int]], folder: str) -> dict[str, Any]:
    found = {}
    for layout, kind, accumulation in cases:
        one = case(layout, kind, accumulation)
        callback = CALLBACKS[kind]()
        trainer = trainer_cases.make_trainer(one, Path(folder) / one.name, world_size, [callback])
        trainer.train()
        session = getattr(trainer.accelerator, "hf_parallel", None)
        state = trainer.accelerator.get_state_dict(trainer.model)
        if session is not None:
            session.watchdog.stop()
        history = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        weights = {name: tensor.detach().clone().numpy() for name, tensor in state.items()}
        found[one.name] = {"history": history, "norms": getattr(callback, "norms", []), "state": weights}
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mine = [each for each in CASES if each not in REST or rest_runs(request)]
    ones = [("one", kind, accumulation) for kind, accumulation in dict.fromkeys(each[1:] for each in mine)]
    for world_size, cases in ((1, ones), (2, mine)):
        folder = tmp_path_factory.mktemp("callbacks")
        options = {"init_group": world_size > 1, "env": trainer_cases.ENV, "timeout": 200.0}
        found |= run_ranks(main, world_size, cases, str(folder), tmp_path=folder, **options)[0]
    return found


@pytest.mark.parametrize(
    ("layout", "kind", "accumulation"), [pytest.param(*each, marks=slow_if(each, REST)) for each in CASES]
)
def test_what_a_callback_does_is_in_effect(layout: str, kind: str, accumulation: int, runs: dict[str, Any]) -> None:
    mine, other = (runs[f"{name}-{kind}-{accumulation}"] for name in (layout, "one"))
    assert mine["norms"] == pytest.approx(other["norms"], rel=1e-5)
    assert mine["history"] == pytest.approx(other["history"], abs=1e-5)
    for name in mine["state"]:
        here, there = torch.from_numpy(mine["state"][name]), torch.from_numpy(other["state"][name])
        assert float((here - there).norm() / there.norm()) < 1e-5, name
