"""Parameters that a callback freezes or unfreezes while training goes on, on every layout as in one process.

If a row fails, a stage waits for gradients that nobody sends, or replicas leave a parameter out of their reduction.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rank_runner import RankError, run_ranks
from safetensors.torch import save_file
from trainer_cases import ENV, NO_NOISE, Case, Snapshots, compare, finished, make_trainer, runs_and_references
from transformers import TrainerCallback

from hf_parallel.errors import UnsupportedError


pytestmark = pytest.mark.long


class Gradual(TrainerCallback):
    """Trains the head, then the last blocks, then all; freezes the first block again."""

    def __init__(self, when: str) -> None:
        self.when = when

    def change(self, model: Any, step: int) -> None:
        blocks = [m for n, m in model.named_modules() if n.rpartition(".")[0].endswith("layers") and n[-1:].isdigit()]
        if step == 1:
            for block in blocks[2:]:
                block.requires_grad_(True)
        if step == 2:
            model.get_input_embeddings().requires_grad_(True)
            for parameter in model.parameters():
                parameter.requires_grad = True
        if step == 4:
            for _, parameter in blocks[0].named_parameters():
                parameter.requires_grad = False

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.when == "step":
            self.change(model, state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.when == "epoch":
            self.change(model, round(state.epoch or 0))


class TiedUnfrozen(TrainerCallback):
    """Unfreezes a tied matrix by the name that only the first stage has; freezes it by the head's."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.get_input_embeddings().weight.requires_grad_(True)
        if state.global_step == 3:
            model.get_output_embeddings().weight.requires_grad_(False)


class Parameters(Snapshots):
    """Parameters after the third step only: which of the first gradients exist depends on what is frozen."""

    def write(self, name: str, model: Any, pick: Any) -> None:
        if name == "parameters":
            super().write(name, model, pick)
        elif self.trainer.args.should_save:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({"none": torch.zeros(1)}, self.folder / f"{name}.safetensors")


def only_head(model: Any) -> Any:
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)
    return model


def without_ends(model: Any) -> Any:
    model.get_input_embeddings().requires_grad_(False)
    return model


tiny.MODELS |= {
    "head_llama": lambda: only_head(tiny.llama()),
    "head_qwen3": lambda: only_head(tiny.qwen3()),
    "inner_llama": lambda: without_ends(tiny.llama(tied=True)),
}
PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}
TP2: dict[str, Any] = {"tp_size": 2}
CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "dp2": (2, "head_llama", "step", {}),
    "pp2": (2, "head_llama", "step", PP2),
    "pp2_epoch": (2, "head_qwen3", "epoch", PP2),
    "pp2_tied": (2, "inner_llama", "tied", PP2),
    "pp2_logits": (2, "head_llama", "logits", PP2),
    "pp2_zbv": (2, "head_llama", "step", {**PP2, "pipeline": {"schedule": "zbv_zero_bubble"}}),
    "tp2": (2, "head_llama", "step", TP2),
    "tp2_tied": (2, "inner_llama", "tied", TP2),
    "dp2_tied": (2, "inner_llama", "tied", {}),
    "pp2_dp2": (4, "head_qwen3", "step", PP2),
}


def frozen_main(rank: int, world_size: int, names: list[tuple[str, str, str, Any]], folder: str) -> list[Any]:
    found = []
    for name, model, when, parallel in names:
        epochs = {"num_train_epochs": 5} if when == "epoch" else {}
        case = Case(
            name,
            model,
            steps=-1 if epochs else 5,
            accumulation=2,
            count=16 if epochs else 96,
            loss="subclass" if when == "logits" else "",
            arguments={**NO_NOISE, **epochs},
            user_optimizer=True,
            parallel=parallel,
        )
        where = Path(folder) / name
        snapshots = Parameters(where)
        callback = TiedUnfrozen() if when == "tied" else Gradual("epoch" if epochs else "step")
        trainer = snapshots.trainer = make_trainer(case, where, world_size, [callback, snapshots])
        trainer.train()
        found.append(json.loads(json.dumps(finished(trainer, where))))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return runs_and_references(frozen_main, CASES, tmp_path_factory.mktemp("unfreezing"))


@pytest.mark.parametrize("name", CASES)
def test_what_is_unfrozen_while_training_is_trained_as_in_one_process(name: str, runs: Any) -> None:
    found, references = runs
    _, model, when, _ = CASES[name]
    compare(found[name], references[f"{model}-{when}"])


def refused_main(rank: int, world_size: int, parallel: dict[str, Any], folder: str) -> None:
    case = Case("refused", "head_llama", steps=4, arguments=NO_NOISE, user_optimizer=True, parallel=parallel)
    make_trainer(case, Path(folder), world_size, [Gradual("step")]).train()


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (
            {"local_sgd": {"sync_every": 2}},
            r"was unfrozen after local_sgd.sync_every=2 had begun.*Set requires_grad before",
        ),
        ({"zero": {"stage": 1}}, r"layers\.\d.* was unfrozen after zero.stage=1.*Set requires_grad before training"),
    ],
    ids=["local", "zero1"],
)
def test_what_was_laid_out_for_other_parameters_refuses_them(parallel: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=text):
        run_ranks(refused_main, 2, parallel, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)


def staged_main(rank: int, world_size: int, parallel: dict[str, Any], folder: str) -> str:
    case = Case("staged", "head_llama", steps=4, arguments=NO_NOISE, user_optimizer=True, parallel=parallel)
    trainer = make_trainer(case, Path(folder), world_size, [Gradual("step")])
    with pytest.raises(UnsupportedError) as refused:
        trainer.train()
    trainer.accelerator.hf_parallel.watchdog.stop()
    assert trainer.state.global_step == 1
    return str(refused.value)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"zero": {"stage": 1}}, "was unfrozen after zero.stage=1"),
        ({"local_sgd": {"sync_every": 2}}, "was unfrozen after local_sgd.sync_every=2"),
    ],
    ids=["zero1", "local"],
)
def test_stages_without_the_unfrozen_parameters_refuse_them_in_the_same_words(
    more: Any, text: str, tmp_path: Path
) -> None:
    said = run_ranks(staged_main, 4, {**PP2, **more}, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)
    assert len(set(said)) == 1, said
    assert said[0].startswith("model.layers.2.")
    assert text in said[0]


def resumed_main(rank: int, world_size: int, folder: str) -> None:
    saved = Case("saved", "head_llama", steps=4, save=True, arguments=NO_NOISE, user_optimizer=True, parallel={})
    trainer = make_trainer(saved, Path(folder) / "saved", world_size, [Gradual("step")])
    trainer.train()
    trainer.accelerator.hf_parallel.watchdog.stop()
    case = dataclasses.replace(saved, model="llama", steps=6, parallel={"zero": {"stage": 1}})
    make_trainer(case, Path(folder) / "resumed", world_size).train(str(Path(folder) / "saved" / "checkpoint-4"))


def test_parameters_that_took_unequal_numbers_of_steps_do_not_resume_in_one_flat_part(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"step is \d for .* and \d for other parameters.*Resume with zero.stage 0 or 3"
    ):
        run_ranks(resumed_main, 2, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)


def compressed_main(rank: int, world_size: int, parallel: Any, folder: str) -> tuple[list[float], Any]:
    """Losses, and a number for the weights of each replica at the end."""
    case = Case("int8", "head_llama", steps=4, arguments=NO_NOISE, user_optimizer=True, parallel=parallel)
    trainer = make_trainer(case, Path(folder), world_size, [Gradual("step")])
    trainer.train()
    trainer.accelerator.hf_parallel.watchdog.stop()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, torch.stack([p.detach().double().norm() for p in trainer.model.parameters()]).numpy()


def test_replicas_stay_equal_when_compressed_parameters_are_unfrozen(tmp_path: Path) -> None:
    parallel = {"gradient_compression": {"method": "int8"}}
    results = run_ranks(compressed_main, 2, parallel, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)
    np.testing.assert_array_equal(results[0][1], results[1][1])
