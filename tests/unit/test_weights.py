"""Weights of a checkpoint: every rank reads exactly its own, and what is damaged or foreign is refused by name."""

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
from tp_models import ledger_of

from hf_parallel.checkpoints.weights.converted import conversion_of
from hf_parallel.checkpoints.weights.gather import check_config, load_weights, weight_files
from hf_parallel.errors import CheckpointError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.tensor_parallel.layout import ShardSpec


ALONE = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))
MATRIX = "model.layers.1.mlp.up_proj.weight"  # 64 x 32


def place(shape: MeshShape, rank: int) -> Mesh:
    return dataclasses.replace(ALONE, shape=shape, rank=rank)


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


def test_the_config_of_another_model_is_refused(single: Path) -> None:
    check_config(single, tiny.llama(tied=True).config)
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers=4, but this run's model has 2\. "):
        check_config(single, tiny.llama(layers=2).config)
    with pytest.raises(CheckpointError, match=r"config\.json: model_type=llama, but this run's model has gpt2\. "):
        check_config(single, tiny.gpt2().config)
    (single / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: .*truncated or damaged"):
        check_config(single, tiny.llama().config)


def test_names_that_transformers_converts_are_read_by_its_own_conversion(tmp_path: Path) -> None:
    expected, model = tiny.mixtral(), tiny.mixtral()
    expected.save_pretrained(tmp_path)
    assert not any("gate_up_proj" in name for name in weight_files(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = expected.get_parameter(name).detach()
    spec = ShardSpec.contiguous(1, whole.shape[1])
    ledger = ledger_of(model, {name: spec})
    for rank in range(2):
        held = {key: torch.zeros_like(parameter) for key, parameter in model.named_parameters()}
        held[name] = torch.zeros_like(spec.shard(whole, 2, rank))
        load_weights(tmp_path, ledger, held, place(MeshShape(1, 1, 2), rank), converted=conversion_of(tmp_path, model))
        for key, tensor in held.items():
            want = spec.shard(whole, 2, rank) if key == name else expected.get_parameter(key)
            assert torch.equal(tensor, want), key
    with pytest.raises(CheckpointError, match=r"no tensor named model\.layers\.0\.mlp\.gate\.weight among \d+"):
        load_weights(tmp_path, ledger, held, ALONE)
