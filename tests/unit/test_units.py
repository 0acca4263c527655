"""Parts of a width that ranks do not divide: the rule by which plans are tried, and memory is estimated."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from hf_parallel.memory.heads import most_heads
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.planner.profile import profile_of
from hf_parallel.tensor_parallel.plan.plan_for import plan_for
from hf_parallel.tensor_parallel.units import most_of, numbers_of, unit_sizes


SIZES = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 128, "vocab_size": 96}


class Holder:
    def __init__(self, **numbers: object) -> None:
        vars(self).update(numbers)


def test_numbers_are_integers_above_one_that_count_no_layers() -> None:
    held = Holder(heads=8, num_hidden_layers=4, layer_idx=3, is_causal=True, pairs=1, scale=0.5)
    assert numbers_of([held, Holder(width=128)]) == {8, 128}


def test_the_most_even_cut_is_tried_first_and_of_those_the_coarsest_units() -> None:
    assert unit_sizes(128, 3, {8, 4, 2, 5}) == [1, 16, 32]
    assert unit_sizes(132, 4, {4, 6, 12}) == [1, 33, 11, 22]  # even: plain parts first
    assert unit_sizes(90, 4, {45, 30, 9, 5}) == [1, 3, 2, 10, 18]  # 24 of 90 three by three, and two by two


def test_the_rank_with_most_has_the_units_that_are_over() -> None:
    assert most_of(128, 3, 16) == 48
    assert most_of(128, 3) == 43
    assert most_of(128, 4, 16) == 32


# Queries, keys and values, ranks -> queries of each rank, and rows of the keys that it stores (all where it takes some of them).
SHARES = {
    (8, 8, 3): ([3, 3, 2], [3, 3, 2]),
    (32, 8, 3): ([12, 12, 8], [3, 3, 2]),
    (8, 2, 3): ([4, 2, 2], [2, 2, 2]),
    (8, 1, 3): ([3, 3, 2], [1, 1, 1]),
    (12, 4, 3): ([6, 3, 3], [2, 1, 1]),
    (7, 7, 3): ([3, 2, 2], [3, 2, 2]),
}


@pytest.mark.parametrize("sizes", SHARES)
def test_ranks_have_as_even_a_share_of_attention_as_its_heads_allow(sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, tp = sizes
    more = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = AutoConfig.for_model("llama", **SIZES | more | {"num_hidden_layers": 2, "head_dim": 8})
    plan = plan_for(config, tp)
    named = {
        path.rpartition(".")[2]: linear.weight for path, linear in plan.linears.items() if ".0.self_attn." in path
    }
    found = {name: [named[name].local_size(tp, rank) // 8 for rank in range(tp)] for name in ("o_proj", "k_proj")}
    assert (found["o_proj"], found["k_proj"]) == SHARES[sizes]
    assert most_heads(heads, kv_heads, tp, shape_of_config(config).numbers) == (
        SHARES[sizes][0][0],
        SHARES[sizes][1][0],
    )


@pytest.mark.parametrize("name", ["llama", "phi", "gpt_neox"])
def test_the_fullest_rank_of_a_plan_is_the_one_that_is_estimated(name: str) -> None:
    """The feed-forward part by single elements, attention by its 8 heads."""
    config = AutoConfig.for_model(name, **SIZES | {"num_hidden_layers": 4})
    shape, plan = shape_of_config(config), plan_for(config, 3)
    rows = {path: linear.weight for path, linear in plan.linears.items() if linear.role == "row" and ".0." in path}
    sections = {spec.sections[0].size: spec.sections[0] for spec in rows.values()}
    assert sections.keys() == {shape.intermediate, shape.hidden}
    assert sections[shape.intermediate].split(3)[0] == most_of(shape.intermediate, 3)
    assert sections[shape.hidden].split(3)[0] == shape.head_dim * most_of(shape.heads, 3)
    assert profile_of(config).kinds[0].numbers == shape.numbers
