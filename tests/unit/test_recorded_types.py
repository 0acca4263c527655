"""What a block is recorded to keep is what autograd saves of it, on the types whose FLOPs are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planner_types import LENGTH, TYPES, config_of_type
from saved_tensors import saved_bytes
from transformers import AutoModelForCausalLM

from hf_parallel.memory.layers import with_layers
from hf_parallel.memory.moments import Batch
from hf_parallel.memory.record import record_step


ROWS, WITHIN = 2, 0.05
# A dropout mask has a byte for each element on a GPU and four on a CPU; of the others the cause is not known.
APART = ("gpt2", "opt", "gpt_neox", "phi", "stablelm", "nemotron")
# In fp32, and with 128 positions: operations need 16 bit, real devices, or more positions than that.
NOT_RECORDED = ("falcon", "gpt_neo", "mixtral", "qwen3_moe", "olmoe")


def saved_of_a_block(kind: str) -> float:
    """Bytes that one more block saves in a real forward on a CPU."""
    sizes = []
    for layers in (3, 4):
        torch.manual_seed(0)
        config: Any = with_layers(config_of_type(kind), layers)
        model = AutoModelForCausalLM.from_config(config).train()
        ids = torch.randint(0, 90, (ROWS, LENGTH))
        sizes.append(saved_bytes(model, {"input_ids": ids, "labels": ids}))
    return sizes[1] - sizes[0]


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in APART + NOT_RECORDED])
def test_a_block_is_recorded_to_keep_what_autograd_saves(kind: str) -> None:
    recorded = record_step(config_of_type(kind), "fp32")
    assert recorded is not None
    kept = recorded.parts(Batch(ROWS * LENGTH, LENGTH)).forward.kept
    assert kept == pytest.approx(saved_of_a_block(kind), rel=WITHIN)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", APART)
def test_a_cpu_saves_more_of_some_types_than_a_gpu_is_recorded_to_keep(kind: str) -> None:
    recorded = record_step(config_of_type(kind), "fp32")
    assert recorded is not None
    assert recorded.parts(Batch(ROWS * LENGTH, LENGTH)).forward.kept < saved_of_a_block(kind)
