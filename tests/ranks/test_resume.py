"""A checkpoint fits every layout, a damaged one is refused alike on every rank, and a save that fails loses nothing.

If these fail, a run that changes its layout goes on from other numbers, a job hangs on a damaged file, or a full disk
costs the checkpoint that was there. All 64 pairs of layouts are in `make resume-matrix`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_runner import run_ranks
from resume_cases import (
    CHECKPOINT,
    ENV,
    SAVED_AT,
    Cell,
    Continued,
    Job,
    make_trainer,
    resumed,
    run_cells,
    run_job,
    run_jobs,
    states_equal,
)
from transformers import Trainer

from hf_parallel.checkpoints.folders import MANIFEST, STAGING, complete_folders
from hf_parallel.errors import CheckpointError


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CELLS = [("tp2", "fsdp2"), ("zero1", "pp2"), ("pp2", "1"), ("pp2", "pp2")]


def source(folder: Path, layout: str, **changes: Any) -> Job:
    return Job(layout, str(folder / f"saved-{layout}"), **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Continued]:
    folder = tmp_path_factory.mktemp("resume")
    return run_cells(folder, {name: source(folder, name) for name in sorted({saved for saved, _ in CELLS})}, CELLS)


@pytest.mark.parametrize(("saved", "layout"), CELLS)
def test_a_run_resumed_under_another_layout_continues(saved: str, layout: str, runs: dict[Cell, Continued]) -> None:
    job, losses, straight = runs[saved, layout]
    assert len(losses) == 5
    assert losses == (straight if saved == layout else pytest.approx(straight, abs=1e-5))
    assert states_equal(Path(str(job.resume)), Path(job.folder) / "again"), (
        "the state that was read is not the saved one"
    )


def test_a_checkpoint_lists_its_files_and_nothing_else_is_left(
    runs: dict[Cell, Continued],
) -> None:
    folder = Path(str(runs["tp2", "fsdp2"][0].resume))
    listed = json.loads((folder / MANIFEST).read_text())
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    assert listed["files"].keys() == found
    assert listed["tensors"]["weights"] == 20  # the head is tied to the embedding
    assert listed["tensors"]["training_state"] == 40  # two moments each
    assert {name for name in found if name.endswith(".distcp")} == {
        "training_state/__0_0.distcp",
        "training_state/__1_0.distcp",
    }
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]


def test_a_model_whose_names_are_converted_resumes(tmp_path: Path) -> None:
    saved = source(tmp_path, "tp2", model="mixtral")
    (straight,) = run_jobs([saved], tmp_path)
    jobs = [resumed(tmp_path, saved, layout) for layout in ("tp2", "fsdp2")]
    same, *_ = run_jobs(jobs, tmp_path)
    assert same == straight[SAVED_AT:]
    # Microbatches and replicas count the balance loss of the router each for themselves: what was read is equal.
    assert all(states_equal(Path(saved.folder) / CHECKPOINT, Path(job.folder) / "again") for job in jobs)


def test_what_is_written_while_training_goes_on_is_what_was_there_when_it_began(tmp_path: Path) -> None:
    here = source(tmp_path / "here", "zero1")
    behind = source(tmp_path / "behind", "zero1", parallel={"checkpoint": {"async_save": True}})
    alone = source(tmp_path / "alone", "1", parallel={"checkpoint": {"async_save": True}})
    losses = run_jobs([here, behind, alone], tmp_path)
    assert losses[1] == losses[0]
    for name in (CHECKPOINT, "checkpoint-6", "checkpoint-8"):
        assert states_equal(Path(here.folder) / name, Path(behind.folder) / name)
    for job in (behind, alone):
        assert [path.name for path in complete_folders(Path(job.folder))] == [
            "checkpoint-8",
            "checkpoint-6",
            CHECKPOINT,
        ]
        assert len(list(Path(job.folder).iterdir())) == 3


def stock_main(rank: int, world_size: int, stock: Job, mine: Job) -> list[float]:
    """A stock Trainer saves; one process with the callback goes on, and saves for any layout."""
    trainer = make_trainer(stock)
    plain = Trainer(
        trainer.model, trainer.args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator
    )
    plain.train()
    assert (Path(stock.folder) / CHECKPOINT / "optimizer.pt").is_file()
    run_job(mine)
    return [entry["loss"] for entry in plain.state.log_history if "loss" in entry]


def test_a_checkpoint_of_the_stock_trainer_goes_on_in_one_process_and_then_anywhere(tmp_path: Path) -> None:
    stock = source(tmp_path, "1")
    again = {"save_strategy": "steps"}
    mine = Job("1", str(tmp_path / "mine"), str(Path(stock.folder) / CHECKPOINT), arguments=again)
    (straight,) = run_ranks(stock_main, 1, stock, mine, tmp_path=tmp_path, init_group=False, env=ENV)
    (losses,) = run_jobs([Job("dp2", str(tmp_path / "dp2"), str(tmp_path / "mine" / "checkpoint-6"))], tmp_path)
    assert losses == pytest.approx(straight[SAVED_AT:], abs=1e-5)


# -- what is damaged or foreign --------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def rename_in_index(folder: Path) -> None:
    """An index that lacks a tensor, in a folder whose files are as listed: nothing but the index itself says so."""
    path = folder / "training_state" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"optimizer::model.norm.weight", b"optimizer::model.gone.weight"))
    (folder / MANIFEST).unlink()


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights_changed": (
        lambda f: flip(f / "model.safetensors"),
        r"model.safetensors is damaged: its content is not what",
    ),
    "state_truncated": (lambda f: cut(f / "training_state" / "__1_0.distcp"), "__1_0.distcp has"),
    "state_missing": (lambda f: (f / "training_state" / "__0_0.distcp").unlink(), "__0_0.distcp does not exist"),
    "index_entry": (rename_in_index, ".metadata has no tensor optimizer::model.norm.weight::exp_avg"),
    "random_state": (lambda f: (f / "rng_state_1.pth").unlink(), "rng_state_1.pth does not exist"),
}


def refused_main(rank: int, world_size: int, jobs: list[Job]) -> list[str]:
    found = []
    for job in jobs:
        try:
            run_job(job)
            found.append("nothing was refused")
        except CheckpointError as error:
            found.append(str(error))
    return found


def refusals(jobs: list[Job], folder: Path) -> list[list[str]]:
    """What each rank said to each job."""
    results = run_ranks(refused_main, 2, jobs, tmp_path=folder, timeout=300, env=ENV)
    return [list(each) for each in zip(*results, strict=True)]


def test_what_is_damaged_or_foreign_is_refused_alike_on_every_rank(tmp_path: Path) -> None:
    import shutil

    saved = source(tmp_path, "zero1", arguments={"max_steps": SAVED_AT})
    run_jobs([saved], tmp_path)
    jobs = []
    for name, (damage, _) in DAMAGES.items():
        copy = tmp_path / name / CHECKPOINT
        shutil.copytree(Path(saved.folder) / CHECKPOINT, copy)
        damage(copy)
        jobs.append(Job("pp2", str(tmp_path / f"from-{name}"), str(copy)))
    other = resumed(tmp_path, saved, "pp2", model="llama_tied")
    weights_only = resumed(tmp_path, source(tmp_path, "pp2", arguments={"save_only_model": True}), "pp2")
    run_jobs([source(tmp_path, "pp2", arguments={"save_only_model": True, "max_steps": SAVED_AT})], tmp_path)
    expected = [
        *(text for _, text in DAMAGES.values()),
        "The checkpoint is of another model: build the model",
        "weights only",
    ]
    for said, text in zip(refusals([*jobs, other, weights_only], tmp_path), expected, strict=True):
        assert len(set(said)) == 1, f"the ranks say different things: {said}"
        assert text in said[0]


# -- a disk that fills up --------------------------------------------------------------------------------------------------


def full_disk_main(rank: int, world_size: int, job: Job, fails_on: int, what: str) -> str:
    """The second checkpoint meets a full disk on one rank."""
    import torch.distributed.checkpoint.filesystem as filesystem

    from hf_parallel.checkpoints.weights import write

    trainer = make_trainer(job)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args: Any, **kwargs: Any) -> None:
        if Path(job.folder, STAGING, "checkpoint-6").exists():
            raise full
        return original(*args, **kwargs)

    owner, name = {
        "state": (filesystem, "_write_item"),
        "weights": (write, "lay_out"),
    }[what]
    original = getattr(owner, name)
    if rank == fails_on:
        setattr(owner, name, fail)
    try:
        trainer.train()
    except CheckpointError as error:
        return str(error)
    finally:
        setattr(owner, name, original)
        trainer.accelerator.hf_parallel.watchdog.stop()
    return "no error"


@pytest.mark.parametrize(("what", "rank", "behind"), [("state", 1, False), ("state", 1, True), ("weights", 0, False)])
def test_a_full_disk_leaves_the_old_checkpoint_and_says_so_on_every_rank(
    what: str, rank: int, behind: bool, tmp_path: Path
) -> None:
    parallel = {"checkpoint": {"async_save": behind}}
    job = dataclasses.replace(source(tmp_path, "zero1"), arguments={"save_total_limit": 1}, parallel=parallel)
    said = run_ranks(full_disk_main, 2, job, rank, what, tmp_path=tmp_path, timeout=120, env=ENV)
    assert len(set(said)) == 1, said
    assert "checkpoint-6 could not be written" in said[0]
    assert f"rank {rank}" in said[0]
    assert "No space left on device" in said[0]
    assert "GB free there" in said[0]
    assert [path.name for path in complete_folders(Path(job.folder))] == [CHECKPOINT]
    assert [path.name for path in Path(job.folder).iterdir()] == [CHECKPOINT]
