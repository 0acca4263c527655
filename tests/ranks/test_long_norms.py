"""Gradient norms at a vocabulary of 49152 are those of fp64 on every layout; torch's own fp32 norm is off by 1e-4 there."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import user_loops
from rank_runner import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM
from user_loops import Loop


SIZES = {"intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}
LAYOUTS = ("dp2", "zero1", "zero3", "tp2", "pp2")


def build() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**tiny.SMALL, "vocab_size": 49152}, **SIZES))


def measure(loop: Loop) -> None:
    loop.prepare()
    loop.backward(0)
    if loop.layout == "one":
        gradients = [p.grad.double().square().sum() for p in loop.model.parameters()]
        loop.history.append(float(torch.stack(gradients).sum().sqrt()))
    else:
        loop.history.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), float("inf"))))


def main(rank: int, world_size: int, layouts: list[str]) -> list[float]:
    return [user_loops.run(layout, measure, build=build)["history"][-1] for layout in layouts]


@pytest.mark.long
def test_norms_of_long_gradients_are_right_to_one_in_a_million(tmp_path_factory: pytest.TempPathFactory) -> None:
    options: dict[str, Any] = {"env": {"ACCELERATE_USE_CPU": "true"}, "timeout": 120.0}
    folder = tmp_path_factory.mktemp("norms")
    (expected,) = run_ranks(main, 1, ["one"], tmp_path=folder, init_group=False, **options)[0]
    found = run_ranks(main, 2, list(LAYOUTS), tmp_path=folder, **options)[0]
    assert dict(zip(LAYOUTS, found, strict=True)) == {name: pytest.approx(expected, rel=1e-6) for name in LAYOUTS}
