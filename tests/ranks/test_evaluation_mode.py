"""A loop that forgets `model.train()`: `from_pretrained` leaves a model in evaluation mode, and stock trains it so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from user_loops import losses_or_refusal


def losses_of(rank: int, world_size: int, parallel: dict[str, Any] | None) -> Any:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    more = {} if parallel is None else {"parallelism_config": HFParallelPlugin({}, **parallel)}
    accelerator = Accelerator(cpu=True, **more)
    model = tiny.llama().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(tiny.rows(16), batch_size=4, collate_fn=tiny.collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return losses_or_refusal(accelerator, model, optimizer, loader)


@pytest.mark.parametrize("parallel", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp2", "pp2"])
def test_a_model_in_evaluation_mode_trains_as_stock_or_is_refused(parallel: dict[str, Any], tmp_path: Path) -> None:
    env = {"ACCELERATE_USE_CPU": "true"}
    alone = run_ranks(losses_of, 1, None, tmp_path=tmp_path, env=env, init_group=False)[0]
    for found in run_ranks(losses_of, 2, parallel, tmp_path=tmp_path, env=env):
        if "pp_size" in parallel:
            assert "model.train()" in found
        else:
            assert found == pytest.approx(alone, abs=1e-5)


class LossAndEntropy(Trainer):
    """A loss of the user's that reads the loss and the logits of one call."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        entropy = torch.distributions.Categorical(logits=outputs.logits.float()).entropy().mean()
        loss = outputs.loss - 0.1 * entropy
        return (loss, outputs) if return_outputs else loss


def evaluated(rank: int, world_size: int, parallel: dict[str, Any] | None, folder: str) -> float:
    from hf_parallel import HFParallelCallback

    trainer = LossAndEntropy(
        model=tiny.llama(),
        args=TrainingArguments(folder, use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=4),
        eval_dataset=tiny.rows(10),
        data_collator=tiny.collate,
        callbacks=[] if parallel is None else [HFParallelCallback({}, **parallel)],
    )
    return float(trainer.evaluate()["eval_loss"])


def test_an_evaluation_for_its_loss_alone_gives_logits_to_a_loss_of_the_user(tmp_path: Path) -> None:
    env = {"ACCELERATE_USE_CPU": "true"}
    alone = run_ranks(evaluated, 1, None, str(tmp_path), tmp_path=tmp_path, env=env, init_group=False)[0]
    for found in run_ranks(evaluated, 2, {"pp_size": 2}, str(tmp_path), tmp_path=tmp_path, env=env):
        assert found == pytest.approx(alone, abs=1e-5)
