"""Asynchronous schedules train as one process does whose gradients are made of older weights (`trainer_cases.Delayed`).

If a row fails, microbatches run with the weights of another step than they should, on one stage or in one direction, or
gradients of one window reach the update of another.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from trainer_cases import ENV, NO_NOISE, Case, compare, make_trainer, run_cases, wanted_cases
from transformers import Trainer, TrainerCallback


# All runs happen in the set-up of the first test.
pytestmark = pytest.mark.timeout(600)


def case_of(name: str, pp_size: int, parts: int, **more: Any) -> Case:
    schedule = more.pop("schedule", "pipedream_2bw")
    settings = {"pp_size": pp_size, "schedule": schedule, **({"num_microbatches": parts} if parts > 1 else {})}
    settings |= more.pop("settings", {})
    delay = pp_size - 1 if schedule == "pipedream" else 1
    return Case(name, parallel=settings, delay=delay, arguments={**NO_NOISE, **more.pop("arguments", {})}, **more)


def apart_case(name: str, split: tuple[int, ...], **more: Any) -> Case:
    """PipeDream without vertical sync: stages step at different times."""
    settings = {"vertical_sync": False, "split": list(split), **more.pop("settings", {})}
    return case_of(name, len(split), 1, schedule="pipedream", settings=settings, delay_split=split, clip=0.0, **more)


ZERO1: dict[str, Any] = {"zero": {"stage": 1}}
OFFLOADED: dict[str, Any] = {"zero": {"stage": 1, "offload_optimizer": "cpu"}}
DEFAULT = [
    case_of("2bw_pp2_m4", 2, 4, model="llama_tied", variable_length=True),
]
TWO = [
    case_of("2bw_pp2_m1", 2, 1, settings={"num_microbatches": 1}),
    case_of("2bw_pp2_windows", 2, 2, accumulation=2, count=40, steps=7, variable_length=True),
    case_of("2bw_pp2_recompute", 2, 4, arguments={"gradient_checkpointing": True}),
    case_of("2bw_pp2_evaluates", 2, 4, evaluate=True, metrics=True),
    case_of("2bw_pp2_gpt2", 2, 3, model="gpt2", variable_length=True, loss="func"),
    case_of("2bw_pp2_no_clip", 2, 4, clip=0.0),
    case_of("2bw_pp2_lora", 2, 4, model="llama_lora"),
    case_of("2bw_pp2_sgd", 2, 2, arguments={"optim": "sgd"}),
    case_of("pipedream_pp2", 2, 1, schedule="pipedream"),
    apart_case("apart_pp2", (2, 2), variable_length=True),
    apart_case("apart_pp2_recompute", (1, 3), arguments={"gradient_checkpointing": True}),
    apart_case("apart_pp2_evaluates", (2, 2), evaluate=True, metrics=True),
    apart_case("apart_pp2_phi3", (1, 1), model="phi3", loss="func"),
    apart_case("apart_pp2_epochs", (2, 2), count=40, steps=7),
]
FOUR = [
    case_of("2bw_pp4_m3", 4, 3, model="llama_8", batch=6),
    case_of("2bw_pp4_m8", 4, 8, model="llama_8"),
    case_of("2bw_pp2_dp2", 2, 4, model="llama_tied", variable_length=True),
    case_of("2bw_pp2_dp2_zero1", 2, 4, model="llama_tied", settings=ZERO1, variable_length=True),
    case_of("2bw_pp2_dp2_offload", 2, 3, model="gpt2", settings=OFFLOADED, evaluate=True, eval_count=40, clip=0.0),
    case_of("2bw_pp2_dp2_zero1_lora", 2, 2, model="llama_lora", settings=ZERO1),
    case_of("2bw_pp2_tp2", 2, 4, model="llama_tied", settings={"tp_size": 2}, variable_length=True),
    case_of(
        *("2bw_pp2_tp2_gpt2", 2, 3),
        model="gpt2",
        settings={"tp_size": 2, "sequence_parallel": True},
        evaluate=True,
        arguments={"gradient_checkpointing": True},
    ),
    case_of("pipedream_pp4", 4, 1, model="llama_8", schedule="pipedream"),
    apart_case("apart_pp4", (2, 2, 2, 2), model="llama_8_untied", steps=8),
    apart_case("apart_pp4_uneven", (3, 2, 1, 2), model="llama_8_untied", evaluate=True),
    apart_case("apart_pp2_dp2", (2, 2), variable_length=True),
    apart_case("apart_pp2_dp2_zero1", (2, 2), settings=ZERO1, variable_length=True),
    apart_case("apart_pp2_tp2", (2, 2), settings={"tp_size": 2}, variable_length=True),
    apart_case("apart_pp2_lora", (2, 2), model="llama_lora"),
]


def runs_of(cases: list[Case], world_size: int, folder: Path) -> dict[str, dict[str, Any]]:
    stock = [dataclasses.replace(case, parallel=None, name=f"stock_{case.name}") for case in cases]
    return run_cases(stock, 1, folder / "stock") | run_cases(cases, world_size, folder / "mesh")


def final_of(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the run has saved at its end, of adapters those alone."""
    (file,) = (Path(run["folder"]) / "final").glob("*model.safetensors")
    return load_file(file)


def compare_final(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    compare(mine, reference)
    found, expected = (final_of(run) for run in (mine, reference))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
        assert difference <= 1e-5, f"{name} differs by {difference:.1e} relative after the last step"


SAVED = case_of("saved", 2, 4, model="llama_tied", save=True, evaluate=True, count=40)  # within an epoch of five steps


SAVED_APART = apart_case("saved", (1, 1, 1, 1), save=True, evaluate=True, count=40)
SAVED_IN_PARTS = dataclasses.replace(SAVED, parallel={**(SAVED.parallel or {}), **ZERO1}, eval_count=40)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "world_size"),
    [(SAVED, 2), (SAVED_IN_PARTS, 4), (SAVED_APART, 4)],
    ids=["pp2", "pp2_dp2_zero1", "pp4_apart"],
)
def test_a_resumed_run_goes_on_with_the_weights_of_the_updates_before(
    case: Case, world_size: int, tmp_path: Path
) -> None:
    whole = runs_of([case], world_size, tmp_path / "whole")
    compare_final(whole["saved"], whole["stock_saved"])
    for checkpoint in (2, 4):
        resumed = dataclasses.replace(case, resume_at=checkpoint, save=False)
        folder = tmp_path / f"from{checkpoint}"
        shutil.copytree(tmp_path / "whole" / "mesh" / "saved", folder / "saved")
        again = run_cases([resumed], world_size, folder)["saved"]
        assert again["history"][-1] == pytest.approx(whole["saved"]["history"][-1], abs=1e-6)
        final, expected = (final_of(run) for run in (again, whole["saved"]))
        for name, tensor in expected.items():
            torch.testing.assert_close(final[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


class Stops(TrainerCallback):
    """Leaves the first epoch early, and unfreezes or steps as a test asks."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.kind == "leaves" and state.global_step == 2:
            control.should_epoch_stop = True
        if self.kind == "freezes" and state.global_step == 2:
            next(model.parameters()).requires_grad_(False)
        if self.kind in ("reloads", "averages") and state.global_step == 2:
            factor = 0.5 if self.kind == "reloads" else 1.0
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
        if self.kind == "retunes" and state.global_step == 2:
            for module in model.modules():
                if hasattr(module, "scaling"):
                    module.scaling *= 0.5
        if self.kind == "wraps" and state.global_step == 2:
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(lambda module, inputs, output: output * 0.5)
        if self.kind == "adds_up" and state.global_step == 2:
            args.gradient_accumulation_steps = 2
        if self.kind == "steps_again" and state.global_step == 2:
            kwargs["optimizer"].step()
        if self.kind == "decays_alone" and state.global_step == 2 and state.is_world_process_zero:
            for group in kwargs["optimizer"].param_groups:
                group["weight_decay"] = 0.5

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.kind == "writes" and state.global_step == 2:
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)

        if self.kind == "clips":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if self.kind == "scales" and state.global_step == 2:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            total = sum(float(gradient.norm()) ** 2 for gradient in gradients) ** 0.5
            for gradient in gradients:
                gradient.mul_(1.0 / total)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.kind == "halves":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        if self.kind == "hooks":
            next(model.parameters()).register_hook(lambda gradient: gradient * 2)


class OwnStep(Trainer):
    """A user's subclass that handles batches between the data loader and the model."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


def losses_with(rank: int, world_size: int, case: Case, kinds: list[str], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in kinds:
        loss = {"own_loss": "subclass", "mean": "func_mean"}.get(kind, "")
        trainer = make_trainer(dataclasses.replace(case, loss=loss), Path(folder) / kind, world_size, [Stops(kind)])
        if kind in ("reloads", "averages"):
            for name, parameter in trainer.model.named_parameters():
                parameter.requires_grad_("norm" not in name)
        if kind == "own_step":
            trainer.__class__ = type("Mixed", (type(trainer).__mro__[1], OwnStep), {})
        try:
            trainer.train()
            if kind == "again":
                with torch.no_grad():
                    for parameter in trainer.model.parameters():
                        parameter.mul_(0.5)
                trainer.train()
            found[kind] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"
        session = getattr(trainer.accelerator, "hf_parallel", None)
        if session is not None:
            session.watchdog.stop()
    return found


SMALL = case_of("small", 2, 4, count=40)
ALONE = case_of("alone", 2, 1, settings={"num_microbatches": 1}, count=40)  # the last stage is a step ahead


APART = apart_case("apart", (1, 1, 1, 1), count=40)


@pytest.mark.long
@pytest.mark.parametrize("case", [SMALL, ALONE, APART], ids=lambda case: case.name)
def test_an_epoch_that_is_left_early_and_a_run_before_leave_nothing_behind(case: Case, tmp_path: Path) -> None:
    options: dict[str, Any] = {"timeout": 120, "env": ENV}
    kinds = ["leaves", "again", "averages", "halves", *(["clips"] if case is APART else [])]
    size = (case.parallel or {})["pp_size"]
    found = run_ranks(losses_with, size, case, kinds, str(tmp_path / "mesh"), tmp_path=tmp_path, **options)
    one = dataclasses.replace(case, parallel=None)
    (expected,) = run_ranks(
        losses_with,
        1,
        one,
        kinds,
        str(tmp_path / "one"),
        tmp_path=tmp_path / "alone",
        init_group=False,
        **options,
    )
    for kind in kinds:
        assert len(found[0][kind]) == 6
        assert found[0][kind] == pytest.approx(expected[kind], abs=1e-5)


NOT_APART = {
    "tied": (
        dataclasses.replace(APART, model="llama_tied"),
        r"model.embed_tokens.weight is trained on several stages \(1 parameters are\) with pipeline.vertical_sync=false.*Set "
        "pipeline.vertical_sync to true",
    ),
    "clipped": (dataclasses.replace(APART, clip=1.0), "max_grad_norm=1 with pipeline.vertical_sync=false.*to 0"),
}


def refusals_of(rank: int, world_size: int, cases: dict[str, Case], folder: str) -> dict[str, str]:
    found = {}
    for name, case in cases.items():
        try:
            make_trainer(case, Path(folder) / name, world_size).train()
        except Exception as error:
            found[name] = str(error)
    return found


@pytest.mark.long
def test_what_stages_that_step_at_different_times_cannot_have_is_refused_on_every_rank(tmp_path: Path) -> None:
    cases = {name: case for name, (case, _) in NOT_APART.items()}
    found = run_ranks(refusals_of, 4, cases, str(tmp_path / "runs"), tmp_path=tmp_path, timeout=120, env=ENV)
    for texts in found:
        for name, (_, says) in NOT_APART.items():
            assert re.search(says, texts.get(name, "trains")), texts


APART_TWO = apart_case("apart_two", (2, 2), count=40)


@pytest.mark.long
@pytest.mark.parametrize("case", [ALONE, APART_TWO], ids=lambda case: case.name)
def test_an_optimizer_that_one_stage_sets_otherwise_is_refused(case: Case, tmp_path: Path) -> None:
    for found in run_ranks(
        losses_with, 2, case, ["decays_alone"], str(tmp_path), tmp_path=tmp_path, timeout=60, env=ENV
    ):
        assert re.search(r"weight_decay of parameter group \d .* is 0.5 on rank 0", str(found["decays_alone"])), found


REFUSED = {
    "freezes": "was frozen or unfrozen with pipeline.schedule=pipedream_2bw.*Set requires_grad before training",
    "reloads": "layernorm.weight, which is frozen, was changed with pipeline.schedule=pipedream_2bw.*trained weights only",
    "retunes": r"scaling \(\S+ before, \S+ now\) was changed during training.*pipedream_2bw.*Change modules before training starts",
    "wraps": r"_forward_hooks \(0 before, 1 now\) was changed during training.*or set pipeline.schedule to 1f1b",
    "hooks": "hooks on 1 parameters .*Remove them",
    "writes": "weights were changed between the backward pass and optimizer.step.*Change them after the step",
    "adds_up": "no data loader announced, with .*gradient_accumulation_steps as it is within an epoch",
    "scales": "all gradients of a stage were multiplied by one number",  # by another on each
    "steps_again": "a second optimizer.step.*Use one optimizer",
    "own_loss": "no data loader announced, with pipeline.schedule=pipedream_2bw.*compute_loss",
    "mean": "no data loader announced, .*compute_loss_func a sum over labels divided by num_items_in_batch",
    "own_step": "no data loader announced, with pipeline.schedule=pipedream_2bw.*training_step",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("refusals")
    found: dict[str, Any] = run_ranks(
        losses_with, 2, SMALL, list(REFUSED), str(folder), tmp_path=folder, timeout=240, env=ENV
    )[0]
    return found


@pytest.mark.long
@pytest.mark.parametrize("kind", REFUSED)
def test_what_meets_the_gradients_of_several_steps_is_refused(kind: str, refusals: dict[str, Any]) -> None:
    assert re.search(REFUSED[kind], str(refusals[kind])), refusals[kind]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    two, four = wanted_cases(request, DEFAULT + TWO), wanted_cases(request, FOUR)
    found = runs_of(two, 2, tmp_path_factory.mktemp("two")) if two else {}
    return found | (runs_of(four, 4, tmp_path_factory.mktemp("four")) if four else {})


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: case.name)
def test_an_asynchronous_run_is_that_of_one_process_with_delayed_gradients(
    case: Case, runs: dict[str, dict[str, Any]]
) -> None:
    compare_final(runs[case.name], runs[f"stock_{case.name}"])


@pytest.mark.long
@pytest.mark.parametrize("case", TWO + FOUR, ids=lambda case: case.name)
def test_every_asynchronous_run_is_that_of_one_process_with_delayed_gradients(
    case: Case, runs: dict[str, dict[str, Any]]
) -> None:
    compare_final(runs[case.name], runs[f"stock_{case.name}"])
