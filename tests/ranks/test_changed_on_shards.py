"""What users do to a whole model around training, where ranks have shards of it: as in one process, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate.state import AcceleratorState, GradientState
from rank_runner import run_ranks
from torch import nn
from torch.nn.utils import prune
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback


pytestmark = pytest.mark.timeout(120)


def pruned() -> Any:
    model = tiny.llama(layers=2)
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.3)
    return model


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny.llama(layers=2), LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))


class DrawsAgain(TrainerCallback):
    """Draws the head anew, as torch does with new layers."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            torch.manual_seed(5)
            nn.init.normal_(model.lm_head.weight, std=0.02)


class Unloads(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.merge_and_unload()


CASES: dict[str, tuple[Any, list[Any]]] = {
    "pruned": (pruned, []),
    "drawn": (lambda: tiny.llama(layers=2), [DrawsAgain]),
    "unloaded": (adapted, [Unloads]),
}


def trained(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Losses and weights at the end of each case; or the error."""
    found: dict[str, Any] = {}
    for name, (make, callbacks) in CASES.items():
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        torch.manual_seed(0)
        arguments = TrainingArguments(
            f"{folder}/{name}-{world_size}",
            per_device_train_batch_size=4,
            max_steps=3,
            learning_rate=1e-2,
            adam_epsilon=1e-4,
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        own = [HFParallelCallback({}, tp_size=2)] if world_size > 1 else []
        trainer = Trainer(
            model=make(),
            args=arguments,
            train_dataset=tiny.rows(32),
            callbacks=[*(kind() for kind in callbacks), *own],
        )
        try:
            trainer.train()
            state = trainer.accelerator.get_state_dict(trainer.model)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        found[name] = losses, {key: value.tolist() for key, value in state.items()}
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("changed")
    options: dict[str, Any] = {"tmp_path": folder, "env": {"ACCELERATE_USE_CPU": "true"}}
    alone = run_ranks(trained, 1, str(folder), init_group=False, **options)[0]
    return alone, run_ranks(trained, 2, str(folder), **options)


@pytest.mark.parametrize("name", ["pruned", "drawn"])
def test_it_trains_as_in_one_process(name: str, runs: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    alone, ranks = runs[0][name], runs[1][0][name]
    assert not isinstance(ranks, str), ranks
    assert ranks[0] == pytest.approx(alone[0], rel=1e-5)
    assert ranks[1].keys() == alone[1].keys()
    for key, value in alone[1].items():
        expected = torch.tensor(value)
        assert (torch.tensor(ranks[1][key]) - expected).norm() <= 1e-5 * expected.norm(), key


def test_modules_that_were_taken_out_are_not_saved_beside_what_took_their_place(
    runs: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    assert not isinstance(runs[0]["unloaded"], str)
    said = [found["unloaded"] for found in runs[1]]
    assert len(set(said)) == 1, said
    assert "mlp.up_proj was replaced or taken out after the model was prepared" in said[0]
    assert "merge adapters in what was saved" in said[0]
