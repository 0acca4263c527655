"""User code that writes weights, or decides by numbers, of which each rank has a part: refused on every rank that has some.

A file of one stage or of shards looks like a model until somebody loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
from rank_runner import run_ranks
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback, TrainingArguments


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
LAYOUTS = ("pp2", "tp2")
WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "parameters": lambda model, path: torch.save(dict(model.named_parameters()), path),
    "trained": lambda model, path: torch.save({k: p for k, p in model.named_parameters() if p.requires_grad}, path),
    "detached": lambda model, path: torch.save({k: p.detach() for k, p in model.named_parameters()}, path),
    "copied": lambda model, path: torch.save({k: p.data.cpu().clone() for k, p in model.named_parameters()}, path),
    "safetensors": lambda model, path: save_file({k: p.detach().clone() for k, p in model.named_parameters()}, path),
    "bytes": lambda model, path: sum(tensor.nbytes for tensor in model.state_dict().values()),
}


def tried(model: Any, path: Path) -> dict[str, str]:
    found = {}
    for name, write in WRITERS.items():
        try:
            found[name] = f"{write(model, path / name)}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Writes(TrainerCallback):
    def __init__(self, path: Path) -> None:
        self.path, self.found = path, {}  # type: tuple[Path, dict[str, str]]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = tried(model, self.path)


class LeavesOut(TrainerCallback):
    """Leaves out a step whose gradients are large; adds their squares up by hand. The norms of two stages are 0.61 and 0.58."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if sum(float(gradient.norm()) ** 2 for gradient in gradients) ** 0.5 > 0.59:
            for parameter in model.parameters():
                parameter.grad = None


def train(layout: str, folder: Path, callback: TrainerCallback) -> Trainer:
    from hf_parallel import HFParallelCallback

    arguments = TrainingArguments(
        *(str(folder),), per_device_train_batch_size=8, max_steps=1, use_cpu=True, report_to=[], save_strategy="no"
    )
    trainer = Trainer(
        model=tiny.llama(layers=2),
        args=arguments,
        train_dataset=tiny.rows(16),
        data_collator=tiny.collate,
        callbacks=[callback, HFParallelCallback({}, **user_loops.LAYOUTS[layout] or {})],
    )
    trainer.train()
    return trainer


def main(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    place = Path(folder) / str(rank)
    place.mkdir()
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        writes = Writes(place)
        trainer = train(layout, Path(folder), writes)
        trainer.accelerator.hf_parallel.watchdog.stop()
        found[f"callback-{layout}"] = writes.found

        def body(loop: user_loops.Loop) -> None:
            loop.prepare()
            loop.backward(0)
            loop.step()
            loop.history = [tried(loop.model, place)]

        found[f"loop-{layout}"] = user_loops.run(layout, body)["history"][0]
    try:
        train("pp2", Path(folder), LeavesOut())
    except Exception as error:
        found["left out"] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("files")
    return run_ranks(main, 2, str(folder), tmp_path=folder, env=ENV)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "bytes"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_callback_writes_no_part_of_the_model(layout: str, name: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[f"callback-{layout}"][name].startswith("UnsupportedError")
        assert "accelerator.get_state_dict(model)" in rank[f"callback-{layout}"][name]


@pytest.mark.parametrize("name", ["parameters", "trained"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_writes_no_parameters(layout: str, name: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[f"loop-{layout}"][name].startswith("UnsupportedError: saving a parameter of the model")


def test_bytes_of_a_stage_are_not_those_of_the_model(found: list[dict[str, Any]]) -> None:
    whole = str(sum(tensor.nbytes for tensor in tiny.llama(layers=2).state_dict().values()))
    for rank in found:
        assert "get_state_dict(model)" in rank["callback-pp2"]["bytes"]
        assert rank["callback-tp2"]["bytes"] == whole


def test_a_step_that_one_stage_leaves_out_is_refused(found: list[dict[str, Any]]) -> None:
    assert all("which is 0 and 1 on different stages" in rank["left out"] for rank in found)
