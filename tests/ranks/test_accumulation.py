"""A recipe that says how many batches a step has gives that number, or is refused.

If these fail, a run trains with another global batch than its file says.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from trainer_cases import ENV, Case, make_trainer

from hf_parallel.errors import ConfigError
from hf_parallel.settings.accumulation import accumulation_steps


CASE = Case("accumulated", steps=2, batch=4, parallel={"gradient_accumulation_steps": 3})


def trainer_losses(case: Case, folder: str, world_size: int, recipe: dict[str, Any] | None = None) -> list[float]:
    callbacks = []
    if recipe is not None:
        from hf_parallel import HFParallelCallback

        callbacks = [HFParallelCallback(recipe)]
    trainer = make_trainer(case, Path(folder), world_size, callbacks)
    trainer.train()
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    assert trainer.args.gradient_accumulation_steps == 3
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def loop_steps(accumulates: bool, given: int = 1) -> tuple[int, int]:
    """Batches of a step, and optimizer steps of 4 batches, of a loop without a Trainer."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = HFParallelPlugin({"gradient_accumulation_steps": 2})
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=given, parallelism_config=plugin)
    model = tiny.llama(layers=1)
    steps, optimizer = 0, torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
        ids = torch.arange(1, 9).view(1, 8)
        for _ in range(4):
            if accumulates:
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=ids, labels=ids).loss)
                    steps += accelerator.sync_gradients
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
    finally:
        accelerator.hf_parallel.watchdog.stop()
    return accelerator.gradient_accumulation_steps, steps


def two_ranks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"trainer": trainer_losses(CASE, folder, world_size)}
    for name, action in {
        "trainer of two": lambda: make_trainer(dataclasses.replace(CASE, accumulation=2), Path(folder), world_size),
        "loop": lambda: loop_steps(accumulates=True),
        "loop that steps at once": lambda: loop_steps(accumulates=False),
        "loop of three": lambda: loop_steps(accumulates=True, given=3),
    }.items():
        try:
            found[name] = action()
        except ConfigError as error:
            found[name] = str(error)
    return found


def one_rank(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    stock = dataclasses.replace(CASE, parallel=None, accumulation=3)
    trial = dataclasses.replace(CASE, parallel=None)
    recipe = {"gradient_accumulation_steps": 3}
    return trainer_losses(stock, folder, world_size), trainer_losses(trial, folder, world_size, recipe)


def test_the_number_of_the_settings_is_the_number_of_the_run_or_an_error(tmp_path: Path) -> None:
    [(stock, trial)] = run_ranks(one_rank, 1, str(tmp_path), tmp_path=tmp_path, init_group=False, env=ENV)
    assert trial == stock  # a trial on one process accumulates as well
    for found in run_ranks(two_ranks, 2, str(tmp_path), tmp_path=tmp_path, env=ENV):
        assert found["trainer"] == pytest.approx(stock, abs=1e-5)
        assert (
            "gradient_accumulation_steps=3 with TrainingArguments(gradient_accumulation_steps=2)"
            in found["trainer of two"]
        )
        assert found["loop"] == (2, 2)
        assert "Put its body into `with accelerator.accumulate(model):`" in found["loop that steps at once"]
        assert (
            "gradient_accumulation_steps=2 with Accelerator(gradient_accumulation_steps=3)" in found["loop of three"]
        )


@pytest.mark.parametrize(("wanted", "given", "expected"), [("auto", 4, 4), (8, 1, 8), (8, 8, 8), (1, 1, 1)])
def test_one_number_is_agreed_on(wanted: Any, given: int, expected: int) -> None:
    assert accumulation_steps(wanted, given, "TrainingArguments") == expected


@pytest.mark.parametrize(("wanted", "given"), [(1, 4), (8, 4)])
def test_two_numbers_are_refused_with_a_fix(wanted: int, given: int) -> None:
    with pytest.raises(ConfigError, match=rf"Leave it out of TrainingArguments, or set .* to {given} or 'auto'"):
        accumulation_steps(wanted, given, "TrainingArguments")
