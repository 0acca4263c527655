"""Checkpoint folders: complete or absent, listed, and never lost, whatever is killed or damaged when.

If these fail, a job that was killed resumes from half a checkpoint, or has lost its only one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hf_parallel.checkpoints.folders import (
    MANIFEST,
    STAGING,
    clean,
    complete_folders,
    files_of,
    missing_part,
    newest,
    publish,
    record,
    rotate,
    verify,
    write_manifest,
)
from hf_parallel.errors import CheckpointError


def folder_with(path: Path, text: str) -> Path:
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "file.txt").write_text(text)
    return path


def checkpoint(run_dir: Path, step: int, mtime: float | None = None) -> Path:
    """A complete checkpoint."""
    folder = folder_with(run_dir / f"checkpoint-{step}", f"of step {step}")
    (folder / "trainer_state.json").write_text("{}")
    write_manifest(folder, record(folder, files_of(folder)), {"step": step})
    if mtime is not None:
        os.utime(folder, (mtime, mtime))
    return folder


# -- manifest ------------------------------------------------------------------------------------------------------------


def test_a_manifest_lists_every_file_with_its_length_and_hash(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2)
    listed = json.loads((folder / MANIFEST).read_text())
    assert listed["step"] == 2
    assert listed["files"].keys() == {"sub/file.txt", "trainer_state.json"}
    assert listed["files"]["sub/file.txt"]["bytes"] == len("of step 2")
    verify(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: path.unlink(),
            r"sub/file\.txt does not exist, but manifest\.json lists it\. Take another",
        ),
        (lambda path: path.write_text("of st"), r"sub/file\.txt has 5 bytes, manifest\.json says 9: it is truncated"),
        (
            lambda path: path.write_text("of stop 2"),
            r"sub/file\.txt is damaged: its content is not what manifest\.json says",
        ),
    ],
    ids=["missing", "truncated", "changed"],
)
def test_what_is_missing_truncated_or_changed_is_named(damage: object, message: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    folder = checkpoint(tmp_path, 2)
    damage(folder / "sub" / "file.txt")
    with pytest.raises(CheckpointError, match=message) as caught:
        verify(folder)
    assert "another checkpoint: checkpoint-1." in str(caught.value)


def test_the_ranks_share_the_files_out_among_them(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2)
    (folder / "trainer_state.json").write_text("[]")
    verify(folder, 0, 2)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is damaged"):
        verify(folder, 1, 2)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: .*truncated or damaged"):
        verify(folder)


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") == (None, [])
    for step in (2, 10, 12):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-12" / "sub" / "file.txt").unlink()
    (tmp_path / "checkpoint-14").mkdir()  # half of a copy
    folder_with(tmp_path / STAGING / "checkpoint-16", "staged")
    folder_with(tmp_path / "checkpoint-final", "not numbered")
    found, passed = newest(tmp_path)
    assert found == tmp_path / "checkpoint-10"
    assert [problem.split(" ")[0] for problem in passed] == [
        str(tmp_path / "checkpoint-14"),
        str(tmp_path / "checkpoint-12" / "sub" / "file.txt"),
    ]
    assert [path.name for path in complete_folders(tmp_path)] == ["checkpoint-10", "checkpoint-2"]


def test_a_checkpoint_of_the_stock_trainer_counts(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "checkpoint-3", "stock")
    assert "neither manifest.json nor trainer_state.json" in str(missing_part(folder))
    (folder / "trainer_state.json").write_text("{}")
    assert newest(tmp_path)[0] == folder


# -- what killed jobs leave ----------------------------------------------------------------------------------------------


def test_leftovers_of_killed_jobs_are_removed_and_a_replaced_checkpoint_returns(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4).rename(tmp_path / ".checkpoint-4.replaced")
    checkpoint(tmp_path, 6)
    folder_with(tmp_path / ".checkpoint-6.replaced", "its older self")
    folder_with(tmp_path / ".checkpoint-1.removed", "half removed")
    folder_with(tmp_path / STAGING / "checkpoint-8", "half written")
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert missing_part(tmp_path / "checkpoint-4") is None
    clean(tmp_path / "nowhere")


def test_rotation_spares_the_new_one_and_the_best(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        checkpoint(tmp_path, step, mtime=1000 + step)
    rotate(tmp_path, None, tmp_path / "checkpoint-8", None)
    assert len(list(tmp_path.iterdir())) == 4
    rotate(tmp_path, 2, tmp_path / "checkpoint-8", str(tmp_path / "checkpoint-4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]
    rotate(tmp_path, 1, tmp_path / "checkpoint-8", None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]


def test_a_kill_in_the_middle_of_a_removal_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hf_parallel.checkpoints.folders as folders

    for step in (2, 4):
        checkpoint(tmp_path, step, mtime=1000 + step)
    calls: list[Path] = []

    def die(path: Path, ignore_errors: bool = False) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(folders.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            rotate(tmp_path, 1, tmp_path / "checkpoint-4", None)
    assert newest(tmp_path) == (tmp_path / "checkpoint-4", [])
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


# -- publishing --------------------------------------------------------------------------------------------------------


def test_a_published_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    final = folder_with(tmp_path / "checkpoint-2", "old")
    publish(folder_with(tmp_path / "staging" / "checkpoint-2", "new"), final)
    assert (final / "sub" / "file.txt").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "staging"]


@pytest.mark.parametrize("failing", [1, 2])
def test_the_old_folder_is_in_place_whichever_rename_fails(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = folder_with(tmp_path / "checkpoint-2", "old")
    staged = folder_with(tmp_path / "staging" / "checkpoint-2", "new")
    rename, calls = Path.rename, []

    def failing_rename(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == failing:
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="no space left"):
        publish(staged, final)
    assert (final / "sub" / "file.txt").read_text() == "old"
    monkeypatch.setattr(Path, "rename", rename)
    publish(staged, final)
    assert (final / "sub" / "file.txt").read_text() == "new"


def test_after_a_kill_between_the_renames_the_old_folder_outlives_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill lets nothing clean up: the old folder has its spare name until a new one is in place."""
    final = folder_with(tmp_path / "checkpoint-2", "old")
    spare = final.rename(tmp_path / ".checkpoint-2.replaced")
    staged = folder_with(tmp_path / "staging" / "checkpoint-2", "new")

    def fail(self: Path, target: Path) -> Path:
        assert (spare / "sub" / "file.txt").read_text() == "old"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            publish(staged, final)
    assert (spare / "sub" / "file.txt").read_text() == "old"
    publish(staged, final)
    assert [path.name for path in tmp_path.iterdir() if path.name != "staging"] == ["checkpoint-2"]
