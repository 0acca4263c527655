"""What a block is recorded to keep is what autograd saves of it, on the types whose FLOPs are counted."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from planner_types import LENGTH, TYPES, config_of_type
from saved_tensors import saved_bytes
from transformers import AutoModelForCausalLM

from hf_parallel.memory.layers import with_layers
from hf_parallel.memory.moments import Batch
from hf_parallel.memory.record import record_step
from hf_parallel.memory.terms import Precision
from hf_parallel.memory.variant import Variant


ROWS, WITHIN = 2, 0.05
DTYPES: Final[dict[Precision, torch.dtype]] = {"half": torch.bfloat16, "fp32": torch.float32}
# A dropout mask has a byte for each element on a GPU, and on a CPU as many as the element.
CHANGED: Final[dict[str, dict[str, Any]]] = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "gpt_neo": {"max_position_embeddings": 256},  # it is recorded with more than 128
}
# In fp32 a GPU writes the result of attention as the next product reads it. A CPU writes it as the queries lie, as in bf16.
COPIED = ("gpt_neox", "phi", "stablelm", "nemotron")


def saved_of_a_block(config: Any, precision: Precision) -> float:
    """Bytes that one more block saves in a real forward on a CPU."""
    sizes = []
    for layers in (3, 4):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(with_layers(config, layers), dtype=DTYPES[precision]).train()
        ids = torch.randint(0, 90, (ROWS, LENGTH))
        sizes.append(saved_bytes(model, {"input_ids": ids, "labels": ids}))
    return sizes[1] - sizes[0]


def recorded_of_a_block(config: Any, precision: Precision) -> float:
    recorded = record_step(config, precision, Variant(mixed=False))  # as the real one runs
    assert recorded is not None
    return recorded.parts(Batch(ROWS * LENGTH, LENGTH)).forward.kept


CASES = [(kind, precision) for kind in TYPES for precision in DTYPES]
CASES = [(kind, precision) for kind, precision in CASES if precision == "half" or kind not in COPIED]


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_a_block_is_recorded_to_keep_what_autograd_saves(kind: str, precision: Precision) -> None:
    config = config_of_type(kind, **CHANGED.get(kind, {}))
    assert recorded_of_a_block(config, precision) == pytest.approx(saved_of_a_block(config, precision), rel=WITHIN)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [*COPIED, "gpt2", "opt"])
def test_a_cpu_saves_more_of_some_types_in_fp32_than_a_gpu_is_recorded_to_keep(kind: str) -> None:
    config = config_of_type(kind)
    assert recorded_of_a_block(config, "fp32") < saved_of_a_block(config, "fp32")
