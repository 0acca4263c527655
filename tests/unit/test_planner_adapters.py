"""What the planner counts of LoRA's products, of the sums with those of the model, and of a base that is quantised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_parallel.compat.private_quantised import quantised_bits
from hf_parallel.errors import ConfigError
from hf_parallel.planner.adapters import adapted
from hf_parallel.planner.constants import constants
from hf_parallel.planner.cost import Pass, Place, block_pass
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.memory import memory_bytes, saved_by_block
from hf_parallel.planner.profile import BlockProfile, ModelProfile, Product
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.search import plan


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
    spec = layout_of({"micro_batch": ROWS, "adapters": adapters} | layout)
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


def test_more_than_adapters_have_are_some_of_the_models_own() -> None:
    whole, frozen = block(0)[0], block(MODEL.parameters // 2)[0]
    assert frozen.forward == whole.forward
    assert frozen.weights == pytest.approx(
        whole.weights / 2, rel=0.1
    )  # of which kernels that fill the pass are not a part
    assert block(ALL)[0].backward < frozen.backward < whole.backward


def test_a_quantised_matrix_is_unpacked_for_each_product() -> None:
    (half, place), (packed, _) = block(16 * ALL), block(16 * ALL, block_bits=4.0)
    moved = (0.5 + 2) * 12 * HIDDEN**2 / (place.c.unpack * place.moved)
    assert packed.forward - half.forward == pytest.approx(moved)
    assert packed.backward - half.backward == pytest.approx(moved)


def test_what_runs_again_is_unpacked_again() -> None:
    def added(recompute: str) -> float:
        half, packed = (block(16 * ALL, block_bits=bits, recompute=recompute)[0] for bits in (0.0, 4.0))
        return packed.both - half.both

    assert added("full") == pytest.approx(added("none") * 3 / 2)


def test_unpacking_lengthens_short_passes_most() -> None:
    wide = Product(4 * HIDDEN, 16 * HIDDEN)
    large = replace(BLOCK, products=(wide,), parameters=wide.inputs * wide.outputs)

    def longer(tokens: int) -> float:
        half, packed = (
            layout_of({"adapters": 8 * ALL, "recompute": "full", "block_bits": bits}) for bits in (0.0, 4.0)
        )
        places = (Place(spec, Cluster(1, 1, "a100_80"), tokens, constants()) for spec in (half, packed))
        times = [block_pass(MODEL, large, place).both for place in places]
        return times[1] / times[0]

    assert longer(256) > 1.5
    assert longer(16384) < 1.05


def test_a_quantised_base_has_its_bits_in_blocks_alone() -> None:
    def weights(**layout: object) -> float:
        spec = layout_of({"pp": 2, "num_microbatches": 4, "adapters": 8 * ALL, **layout})
        return memory_bytes(MODEL, spec, [2, 2], 512)["weights"]

    spared = 2 * 12 * HIDDEN**2 * (2 - 4.13 / 8)
    assert weights() - weights(block_bits=4.13) == pytest.approx(spared)


def test_a_quantised_base_is_gathered_as_it_lies() -> None:
    """FSDP sends packed matrices; published: QLoRA of 34 billion parameters in full shards fits two cards of 24 GB."""
    layout = {"dp": 2, "zero": 3, "state_bytes": (2, 2, 4), "kernels": "eager"}

    def gathered(bits: float) -> tuple[float, float]:
        spec = layout_of({"adapters": 8 * ALL, "block_bits": bits} | layout)
        place = Place(spec, Cluster(1, 2, "rtx3090", intra="pcie", intra_gb_s=0.1), LENGTH, constants())
        buffers = memory_bytes(MODEL, spec, [LAYERS], LENGTH)["buffers"] - (2.0 * 4 * HIDDEN**2 if bits else 0.0)
        return buffers, block_pass(MODEL, BLOCK, place).forward

    (half, slow), (packed, fast) = gathered(0.0), gathered(4.0)
    block = 12 * HIDDEN**2
    assert half - packed == pytest.approx(3 * block * (2 - 0.5))
    link = 0.1e9 * constants().c_intra
    assert slow - fast == pytest.approx(block / 2 * (2 - 0.5) / link, rel=0.1)


def test_a_frozen_norm_does_not_keep_what_its_weight_scales() -> None:
    rms = replace(MODEL, kinds=(replace(BLOCK, has_rms=True),))
    layout = {"state_bytes": (2, 2, 4)}  # of others: of this package's own it is recorded
    trained, frozen = (
        saved_by_block(rms, rms.kinds[0], layout_of(layout | {"adapters": count}), LENGTH) for count in (0, 8 * ALL)
    )
    assert trained - frozen == 2 * 2 * HIDDEN


def test_plans_of_a_quantised_base_keep_its_weights_in_one_piece() -> None:
    big = replace(MODEL, layers=(0,) * 400)
    asked: dict[str, Any] = {"seq_len": 512, "global_batch": 8}
    adapters = {"adapters": 800 * ALL // LAYERS}
    with pytest.raises(ConfigError, match=r"block_bits=4\.13 in the layout, a base in 4 bit \(1"):
        plan(big, Cluster(1, 1, "rtx3090"), **asked, layout=adapters)
    plans = plan(big, Cluster(1, 4, "rtx3090"), **asked, layout=adapters | {"block_bits": 4.13}, most=100)
    assert {one.spec.tp for one in plans} == {1}
    assert {one.spec.zero for one in plans} <= {0, 1, 2}


@pytest.mark.parametrize("bits", [0.5, 17, True, "nf4", -1])
def test_other_bits_are_refused(bits: object) -> None:
    with pytest.raises(ConfigError, match=r"block_bits=.*: expected bits of a parameter, 1 to 16, or 0"):
        layout_of({"adapters": 1000, "block_bits": bits})


def test_quantised_weights_are_not_trained() -> None:
    with pytest.raises(ConfigError, match=r"block_bits=4.13 without adapters: quantised weights are not trained"):
        layout_of({"block_bits": 4.13})


def test_the_bits_of_a_model_are_those_it_has() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert quantised_bits(model) == 0
    packed = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = type("State", (), {"shape": (4, 4)})()  # type: ignore[attr-defined]
    model[0].weight = packed
    assert quantised_bits(model) == 4.5
