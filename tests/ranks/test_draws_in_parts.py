"""Random numbers on parts of rows: NEFTune's noise is that of one process, dropout masks of each part are its own.

If a row fails, `neftune_noise_alpha` or dropout regularises more or less than it says with `sp_size`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from trainer_cases import ENV, NO_NOISE, Case, Snapshots, compare, finished, make_trainer
from transformers import TrainerCallback


pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SP2: dict[str, Any] = {"sp_size": 2}
PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}
NOISY: dict[str, Any] = {"neftune_noise_alpha": 5.0, **NO_NOISE}
TWO = {"sp2": SP2, "ring2": {**SP2, "sp_attention": "ring"}, "zero3": {**SP2, "zero": {"stage": 3}}, "pp2": PP2}
FOUR = {"sp2_tp2": {**SP2, "tp_size": 2}, "sp2_pp2": {**SP2, **PP2}}
MODELS = {"first": "llama", "evaluated": "llama", "counted": "roberta"}  # RoBERTa counts positions on whole rows
ROWS = [
    *((layout, "one", when) for layout in ("sp2", "ring2") for when in MODELS),
    *(("zero3", "one", "first"), ("sp2_tp2", "one", "first")),
]
ALIKE = [("sp2_pp2", "pp2", "evaluated")]  # each part and each microbatch draws from a stream of its own there


def noisy(layout: str, when: str, parallel: dict[str, Any], folder: Path, world_size: int) -> dict[str, Any]:
    case = Case(layout, model=MODELS[when], steps=4, variable_length=True, arguments=NOISY, parallel=parallel)
    snapshots = Snapshots(folder)
    trainer = snapshots.trainer = make_trainer(case, folder, world_size, [snapshots])
    if when == "evaluated":  # the hook comes late then
        trainer.evaluate()
    trainer.train()
    return finished(trainer, folder)


def noisy_main(rank: int, world_size: int, layouts: dict[str, Any], folder: str) -> dict[str, Any]:
    return {
        f"{name}-{when}": noisy(name, when, parallel, Path(folder) / name / when, world_size)
        for name, parallel in layouts.items()
        for when in MODELS
        if name == "one" or any((name, when) in ((a, w), (b, w)) for a, b, w in ROWS + ALIKE)
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("noise")
    found: dict[str, Any] = {}
    for world_size, layouts in ((1, {"one": {}}), (2, TWO), (4, FOUR)):
        options: dict[str, Any] = {"tmp_path": folder, "init_group": world_size > 1, "env": ENV, "timeout": 250.0}
        found |= run_ranks(noisy_main, world_size, layouts, str(folder), **options)[0]
    return found


@pytest.mark.parametrize(("layout", "other", "when"), ROWS)
def test_noise_on_parts_of_rows_is_that_of_whole_rows(
    layout: str, other: str, when: str, runs: dict[str, Any]
) -> None:
    compare(runs[f"{layout}-{when}"], runs[f"{other}-{when}"])


@pytest.mark.parametrize(("layout", "other", "when"), ALIKE)
def test_noise_of_other_values_trains_alike(layout: str, other: str, when: str, runs: dict[str, Any]) -> None:
    losses = [[log["loss"] for log in runs[f"{each}-{when}"]["history"] if "loss" in log] for each in (other, layout)]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)


class Masks(TrainerCallback):
    """Which numbers the last dropout of a block leaves out in training."""

    def __init__(self) -> None:
        self.dropped: list[list[bool]] = []

    def watch(self, block: Any) -> None:
        block.mlp.dropout.register_forward_hook(self.note)

    def note(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.dropped.append((output == 0).flatten().tolist())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.dropped.clear()  # what planning left


def masks_main(rank: int, world_size: int, parallel: dict[str, Any], folder: str) -> dict[str, Any]:
    """Of the last block."""
    masks = Masks()
    tiny.MODELS["watched"] = lambda: watched(masks)
    trainer = make_trainer(
        Case("masks", model="watched", steps=1, parallel=parallel), Path(folder), world_size, [masks]
    )
    trainer.train()
    mesh = trainer.accelerator.hf_parallel.mesh
    trainer.accelerator.hf_parallel.watchdog.stop()
    return {"place": (mesh.pp_rank, mesh.sp_rank), "dropped": masks.dropped}


def watched(masks: Masks) -> Any:
    model = tiny.gpt2(dropout_rate=0.2)
    masks.watch(model.transformer.h[-1])
    return model


def test_parts_of_rows_on_stages_have_dropout_masks_of_their_own(tmp_path: Path) -> None:
    found = run_ranks(masks_main, 4, {**SP2, **PP2}, str(tmp_path), tmp_path=tmp_path, env=ENV)
    first, second = (each["dropped"] for each in found if each["place"][0] == 1)
    assert len(first) == len(second) > 0
    for mask, other in zip(first, second, strict=True):
        share = sum(a and b for a, b in zip(mask, other, strict=True)) / len(mask)
        assert 0.01 < share < 0.08, "0.2 of each is dropped, so 0.04 of both"
