"""A manifest is strict: a folder holds what it lists and nothing else, and it lists files of the folder only.

If these fail, a planted file decides which weights a run goes on from, or a checkpoint leaks files of the machine it is merged on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_parallel.checkpoints.folders import (
    MANIFEST,
    clean,
    files_of,
    missing_part,
    newest,
    publish,
    record,
    rotate,
    verify,
    write_manifest,
)
from hf_parallel.checkpoints.state.dcp import TensorIndex, save_pieces
from hf_parallel.checkpoints.state.description import check_trainer_state, read_description
from hf_parallel.checkpoints.state.pieces import Piece
from hf_parallel.checkpoints.state.shared import Claim
from hf_parallel.checkpoints.weights.gather import weight_files
from hf_parallel.cli.main import app
from hf_parallel.errors import CheckpointError


def checkpoint(run_dir: Path, step: int = 3, mtime: float | None = None) -> Path:
    folder = run_dir / f"checkpoint-{step}"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file.txt").write_text("text")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    write_manifest(folder, record(folder, files_of(folder)), {"step": step, "tensors": {"weights": 0}})
    if mtime is not None:
        os.utime(folder, (mtime, mtime))
    return folder


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


# -- rotation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [(5, 5, 5), (7, 6, 5), (5, 7, 6), (6, 7, 5)], ids=str)
def test_rotation_goes_by_step_whatever_the_times_are(times: tuple[int, ...], tmp_path: Path) -> None:
    for step, mtime in zip((8, 10, 12), times, strict=True):
        checkpoint(tmp_path, step, mtime)
    rotate(tmp_path, 2, tmp_path / "checkpoint-12", None)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-12"]


def test_rotation_keeps_what_was_just_written_and_the_best_among_those_of_an_earlier_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30, 100):
        checkpoint(tmp_path, step)
    rotate(tmp_path, 3, tmp_path / "checkpoint-20", None)
    assert names(tmp_path) == ["checkpoint-100", "checkpoint-20", "checkpoint-30"]
    assert "checkpoint-100 is older than checkpoint-20" in caplog.text
    rotate(tmp_path, 1, tmp_path / "checkpoint-20", str(tmp_path / "checkpoint-30"))
    assert names(tmp_path) == ["checkpoint-20", "checkpoint-30"]
    rotate(tmp_path, 1, tmp_path / "checkpoint-20", str(tmp_path / "elsewhere" / "checkpoint-5"))
    assert names(tmp_path) == ["checkpoint-20"]


def test_rotation_leaves_alone_what_no_save_wrote(tmp_path: Path) -> None:
    elsewhere = checkpoint(tmp_path / "elsewhere", 1)
    run_dir = tmp_path / "run"
    for step in (2, 4):
        checkpoint(run_dir, step)
    odd = [
        "checkpoint-007",
        "checkpoint-abc",
        "checkpoint--5",
        "checkpoint-3.bak",
        "checkpoint-\u0661",
        "my-checkpoint-1",
    ]
    for name in odd:
        (run_dir / name).mkdir()
    (run_dir / "checkpoint-1").symlink_to(elsewhere)
    (run_dir / "checkpoint-3").write_text("a file")
    rotate(run_dir, 1, run_dir / "checkpoint-4", None)
    assert names(run_dir) == sorted([*odd, "checkpoint-1", "checkpoint-3", "checkpoint-4"])
    assert (elsewhere / "sub" / "file.txt").exists()
    assert newest(run_dir)[0] == run_dir / "checkpoint-4"


def test_a_checkpoint_that_cannot_be_removed_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        checkpoint(tmp_path, step)

    def fail(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", fail)
    rotate(tmp_path, 1, tmp_path / "checkpoint-4", None)
    assert "checkpoint-2 is beyond save_total_limit and cannot be removed: Permission denied" in caplog.text


def test_a_link_in_place_of_a_folder_is_replaced_and_cleaned_without_touching_what_it_leads_to(tmp_path: Path) -> None:
    elsewhere, run_dir = checkpoint(tmp_path / "elsewhere", 1), tmp_path / "run"
    staged = checkpoint(run_dir / ".incomplete", 2)
    (run_dir / "checkpoint-2").symlink_to(elsewhere)
    publish(staged, run_dir / "checkpoint-2")
    (run_dir / ".incomplete").rmdir()
    (run_dir / ".incomplete").symlink_to(elsewhere.parent)
    (run_dir / ".checkpoint-5.removed").symlink_to(elsewhere)
    clean(run_dir)
    assert names(run_dir) == ["checkpoint-2"]
    verify(elsewhere)


# -- what a manifest says --------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"bytes": 4, "sha256": "0" * 64}


def say(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**content, **changes}))

    return edit


def entry(name: str, value: Any = GOOD) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        content["files"][name] = value
        (folder / MANIFEST).write_text(json.dumps(content))

    return edit


def write(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST).write_text(text) and None


def instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / MANIFEST).rename(folder.parent / "kept.json")
        make(folder / MANIFEST)

    return edit


ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no list": (write('{"format": 1}'), "files=None lists no file"),
    "an empty list": (say(files={}), "files={} lists no file"),
    "a list of names": (say(files=["trainer_state.json"]), "lists no file"),
    "another format": (say(format=2), "format=2, and this version reads 1"),
    "no format": (write('{"files": {}}'), "format=None"),
    "true for a format": (say(format=True), "format=True"),
    "a negative step": (say(step=-3), "step=-3 is not a number of steps"),
    "half a step": (say(step=1.5), "step=1.5"),
    "a step in words": (say(step="3"), "step='3'"),
    "no step": (say(step=None), "step=None"),
    "negative tensors": (say(tensors={"weights": -1}), "tensors="),
    "openness in words": (say(open="yes"), "open='yes'"),
    "a parent": (entry("../secret"), r"'\.\./secret' is not the name of a file inside"),
    "a parent inside": (entry("sub/../trainer_state.json"), "is not the name of a file inside"),
    "an absolute name": (entry("/etc/passwd"), "is not the name of a file inside"),
    "two slashes": (entry("sub//file.txt"), "is not the name of a file inside"),
    "a dot": (entry("./trainer_state.json"), "is not the name of a file inside"),
    "nothing": (entry(""), "is not the name of a file inside"),
    "itself": (entry(MANIFEST), "is not the name of a file inside"),
    "a zero byte": (entry("a\0b"), "is not the name of a file inside"),
    "negative bytes": (entry("x", {**GOOD, "bytes": -1}), "bytes=-1, which is no length"),
    "bytes in words": (entry("x", {**GOOD, "bytes": "4"}), "bytes='4', which is no length"),
    "true for bytes": (entry("x", {**GOOD, "bytes": True}), "bytes=True, which is no length"),
    "a short hash": (entry("x", {**GOOD, "sha256": "00"}), "which is not 64 hexadecimal digits"),
    "a number for a hash": (entry("x", {**GOOD, "sha256": 7}), "which is not 64 hexadecimal digits"),
    "capitals": (entry("x", {**GOOD, "sha256": "A" * 64}), "which is not 64 hexadecimal digits"),
    "no hash": (entry("x", {"bytes": 4}), "instead of bytes and sha256"),
    "a list": (write("[]"), "instead of a mapping"),
    "a key twice": (write('{"format": 1, "files": {}, "files": {}}'), "'files' is there twice"),
    "a file twice": (write('{"format": 1, "files": {"a": 1, "a": 2}}'), "'a' is there twice"),
    "5000 digits": (write('{"format": 1, "step": ' + "9" * 5000 + ', "files": {}}'), "cannot be read: ValueError"),
    "depth": (write("[" * 100_000), "cannot be read"),
    "no text": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe") and None, "cannot be read: UnicodeDecode"),
    "a link": (instead(lambda path: path.symlink_to("../kept.json")), "is a symbolic link"),
    "a link to nothing": (instead(lambda path: path.symlink_to("nowhere")), "is a symbolic link"),
    "a pipe": (instead(os.mkfifo), "is no regular file"),
    "a folder": (instead(os.mkdir), "is no regular file|cannot be read"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_manifest_that_says_what_no_save_says_is_refused(name: str, tmp_path: Path) -> None:
    damage, message = ODD[name]
    folder = checkpoint(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        verify(folder)
    assert missing_part(folder) is not None
    assert newest(tmp_path)[0] is None


# -- what lies in the folder ---------------------------------------------------------------------------------------------


def plant(name: str) -> Callable[[Path], Any]:
    return lambda folder: ((folder / name).parent.mkdir(exist_ok=True), (folder / name).write_text("{}"))


def swap(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).rename(folder.parent / "moved")
        make(folder / name)

    return edit


STRAY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an index": (plant("model.safetensors.index.json"), r"index\.json is not in manifest\.json"),
    "weights": (plant("model-00001-of-00002.safetensors"), r"is not in manifest\.json.* Move it away"),
    "pickled weights": (plant("pytorch_model.bin"), r"pytorch_model\.bin is not in manifest\.json"),
    "code": (plant("modeling_evil.py"), r"modeling_evil\.py is not in manifest\.json"),
    "a note": (plant("notes.txt"), r"notes\.txt is not in manifest\.json"),
    "a hidden file": (plant(".hidden"), r"\.hidden is not in manifest\.json"),
    "a file deeper": (plant("sub/other.txt"), r"sub/other\.txt is not in manifest\.json"),
    "a random state": (plant("rng_state_7.pth"), r"rng_state_7\.pth is not in manifest\.json"),
    "an empty folder": (lambda folder: (folder / "optimizer_0").mkdir(), r"optimizer_0 is not in manifest\.json"),
    "a link beside": (lambda folder: (folder / "secret").symlink_to("/etc/hostname"), "secret is a symbolic link"),
    "a pipe beside": (lambda folder: os.mkfifo(folder / "pipe"), "pipe is no regular file"),
    "a link for a file": (
        swap("trainer_state.json", lambda path: path.symlink_to("../moved")),
        "trainer_state.json is a symbolic link",
    ),
    "a link for a folder": (swap("sub", lambda path: path.symlink_to("../moved")), "sub is a symbolic link"),
    "a folder for a file": (swap("trainer_state.json", os.mkdir), "trainer_state.json is a folder"),
    "a file for a folder": (swap("sub", lambda path: path.write_text("")), "does not exist|sub is no"),
    "a pipe for a file": (swap("trainer_state.json", os.mkfifo), "is no regular file"),
}


@pytest.mark.parametrize("name", STRAY)
def test_a_folder_that_holds_what_no_save_wrote_is_refused(name: str, tmp_path: Path) -> None:
    damage, message = STRAY[name]
    folder = checkpoint(tmp_path)
    verify(folder)
    damage(folder)
    for share in range(2):
        with pytest.raises(CheckpointError, match=message):
            verify(folder, share, 2)


def test_what_file_systems_leave_and_a_link_to_the_folder_itself_are_no_trouble(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / ".nfs00000000012af3").write_text("")
    (folder / ".DS_Store").write_text("")
    (tmp_path / "latest").symlink_to(folder.name)
    verify(tmp_path / "latest")


def test_a_folder_that_callbacks_were_adding_to_when_the_job_died_is_read_without_what_they_added(
    tmp_path: Path,
) -> None:
    folder = checkpoint(tmp_path)
    say(open=True)(folder)
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "scores.json").write_text("{}")
    verify(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json is not in manifest\.json"):
        verify(folder)


# -- weights ---------------------------------------------------------------------------------------------------------------


def of_model(folder: Path, size: str = "50GB") -> Path:
    tiny.llama().save_pretrained(folder, max_shard_size=size)
    (folder / "trainer_state.json").write_text("{}")
    return folder


def listed(folder: Path) -> Path:
    write_manifest(folder, record(folder, files_of(folder)), {})
    return folder


def test_a_planted_index_does_not_win_over_the_weights(tmp_path: Path) -> None:
    folder = of_model(tmp_path / "checkpoint-3")
    expected = weight_files(folder)
    save_file({name: torch.zeros(1) for name in expected}, tmp_path / "evil.safetensors")
    planted = json.dumps({"weight_map": dict.fromkeys(expected, "../evil.safetensors")})
    (folder / "model.safetensors.index.json").write_text(planted)
    assert weight_files(folder) == expected  # as transformers reads it, without a manifest
    (folder / "model.safetensors.index.json").unlink()
    listed(folder)
    (folder / "model.safetensors.index.json").write_text(planted)
    assert weight_files(folder) == expected
    result = CliRunner().invoke(app, ["merge", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "index.json is not in manifest.json" in result.output


def test_planted_weights_do_not_win_over_those_of_the_index(tmp_path: Path) -> None:
    folder = listed(of_model(tmp_path / "checkpoint-3", "40KB"))
    expected = weight_files(folder)
    save_file({name: torch.zeros(1) for name in expected}, folder / "model.safetensors")
    assert weight_files(folder) == expected


@pytest.mark.parametrize(
    "file",
    ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", "", ".", "..", "config.json", 7, None, ["a"]],
)
def test_an_index_names_files_beside_it_only(file: object, tmp_path: Path) -> None:
    folder = of_model(tmp_path / "checkpoint-3", "40KB")
    (tmp_path / "other.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not the name of a safetensors file beside it"):
        weight_files(folder)


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "model.safetensors", "assets"])
def test_merge_follows_no_link(name: str, has_manifest: bool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    folder = of_model(tmp_path / "checkpoint-3")
    if name == "model.safetensors":
        (folder / name).rename(secret)
    elif name == "assets":
        secret.mkdir()
    else:
        secret.write_text("secret")
    if has_manifest:
        listed(folder)
    (folder / name).symlink_to(secret)
    result = CliRunner().invoke(app, ["merge", str(folder), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert f"{folder / name} is a symbolic link" in result.output
    assert not (tmp_path / "out").exists()


# -- the training state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"global_step": -1}', "global_step=-1 is not a number of steps"),
        ('{"global_step": "3"}', "global_step='3'"),
        ('{"global_step": true}', "global_step=True"),
        ('{"global_step": 3, "epoch": -0.5}', "epoch=-0.5 is not an epoch"),
        ('{"global_step": 3, "epoch": NaN}', "epoch=nan is not an epoch"),
        ("{", "cannot be read"),
        ("[3]", "instead of a mapping"),
        ("{}", "global_step=None"),
    ],
)
def test_a_state_at_a_step_that_cannot_be_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        check_trainer_state(tmp_path)
    (tmp_path / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match="without it training would begin at step 0"):
        check_trainer_state(tmp_path)


GOOD_DESCRIPTION: dict[str, Any] = {
    "format": 1,
    "mesh": {"dp_size": 1, "pp_size": 1, "tp_size": 1},
    "optimizer": "AdamW",
    "groups": [{"params": ["a"]}],
    "replicas": None,
    "wire": None,
    "dropout_step": None,
    "tensors": [],
    "numbers": {},
}


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": {"dp_size": -1, "pp_size": 1, "tp_size": 1}},
        {"mesh": {"dp_size": 0, "pp_size": 1, "tp_size": 1}},
        {"mesh": {"dp_size": 1}},
        {"mesh": None},
        {"groups": [{}]},
        {"groups": {"params": []}},
        {"replicas": -2},
        {"replicas": 0},
        {"wire": {"method": "topk"}},
        {"dropout_step": -1},
        {"tensors": [1]},
        {"numbers": []},
        {"optimizer": 3},
        {"format": "1"},
    ],
    ids=str,
)
def test_a_description_that_no_save_writes_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "training_state.json").write_text(json.dumps(GOOD_DESCRIPTION))
    read_description(tmp_path)
    (tmp_path / "training_state.json").write_text(json.dumps({**GOOD_DESCRIPTION, **change}))
    with pytest.raises(CheckpointError, match=rf"training_state\.json .*({next(iter(change))}|reads 1)"):
        read_description(tmp_path)


def test_an_index_of_tensors_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    data = torch.arange(6.0)
    save_pieces(tmp_path / "state", [Piece("optimizer::a::exp_avg", (6,), (0,), data)])
    assert TensorIndex(tmp_path / "state").tensors
    path = tmp_path / "state" / ".metadata"
    good = path.read_bytes()
    (tmp_path / "_0_0.distcp").write_bytes((tmp_path / "state" / "__0_0.distcp").read_bytes())
    path.write_bytes(good.replace(b"__0_0.distcp", b"../0_0.distcp"[:12]))
    with pytest.raises(CheckpointError, match="which is no file beside it"):
        TensorIndex(tmp_path / "state")
    path.write_bytes(good)
    (tmp_path / "state" / "__0_0.distcp").rename(tmp_path / "moved")
    (tmp_path / "state" / "__0_0.distcp").symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="which is no file beside it"):
        TensorIndex(tmp_path / "state")


# -- one job at a time -----------------------------------------------------------------------------------------------------


def test_two_jobs_do_not_write_checkpoints_to_one_folder_at_once(tmp_path: Path) -> None:
    first, second = Claim(tmp_path / "run"), Claim(tmp_path / "run")
    first.take()
    with pytest.raises(CheckpointError, match=r"another process is writing a checkpoint to .* another output_dir"):
        second.take()
    assert not second.is_held
    first.release()
    second.take()
    second.release()
    assert names(tmp_path / "run") == []
