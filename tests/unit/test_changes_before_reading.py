"""What code does to weights that are not read yet is done to what is read, or refused: never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_parallel import from_pretrained
from hf_parallel.checkpoints.weights.unread import RECORD
from hf_parallel.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, in a run of two processes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).save_pretrained(tmp_path)
    return tmp_path


def unread(folder: Path) -> PreTrainedModel:
    return from_pretrained(folder, {"pp_size": 2})


def read(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its values, as it is before it is cut."""
    record = vars(model)[RECORD]
    record.begin(model)
    record.fill(model, None, None, torch.device("cpu"))
    return model


def scale(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(2)


def zero_a_row(model: PreTrainedModel) -> None:
    model.lm_head.weight.data[3] = 0


def zero_a_row_by_a_view(model: PreTrainedModel) -> None:
    model.lm_head.weight.detach()[3].zero_()


def initialise(model: PreTrainedModel) -> None:
    nn.init.normal_(model.lm_head.weight, std=0.02)


def reset(model: PreTrainedModel) -> None:
    model.lm_head.reset_parameters()


def set_data(model: PreTrainedModel) -> None:
    model.lm_head.weight.data = torch.zeros_like(model.lm_head.weight)


def change_and_set_data(model: PreTrainedModel) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.normal_()


def change_and_cast(model: PreTrainedModel) -> None:
    model.lm_head.weight.data.normal_()
    model.to(torch.bfloat16)


def replace(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)


def change_a_copy(model: PreTrainedModel) -> PreTrainedModel:
    made = copy.deepcopy(model)
    made.lm_head.weight.data.zero_()
    return made


def copy_a_changed_one(model: PreTrainedModel) -> PreTrainedModel:
    model.lm_head.weight.data.zero_()
    return copy.deepcopy(model)


@pytest.mark.parametrize(
    "change",
    [
        *(scale, zero_a_row, zero_a_row_by_a_view, initialise, reset, set_data, change_and_set_data, change_and_cast),
        *(replace, change_a_copy, copy_a_changed_one),
    ],
    ids=lambda change: change.__name__,
)
def test_changes_of_values_are_refused(
    change: Callable[[PreTrainedModel], PreTrainedModel | None], folder: Path
) -> None:
    model = unread(folder)
    model = change(model) or model
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight was changed before it was read.*without sharded_loading"
    ):
        vars(model)[RECORD].begin(model)


def test_a_state_dict_that_is_loaded_into_them_is_refused(folder: Path) -> None:
    model = unread(folder)
    model.load_state_dict({"lm_head.weight": torch.zeros(64, 32)}, strict=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight was changed"):
        vars(model)[RECORD].begin(model)


def half_and_back(model: PreTrainedModel) -> None:
    model.half().float()


def a_part_in_half_and_back(model: PreTrainedModel) -> None:
    model.model.layers[0].half()
    model.float()


def by_data(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def what_changes_no_value(model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad = True
    model.lm_head.weight.data = model.lm_head.weight.data
    model.lm_head.bias = nn.Parameter(torch.ones(64))
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.ones(64, 32))
    model.tie_weights()
    model.to("cpu").train()
    assert sum(p.numel() for p in model.parameters()) > 0
    assert (model.lm_head.weight * 2).is_meta
    torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("do", [half_and_back, a_part_in_half_and_back, by_data, what_changes_no_value])
def test_what_is_done_is_done_to_what_is_read(do: Callable[[PreTrainedModel], None], folder: Path) -> None:
    model, whole = unread(folder), AutoModelForCausalLM.from_pretrained(folder)
    do(model)
    if do is what_changes_no_value:
        whole.lm_head.bias = nn.Parameter(torch.ones(64))
        whole.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.ones(64, 32))
    else:
        do(whole)
    wanted = whole.state_dict()
    found = read(model).state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_copy_is_read_as_the_model_was_cast(folder: Path) -> None:
    model, whole = unread(folder), AutoModelForCausalLM.from_pretrained(folder)
    made = copy.deepcopy(model.half()).float()
    found = read(made).state_dict()
    for name, value in whole.half().float().state_dict().items():
        assert torch.equal(found[name], value), name
