"""If these fail, the host of a pipeline stage pays for blocks that other stages run.

Calls are counted, not timed: at tiny kernels the host's time follows them.
"""

from __future__ import annotations

import torch
from counted_calls import counted_calls
from stage_models import WIDTHS, batch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.run.stage import Stage, cut_stages


OWN = 2
CALLS_OF_A_SKIPPED_BLOCK = 25  # the model's loop, torch's call of a module, the random stream of the block


def last_stage(num_blocks: int) -> Stage:
    model = LlamaForCausalLM(LlamaConfig(**{**WIDTHS, "num_hidden_layers": num_blocks})).train()
    plan = discover_stages(model, batch())
    stages = cut_stages(model, plan, [0, num_blocks - OWN, num_blocks], [1], model.forward)
    stages[1].seed = 7
    return stages[1]


def test_a_skipped_block_costs_a_few_calls() -> None:
    inputs = batch()
    counts = {}
    for num_blocks in (8, 24):
        stage = last_stage(num_blocks)
        shape = (*inputs["input_ids"].shape, WIDTHS["hidden_size"])
        received = torch.randn(shape, requires_grad=True)
        counts[num_blocks] = counted_calls(lambda stage=stage, received=received: stage((received,), **inputs))
    assert counts[24] - counts[8] <= (24 - 8) * CALLS_OF_A_SKIPPED_BLOCK
