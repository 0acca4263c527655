"""Heads of the tensor-parallel rank with most, against what the parameters of dry runs of a rank are."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from hf_parallel.memory.estimate import parameters_of_ranks
from hf_parallel.memory.heads import beyond_even, most_heads
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import Layout
from hf_parallel.planner.memory import parameters_of_ranks as planned_parameters
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.read_layout import layout_of


# Queries, keys and values, ranks -> what a dry run of rank 0 has of both.
FOUND = {
    (12, 6, 4): (4, 2),
    (12, 4, 3): (6, 2),
    (8, 2, 4): (2, 2),
    (9, 9, 4): (3, 3),
    (6, 3, 4): (2, 3),
    (9, 3, 2): (6, 2),
    (10, 5, 3): (4, 2),
    (8, 4, 2): (4, 2),
}


@pytest.mark.parametrize("sizes", FOUND)
def test_ranks_share_whole_groups_of_heads(sizes: tuple[int, int, int]) -> None:
    assert most_heads(*sizes) == FOUND[sizes]


def test_heads_that_the_ranks_divide_are_shared_evenly() -> None:
    assert beyond_even(8, 4, 2) == (0, 0)
    assert beyond_even(8, 4, 1) == (0, 0)
    assert beyond_even(0, 0, 2) == (0, 0)


@pytest.mark.parametrize("sizes", FOUND)
def test_a_rank_holds_the_weights_of_its_heads(sizes: tuple[int, int, int]) -> None:
    heads, kv_heads, tp = sizes
    config = LlamaConfig(
        hidden_size=16 * heads,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=240,
        vocab_size=960,
    )
    own, kv_own = FOUND[sizes]
    hidden = 16 * heads
    expected = 2 * 960 * hidden / tp + 2 * (3 * 240 * hidden / tp + 2 * 16 * hidden * (own + kv_own))
    planned = planned_parameters(profile_of(config), layout_of({"tp": tp}), [2])
    counted = parameters_of_ranks(shape_of_config(config), Layout(tp, tp, tp_size=tp))
    assert planned[0] == pytest.approx(expected, abs=5 * hidden)  # norms
    assert counted[0] == pytest.approx(expected, abs=5 * hidden)
