"""All weights come through one reader, which opens a file once however many tensors are wanted.

If these fail, a resume of a large model waits for thousands of opens on a shared file system.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from hf_parallel.checkpoints import reader as stored
from hf_parallel.checkpoints.reader import MOST_OPEN, Reader
from hf_parallel.checkpoints.weights import gather as weights
from hf_parallel.checkpoints.weights.converted import conversion_of
from hf_parallel.ledger import build_ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape


PACKAGE = Path(weights.__file__).parent


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weight files that are opened, in order."""
    found: list[str] = []
    original = os.open

    def counting(path: Any, *args: Any, **kwargs: Any) -> int:
        found.append(Path(path).name)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", counting)
    return found


def load(folder: Path, model: nn.Module) -> None:
    from datetime import timedelta

    mesh = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))
    ledger = build_ledger(model, pp_size=1, holds=lambda stage, name: True, specs={})
    held = dict(model.named_parameters())
    weights.load_weights(folder, ledger, held, mesh, converted=conversion_of(folder, model))


@pytest.mark.parametrize(("size", "opens"), [("50GB", 1), ("40KB", 1)])
def test_a_file_is_opened_once_whatever_is_in_it(size: str, opens: int, tmp_path: Path, opened: list[str]) -> None:
    expected = tiny.llama(layers=8)
    expected.save_pretrained(tmp_path, max_shard_size=size)
    model = tiny.llama(layers=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    opened.clear()
    load(tmp_path, model)
    files = [path.name for path in tmp_path.glob("*.safetensors")]
    assert sorted(name for name in opened if name.endswith(".safetensors")) == sorted(files * opens)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_converted_weights_are_read_with_one_open_more(tmp_path: Path, opened: list[str]) -> None:
    tiny.mixtral().save_pretrained(tmp_path)
    opened.clear()
    load(tmp_path, tiny.mixtral())
    assert opened.count("model.safetensors") <= 2


def test_a_reader_keeps_few_files_open_and_closes_them(tmp_path: Path) -> None:
    paths = []
    for index in range(MOST_OPEN + 5):
        from safetensors.torch import save_file

        paths.append(tmp_path / f"{index}.safetensors")
        save_file({"a": torch.full((2,), float(index))}, paths[-1])
    before = len(os.listdir("/proc/self/fd"))
    with Reader() as reader:
        for _ in range(2):
            for index, path in enumerate(paths):
                assert reader.read(reader.find(path, "a")).tolist() == [index, index]
        assert len(os.listdir("/proc/self/fd")) <= before + MOST_OPEN
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_else_reads_weight_files() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = node.module if isinstance(node, ast.ImportFrom) else None
            taken = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            reads = (named or "").startswith("safetensors") and taken != {"save_file"}
            assert not reads, f"{path} reads weight files by itself"
    assert stored.Reader is Reader
