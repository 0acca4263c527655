"""Replicas that user code made unlike: noticed when a checkpoint is written, and at the end of training; with ZeRO in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.guards.weights.drift import refuse_drift


pytestmark = pytest.mark.timeout(120)


class Changes(TrainerCallback):
    """Changes weights after the second step, on some ranks."""

    def __init__(self, ranks: list[int], factor: float) -> None:
        self.ranks, self.factor = ranks, factor

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index in self.ranks:
            self.change(model)

    def change(self, model: Any) -> None:
        mlp = model.model.layers[0].mlp
        with torch.no_grad():
            (mlp.experts.gate_up_proj if hasattr(mlp, "experts") else mlp.up_proj.weight).mul_(self.factor)


class Rebinds(Changes):
    """Gives a parameter other memory."""

    def change(self, model: Any) -> None:
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data * self.factor


class ChangesBeforeUpdates(Changes):
    """Changes weights after the norm, just before the third update, which overwrites what other ranks have of its part."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        return

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, model, **kwargs)


class ChangesLate(Changes):
    """Gives rank 0 other weights when training has ended: what is to be saved."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        return

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.process_index in self.ranks:
            self.change(model)


KINDS = {"": Changes, "late": ChangesLate, "rebinds": Rebinds, "before_updates": ChangesBeforeUpdates}


def drift_main(
    rank: int,
    world_size: int,
    folder: str,
    ranks: list[int],
    factor: float,
    save: bool,
    config: dict[str, Any],
    kind: str = "",
) -> str:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=3,
        save_strategy="steps" if save else "no",
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [KINDS[kind](ranks, factor), HFParallelCallback(config)]
    model = tiny.mixtral_plain() if "ep_size" in config else tiny.llama(layers=2)
    trainer = Trainer(model=model, args=arguments, train_dataset=tiny.rows(32), callbacks=callbacks)
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


SETTINGS: dict[str, dict[str, Any]] = {
    "dp2": {"pp_size": 1},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
}


@pytest.mark.parametrize("save", [True, False], ids=["saved", "ended"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_weights_changed_on_one_rank_are_refused(settings: str, save: bool, tmp_path: Path) -> None:
    given = (str(tmp_path / "run"), [0], 0.5, save, SETTINGS[settings])
    said = run_ranks(drift_main, 2, *given, tmp_path=tmp_path, timeout=90)
    assert len(set(said)) == 1, said
    wanted = (
        "the weights of rank 1"
        if settings != "dp2" and not save
        else "parameter model.layers.0.mlp.up_proj.weight differs"
    )
    assert said[0].startswith(f"RankMismatchError: {wanted}"), said[0]
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.parametrize("kind", ["rebinds", "before_updates"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_weights_that_an_update_overwrites_are_refused(settings: str, kind: str, tmp_path: Path) -> None:
    given = (str(tmp_path / "run"), [0], 0.5, False, SETTINGS[settings], kind)
    said = run_ranks(drift_main, 2, *given, tmp_path=tmp_path, timeout=90)
    assert len(set(said)) == 1, said
    wanted = "parameter model.layers.0.mlp.up_proj.weight differs" if settings == "dp2" else "the weights of rank 1"
    assert said[0].startswith(f"RankMismatchError: {wanted}"), said[0]


@pytest.mark.parametrize("kind", ["rebinds", "before_updates"])
def test_what_all_ranks_do_to_weights_is_not(kind: str, tmp_path: Path) -> None:
    given = (str(tmp_path / "run"), [0, 1], 0.5, True, SETTINGS["zero2"], kind)
    assert run_ranks(drift_main, 2, *given, tmp_path=tmp_path, timeout=90) == ["ended", "ended"]


COPIES = {  # of the state: stage, who changes weights, and what is said
    "zero1": (1, [0], "the weights of rank 1"),
    "zero2": (2, [3], "the weights of rank 3"),
    "zero1-one copy": (1, [2, 3], "parameter model.layers.0.mlp.up_proj.weight differs"),
    "zero3": (3, [0], "rank 1 computed a loss over weights (a penalty), or changed weights, gradients or copies"),
}


@pytest.mark.parametrize("name", COPIES)
def test_all_copies_of_a_partitioned_state_hear_of_it(name: str, tmp_path: Path) -> None:
    stage, ranks, wanted = COPIES[name]
    given = (str(tmp_path / "run"), ranks, 0.5, False, {"zero": {"stage": stage, "dp_shard_size": 2}})
    said = run_ranks(drift_main, 4, *given, tmp_path=tmp_path, timeout=90)
    assert len(set(said)) == 1, said
    assert said[0].startswith(f"RankMismatchError: {wanted}"), said[0]


OTHERS = {  # settings, and what is said
    "pp2": (
        {"pp_size": 2, "pipeline": {"num_microbatches": 2}},
        "parameter model.layers.0.mlp.up_proj.weight differs",
    ),
    "tp2": ({"tp_size": 2}, "parameter model.layers.0.mlp.up_proj.weight differs"),
    "ep2": ({"ep_size": 2}, "parameter model.layers.0.mlp.experts.gate_up_proj differs"),
    "tp2-zero1": ({"tp_size": 2, "zero": {"stage": 1}}, "the weights of rank 2"),
    "ep2-zero1": ({"ep_size": 2, "zero": {"stage": 1}}, "the weights of rank 2"),
}


@pytest.mark.parametrize("settings", OTHERS)
def test_ranks_that_hold_something_else_hear_of_it(settings: str, tmp_path: Path) -> None:
    config, wanted = OTHERS[settings]
    given = (str(tmp_path / "run"), [0], 0.5, "zero" not in config, config)
    said = run_ranks(drift_main, 4, *given, tmp_path=tmp_path, timeout=90)
    assert len(set(said)) == 1, said
    assert said[0].startswith(f"RankMismatchError: {wanted}"), said[0]


def test_weights_changed_on_all_ranks_are_not(tmp_path: Path) -> None:
    given = (str(tmp_path / "run"), [0, 1], 0.5, True, SETTINGS["zero1"])
    assert run_ranks(drift_main, 2, *given, tmp_path=tmp_path, timeout=90) == ["ended", "ended"]
    assert list((tmp_path / "run").glob("checkpoint-*"))


def test_what_rank_0_is_given_for_saving_when_training_has_ended_is_its_own(tmp_path: Path) -> None:
    given = (str(tmp_path / "run"), [0], 0.5, False, SETTINGS["dp2"], "late")
    assert run_ranks(drift_main, 2, *given, tmp_path=tmp_path, timeout=90) == ["ended", "ended"]


def measure_main(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    weights = {"a": torch.nn.Parameter(torch.randn(30, 3)), "b": torch.nn.Parameter(torch.randn(7).bfloat16())}
    weights["frozen"] = torch.nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
    group = torch.distributed.group.WORLD
    assert refuse_drift([(weights, group)]) == ""
    with torch.no_grad():
        weights["a"].mul_(1 + 1e-5 * rank)
    return refuse_drift([(weights, group)])


def test_differences_of_rounding_are_said(tmp_path: Path) -> None:
    said = run_ranks(measure_main, 2, tmp_path=tmp_path)
    assert said[0] == said[1]
    assert said[0].startswith(
        "parameter a differs between the replicas by 1.0e-05 of its norm (1 of 3 parameters differ)"
    )
