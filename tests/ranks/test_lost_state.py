"""A run with checkpoints that would not hold what its optimizer keeps is refused before the first update; one without is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import RankError, run_ranks
from transformers import Trainer, TrainingArguments

from hf_parallel import HFParallelCallback


ENV = {"ACCELERATE_USE_CPU": "true"}


class Counter(torch.optim.AdamW):
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}


class Around(torch.optim.Optimizer):
    """Slow weights around another optimizer, as of Lookahead."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.slow = optimizer, 0
        super().__init__(optimizer.param_groups, {})
        self.state = optimizer.state

    def step(self, closure: Any = None) -> Any:
        self.slow += 1
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])
        self.slow = state_dict["slow"]


class Lomo(torch.optim.SGD):
    """By its module, LOMO's."""


Lomo.__module__ = "lomo_optim.lomo"
KINDS: dict[str, Any] = {
    "counter": lambda parameters: Counter(parameters, lr=1e-2),
    "around": lambda parameters: Around(torch.optim.AdamW(parameters, lr=1e-2)),
    "lomo": lambda parameters: Lomo(parameters, lr=1e-2),
}


def main(rank: int, world_size: int, kind: str, saves: bool, folder: str) -> int:
    model = tiny.llama(layers=2)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            folder,
            max_steps=2,
            save_strategy="steps" if saves else "no",
            save_steps=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=tiny.rows(16),
        data_collator=tiny.collate,
        callbacks=[HFParallelCallback({})],
        optimizers=(KINDS[kind](model.parameters()), None),
    )
    try:
        trainer.train()
    finally:
        trainer.accelerator.hf_parallel.watchdog.stop()
        Path(folder, f"steps.{rank}").write_text(str(trainer.state.global_step))
    return int(trainer.state.global_step)


@pytest.mark.parametrize(
    ("kind", "saves", "said"),
    [
        (
            "counter",
            True,
            "a checkpoint would not hold what its state_dict() has beside the state of parameters ('count')",
        ),
        (
            "around",
            True,
            "a checkpoint would not hold what its state_dict() has beside the state of parameters ('inner', 'slow')",
        ),
        ("lomo", False, "it updates weights while the backward pass runs"),
    ],
)
def test_refused_before_the_first_update(kind: str, saves: bool, said: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as found:
        run_ranks(main, 2, kind, saves, str(tmp_path), tmp_path=tmp_path, env=ENV)
    assert said in str(found.value)
    assert [(tmp_path / f"steps.{rank}").read_text() for rank in range(2)] == ["0", "0"]


@pytest.mark.parametrize("kind", ["counter", "around"])
def test_trained_without_checkpoints(kind: str, tmp_path: Path) -> None:
    assert run_ranks(main, 2, kind, False, str(tmp_path), tmp_path=tmp_path, env=ENV) == [2, 2]
