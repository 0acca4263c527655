"""On a GPU the losses of tensor-parallel ranks are compared a step late: never so late that a wrong update is evaluated or saved.

Here the CPU stands for the device: what a step compared is judged when somebody asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.calls.backwards import Backwards


ENV = {"ACCELERATE_USE_CPU": "true"}


class Event:
    """A device that has got there."""

    def synchronize(self) -> None:
        return None


def agree_later(self: Any, direct: Any = ()) -> None:
    """As on a GPU."""
    on_logits = self._on_logits
    values = self._gathered(())
    self.settle()
    self._under_way = values, Event(), on_logits


class Unlike(Trainer):
    """In the second step a rank multiplies its loss with a number of its own."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        factor = 1.0 + 0.01 * self.args.process_index if self.state.global_step == 1 else 1.0
        return model(**inputs).loss * factor


CASES: dict[str, tuple[int, dict[str, Any]]] = {  # steps that a run has made when it ends
    "goes_on": (2, {"max_steps": 4}),
    "saves": (2, {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}),
    "evaluates": (2, {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}),
    "ends": (2, {"max_steps": 2}),
}


def main(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    Backwards.agree_later = agree_later  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for name, (_, arguments) in CASES.items():
        where = Path(folder) / name
        settings = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **arguments}
        args = TrainingArguments(str(where), per_device_train_batch_size=4, **settings)
        trainer = Unlike(
            model=tiny.llama(layers=2),
            args=args,
            train_dataset=tiny.rows(32),
            eval_dataset=tiny.rows(4),
            data_collator=tiny.collate,
            callbacks=[HFParallelCallback({}, tp_size=2)],
        )
        with pytest.raises(RankMismatchError) as refused:
            trainer.train()
        trainer.accelerator.hf_parallel.watchdog.stop()
        torch.distributed.barrier()
        saved = [path.name for path in where.glob("checkpoint-*")]
        evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        found[name] = str(refused.value), trainer.state.global_step, saved, evaluated
    return found


def test_a_wrong_update_is_refused_before_it_is_evaluated_or_saved(tmp_path: Path) -> None:
    ranks = run_ranks(main, 2, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)
    for name, (steps, _) in CASES.items():
        (said, step, saved, evaluated), (other, *_) = (found[name] for found in ranks)
        assert said == other
        assert "backpropagated different losses" in said
        assert "Go back to the last checkpoint" in said
        assert step == steps
        assert saved == evaluated == []
