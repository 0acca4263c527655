"""If these fail, the host of a pipeline stage pays for blocks that other stages run.

Calls are counted, not timed: at tiny kernels the host's time follows them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
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


def counted(run: Callable[[], Any]) -> int:
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run()  # what is looked up once
    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def test_a_skipped_block_costs_a_few_calls() -> None:
    inputs = batch()
    counts = {}
    for num_blocks in (8, 24):
        stage = last_stage(num_blocks)
        shape = (*inputs["input_ids"].shape, WIDTHS["hidden_size"])
        received = torch.randn(shape, requires_grad=True)
        counts[num_blocks] = counted(lambda stage=stage, received=received: stage((received,), **inputs))
    assert counts[24] - counts[8] <= (24 - 8) * CALLS_OF_A_SKIPPED_BLOCK
