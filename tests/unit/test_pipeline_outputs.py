"""Outputs of a pipeline are copied without what reads the rest of them: the stages and their groups."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch

from hf_parallel.guards.calls.outputs import MissingOutput, PipelineOutput, PipelineTrainingOutput


def read(stages: Any) -> torch.Tensor:
    return torch.full((2,), 3.0)


def test_a_copy_reads_from_the_same_stages() -> None:
    stages = threading.Lock()  # cannot be copied
    loss = torch.ones((), requires_grad=True) * 2.0  # nor can it: it has a graph
    output = PipelineTrainingOutput(loss=loss).runs_again(functools.partial(read, stages))
    output.has_more(("aux_loss",), (), functools.partial(read, stages))
    made = copy.deepcopy(output, {id(loss): loss})
    assert type(made) is PipelineTrainingOutput
    assert made is not output
    assert made.loss is loss
    made["loss"] = loss * 2.0
    assert (float(made.loss), float(output.loss)) == (4.0, 2.0)
    assert torch.equal(made.logits, torch.full((2,), 3.0))
    with pytest.raises(MissingOutput):
        _ = made.hidden


def test_what_it_holds_is_copied() -> None:
    output = PipelineOutput(logits=torch.zeros(2))
    made = copy.deepcopy(output)
    made.logits.add_(1.0)
    assert output.logits.tolist() == [0.0, 0.0]
    assert made.loss is None
