"""Parameters that lie in one buffer look to others as if each had memory of its own.

If a test fails here, what saves a model through accelerate or safetensors drops weights without an error.
"""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.utils import clean_state_dict_for_safetensors
from torch import nn

from hf_parallel.compat.private_torch import version_of
from hf_parallel.data_parallel.flat import FlatParameter, place_in
from hf_parallel.errors import UnsupportedError


def in_one_buffer() -> tuple[nn.Sequential, torch.Tensor]:
    model, flat = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 0), nn.Linear(0, 4)), torch.arange(32.0)
    offset = 0
    for param in model.parameters():
        param.data = place_in(flat, offset, param.shape)
        offset += param.numel()
    return model, flat


def test_a_change_of_the_buffer_is_one_of_the_parameters_and_the_other_way_round() -> None:
    model, flat = in_one_buffer()
    assert torch.equal(model[0].weight, torch.arange(6.0).view(2, 3))
    assert torch.equal(model[0].bias, torch.tensor([6.0, 7.0]))
    flat.mul_(2)
    assert torch.equal(model[0].bias, torch.tensor([12.0, 14.0]))
    nn.init.ones_(model[0].bias)
    assert flat[5:9].tolist() == [10.0, 1.0, 1.0, 16.0]


def test_no_parameter_is_taken_for_an_alias_of_another() -> None:
    model, _ = in_one_buffer()
    kept = clean_state_dict_for_safetensors(dict(model[0].state_dict()))
    assert kept.keys() == {"weight", "bias"}
    assert model[0].weight.untyped_storage().nbytes() == 24


def test_the_memory_lives_as_long_as_a_parameter_and_a_copy_has_its_own() -> None:
    model, flat = in_one_buffer()
    other = copy.deepcopy(model)
    flat.zero_()
    del flat
    assert not model[0].weight.any()
    assert other[0].weight[1, 2] == 5


def test_every_change_of_a_part_counts_and_none_of_the_buffer() -> None:
    buffer = torch.ones(8)
    part = FlatParameter(buffer[:4].data)
    before = version_of(part)
    buffer.add_(1.0)
    float(part.data.sum())
    assert version_of(part) == before
    assert part.tolist() == [2.0] * 4
    part.data.mul_(2.0)
    part.data[1:].zero_()
    part.data *= 3.0
    assert version_of(part) == before + 3
    assert buffer.tolist() == [12.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0]
    with pytest.raises(UnsupportedError, match="whose memory has to stay"):
        part.data = torch.zeros(4)
