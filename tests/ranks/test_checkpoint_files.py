"""What lies in a checkpoint folder is what a save put there, what is damaged is said alike by all ranks, and stock code is not misled.

If these fail, a stock Trainer goes on with an empty optimizer, a run over machines that share no folder leaves checkpoints that
nobody can resume, or a callback's file costs the checkpoint it was put into.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import run_ranks
from resume_cases import ENV, SAVED_AT, Job, make_trainer, run_jobs
from transformers import Trainer, TrainerCallback
from typer.testing import CliRunner

from hf_parallel.checkpoints.folders import MANIFEST, complete_folders, verify
from hf_parallel.checkpoints.state import shared
from hf_parallel.cli.main import app
from hf_parallel.errors import CheckpointError


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CHECKPOINT = f"checkpoint-{SAVED_AT}"


# -- a stock Trainer ---------------------------------------------------------------------------------------------------------


def stock_main(
    rank: int, world_size: int, job: Job, in_place: str, merged: str
) -> tuple[list[float], str, list[float]]:
    """Losses of a stock run, what stock code says to our checkpoint, and the losses that follow from the merged one."""

    def stock() -> Trainer:
        made = make_trainer(job)
        return Trainer(made.model, made.args, train_dataset=made.train_dataset, data_collator=made.data_collator)

    def losses(trainer: Trainer) -> list[float]:
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    straight = stock()
    straight.train()
    try:
        stock().train(resume_from_checkpoint=in_place)
        said = "nothing"
    except Exception as error:
        said = str(error)
    resumed = stock()
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.mul_(0.5)
    resumed.train(resume_from_checkpoint=merged)
    return losses(straight), said, losses(resumed)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("layout", ["zero1", "pp2", pytest.param("tp2", marks=SLOW), pytest.param("1", marks=SLOW)])
def test_a_stock_trainer_stops_at_a_checkpoint_and_goes_on_exactly_from_the_merged_one(
    layout: str, tmp_path: Path
) -> None:
    saved = Job(layout, str(tmp_path / "saved"), model="llama_tied")
    run_jobs([saved], tmp_path)
    folder, merged = Path(saved.folder) / CHECKPOINT, tmp_path / "merged"
    result = CliRunner().invoke(app, ["merge", str(folder), str(merged), "--trainer-state"])
    assert result.exit_code == 0, result.output
    assert not {path.name for path in merged.iterdir()} & {MANIFEST, "training_state", "training_state.json"}
    job = Job("1", str(tmp_path / "stock"), model="llama_tied", arguments={"save_strategy": "no"})
    ((straight, said, resumed),) = run_ranks(
        stock_main, 1, job, str(folder), str(merged), tmp_path=tmp_path, init_group=False, env=ENV
    )
    assert "hf-parallel merge CHECKPOINT FOLDER --trainer-state" in said
    assert resumed[-5:] == pytest.approx(straight[SAVED_AT:], abs=1e-5)
    assert not list(folder.rglob("*.bin"))  # training_args.bin is a pickle of code


# -- damaged, missing, stray -------------------------------------------------------------------------------------------------


def unlisted(damage: Callable[[Path], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        damage(folder)
        (folder / MANIFEST).unlink()

    return edit


def change_description(**changes: Any) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        path = folder / "training_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


SCALER = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "listed_stray": (
        lambda f: shutil.copy(f / "rng_state_0.pth", f / "rng_state_2.pth"),
        "rng_state_2.pth is not in manifest",
    ),
    "rng_missing": (
        unlisted(lambda f: (f / "rng_state_1.pth").unlink()),
        "rng_state_1.pth does not exist, and 2 ranks",
    ),
    "rng_stray": (
        unlisted(lambda f: shutil.copy(f / "rng_state_0.pth", f / "rng_state_2.pth")),
        "rng_state_2.pth is the random state of a rank that did not exist",
    ),
    "rng_text": (unlisted(lambda f: (f / "rng_state_0.pth").write_text("no")), "rng_state_0.pth cannot be read: "),
    "rng_cut": (
        unlisted(lambda f: (f / "rng_state_0.pth").write_bytes((f / "rng_state_0.pth").read_bytes()[:-99])),
        "rng_state_0.pth cannot be read: ",
    ),
    "rng_keys": (
        unlisted(lambda f: torch.save({"python": 1}, f / "rng_state_0.pth")),
        "rng_state_0.pth has no numpy, cpu",
    ),
    "rng_values": (
        unlisted(lambda f: torch.save({"python": 1, "numpy": 2, "cpu": 3}, f / "rng_state_0.pth")),
        "rng_state_0.pth cannot be taken up",
    ),
    "scaler_stray": (
        unlisted(lambda f: torch.save(SCALER, f / "scaler.pt")),
        "scaler.pt is the state of a loss scaler",
    ),
    "scaler_missing": (unlisted(change_description(scaler=True)), "scaler.pt does not exist, and the run that saved"),
    "scaler_text": (
        unlisted(lambda f: ((f / "scaler.pt").write_text("no"), change_description(scaler=True)(f))),
        "scaler.pt cannot be read: ",
    ),
    "scaler_precision": (
        unlisted(lambda f: (torch.save(SCALER, f / "scaler.pt"), change_description(scaler=True)(f))),
        "which a run with fp16=True has and this one has not",
    ),
    "scheduler_text": (unlisted(lambda f: (f / "scheduler.pt").write_text("no")), "scheduler.pt cannot be read: "),
    "scheduler_step": (
        unlisted(lambda f: torch.save({"last_epoch": -4}, f / "scheduler.pt")),
        "scheduler.pt says last_epoch=-4",
    ),
    "state_step": (
        unlisted(lambda f: (f / "trainer_state.json").write_text('{"global_step": -3}')),
        "global_step=-3 is not a number of steps",
    ),
    "dtype": (
        unlisted(change_description(numbers={"optimizer::x::step": {"dtype": "load", "value": 1}})),
        "a number of type 'load': it is damaged",
    ),
}


def refused_main(rank: int, world_size: int, jobs: list[Job]) -> list[str]:
    found = []
    for job in jobs:
        trainer = make_trainer(job)
        try:
            trainer.train(resume_from_checkpoint=job.resume)
            found.append("nothing was refused")
        except CheckpointError as error:
            assert trainer.state.global_step in (0, SAVED_AT), "a step was made"
            found.append(str(error))
        trainer.accelerator.hf_parallel.watchdog.stop()
    return found


def test_small_files_that_are_damaged_missing_or_stray_are_refused_alike_on_every_rank(tmp_path: Path) -> None:
    saved = Job("zero1", str(tmp_path / "saved"), arguments={"max_steps": SAVED_AT})
    run_jobs([saved], tmp_path)
    jobs = []
    for name, (damage, _) in DAMAGES.items():
        copy = tmp_path / name / CHECKPOINT
        shutil.copytree(Path(saved.folder) / CHECKPOINT, copy)
        damage(copy)
        jobs.append(Job("zero1", str(tmp_path / f"from-{name}"), str(copy)))
    results = run_ranks(refused_main, 2, jobs, tmp_path=tmp_path, timeout=300, env=ENV)
    for (name, (_, text)), *said in zip(DAMAGES.items(), *results, strict=True):
        assert len(set(said)) == 1, f"{name}: the ranks say different things: {said}"
        assert text in said[0], (name, said[0])


# -- a folder that is not shared ---------------------------------------------------------------------------------------------


def unshared_main(rank: int, world_size: int, job: Job) -> tuple[str, int, list[str]]:
    shared.WAIT_S = 0.3
    mine = dataclasses.replace(job, folder=f"{job.folder}-{rank}")
    trainer = make_trainer(mine)
    steps = Steps()
    trainer.add_callback(steps)
    try:
        trainer.train()
        said = "no error"
    except CheckpointError as error:
        said = str(error)
    trainer.accelerator.hf_parallel.watchdog.stop()
    folder = Path(mine.folder)
    return said, steps.begun, sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class Steps(TrainerCallback):
    """Counts the steps that begin."""

    begun = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun += 1


def both_main(rank: int, world_size: int, saving: Job, plain: Job) -> list[tuple[str, int, list[str]]]:
    return [unshared_main(rank, world_size, saving), unshared_main(rank, world_size, plain)]


def test_a_folder_that_the_ranks_do_not_share_is_refused_before_the_first_step(tmp_path: Path) -> None:
    saving = Job("pp2", str(tmp_path / "mine"), arguments={"max_steps": 2})
    plain = Job("pp2", str(tmp_path / "plain"), arguments={"max_steps": 2, "save_strategy": "no"})
    results = run_ranks(both_main, 2, saving, plain, tmp_path=tmp_path, env=ENV)
    refused, allowed = zip(*results, strict=True)
    assert len({said for said, _, _ in refused}) == 1
    said = refused[0][0]
    assert f"output_dir={tmp_path}/mine-0: rank 1 on " in said
    assert "Is this folder shared?" in said
    assert all((steps, left) == (0, []) for _, steps, left in refused)
    assert [(said, steps) for said, steps, _ in allowed] == [("no error", 2)] * 2


# -- files of callbacks ------------------------------------------------------------------------------------------------------


class Adds(TrainerCallback):
    """Puts files into each checkpoint, as callbacks of adapters and of experiment trackers do."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        (folder / "extra").mkdir(parents=True, exist_ok=True)
        (folder / "extra" / f"of-{args.process_index}.json").write_text(json.dumps({"step": state.global_step}))
        if args.process_index == 0:
            (folder / "generation_config.json").write_text('{"max_length": 7}')


def adds_main(rank: int, world_size: int, jobs: list[Job]) -> list[list[float]]:
    stock = Trainer._save_checkpoint

    def of_a_subclass(self: Trainer, model: Any, trial: Any) -> None:
        stock(self, model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        if rank == 0:
            folder.mkdir(exist_ok=True)
            (folder / "mine.txt").write_text("mine")

    Trainer._save_checkpoint = of_a_subclass  # where a subclass of the user's stands: below what hf_parallel mixes in
    found = []
    for job in jobs:
        trainer = make_trainer(job)
        adding = Adds() if job.resume else TrainerCallback()
        vars(adding).setdefault("on_save", Adds().on_save)  # a method of the class, or one that is put on the object
        trainer.add_callback(adding)
        trainer.train(resume_from_checkpoint=job.resume)
        trainer.accelerator.hf_parallel.watchdog.stop()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


def test_files_that_callbacks_add_are_kept_and_listed_and_the_run_resumes(tmp_path: Path) -> None:
    jobs = []
    for name, behind in (("here", False), ("behind \n \u00e9", True)):
        saved = Job("dp2", str(tmp_path / name), parallel={"checkpoint": {"async_save": behind}})
        again = dataclasses.replace(saved, folder=f"{saved.folder}-again", resume=f"{saved.folder}/{CHECKPOINT}")
        jobs += [saved, again]
    losses, *_ = run_ranks(adds_main, 2, jobs, tmp_path=tmp_path, timeout=300, env=ENV)
    for saved, straight, resumed in ((jobs[0], *losses[:2]), (jobs[2], *losses[2:])):
        assert len(complete_folders(Path(saved.folder))) == 3
        for folder in complete_folders(Path(saved.folder)):
            verify(folder)
            manifest = json.loads((folder / MANIFEST).read_text())
            assert {"extra/of-0.json", "extra/of-1.json", "mine.txt"} < manifest["files"].keys()
            assert "open" not in manifest
            assert json.loads((folder / "generation_config.json").read_text()) == {"max_length": 7}
        assert resumed == straight
        assert sorted(path.name for path in Path(saved.folder).iterdir()) == [
            "checkpoint-3",
            "checkpoint-6",
            "checkpoint-8",
        ]


# -- one process -------------------------------------------------------------------------------------------------------------


def alone_main(rank: int, world_size: int, job: Job) -> None:
    trainer = make_trainer(job)
    trainer.train()
    trainer.save_model(str(Path(job.folder) / "model"))


def test_one_process_writes_no_pickle_into_the_folder_of_a_model(tmp_path: Path) -> None:
    job = Job("1", str(tmp_path / "run"), arguments={"max_steps": SAVED_AT})
    run_ranks(alone_main, 1, job, tmp_path=tmp_path, init_group=False, env=ENV)
    names = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert "training_args.json" in names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    assert {path.name for path in (tmp_path / "run" / CHECKPOINT).glob("training_args*")} == {"training_args.json"}
