"""What must hold of every layout and cluster, on layouts that are drawn at random, of what is counted and what is recorded."""

from __future__ import annotations

import functools
import random
from typing import Any, Final

import pytest
from transformers import LlamaConfig

from hf_parallel.planner.candidates import Request, candidates, even_bytes
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.predict import estimate
from hf_parallel.planner.profile import ModelProfile, profile_of
from hf_parallel.planner.read_layout import CHOICES, layout_of
from hf_parallel.planner.search import plan


SEEDS: Final = (0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2)))
DRAWS: Final = 40
SAME: Final = 1 + 1e-9  # sums in another order
OWN: Final = {"kernels": "eager", "attention": "sdpa", "sp": 1, "overlap_tp": False, "overlap_pp": False}
seeded = pytest.mark.parametrize("seed", SEEDS)


@functools.cache
def profile() -> ModelProfile:
    return profile_of(
        LlamaConfig(
            hidden_size=256, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, intermediate_size=704,
            vocab_size=4096,
        )
    )  # fmt: skip


def drawn(draw: random.Random, *, ranks: int = 16) -> dict[str, Any]:
    """A layout of so many ranks; every other one is as this package runs it."""
    own = draw.random() < 0.5
    tp, pp = draw.choice((1, 2, 4)), draw.choice((1, 2, 4))
    layout: dict[str, Any] = {"tp": min(tp, ranks), "pp": min(pp, max(1, ranks // tp))}
    layout["dp"] = max(1, ranks // layout["tp"] // layout["pp"])
    keys = ("zero", "schedule", "recompute", "kernels", "attention", "compression", "offload_optimizer")
    layout |= {key: draw.choice(CHOICES[key]) for key in keys}
    layout |= {key: draw.random() < 0.5 for key in ("sequence_parallel", "overlap_dp", "overlap_tp", "overlap_pp")}
    layout |= {"dtype": draw.choice(("bf16", "fp32")), "param_dtype": draw.choice(CHOICES["param_dtype"])}
    layout |= {"micro_batch": draw.choice((1, 2, 4)), "num_microbatches": draw.choice((1, 4, 9))}
    return layout | (OWN if own else {})


def step(layout: dict[str, Any], cluster: Cluster, length: int = 512) -> float:
    return estimate(profile(), cluster, layout_of(layout, cluster), length).step_s


def total(layout: dict[str, Any], cluster: Cluster, length: int = 512) -> float:
    return estimate(profile(), cluster, layout_of(layout, cluster), length).total_bytes


@seeded
def test_more_bandwidth_is_never_slower(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(DRAWS):
        layout, intra, inter = drawn(draw), draw.uniform(4, 300), draw.uniform(1, 1600)
        slow = Cluster(2, 8, "a100_80", intra_gb_s=intra, inter_gbit_s=inter)
        wider = Cluster(2, 8, "a100_80", intra_gb_s=intra * draw.uniform(1, 4), inter_gbit_s=inter)
        faster = Cluster(2, 8, "a100_80", intra_gb_s=intra, inter_gbit_s=inter * draw.uniform(1, 4))
        assert step(layout, wider) <= step(layout, slow) * SAME, layout
        assert step(layout, faster) <= step(layout, slow) * SAME, layout


@seeded
def test_one_gpu_is_one_gpu_whatever_is_said_of_the_others(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(DRAWS):
        layout = drawn(draw, ranks=1) | {"tp": 1, "pp": 1, "dp": 1, "compression": "none", "zero": 0}
        alone = Cluster(1, 1, "a100_80")
        found = estimate(profile(), alone, layout_of(layout, alone), 512)
        assert (found.exposed_communication_s, found.bubble) == (0, pytest.approx(0, abs=1e-12)), layout
        other = Cluster(1, 1, "a100_80", intra_gb_s=draw.uniform(1, 300), inter_gbit_s=draw.uniform(1, 1600))
        assert estimate(profile(), other, layout_of(layout, other), 512) == found, layout
        unused = {"overlap_dp": not layout["overlap_dp"], "zero": draw.choice((1, 2)), "engine": "native"}
        again = estimate(profile(), alone, layout_of(layout | unused, alone), 512)
        assert again.step_s == pytest.approx(found.step_s), layout
        assert again.total_bytes == pytest.approx(found.total_bytes), layout


@seeded
def test_more_rows_or_longer_ones_never_need_less_memory(seed: int) -> None:
    draw, cluster = random.Random(seed), Cluster(2, 8, "a100_80")
    for _ in range(DRAWS):
        layout = drawn(draw)
        spec, rows = layout_of(layout), draw.choice((2, 3, 4))
        counts = [profile_blocks(spec)] * spec.num_stages
        assert sum(counts) == len(profile().layers), layout
        small, large = (
            bytes_of(layout | {"micro_batch": micro}, counts) for micro in (spec.micro_batch, rows * spec.micro_batch)
        )
        assert small <= large * SAME, layout
        assert small <= bytes_of(layout, counts, 1024) * SAME, layout
        assert total(layout, cluster) > 0


def profile_blocks(spec: LayoutSpec) -> int:
    """Of each stage."""
    return len(profile().layers) // spec.num_stages


def bytes_of(layout: dict[str, Any], counts: list[int], length: int = 512) -> float:
    from hf_parallel.planner.memory import memory_bytes

    return sum(memory_bytes(profile(), layout_of(layout), counts, length).values())


@seeded
def test_more_memory_never_removes_a_layout_nor_makes_the_fastest_slower(seed: int) -> None:
    draw = random.Random(seed)
    given = {"dtype": draw.choice(("bf16", "fp32")), "recompute": draw.choice(CHOICES["recompute"])}
    sizes = sorted(draw.uniform(1.8, 4) for _ in range(3))
    before: set[str] = set()
    fastest = float("inf")
    for size in sizes:
        cluster = Cluster(1, 4, "a100_80", gpu_memory_gb=size)
        plans = plan(profile(), cluster, seq_len=512, global_batch=16, most=10**6, layout=given)
        found, best = {str(one.layout) for one in plans}, min(one.estimate.step_s for one in plans)
        assert before <= found
        assert best <= fastest * SAME
        before, fastest = found, best
    assert before


def test_every_candidate_that_fits_is_among_the_plans() -> None:
    cluster = Cluster(1, 4, "a100_80", gpu_memory_gb=2.5)
    request = Request(profile(), cluster, 512, 16, layout_of({}), frozenset())
    fits = [spec for spec in candidates(request) if even_bytes(request, spec) <= cluster.gpu_bytes]
    plans = plan(profile(), cluster, seq_len=512, global_batch=16, most=10**6)
    assert 0 < len(plans) <= len(fits)
    assert all(one.fits for one in plans)
