"""Partial sums of a half-precision model that are made and summed in fp32 must leave the noise of one process.

If these fail, `tensor_parallel.reduce_dtype: float32` has no effect, changes what fp32 training computes, or costs other
bytes than it says.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any
from unittest import mock

import pytest
import torch
from thinning import in_turns
from torch import Tensor
from tp_models import spread
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.cost import traffic
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_virtual_ranks, virtual_groups
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.run.functions import VirtualGroup
from hf_parallel.tensor_parallel.shard_plan import TPPlan


ROWS, LENGTH, SEEDS = 4, 16, 3
Gradients = dict[str, Tensor]


def make(dtype: torch.dtype, *, seed: int = 0, heads: int = 8) -> LlamaForCausalLM:
    """Weights that bf16 holds exactly, of a size that lets every layer matter."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 256}
    config = LlamaConfig(
        **sizes, num_attention_heads=8, num_key_value_heads=heads, max_position_embeddings=32, pad_token_id=0
    )
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).train()
    spread(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16().float())
    return model.to(dtype)


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 250, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def plan_of(tp_size: int, sequence: bool) -> TPPlan:
    sample = {name: value[:3, :8] for name, value in batch(99).items()}
    return plan_model(make(torch.float32), tp_size, sample, sequence=sequence)


def backward(
    model: torch.nn.Module, inputs: dict[str, Tensor], parts: int = 1, *, autocast: bool = False
) -> Gradients:
    count = inputs["labels"][:, 1:].numel()
    for part in zip(*(value.chunk(parts) for value in inputs.values()), strict=True):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(**dict(zip(inputs, part, strict=True)), use_cache=False, num_items_in_batch=count).loss
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sharded(
    plan: TPPlan, seed: int, wide: bool, *, dtype: torch.dtype = torch.bfloat16, autocast: bool = False
) -> Gradients:
    """Whole gradients of all ranks of a plan, which run as threads."""
    groups = virtual_groups(plan.tp_size, 60.0)
    models = [make(dtype, seed=seed) for _ in groups]
    for rank, (model, group) in enumerate(zip(models, groups, strict=True)):
        apply_tensor_parallel(model, plan, group, rank, lambda name: True, reduces_in_fp32=wide)
    parts = run_virtual_ranks(groups, lambda rank: backward(models[rank], batch(seed), autocast=autocast))
    specs = plan.shard_specs()
    return {
        name: specs[name].assemble([part[name] for part in parts]) if name in specs else parts[0][name]
        for name in parts[0]
    }


def error(mine: Gradients, exact: Gradients) -> float:
    """Of all gradients together, relative."""
    wrong = sum(float((mine[name].double() - exact[name].double()).square().sum()) for name in exact)
    return float((wrong / sum(float(value.double().square().sum()) for value in exact.values())) ** 0.5)


def noise(plan: TPPlan, autocast: bool) -> dict[str, float]:
    """Error against fp32 of each way, over that of one process; medians over seeds."""
    found: dict[str, list[float]] = {"regrouped": [], "compute": [], "float32": []}
    for seed in range(SEEDS):
        dtype = torch.float32 if autocast else torch.bfloat16
        exact = backward(make(torch.float32, seed=seed), batch(seed))
        one = error(backward(make(dtype, seed=seed), batch(seed), autocast=autocast), exact)
        regrouped = backward(make(dtype, seed=seed), batch(seed), 2, autocast=autocast)
        found["regrouped"].append(error(regrouped, exact) / one)
        for name in ("compute", "float32"):
            mine = sharded(plan, seed, name == "float32", dtype=dtype, autocast=autocast)
            found[name].append(error(mine, exact) / one)
    return {name: statistics.median(values) for name, values in found.items()}


@pytest.mark.parametrize(("tp_size", "autocast"), in_turns([2, 4], [False, True]))
def test_sums_in_fp32_leave_the_noise_of_one_process(tp_size: int, autocast: bool) -> None:
    sequence = tp_size == 4
    ratios = noise(plan_of(tp_size, sequence), autocast)
    assert ratios["float32"] <= 1.02, ratios
    assert ratios["float32"] < ratios["compute"], ratios


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_exact_anyway_stays_bit_equal(sequence: bool, dtype: torch.dtype) -> None:
    plan = plan_of(2, sequence)
    narrow, wide = (sharded(plan, 1, wide, dtype=dtype) for wide in (False, True))
    assert all(torch.equal(narrow[name], wide[name]) for name in narrow)


def sent(plan: TPPlan, wide: bool) -> dict[torch.dtype, int]:
    """Elements that rank 0 exchanges in a forward and backward pass, by dtype."""
    elements: dict[torch.dtype, int] = {}
    own = VirtualGroup.exchange

    def counted(self: Any, x: Tensor) -> list[Tensor]:
        if self.rank() == 0:
            elements[x.dtype] = elements.get(x.dtype, 0) + x.numel()
        return own(self, x)

    with mock.patch.object(VirtualGroup, "exchange", counted):
        sharded(plan, 0, wide)
    return elements


def test_the_bytes_are_those_that_are_stated() -> None:
    plan = plan_of(2, False)
    narrow, wide = sent(plan, False), sent(plan, True)
    numbers, width, tokens = 4 * ROWS * LENGTH, 128, ROWS * LENGTH
    flag = 1  # whether the loss may have parts of the logits, asked once
    assert narrow[torch.float32] == numbers + flag, "of the loss over parts of the vocabulary"
    assert wide[torch.bfloat16] == width * tokens, "the output of the embedding, one rank's rows and zeros"
    assert wide[torch.float32] == narrow[torch.float32] + narrow[torch.bfloat16] - wide[torch.bfloat16], (
        "all other sums"
    )
    # A ring of two: each rank sends what it has once.
    assert traffic(plan, 2).per_token * tokens == narrow[torch.bfloat16] * 2 + numbers * 4
    assert traffic(plan, 2, 4).per_token * tokens == wide[torch.bfloat16] * 2 + (wide[torch.float32] - flag) * 4
