"""What the planner counts of LoRA's products, and of the sums with those of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_parallel.planner.adapters import adapted
from hf_parallel.planner.constants import constants
from hf_parallel.planner.cost import Pass, Place, block_pass
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import layout_of
from hf_parallel.planner.profile import BlockProfile, ModelProfile, Product


HIDDEN, LAYERS, ROWS, LENGTH = 2048, 4, 64, 1024
TOKENS = ROWS * LENGTH
ATTENTION = (
    Product(HIDDEN, 3 * HIDDEN, is_attention=True),
    Product(HIDDEN, HIDDEN, cut="row", is_attention=True),
)
FEED = (Product(HIDDEN, 4 * HIDDEN), Product(4 * HIDDEN, HIDDEN, cut="row"))
BLOCK = BlockProfile((*ATTENTION, *FEED), 12 * HIDDEN**2, 16, 16, 64, 64, has_rms=False)
MODEL = ModelProfile(HIDDEN, 1000, (BLOCK,), (0,) * LAYERS, 1000 * HIDDEN, 1000 * HIDDEN, True, True)
ALL = 16 * HIDDEN * LAYERS  # parameters of adapters of rank 1 on all products
SOME = 6 * HIDDEN * LAYERS  # on those of attention


def block(adapters: int, **layout: object) -> tuple[Pass, Place]:
    spec = layout_of({"micro_batch": ROWS, "adapters": adapters, **layout})
    place = Place(spec, Cluster(1, 1, "a100_80"), LENGTH, constants())
    return block_pass(MODEL, BLOCK, place), place


def test_where_kernels_add_up_only_the_products_of_adapters_count() -> None:
    few, place = block(16 * ALL, kernels="fused")
    many, _ = block(32 * ALL, kernels="fused")
    products = 2 * TOKENS * 16 * ALL / LAYERS / place.rate
    assert many.forward - few.forward == pytest.approx(products)
    assert many.backward - few.backward == pytest.approx(2 * products)


def test_eager_adapters_read_and_write_what_they_are_added_to() -> None:
    fused, eager = (
        [block(adapters, kernels=kernels)[0].forward for adapters in (0, 16 * ALL)] for kernels in ("fused", "eager")
    )
    _, place = block(16 * ALL)
    moved = 2 * TOKENS * (7 * HIDDEN + 6 * 9 * HIDDEN) / place.moved  # inputs once, outputs six times, two bytes each
    assert eager[1] - eager[0] == pytest.approx(fused[1] - fused[0] + moved)


def test_a_rank_too_low_for_all_products_is_one_of_attention() -> None:
    assert adapted(MODEL, BLOCK, 8 * ALL) == (8, BLOCK.products)
    assert adapted(MODEL, BLOCK, 8 * SOME) == (8, ATTENTION)
    assert adapted(MODEL, replace(BLOCK, products=FEED), 8 * SOME)[1] == FEED


def test_what_runs_again_runs_with_its_adapters() -> None:
    for adapters in (8 * SOME, 16 * ALL):
        kept, _ = block(adapters)
        again, _ = block(adapters, recompute="full")
        assert again.backward - kept.backward == pytest.approx(kept.forward, rel=0.01)  # launches aside


def test_adapters_on_shards_are_shards() -> None:
    whole = block(64 * ALL, kernels="fused")[0].forward - block(ALL, kernels="fused")[0].forward
    halves = [block(rank * ALL, kernels="fused", tp=2)[0].forward for rank in (64, 1)]
    assert halves[0] - halves[1] == pytest.approx(whole / 2)
