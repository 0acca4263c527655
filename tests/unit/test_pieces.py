"""Pieces: whatever run of elements a rank holds, its boxes say exactly where they belong, and any other layout can read them.

If these fail, a resumed run starts from optimizer state that belongs to other elements.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_parallel.checkpoints.state.dcp import INDEX, TensorIndex, save_pieces
from hf_parallel.checkpoints.state.pieces import Piece, boxes_of_run, is_writer, pieces_of
from hf_parallel.errors import CheckpointError
from hf_parallel.ledger import Entry
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.tensor_parallel.layout import Section, ShardSpec


ALONE = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))
FUSED = ShardSpec(0, (Section(6, True, 2), Section(2, False), Section(3, True)))  # queries, one key head, values


def entry_of(shape: tuple[int, ...], spec: ShardSpec | None = None) -> Entry:
    return Entry("w", ("w",), shape, torch.float32, "param", (0,), spec, True)


def at_tp(tp_size: int, tp_rank: int) -> Mesh:
    return dataclasses.replace(ALONE, shape=MeshShape(1, 1, tp_size), rank=tp_rank)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4), st.data())
@settings(deadline=None)
def test_boxes_of_a_run_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = numbered(tuple(shape))
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = list(boxes_of_run(shape, start, stop))
    found = []
    for box in boxes:
        part = whole
        for dim, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, low, size)
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def runs_of(
    whole: torch.Tensor, spec: ShardSpec | None, tp_size: int, parts: int
) -> list[tuple[Mesh, torch.Tensor, int]]:
    """The flat ZeRO parts of every tensor-parallel shard: (mesh, elements, first element)."""
    found = []
    for tp_rank in range(tp_size):
        flat = (whole if spec is None else spec.shard(whole, tp_size, tp_rank)).reshape(-1)
        cut = -(-flat.numel() // parts)
        found += [(at_tp(tp_size, tp_rank), flat[i * cut : (i + 1) * cut].clone(), i * cut) for i in range(parts)]
    return [(mesh, run, start) for mesh, run, start in found if run.numel()]


LAYOUTS = [(tp_size, parts) for tp_size in (1, 2, 3) for parts in (1, 2, 5)]


@pytest.mark.parametrize("spec", [None, FUSED, ShardSpec.contiguous(0, 11), ShardSpec.contiguous(1, 5)])
@pytest.mark.parametrize(("tp_size", "parts"), LAYOUTS)
def test_what_one_layout_writes_every_other_reads(
    tp_size: int, parts: int, spec: ShardSpec | None, tmp_path: Path
) -> None:
    whole = numbered((11, 5))
    entry = entry_of((11, 5), spec)
    pieces: list[Piece] = []
    for mesh, run, start in runs_of(whole, spec, tp_size, parts):
        pieces += pieces_of("w", entry, mesh, run, start, counted_only=True)
    assert sum(piece.data.numel() for piece in pieces) == whole.numel()
    save_pieces(tmp_path / "saved", pieces)
    index = TensorIndex(tmp_path / "saved")
    assert index.tensors == {"w": ((11, 5), torch.float32)}
    for other_tp, other_parts in LAYOUTS:
        for mesh, expected, start in runs_of(whole, spec, other_tp, other_parts):
            run = torch.full_like(expected, -1.0)
            index.read(list(pieces_of("w", entry, mesh, run, start)))
            assert torch.equal(run, expected)


def test_a_single_number_is_a_piece(tmp_path: Path) -> None:
    save_pieces(tmp_path, pieces_of("w", entry_of(()), ALONE, torch.tensor(3.0), counted_only=True))
    found = torch.zeros(())
    TensorIndex(tmp_path).read(list(pieces_of("w", entry_of(()), ALONE, found)))
    assert found == 3.0


def test_each_label_has_one_writer() -> None:
    for label in map(str, range(50)):
        assert sum(is_writer(label, copy, 3) for copy in range(3)) == 1
    assert len({copy for copy in range(3) for label in map(str, range(50)) if is_writer(label, copy, 3)}) == 3


# -- what is damaged or foreign ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_pieces(tmp_path, pieces_of("a", entry_of((4, 3)), ALONE, numbered((4, 3)), counted_only=True))
    return tmp_path


def read(folder: Path, label: str = "a", shape: tuple[int, ...] = (4, 3)) -> torch.Tensor:
    target = torch.zeros(shape)
    TensorIndex(folder).read([Piece(label, shape, (0,) * len(shape), target)])
    return target


def test_a_missing_tensor_and_one_of_another_shape_are_named(saved: Path) -> None:
    assert torch.equal(read(saved), numbered((4, 3)))
    with pytest.raises(CheckpointError, match=r"\.metadata has no tensor b. The checkpoint is of another model"):
        read(saved, "b")
    with pytest.raises(CheckpointError, match=r"a has shape \(4, 3\), the model needs \(3, 4\)"):
        read(saved, shape=(3, 4))


def test_gaps_are_refused_when_they_would_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a of shape \(4,\): the ranks would write 3 of 4 elements"):
        save_pieces(tmp_path, [Piece("a", (4,), (0,), torch.zeros(3))])


@pytest.mark.parametrize("content", [b"", b"x" * 40])
def test_a_damaged_or_missing_index_is_named(content: bytes, saved: Path) -> None:
    (saved / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: .*missing, truncated or damaged"):
        read(saved)
    (saved / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: FileNotFoundError"):
        read(saved)


def test_an_index_runs_no_code(saved: Path) -> None:
    marker = saved / "ran"
    (saved / INDEX).write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    with pytest.raises(CheckpointError, match=r"os\.system has no place in an index"):
        read(saved)
    nested = b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x09os.system\x93\x8c\x02id\x85R."
    (saved / INDEX).write_bytes(nested)
    with pytest.raises(CheckpointError, match=r"metadata\.os\.system has no place in an index"):
        read(saved)
    assert not marker.exists()


class OldPickler(pickle.Pickler):
    """Members of enums as Python 3.11.2 writes them."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_an_index_of_an_older_python_is_read(saved: Path) -> None:
    index = pickle.loads((saved / INDEX).read_bytes())
    with (saved / INDEX).open("wb") as file:
        OldPickler(file).dump(index)
    assert b"getattr" in (saved / INDEX).read_bytes()
    assert torch.equal(read(saved), numbered((4, 3)))


@pytest.mark.parametrize("of", ["torch\nSize", "torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"])
def test_of_enums_only_members_are_read_by_name(of: str, saved: Path) -> None:
    (saved / INDEX).write_bytes(f"cbuiltins\ngetattr\n(c{of}\nS'__init_subclass__'\ntR.".encode())
    with pytest.raises(CheckpointError, match=r"__init_subclass__ has no place in an index"):
        read(saved)


def test_a_truncated_file_is_named_with_its_tensor(saved: Path) -> None:
    path = next(saved.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: a cannot be read: .*truncated or damaged"):
        read(saved)
