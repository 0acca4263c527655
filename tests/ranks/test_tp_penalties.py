"""A loss of the user's that reads all parameters: under tp it means the whole ones, and every rank computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from transformers import Trainer, TrainingArguments


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}


class Penalised(Trainer):
    """Norms are no sums over parts; the second term is over one layer only. Another layer is frozen on the way."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        if self.state.global_step == 1:
            for name, parameter in model.model.layers[0].named_parameters():
                if "proj" in name:
                    parameter.requires_grad_(False)
                else:
                    parameter.requires_grad = False
                assert not parameter.requires_grad
        found = super().compute_loss(model, inputs, return_outputs, **kwargs)
        norms = sum(p.norm() for p in model.parameters() if p.requires_grad)
        squares = sum(p.square().sum() for name, p in model.model.layers[1].named_parameters() if "proj" in name)
        penalty = 0.05 * norms + 0.02 * squares
        return (found[0] + penalty, found[1]) if return_outputs else found + penalty


def trained(rank: int, world_size: int, cases: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    return {name: losses_of(name, parallel, world_size) for name, parallel in cases.items()}


def losses_of(name: str, parallel: dict[str, Any], world_size: int) -> list[float]:
    from hf_parallel import HFParallelCallback

    arguments = TrainingArguments(
        name,
        per_device_train_batch_size=4,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-5,
        eval_strategy="steps",
        eval_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Penalised(
        tiny.llama(tied=True),
        arguments,
        train_dataset=tiny.rows(16),
        eval_dataset=tiny.rows(8),
        data_collator=tiny.collate,
        callbacks=[HFParallelCallback({}, **parallel)] if world_size > 1 else [],
    )
    trainer.train()
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    wanted = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in wanted if key in entry]


CASES = {"tp2": {"tp_size": 2}, "whole_logits": {"tp_size": 2, "vocab_parallel_loss": False}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("penalties")
    alone = run_ranks(trained, 1, {"alone": {}}, tmp_path=folder, env=ENV, init_group=False)[0]
    ranks = run_ranks(trained, 2, CASES, tmp_path=folder, env=ENV)
    assert ranks[0] == ranks[1]
    return {**alone, **ranks[0]}


@pytest.mark.parametrize("case", CASES)
def test_a_penalty_over_all_parameters_is_that_of_one_process(case: str, runs: dict[str, list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(runs[case]), torch.tensor(runs["alone"]), rtol=1e-5, atol=0)


def differing(rank: int, world_size: int, parallel: dict[str, Any]) -> dict[str, str]:
    return {name: told(change, parallel) for name, change in CHANGES.items()}


def told(change: Any, parallel: dict[str, Any]) -> str:
    """What a loop says in which a loss goes through `change` before its backward; empty if it trains."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelPlugin, ParallelError

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **parallel))
    model = accelerator.prepare(tiny.llama())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = tiny.collate(tiny.rows(4))
    said = ""
    try:
        for _ in range(2):
            accelerator.backward(change(model(**batch).loss, model))
            optimizer.step()
            optimizer.zero_grad()
    except ParallelError as error:
        said = f"{type(error).__name__}: {error}"
    accelerator.hf_parallel.watchdog.stop()
    return said


def of_rank(loss: Any, model: Any) -> Any:
    return loss * (1 + torch.distributed.get_rank())


def beside(loss: Any, model: Any) -> Any:
    return loss + 0.01 * sum(p.square().sum() for p in model.parameters())


def not_a_number(loss: Any, model: Any) -> Any:
    return loss * float("nan") if torch.distributed.get_rank() else loss


def alike(loss: Any, model: Any) -> Any:
    return loss * 0.3


CHANGES = {change.__name__: change for change in (of_rank, beside, not_a_number, alike)}


def test_a_loss_that_differs_over_the_shards_is_refused_before_the_first_update(tmp_path: Path) -> None:
    for found in run_ranks(differing, 2, {"tp_size": 2}, tmp_path=tmp_path, env=ENV):
        for name in ("of_rank", "beside", "not_a_number"):
            assert "RankMismatchError: the ranks of one model copy backpropagated different losses" in found[name], (
                name
            )
            assert "rank 1 (tp 1 of 2)" in found[name]
        assert not found["alike"]
