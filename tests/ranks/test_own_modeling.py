"""Models whose code comes with their config train on stages and shards as in one process, in a stock Trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import modeling_own
import pytest
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from trainer_cases import ENV
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments


STYLES = ("values", "skips", "sequential")
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one": (1, None),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 3}),
    "pp2_tp2": (4, {"pp_size": 2, "num_microbatches": 4, "tp_size": 2}),
}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 12 tokens; the first ones of some have no label, so that microbatches differ in their number of labels."""
    ids = torch.randint(0, 96, (count, 12), generator=torch.Generator().manual_seed(1))
    labels = [row.masked_fill(torch.arange(12) < index % 5, -100) for index, row in enumerate(ids)]
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def model_of(style: str, folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(modeling_own.__file__, folder)
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "style": style, "auto_map": classes}))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def trains(rank: int, world_size: int, layout: str, folder: str) -> list[float]:
    from hf_parallel import HFParallelCallback

    losses, parallel = [], LAYOUTS[layout][1]
    for style in STYLES:
        torch.manual_seed(0)
        place = Path(folder, style)
        arguments = TrainingArguments(
            str(place),
            per_device_train_batch_size=7,
            gradient_accumulation_steps=2,
            max_steps=3,
            logging_steps=1,
            optim="sgd",
            learning_rate=0.1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        callbacks = [] if parallel is None else [HFParallelCallback({}, **parallel)]
        model = model_of(style, place / f"code{rank}")
        trainer = Trainer(model, arguments, train_dataset=rows(42), eval_dataset=rows(9), callbacks=callbacks)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.save_model(str(place))
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if parallel is not None:
            trainer.hf_parallel_session.watchdog.stop()
    return losses


def run(layout: str, folder: Path) -> list[float]:
    world = LAYOUTS[layout][0]
    env = {**ENV, "HF_MODULES_CACHE": str(folder / "modules")}
    given: dict[str, Any] = {"tmp_path": folder, "timeout": 240, "init_group": world > 1, "env": env}
    return run_ranks(trains, world, layout, str(folder), **given)[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    folder = tmp_path_factory.mktemp("one")
    return run("one", folder), folder


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
def test_models_with_code_of_their_own_train_as_in_one_process(
    layout: str, alone: tuple[list[float], Path], tmp_path: Path
) -> None:
    losses, (expected, there) = run(layout, tmp_path), alone
    assert len(expected) == 4 * len(STYLES)
    assert losses == pytest.approx(expected, rel=1e-5)
    for style in STYLES:
        weights = [load_file(folder / style / "model.safetensors") for folder in (tmp_path, there)]
        assert weights[0].keys() == weights[1].keys()
        for key, value in weights[1].items():
            assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), (style, key)
