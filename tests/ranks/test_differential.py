"""The instrument behind `make differential` agrees on set-ups that train right, and sees one that does not.

If it cannot see a planted bug, 300 runs without a difference mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import run_ranks


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from differential import Runner  # noqa: E402
from differential_cases import Setup, draw, script  # noqa: E402


pytestmark = pytest.mark.long


# Shards, sequences on replicas of parts, stages that are a step behind, and a loop of the user's own.
SEEDS = (27, 57, 76, 99)
MORE = (29, 31, 36, 113)
BUG = """

class Bug(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if os.environ["RANK"] == "1" and state.global_step == 1:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.neg_()
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [ROOT, ROOT / "tests", ROOT / "benchmarks"]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, places)))


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_drawn_setups_train_as_one_process(seeds: tuple[int, ...], tmp_path: Path) -> None:
    setups = [draw(seed) for seed in seeds]
    verdicts = Runner(tmp_path).verdicts(setups)
    found = {setup.seed: f"{v.word}: {v.text}" for setup, v in zip(setups, verdicts, strict=True) if v.word != "equal"}
    assert not found


def test_gradients_that_change_on_one_rank_are_seen(tmp_path: Path) -> None:
    setups = [Setup(seed=1, dp=2, clip=0.0), Setup(seed=2, pp=2, clip=0.0), Setup(seed=3, tp=2, clip=0.0)]
    sources = {
        setup.seed: script(setup).replace("watch(trainer)\n", "watch(trainer)\n    trainer.add_callback(Bug())\n")
        + BUG
        for setup in setups
    }
    verdicts = Runner(tmp_path, sources=sources).verdicts(setups)
    assert verdicts[1].word == "differs"
    # Replicas compare what they hold when training ends, shards of one model what they hold in common before the next update.
    for verdict in verdicts[::2]:
        assert verdict.word == "crashed"
        assert "refused after" in verdict.text
    assert "differs between the replicas by" in verdicts[0].text
    assert (
        "parameter model.layers.0.input_layernorm.weight is held by rank 0 (tp 0 of 2) and rank 1" in verdicts[2].text
    )


def test_a_rank_that_raises_is_a_crash_and_what_all_refuse_is_not(tmp_path: Path) -> None:
    late = script(Setup(seed=1, dp=2)).replace(
        "    trainer.train()\n",
        "    if os.environ['RANK'] == '1':\n        raise ValueError('planted')\n    trainer.train()\n",
    )
    setups = [Setup(seed=1, dp=2), Setup(seed=2, pp=2, optimizer="user_adamw", settings={"num_microbatches": 0})]
    crashed, refused = Runner(tmp_path, sources={1: late}).verdicts(setups)
    assert crashed.word == "crashed"
    assert "ValueError: planted" in crashed.text
    assert refused.word == "refused"
    assert "num_microbatches" in refused.text


def forwarded(rank: int, world_size: int, parallel: dict[str, Any]) -> list[float]:
    import tiny
    from transformers import Trainer, TrainingArguments

    from hf_parallel import HFParallelCallback

    class Loss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            assert set(kwargs) == {"num_items_in_batch"}
            found = super().compute_loss(model, inputs, return_outputs, **kwargs)
            return (found[0] * 0.5, found[1]) if return_outputs else found * 0.5

    arguments = TrainingArguments(
        "out", max_steps=2, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    callbacks = [HFParallelCallback({}, **parallel)] if world_size > 1 else []
    trainer = Loss(
        tiny.llama(), arguments, train_dataset=tiny.rows(16), data_collator=tiny.collate, callbacks=callbacks
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("parallel", [{"pp_size": 2}, {"tp_size": 2}], ids=["pp2", "tp2"])
def test_a_loss_that_takes_the_rest_as_keywords_is_called_by_name(parallel: dict[str, Any], tmp_path: Path) -> None:
    env = {"ACCELERATE_USE_CPU": "true"}
    alone = run_ranks(forwarded, 1, parallel, tmp_path=tmp_path, env=env, init_group=False)[0]
    for losses in run_ranks(forwarded, 2, parallel, tmp_path=tmp_path, env=env):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=0)
