"""Parameters that code freezes on some ranks only: all ranks refuse it, or none trains on; done on every rank it is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import RankError, run_ranks
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.guards.weights import trained


pytestmark = pytest.mark.timeout(120)

PP2: dict[str, Any] = {"pp_size": 2, "pipeline": {"num_microbatches": 2}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"zero": {"stage": 1}}),
    "zero2": (2, {"zero": {"stage": 2}}),
    "tp2": (2, {"tp_size": 2}),
    "sp2": (2, {"sp_size": 2}),
    "pp2_zero1": (4, {**PP2, "zero": {"stage": 1}}),
}


class Freezes(TrainerCallback):
    """Freezes a parameter of one block after the second step."""

    def __init__(self, ranks: list[int], block: int, assigns: bool) -> None:
        self.ranks, self.block, self.assigns = ranks, block, assigns

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index in self.ranks:
            weight = model.model.layers[self.block].mlp.up_proj.weight
            if self.assigns:
                weight.requires_grad = False
            else:
                weight.requires_grad_(False)


def trainer_of(folder: str, callbacks: list[TrainerCallback]) -> Trainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(model=tiny.llama(layers=2), args=arguments, train_dataset=tiny.rows(32), callbacks=callbacks)


def frozen_main(
    rank: int,
    world_size: int,
    folder: str,
    ranks: list[int],
    config: dict[str, Any],
    block: int = 0,
    assigns: bool = False,
    catches: bool = True,
) -> str:
    trained.PATIENCE_S = 2.0
    callbacks = [Freezes(ranks, block, assigns), HFParallelCallback(config)]
    trainer = trainer_of(folder, callbacks)
    try:
        trainer.train()
    except Exception as error:
        if catches:
            return f"{type(error).__name__}: {error}"
        raise
    return "ended"


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_one_rank_freezes_is_refused_on_every_rank(name: str, tmp_path: Path) -> None:
    world_size, config = LAYOUTS[name]
    said = run_ranks(frozen_main, world_size, str(tmp_path / "run"), [0], config, tmp_path=tmp_path, timeout=90)
    assert len(set(said)) == 1, said
    assert re.match(r"RankMismatchError: rank \d .* train different parameters: .*Do it on every rank", said[0])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"pp_size": 1},
            r"RankMismatchError: requires_grad of .*up_proj.weight .* set to False on rank 0 .* not on rank 1",
        ),
        ({"zero": {"stage": 3}}, r"UnsupportedError: .*up_proj.weight .* was frozen or unfrozen after zero.stage=3"),
    ],
    ids=["dp2", "zero3"],
)
def test_replicas_do_not_send_other_buckets(config: dict[str, Any], text: str, tmp_path: Path) -> None:
    given = (str(tmp_path / "run"), [0], config, 0, False, False)
    with pytest.raises(RankError, match=text):
        run_ranks(frozen_main, 2, *given, tmp_path=tmp_path, timeout=90)


@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_does_not_have_it_cannot_freeze_it_alone(rank: int, assigns: bool, tmp_path: Path) -> None:
    given = (str(tmp_path / "run"), [rank], PP2, 1 - rank, assigns)
    said = run_ranks(frozen_main, 2, *given, tmp_path=tmp_path, timeout=90)
    assert len(set(said)) == 1, said
    wanted = rf"RankMismatchError: requires_grad of model.layers.{1 - rank}.mlp.up_proj.weight was set to False on rank {rank} .*"
    assert re.match(wanted + r"True on rank .* Do it on every rank", said[0]), said[0]


@pytest.mark.parametrize("name", ["zero1", "tp2", "pp2", "dp2"])
def test_what_all_ranks_freeze_is_not_refused(name: str, tmp_path: Path) -> None:
    world_size, config = {**LAYOUTS, "pp2": (2, PP2), "dp2": (2, {"pp_size": 1})}[name]
    given = (str(tmp_path / "run"), [0, 1], config, 1)
    assert run_ranks(frozen_main, world_size, *given, tmp_path=tmp_path, timeout=90) == ["ended"] * world_size


class Clears(TrainerCallback):
    """Skips an update whose loss is too large, say, on some ranks."""

    def __init__(self, ranks: list[int], step: int) -> None:
        self.ranks, self.step = ranks, step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index in self.ranks:
            optimizer.zero_grad()


def clearing_main(rank: int, world_size: int, folder: str, ranks: list[int], config: dict[str, Any], step: int) -> str:
    callbacks = [Clears(ranks, step), HFParallelCallback(config)]
    trainer = trainer_of(folder, callbacks)
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ended"


@pytest.mark.parametrize("step", [1, 3], ids=["midway", "last"])
@pytest.mark.parametrize("name", ["zero1", "zero2", "pp2_zero1"])
def test_gradients_that_one_rank_drops_are_refused_on_every_rank(name: str, step: int, tmp_path: Path) -> None:
    world_size, config = LAYOUTS[name]
    given = (str(tmp_path / "run"), [world_size - 1], config, step)
    said = run_ranks(clearing_main, world_size, *given, tmp_path=tmp_path, timeout=90)
    assert all(
        re.match(r"RankMismatchError: rank \d dropped other gradients before an optimizer step", one) for one in said
    ), said


def test_gradients_that_all_ranks_drop_are_not_refused(tmp_path: Path) -> None:
    given = (str(tmp_path / "run"), [0, 1], LAYOUTS["zero1"][1], 1)
    assert run_ranks(clearing_main, 2, *given, tmp_path=tmp_path, timeout=90) == ["ended"] * 2
