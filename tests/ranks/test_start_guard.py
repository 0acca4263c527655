"""The comparison of what ranks begin with, on tensors of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import run_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_parallel.errors import RankMismatchError, UnsupportedError
from hf_parallel.guards.weights.start import begin_alike, fingerprints, refuse_unlike_parts


KINDS: dict[str, torch.Tensor] = {
    "floats": torch.randn(7, 5),
    "halves": torch.randn(3, 3).bfloat16(),
    "doubles": torch.randn(130_001, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "counts": torch.arange(9, dtype=torch.int32),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "turned": torch.randn(4, 6).t(),
    "repeated": torch.randn(1, 5).expand(3, 5),
    "empty": torch.zeros(0, 3),
    "one": torch.tensor(3.0),
    "complexes": torch.randn(5, dtype=torch.complex64),
}


class Mixed(nn.Module):
    """A parameter, tied once, and buffers of all kinds, saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.tied = self.weight
        for index, (name, tensor) in enumerate(KINDS.items()):
            self.register_buffer(name, tensor.detach() if name == "repeated" else tensor.clone(), index % 2 == 0)


def change(tensor: torch.Tensor) -> torch.Tensor:
    """Another value in the last place."""
    made = tensor.clone()
    if made.numel():
        flat = made.reshape(-1)
        flat[-1] = ~flat[-1] if made.dtype == torch.bool else flat[-1] + 1
        made = flat.view(tensor.shape)
    return made


def guard_main(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Mixed()
    found: dict[str, Any] = {"same": begin_alike(model)}
    expected = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    if rank == world_size - 1:
        with torch.no_grad():
            model.weight[0, 0] += 1
        for name in KINDS:
            model._buffers[name] = change(model._buffers[name])
            if name == "repeated":
                model._buffers[name] = (model._buffers[name][:1] + 1).expand(3, 5)
    start = begin_alike(model)
    found["sent"], found["lines"] = start.sent, start.describe()
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    found["equal"] = [name for name, tensor in expected.items() if not torch.equal(tensor, tensors[name])]
    found["tied"] = model.tied is model.weight
    other = Mixed()
    if rank == 1:
        other.register_buffer("more", torch.zeros(1))
    found["unlike"] = begin_alike(other).have_same_tensors
    quantised = nn.Module()
    quantised.register_parameter("codes", nn.Parameter(torch.full((8,), rank, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(
        UnsupportedError, match=r"codes \(1 of 1 tensors\) has quantised values.*Load the same checkpoint"
    ):
        begin_alike(quantised)
    wrapped = nn.Module()
    pair = TwoTensor(torch.ones(4), torch.full((4,), float(rank)))
    wrapped.register_parameter("weight", nn.Parameter(pair, requires_grad=False))
    with pytest.raises(UnsupportedError, match=r"weight\.b \(1 of 2 tensors\) has quantised values"):
        begin_alike(wrapped)
    frozen = Mixed()
    frozen.weight.requires_grad_(rank != 1)
    with pytest.raises(
        RankMismatchError, match=r"weight \(1 of \d+ parameters\) is frozen .* on some ranks.*every rank"
    ):
        begin_alike(frozen)
    held = {"a": torch.ones(3), "b": torch.full((2,), float(rank))}
    if rank == 0:
        held["here"] = torch.zeros(2)
    world = torch.distributed.group.WORLD
    refuse_unlike_parts(held, {"x": (world, ["a", "here"]), "y": (None, ["b"])}, "the checkpoint")
    with pytest.raises(
        RankMismatchError, match=r"b \(1 of 2 tensors\) differs over the replicas: the checkpoint is not"
    ):
        refuse_unlike_parts(held, {"the replicas": (world, ["a", "b"])}, "the checkpoint")
    return found


def test_tensors_of_every_kind_take_the_values_of_rank_0(tmp_path: Path) -> None:
    for found in run_ranks(guard_main, 3, tmp_path=tmp_path):
        assert found["same"].sent == ()
        assert set(found["sent"]) == {"weight", *KINDS} - {"empty"}
        assert "12 tensors" not in found["lines"][0]
        assert "(first: weight) took the values of rank 0, as under DDP" in found["lines"][0]
        assert found["equal"] == []
        assert found["tied"]
        assert found["unlike"] is False


def test_a_fingerprint_sees_a_sign_a_swap_and_a_bit() -> None:
    tensor = torch.randn(100_000)
    variants = [tensor, -tensor, tensor.flip(0), tensor.clone(), tensor.clone(), tensor.clone()]
    variants[3][[1, 3]] *= -1.0
    variants[4].view(torch.int32)[-1] ^= 1
    variants[5][:2] = tensor[:2].flip(0)
    assert len(set(fingerprints(variants))) == len(variants)
    assert fingerprints([tensor]) == fingerprints([tensor.clone()])
    for size in (1, 2, 3, 7, 8, 9):
        assert len(set(fingerprints([tensor[1 : 1 + size], tensor[2 : 2 + size]]))) == 2
