"""The cut that memory is counted for, against the cut that a run makes.

If it fails, `hf-parallel validate` and the plan count the memory of stages that no run has.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from hf_parallel import HFParallelConfig
from hf_parallel.memory.cut import LENGTH, blocks_of_stages
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import layout_of
from hf_parallel.pipeline_parallel.plan.costs import FLOPS_PER_BYTE_OF_OTHERS, block_costs
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.partition import partition


NARROW = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1408}
CONFIGS = {
    "0.2B": LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=2816,
        vocab_size=32000,
    ),
    "large vocabulary": LlamaConfig(**NARROW, num_hidden_layers=16, vocab_size=64000, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**NARROW, head_dim=64, num_hidden_layers=16, vocab_size=50000),
    "7B": LlamaConfig(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cut_of_a_run_is_foreseen_from_sizes(name: str) -> None:
    config: PreTrainedConfig = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.ones(2, 8, dtype=torch.long)
    sample = {"input_ids": ids, "labels": ids, "attention_mask": ids, "use_cache": False}
    plan = discover_stages(model, sample, cost_tokens=(1, LENGTH))
    costs, shape = block_costs(model, plan, flops_per_byte=FLOPS_PER_BYTE_OF_OTHERS), shape_of_config(config)
    for pp_size in (2, 4):
        layout = layout_of(HFParallelConfig(pp_size=pp_size), pp_size, pp_size)
        schedule = layout.schedule.typical()
        bounds = partition(plan.num_blocks, pp_size, "balanced", costs, schedule=schedule)
        real = sorted(high - low for low, high in pairwise(bounds))
        assert sorted(blocks_of_stages(shape, layout)) == real


def test_a_cut_that_is_given_is_taken() -> None:
    shape = shape_of_config(CONFIGS["large vocabulary"])
    given = layout_of(HFParallelConfig(pp_size=2, pipeline={"split": [9, 7]}), 2, 2)
    even = layout_of(HFParallelConfig(pp_size=2, pipeline={"split": "even"}), 2, 2)
    assert blocks_of_stages(shape, given) == [9, 7]
    assert blocks_of_stages(shape, even) == [8, 8]
