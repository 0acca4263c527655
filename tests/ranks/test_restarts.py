"""A run that is started again by its launcher goes on with the rows that follow, on as many ranks as are left.

If a test fails here, a node that dies costs the run, or the run goes on with other rows or another run's checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_parallel.checkpoints.memory import memory_folder, remove_memory_folder


pytestmark = pytest.mark.long

ENV = {"ACCELERATE_USE_CPU": "true"}
STEPS, FAILS_AT = 8, 5
PP2 = {"pp_size": 2, "pipeline": {"num_microbatches": 2}}


@pytest.fixture(autouse=True)
def _gives_memory_back(tmp_path: Path) -> Iterator[None]:
    """What runs that fail leave for a restart."""
    yield
    remove_memory_folder(memory_folder(tmp_path / "out"))


class Fail(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == FAILS_AT:
            raise InterruptedError("as if it was killed")


def main(rank: int, world_size: int, folder: str, settings: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    import hf_parallel.trainer.restarts as restarts
    from hf_parallel import HFParallelCallback
    from hf_parallel.errors import CheckpointError, ConfigError

    restarts.launch_of_this_process = lambda: job.get("launch", "launcher")  # type: ignore[assignment]
    read: list[list[int]] = []

    def collate(features: list[Any]) -> dict[str, torch.Tensor]:
        batch = tiny.collate(features)
        read.append(batch["input_ids"].sum(1).tolist())
        return batch

    save_steps = job.get("save_steps", 0)
    args = TrainingArguments(
        f"{folder}/out",
        per_device_train_batch_size=job.get("rows", 4),
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        adam_epsilon=1e-5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 1,
    )
    callbacks = [HFParallelCallback({}, **settings), *([Fail()] if job.get("fails") else [])]
    try:
        trainer = Trainer(tiny.llama(), args, train_dataset=tiny.rows(40), data_collator=collate, callbacks=callbacks)
        trainer.train(**job.get("train", {}))
    except (CheckpointError, ConfigError) as error:
        return {"error": str(error)}
    except InterruptedError:
        pass
    if world_size > 1:
        trainer.accelerator.hf_parallel.watchdog.stop()
    history = trainer.state.log_history
    steps = {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry}
    return {"steps": steps, "read": read, "memory": memory_folder(Path(f"{folder}/out")).exists()}


def run(folder: Path, world_size: int, settings: dict[str, Any], **job: Any) -> list[dict[str, Any]]:
    launch = {"tmp_path": folder, "env": ENV, "init_group": world_size > 1}
    return run_ranks(main, world_size, str(folder), settings, job, **launch)


def agree(found: dict[int, Any], expected: dict[int, Any]) -> None:
    for step, (loss, norm) in found.items():
        assert loss == pytest.approx(expected[step][0], rel=1e-5)
        assert norm == pytest.approx(expected[step][1], rel=1e-5)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("straight"), 2, {"global_batch_size": 8})


def rows_of(results: list[dict[str, Any]], steps: int) -> list[list[int]]:
    """The rows of each step, whichever replica read them in which batch; one result a replica."""
    batches = 2 // len(results)
    return [
        sorted(
            row
            for result in results
            for batch in result["read"][step * batches : (step + 1) * batches]
            for row in batch
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {}), (1, {})),
        pytest.param((4, PP2), (2, PP2), marks=pytest.mark.slow),
        pytest.param((1, {}), (2, {}), marks=pytest.mark.slow),
    ],
    ids=["dp2_to_one_process", "pp2_dp2_to_pp2", "one_process_to_dp2"],
)
def test_other_replicas_go_on_with_the_same_rows(
    before: tuple[int, Any], after: tuple[int, Any], straight: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"global_batch_size": 8, "checkpoint": {"memory_steps": 1}}
    killed = run(tmp_path, before[0], {**settings, **before[1]}, fails=True)
    assert killed[0]["memory"]
    again = run(tmp_path, after[0], {**settings, **after[1]})
    assert not again[0]["memory"]
    assert sorted(killed[0]["steps"]) == list(range(1, FAILS_AT + 1))
    agree(killed[0]["steps"], straight[0]["steps"])
    assert sorted(again[0]["steps"]) == list(range(1, STEPS + 1))  # the log goes on, too
    agree(again[0]["steps"], straight[0]["steps"])
    first_of_each = again[:: after[1].get("pp_size", 1)]
    assert rows_of(first_of_each, STEPS - FAILS_AT) == rows_of(straight, STEPS)[FAILS_AT:]


def test_without_a_constant_batch_another_world_is_refused_with_numbers(tmp_path: Path) -> None:
    run(tmp_path, 2, {}, fails=True, save_steps=2)
    (again,) = run(tmp_path, 1, {}, save_steps=2)
    assert (
        "checkpoint-4 was written with 8 rows in an optimizer step, and a step of this restart has 4" in again["error"]
    )
    assert "(1 replicas)" in again["error"]
    assert "Set global_batch_size: 8" in again["error"]
    (refused,) = run(tmp_path, 1, {"global_batch_size": 8}, rows=3, save_steps=2)
    assert "global_batch_size=8 with per_device_train_batch_size=3 and 1 replicas" in refused["error"]


def test_the_newest_of_disk_and_memory_is_taken_unless_the_user_says_otherwise(
    straight: list[dict[str, Any]], tmp_path: Path
) -> None:
    kept = {"global_batch_size": 8, "checkpoint": {"memory_steps": 3}}
    run(tmp_path, 1, kept, fails=True, save_steps=2)  # on disk 2 and 4, in memory 3
    again = run(tmp_path, 1, kept, fails=True, save_steps=2)
    assert again[0]["steps"].keys() == {1, 2, 3, 4, 5}
    assert len(again[0]["read"]) < 2 * FAILS_AT  # it began after 4
    anew = run(tmp_path, 1, kept, fails=True, save_steps=2, train={"resume_from_checkpoint": False})
    assert anew[0]["steps"].keys() == again[0]["steps"].keys()
    assert len(anew[0]["read"]) >= 2 * FAILS_AT
    off = {**kept, "checkpoint": {"memory_steps": 3, "auto_resume": False}}
    assert len(run(tmp_path, 1, off, fails=True, save_steps=2)[0]["read"]) >= 2 * FAILS_AT
    other = run(tmp_path, 1, kept, fails=True, save_steps=2, launch="a later one")
    assert len(other[0]["read"]) >= 2 * FAILS_AT
    agree(other[0]["steps"], straight[0]["steps"])


def folds(rank: int, world_size: int, folder: str, killed: bool) -> list[list[float]]:
    import hf_parallel.trainer.restarts as restarts
    from hf_parallel import HFParallelCallback

    restarts.launch_of_this_process = lambda: "launcher"
    args = TrainingArguments(
        f"{folder}/out", per_device_train_batch_size=4, max_steps=STEPS, logging_steps=1, use_cpu=True, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, save_steps=2, save_total_limit=1,
    )  # fmt: skip
    found = []
    for fold in range(2):
        callbacks = [HFParallelCallback({}), *([Fail()] if killed and fold == 1 else [])]
        data = tiny.rows(40)[20 * fold : 20 * fold + 20]
        trainer = Trainer(tiny.llama(), args, train_dataset=data, data_collator=tiny.collate, callbacks=callbacks)
        with suppress(InterruptedError):
            trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


def test_a_script_with_several_trainers_in_one_folder_goes_on_in_that_which_was_killed(tmp_path: Path) -> None:
    def once(folder: str, *, killed: bool = False) -> list[list[float]]:
        (found,) = run_ranks(folds, 1, str(tmp_path / folder), killed, tmp_path=tmp_path, env=ENV, init_group=False)
        return list(found)

    straight = once("straight")
    assert len(once("killed", killed=True)[1]) == FAILS_AT
    assert once("killed") == straight  # the first began anew, and did not take up what the second had saved
