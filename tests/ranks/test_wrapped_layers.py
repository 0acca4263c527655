"""Layers in torch's checkpoint wrapper, whose names only the state dict leaves out: what is saved is what stock code saves, and is read again.

If this fails, a saved model lacks its layers, and whoever loads it gets random ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_parallel import HFParallelCallback


pytestmark = pytest.mark.long

ENV = {"ACCELERATE_USE_CPU": "true"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "zero3": {"zero": {"stage": 3}},
    "pp2": {"pp_size": 2, "pipeline": {"num_microbatches": 2}},
    "tp2": {"tp_size": 2},
}


def trainer(layout: str, folder: str, num_rows: int, best: bool = False) -> Trainer:
    torch.manual_seed(0)
    model = tiny.llama(tied=True, layers=2)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    args = TrainingArguments(
        *(folder,),
        per_device_train_batch_size=num_rows,
        max_steps=4,
        save_steps=2,
        eval_strategy="steps" if best else "no",
        eval_steps=2,
        load_best_model_at_end=best,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    rows = tiny.rows(32)
    callbacks = [HFParallelCallback(LAYOUTS[layout])] if layout != "one" else []
    return Trainer(
        *(model, args), train_dataset=rows, eval_dataset=rows[:8], data_collator=tiny.collate, callbacks=callbacks
    )


def main(rank: int, world_size: int, layouts: tuple[str, ...], folder: str) -> dict[str, Any]:
    found = {}
    for layout in layouts:
        num_rows = 8 // world_size if layout in ("dp2", "zero3") else 8
        place = f"{folder}/{layout}"
        first = trainer(layout, place, num_rows, best=True)
        first.train()
        first.save_model(f"{place}/saved")
        whole = first.accelerator.get_state_dict(first.model)
        again = trainer(layout, place, num_rows)
        again.train(resume_from_checkpoint=f"{place}/checkpoint-2")
        losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry][-2:] for one in (first, again)]
        found[layout] = sorted(whole), losses
    return found


def test_a_saved_model_has_the_layers_that_a_wrapper_is_around(tmp_path: Path) -> None:
    alone = run_ranks(main, 1, ("one",), str(tmp_path), tmp_path=tmp_path, env=ENV, init_group=False, timeout=200.0)
    ranks = run_ranks(main, 2, tuple(LAYOUTS), str(tmp_path), tmp_path=tmp_path, env=ENV, timeout=300.0)
    names, (straight, _) = alone[0]["one"]
    for layout in LAYOUTS:
        for folder in ("saved", "checkpoint-4"):
            mine, stock = (load_file(tmp_path / one / folder / "model.safetensors") for one in (layout, "one"))
            assert mine.keys() == stock.keys()
            for name, tensor in stock.items():
                torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=1e-7)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / layout / "saved").state_dict()
        assert sorted(loaded) == names
        mine_names, (first, again) = ranks[0][layout]
        assert mine_names == names
        assert first == pytest.approx(straight, rel=1e-5)
        assert again == pytest.approx(straight, rel=1e-5)
