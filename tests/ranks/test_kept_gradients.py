"""Gradients that user code keeps without a copy and adds to later ones, and hooks that would see a part of a step's: right or refused."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import user_steps
from transformers import Trainer, TrainerCallback


pytestmark = pytest.mark.long

PP2, TP2, SP2 = {"pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}, {"sp_size": 2}
ZERO1, ZERO2 = {"zero": {"stage": 1}}, {"zero": {"stage": 2}}


class Averages(TrainerCallback):
    """As Grokfast's moving average does: what is kept shares the memory of `p.grad` until `p.grad.data` is assigned."""

    def __init__(self) -> None:
        self.kept: dict[str, deque[Any]] = {}

    def follow(self, model: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                kept = self.kept.setdefault(name, deque(maxlen=3))
                kept.append(parameter.grad.data.detach())
                parameter.grad.data = parameter.grad.data + sum(kept) / len(kept)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.follow(model)


class AveragesBetween(Averages):
    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.follow(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        pass


def limits(parameter: Any) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def limits_accumulated(trainer: Any) -> None:
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(limits)


class Late(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def limits_each(trainer: Any) -> None:
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


user_steps.KINDS |= {
    "averages": (Trainer, {"change": lambda trainer: trainer.add_callback(Averages())}),
    "averages_between": (Trainer, {"change": lambda trainer: trainer.add_callback(AveragesBetween())}),
    "limits_accumulated": (Trainer, {"change": limits_accumulated}),
    "limits_each": (Trainer, {"change": limits_each}),
    "limits_late": (Trainer, {"change": lambda trainer: trainer.add_callback(Late())}),
}
KEPT = "that code has kept from before (g = p.grad, or p.grad.detach() without a copy)"
OWN_TOKENS = "has gradient hooks with sp_size=2: they would see the gradient of this rank's tokens alone"
JOBS: user_steps.Jobs = {
    "averages_pp2": ("averages", PP2, "", 0),
    "averages_tp2": ("averages", TP2, "", 0),
    "averages_sp2": ("averages", SP2, "", 0),
    "averages_zero1": ("averages", ZERO1, "", 0),
    "averages_zero2": ("averages", ZERO2, "", 0),
    "averages_between_pp2": ("averages_between", PP2, "", 0),
    "averages_between_tp2": ("averages_between", TP2, "", 0),
    "averages_between_zero2": ("averages_between", ZERO2, KEPT, 1),
    "limits_accumulated_pp2": ("limits_accumulated", PP2, "", 0),
    "limits_accumulated_zero2": ("limits_accumulated", ZERO2, "would see the gradient of this backward pass only", 0),
    "limits_accumulated_sp2": ("limits_accumulated", SP2, OWN_TOKENS, 0),
    "limits_each_sp2": ("limits_each", SP2, OWN_TOKENS, 0),
    "limits_late_sp2": ("limits_late", SP2, OWN_TOKENS, 0),
}


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return user_steps.runs_of(JOBS, tmp_path_factory.mktemp("kept"), many)


@pytest.mark.parametrize("job", JOBS)
def test_right_or_refused(job: str, runs: user_steps.Runs) -> None:
    user_steps.check_job(JOBS, job, runs)
