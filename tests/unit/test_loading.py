"""Files are read in parts to the byte, and a damaged checkpoint is refused by name instead of being made up.

If these fail, a rank trains on random numbers where the checkpoint has a hole, or on the wrong slice of a tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from hf_parallel import (
    CheckpointError,
    ConfigError,
    HFParallelConfig,
    UnsupportedError,
    from_pretrained,
    sharded_loading,
)
from hf_parallel.checkpoints.weights.unread import RECORD, wanted_of
from hf_parallel.checkpoints.weights.writer import DTYPES, Reader, lay_out, read_header, write
from hf_parallel.engine import weights
from hf_parallel.ledger import build_ledger


LAYOUT = {"pp_size": 2}


@pytest.fixture
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.llama(tied=True).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def tensors() -> dict[str, torch.Tensor]:
    found = {f"of.{name}": torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    return found | {"none": torch.randn(0, 3), "one": torch.tensor(3.0), "rows": torch.randn(64, 3000, 2)}


def test_a_file_written_in_any_order_has_the_bytes_of_safetensors(tmp_path: Path) -> None:
    stored = tensors()
    save_file(stored, tmp_path / "expected", metadata={"format": "pt"})
    shapes = {name: tensor.to("meta") for name, tensor in stored.items()}
    places = lay_out(tmp_path / "mine", shapes, {"format": "pt"})
    for name in reversed(list(stored)):
        write(places[name], stored[name])
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("ranges", [[(1, 1)], [(0, 1), (1, 0), (2, 1)], [(2, 1), (0, 1)]])
def test_ranges_of_any_dim_are_what_slices_are(ranges: list[tuple[int, int]], tmp_path: Path) -> None:
    stored = {"wide": torch.randn(3, 5, 4000), "thin": torch.randn(700, 4, 3), "half": torch.randn(4, 9).bfloat16()}
    save_file(stored, tmp_path / "file")
    reader, found = Reader(), read_header(tmp_path / "file")
    for name, tensor in stored.items():
        assert torch.equal(reader.read(found[name]), tensor)
        for dim in range(tensor.ndim):
            expected = torch.cat([tensor.narrow(dim, start, length) for start, length in ranges], dim)
            assert torch.equal(reader.read(found[name], dim, ranges), expected), (name, dim)


def test_only_the_bytes_of_long_rows_are_read(tmp_path: Path) -> None:
    save_file({"matrix": torch.randn(16, 8192)}, tmp_path / "file")
    reader = Reader()
    reader.read(read_header(tmp_path / "file")["matrix"], 1, [(4096, 2048)])
    assert reader.num_bytes == 16 * 2048 * 4


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def truncate(folder: Path) -> str:
    path = shards(folder)[2]
    os.truncate(path, path.stat().st_size - 100)
    return rf"{path.name}: .* ends at byte \d+ and the file at \d+"


def truncate_first(folder: Path) -> str:
    os.truncate(shards(folder)[0], 20)
    return rf"{shards(folder)[0].name}: its header claims \d+ bytes and the file has 20"


def corrupt_header(folder: Path) -> str:
    data = bytearray(shards(folder)[1].read_bytes())
    data[8:12] = b"\0\0\0\0"
    shards(folder)[1].write_bytes(data)
    return rf"{shards(folder)[1].name}: its header cannot be read"


def half_written(folder: Path) -> str:
    name = shards(folder)[-1].name
    shards(folder)[-1].unlink()
    return rf"{name} cannot be opened: No such file or directory\. The folder is not complete"


def cut_index(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text()[:200])
    return "its index cannot be read"


def without_entry(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    gone = index["weight_map"]["model.layers.2.mlp.up_proj.weight"]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != gone}
    path.write_text(json.dumps(index))
    return r"model\.layers\.2\.\S+ is in none of its files and not in its index, while model\.layers\.\d\S+ is"


def without_tensor(folder: Path) -> str:
    path = shards(folder)[3]
    held = load_file(path)
    name = min(held)
    del held[name]
    save_file(held, path, metadata={"format": "pt"})
    return rf"{path.name} does not hold {name}, which the index says it does"


def other_shape(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    return r"safetensors: model\.layers\.0\.mlp\.\S+ has shape \(.*64.*\), the model needs \(.*80.*\)"


def other_model(folder: Path) -> str:
    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=4, n_head=4)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(folder)
    return r"tensors of GPT2LMHeadModel are not in it.*It holds another model"


@pytest.mark.usefixtures("_two_processes")
@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        truncate_first,
        corrupt_header,
        half_written,
        cut_index,
        without_entry,
        without_tensor,
        other_shape,
        other_model,
    ],
)
def test_a_damaged_checkpoint_is_refused_by_file_and_tensor(damage: Callable[[Path], str], folder: Path) -> None:
    message = damage(folder)
    with pytest.raises(CheckpointError, match=message), sharded_loading({}, **LAYOUT):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.usefixtures("_two_processes")
def test_a_model_without_weights_moves_and_casts_and_refuses_to_run_or_to_be_resized(folder: Path) -> None:
    model = from_pretrained(folder, {"pp_size": 2})
    model.to("cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not model.model.rotary_emb.inv_freq.is_meta
    with pytest.raises(UnsupportedError, match=r"weights of LlamaForCausalLM are not read yet.*HFParallelCallback"):
        model(input_ids=torch.ones(1, 2, dtype=torch.long))
    with pytest.raises(UnsupportedError, match=r"resize_token_embeddings\(\).*Load it without sharded_loading"):
        model.resize_token_embeddings(model.config.vocab_size + 1)
    vars(model)[RECORD].begin(model)
    assert "resize_token_embeddings" not in vars(model)


@pytest.mark.usefixtures("_two_processes")
def test_other_settings_than_those_of_loading_are_named(folder: Path) -> None:
    model = from_pretrained(folder, {"pp_size": 2})
    with pytest.raises(ConfigError, match=r"tp_size: None for loading, 2 for training|pp_size: 2 for loading"):
        vars(model)[RECORD].check(HFParallelConfig(tp_size=2))


def test_one_process_loads_the_whole_model(folder: Path) -> None:
    model = from_pretrained(folder)
    assert not wanted_of(model)
    assert RECORD not in vars(model)


@pytest.mark.usefixtures("_two_processes")
@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_weight_that_is_stored_twice_is_tied_if_it_is_equal(equal: bool, folder: Path, tmp_path: Path) -> None:
    whole = {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}
    embedding = whole["model.embed_tokens.weight"]
    whole["lm_head.weight"] = embedding.clone() if equal else embedding + 1
    single = tmp_path / "single"
    single.mkdir()
    save_file(whole, single / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "config.json", single)
    model = from_pretrained(single, {"pp_size": 2})
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal


def test_a_model_loaded_whole_says_what_it_held_for_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.llama()
    ledger = build_ledger(model, pp_size=2, holds=lambda rank, name: (rank == 0) == ("layers.0" in name), specs={})
    setup: Any = SimpleNamespace(
        model=model, mesh=SimpleNamespace(pp_rank=0, shape=SimpleNamespace(parts_size=1)), reports=True
    )
    weights.warn_of_waste(setup, ledger)
    assert caplog.text == ""
    monkeypatch.setattr(weights, "WASTE_WORTH_A_WARNING", 1000)
    weights.warn_of_waste(setup, ledger)
    assert "for nothing. Load it with hf_parallel.from_pretrained(...)" in caplog.text


@pytest.mark.usefixtures("_two_processes")
def test_what_the_checkpoint_lacks_is_made_up_as_ever(tmp_path: Path) -> None:
    def without_head(seed: int, load: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(seed)
        return load(tmp_path / "base").lm_head.weight

    tiny.llama().model.save_pretrained(tmp_path / "base")
    made = without_head(7, lambda path: from_pretrained(path, {"pp_size": 2}))
    assert torch.equal(made, without_head(7, AutoModelForCausalLM.from_pretrained))


@pytest.mark.usefixtures("_two_processes")
def test_weights_that_are_not_safetensors_are_loaded_whole_with_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(tiny.llama(tied=True).state_dict(), pickled / "pytorch_model.bin")
    shutil.copy(folder / "config.json", pickled)
    model = from_pretrained(pickled, {"pp_size": 2})
    assert not wanted_of(model)
    assert "is loaded whole on every rank" in caplog.text
