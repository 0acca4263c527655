"""Checkpoints: what is damaged, foreign or of another layout is refused by name, and a good one is never lost."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_parallel.checkpoint import load_optimizer, load_weights, optimizer_file, publish, save_optimizer, weight_files
from hf_parallel.errors import CheckpointError
from hf_parallel.ledger import Ledger, build_ledger
from hf_parallel.mesh import Mesh, MeshShape
from hf_parallel.tensor_parallel.layout import ShardSpec


ALONE = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))
MATRIX = "model.layers.1.mlp.up_proj.weight"  # 64 x 32


def place(shape: MeshShape, rank: int) -> Mesh:
    return dataclasses.replace(ALONE, shape=shape, rank=rank)


def ledger_of(model: nn.Module, specs: dict[str, ShardSpec] | None = None) -> Ledger:
    return build_ledger(model, pp_size=1, holds=lambda stage, name: True, specs=specs or {})


def load_into(model: nn.Module, folder: Path) -> None:
    load_weights(folder, ledger_of(model), dict(model.named_parameters()), ALONE)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint in several files, with an index."""
    tiny.llama().save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    return tmp_path / "saved"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    tiny.llama(tied=True).save_pretrained(tmp_path / "single")
    return tmp_path / "single"


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_read_back_exactly(tied: bool, saved: Path, single: Path) -> None:
    model, expected = tiny.llama(tied=tied), tiny.llama(tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    load_into(model, single if tied else saved)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_reads_its_own_slices_only(dim: int, saved: Path) -> None:
    full = tiny.llama().get_parameter(MATRIX).detach()
    spec = ShardSpec.contiguous(dim, full.shape[dim])
    ledger = ledger_of(tiny.llama(), {MATRIX: spec})
    for rank in range(3):
        expected = spec.shard(full, 3, rank)
        held = torch.zeros_like(expected)
        load_weights(saved, ledger, {MATRIX: held}, place(MeshShape(1, 1, 3), rank))
        assert torch.equal(held, expected)


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors and no .*index\.json: it is not a complete"):
        load_into(tiny.llama(), tmp_path)


def test_a_missing_file_of_the_index_is_named(saved: Path) -> None:
    gone = sorted(saved.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"index\.json names files that do not exist: .*{gone.name}"):
        load_into(tiny.llama(), saved)


@pytest.mark.parametrize("text", ["{", '{"metadata": {}}', "[]"])
def test_a_damaged_index_is_named(text: str, saved: Path) -> None:
    (saved / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read: .*damaged"):
        load_into(tiny.llama(), saved)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(keep: float, saved: Path, single: Path) -> None:
    for path, model in (
        (single / "model.safetensors", tiny.llama(tied=True)),
        (sorted(saved.glob("*.safetensors"))[1], tiny.llama()),
    ):
        data = path.read_bytes()
        path.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
        with pytest.raises(CheckpointError, match=rf"{path.name}.* cannot be read: .*truncated or damaged"):
            load_into(model, path.parent)


def test_a_tensor_that_the_index_puts_into_the_wrong_file_is_named(saved: Path) -> None:
    index = saved / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    content["weight_map"][MATRIX] = next(name for name in files if name != content["weight_map"][MATRIX])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{MATRIX} cannot be read"):
        load_into(tiny.llama(), saved)


def test_an_index_without_a_tensor_is_refused(saved: Path) -> None:
    index = saved / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][MATRIX]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"no tensor named {MATRIX} among \d+\. The checkpoint is of another"):
        load_into(tiny.llama(), saved)


def test_a_tensor_of_another_shape_is_refused(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    tensors[MATRIX] = tensors[MATRIX][:-1].contiguous()
    save_file(tensors, single / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{MATRIX} has shape \(63, 32\), the model needs \(64, 32\)"):
        load_into(tiny.llama(tied=True), single)


def test_the_checkpoint_of_another_model_is_refused(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor named transformer\.wte\.weight or lm_head\.weight among"):
        load_into(tiny.gpt2(), single)


def test_all_names_of_the_single_file_are_known(single: Path) -> None:
    assert set(weight_files(single)) == set(load_file(single / "model.safetensors"))


# -- optimizer ---------------------------------------------------------------------------------------------------------


def trained() -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(3, 2, generator=generator)) for name in ("a", "b", "c")}
    optimizer = torch.optim.AdamW(
        [{"params": [parameters["a"], parameters["b"]]}, {"params": [parameters["c"]], "lr": 0.3}], lr=0.1
    )
    for parameter in parameters.values():
        parameter.grad = torch.randn(3, 2, generator=generator)
    optimizer.step()
    return optimizer, parameters


def test_optimizer_state_is_read_back_exactly(tmp_path: Path) -> None:
    optimizer, parameters = trained()
    save_optimizer(tmp_path, optimizer, parameters, ALONE)
    fresh = torch.optim.AdamW(
        [{"params": [parameters["a"], parameters["b"]]}, {"params": [parameters["c"]], "lr": 5.0}], lr=5.0
    )
    load_optimizer(tmp_path, fresh, parameters, ALONE)
    for parameter in parameters.values():
        assert optimizer.state[parameter].keys() == fresh.state[parameter].keys()
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[parameter][key], value), key
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.3]


def test_another_layout_is_refused(tmp_path: Path) -> None:
    optimizer, parameters = trained()
    save_optimizer(tmp_path, optimizer, parameters, place(MeshShape(1, 2, 1), 0))
    with pytest.raises(
        CheckpointError, match=r"stage0-tp0.* was saved with .*'pp_size': 2.*Resume with the saved layout"
    ):
        load_optimizer(tmp_path, optimizer, parameters, ALONE)
    with pytest.raises(CheckpointError, match=r"stage1-tp0.* does not exist: .*another pp_size or tp_size"):
        load_optimizer(tmp_path, optimizer, parameters, place(MeshShape(1, 2, 1), 1))


def test_another_optimizer_or_other_groups_are_refused(tmp_path: Path) -> None:
    optimizer, parameters = trained()
    save_optimizer(tmp_path, optimizer, parameters, ALONE)
    one_group = torch.optim.AdamW(parameters.values())
    with pytest.raises(CheckpointError, match=r"other parameter groups than this run's AdamW"):
        load_optimizer(tmp_path, one_group, parameters, ALONE)
    sgd = torch.optim.SGD([{"params": [parameters["a"], parameters["b"]]}, {"params": [parameters["c"]]}], lr=0.1)
    with pytest.raises(CheckpointError, match=r"holds the state of AdamW, this run uses SGD"):
        load_optimizer(tmp_path, sgd, parameters, ALONE)


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_damaged_optimizer_file_is_named(content: bytes, tmp_path: Path) -> None:
    optimizer, parameters = trained()
    optimizer_file(tmp_path, ALONE).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"optimizer-stage0-tp0\.safetensors cannot be read: .*truncated or damaged"
    ):
        load_optimizer(tmp_path, optimizer, parameters, ALONE)


def test_a_foreign_optimizer_file_is_named(tmp_path: Path) -> None:
    optimizer, parameters = trained()
    save_file({"a": torch.zeros(2)}, optimizer_file(tmp_path, ALONE))
    with pytest.raises(CheckpointError, match=r"optimizer-stage0-tp0\.safetensors .*not written by hf_parallel"):
        load_optimizer(tmp_path, optimizer, parameters, ALONE)


# -- publishing --------------------------------------------------------------------------------------------------------


def folder_with(path: Path, text: str) -> Path:
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "file.txt").write_text(text)
    return path


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
