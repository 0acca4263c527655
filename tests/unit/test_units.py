"""Parts of a width that ranks do not divide: the rule by which plans are tried, and memory is estimated."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

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


def test_coarse_units_are_tried_first_and_single_elements_where_they_are_even() -> None:
    assert unit_sizes(128, 3, {8, 4, 2, 5}) == [32, 16, 1]
    assert unit_sizes(128, 2, {8}) == [1, 16, 1]


def test_the_rank_with_most_has_the_units_that_are_over() -> None:
    assert most_of(128, 3, frozenset({8})) == 48
    assert most_of(128, 3, frozenset()) == 43
    assert most_of(128, 4, frozenset({8})) == 32


@pytest.mark.parametrize("name", ["llama", "phi", "gpt_neox"])
def test_the_fullest_rank_of_a_plan_is_the_one_that_is_estimated(name: str) -> None:
    """A Llama's feed-forward part is shared as its 8 heads are; those of others, which hold no config, by elements."""
    config = AutoConfig.for_model(name, **SIZES | {"num_hidden_layers": 4})
    shape, plan = shape_of_config(config), plan_for(config, 3)
    rows = {path: linear.weight for path, linear in plan.linears.items() if linear.role == "row" and ".0." in path}
    sections = {spec.sections[0].size: spec.sections[0] for spec in rows.values()}
    assert sections.keys() == {shape.intermediate, shape.hidden}
    assert sections[shape.intermediate].split(3)[0] == most_of(shape.intermediate, 3, shape.numbers[1])
    assert sections[shape.hidden].split(3)[0] == shape.head_dim * most_of(shape.heads, 3, shape.numbers[0])
    assert profile_of(config).kinds[0].numbers == shape.numbers
