"""`trainer.save_model()` on rank 0 alone: right where that rank has the whole model, and else soon an error that says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_runner import run_ranks
from trainer_cases import Case, make_trainer
from transformers import LlamaForCausalLM, TrainerCallback

from hf_parallel import CheckpointError


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 2}
SLOW = pytest.mark.slow


def trainer_alone_main(rank: int, world_size: int, parallel: dict[str, Any], folder: str, trained: bool) -> str:
    from hf_parallel import ParallelError

    monitor = {"hang_timeout_s": 3.0}
    trainer = make_trainer(Case("alone", steps=1, parallel={**parallel, "monitor": monitor}), Path(folder), world_size)
    if trained:
        trainer.train()
    text = ""
    if trainer.is_world_process_zero():
        try:
            trainer.save_model()
        except ParallelError as error:
            text = str(error)
    trainer.accelerator.hf_parallel.watchdog.stop()
    return text


ZERO3 = {"pp_size": 1, "zero": {"stage": 3}}


@pytest.mark.parametrize("trained", [True, pytest.param(False, marks=SLOW)], ids=["trained", "new"])
@pytest.mark.parametrize("parallel", [PP2, pytest.param(ZERO3, marks=SLOW)], ids=["pp2", "zero3"])
def test_a_trainer_that_saves_on_rank_0_alone_is_told_what_to_do(
    parallel: dict[str, Any], trained: bool, tmp_path: Path
) -> None:
    text = run_ranks(trainer_alone_main, 2, parallel, str(tmp_path / "x"), trained, tmp_path=tmp_path, env=ENV)[0]
    assert re.match(r"trainer.save_model\(\) was called by rank 0 .* and for 2.7 s not by rank 1", text), text
    assert "Take it out of `if accelerator.is_main_process:`" in text


class SavesOnRankZero(TrainerCallback):
    """As scripts do under DDP: `if state.is_world_process_zero: trainer.save_model()`, after each step."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.trainer.save_model(str(self.folder / f"step-{state.global_step}"))


def whole_alone_main(rank: int, world_size: int, parallel: dict[str, Any], folder: str) -> dict[str, Any]:
    case = Case("alone", steps=3, parallel={**parallel, "monitor": {"hang_timeout_s": 10.0}})
    trainer = make_trainer(case, Path(folder), world_size)
    trainer.add_callback(SavesOnRankZero(trainer, Path(folder)))
    (Path(folder) / "step-3").mkdir(parents=True, exist_ok=True)
    if rank == 0:  # older weights of another size, which would win over the new ones
        (Path(folder) / "step-3" / "model.safetensors.index.json").write_text("{}")
        trainer.save_model(f"{folder}/before")  # the model as it was given
    trainer.train()
    text = ""
    if rank == 0:
        trainer.save_model(f"{folder}/after")
        Path(f"{folder}/file").write_text("")
        try:
            trainer.save_model(f"{folder}/file")
        except CheckpointError as error:
            text = str(error)
    trainer.save_model(f"{folder}/all")
    return {"text": text, **{key: tensor.numpy() for key, tensor in trainer.model.state_dict().items()}}


@pytest.mark.parametrize(
    "zero", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)], ids=["dp2", "zero1", "zero2"]
)
def test_a_trainer_whose_ranks_hold_the_whole_model_saves_it_on_rank_0_alone(zero: int, tmp_path: Path) -> None:
    parallel = {"pp_size": 1, "zero": {"stage": zero}}
    state = run_ranks(whole_alone_main, 2, parallel, str(tmp_path), tmp_path=tmp_path, env=ENV)[0]
    assert re.search(r"rank 0.*file could not be written: .*free there", state.pop("text"))
    for folder in ("step-3", "after", "all"):
        model = LlamaForCausalLM.from_pretrained(tmp_path / folder)
        for name, tensor in model.state_dict().items():
            np.testing.assert_array_equal(tensor.numpy(), state[name])
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert {"model.safetensors", "config.json", "training_args.json"} <= names
        assert "model.safetensors.index.json" not in names
        assert not [n for n in names if n.endswith((".bin", ".pt"))]
    given = LlamaForCausalLM.from_pretrained(tmp_path / "before").state_dict()
    first = LlamaForCausalLM.from_pretrained(tmp_path / "step-1").state_dict()
    assert any(not torch.equal(first[name], given[name]) for name in first)
    assert any((tensor.numpy() != state[name]).any() for name, tensor in first.items())  # the run went on between them
