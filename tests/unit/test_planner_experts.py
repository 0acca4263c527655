"""Experts that neighbouring replicas share: what the planner counts of them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig

import hf_parallel
from hf_parallel.errors import ConfigError
from hf_parallel.memory.estimate import parameters_of_ranks, states
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import Layout
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.links import traffic
from hf_parallel.planner.predict import placed
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of, rows_of, settings_of
from hf_parallel.settings.config import HFParallelConfig


CONFIG = MixtralConfig(
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    vocab_size=32000,
)
EXPERT = 3 * 1024 * 3584  # parameters of one
ONE_NODE, TWO_NODES = Cluster(1, 8, "h100"), Cluster(2, 4, "h100")
SEQ_LEN = 2048


def estimate(cluster: Cluster = ONE_NODE, **layout: Any) -> hf_parallel.Estimate:
    return hf_parallel.predict(CONFIG, cluster, {"dp": 8, "num_microbatches": 2} | layout, seq_len=SEQ_LEN)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_states_are_those_that_validate_counts(zero: int, ep: int) -> None:
    layout = Layout(8, 8, stage=zero, ep_size=ep, precision="autocast")
    shape = shape_of_config(CONFIG)
    (held,) = parameters_of_ranks(shape, layout)
    wanted = states(held, layout, 8 * 8 * EXPERT / ep)
    found = estimate(zero=zero, ep=ep, param_dtype="fp32").memory_bytes
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-3)
    assert found["gradients"] == pytest.approx(wanted["gradients"], rel=1e-3)
    assert found["optimizer"] == pytest.approx(wanted["optimizer state"], rel=1e-3)


def test_experts_over_tp_ranks_are_whole_and_as_many_bytes() -> None:
    cut = estimate(tp=2, dp=4, ep=4).memory_bytes
    whole = estimate(tp=2, dp=4, ep=8, experts_over_tp=True, sequence_parallel=True).memory_bytes
    assert all(whole[term] == pytest.approx(cut[term]) for term in ("weights", "gradients", "optimizer"))


def test_experts_over_tp_ranks_need_no_sum_of_parts_and_send_tokens_to_tp_ranks() -> None:
    layout = {"tp": 2, "dp": 4, "num_microbatches": 2, "sequence_parallel": True, "kernels": "fused"}
    cut, whole = (_traffic(ONE_NODE, layout | one) for one in ({"ep": 4}, {"ep": 8, "experts_over_tp": True}))
    to_replicas = cut["ep"].gpu * (6 / 8) / (3 / 4)
    assert whole["ep"].gpu == pytest.approx(to_replicas)
    assert whole["tp"].gpu == pytest.approx(cut["tp"].gpu / 2 + to_replicas / 6)


def test_experts_of_one_tp_group_are_summed_over_all_replicas() -> None:
    layout = {"tp": 2, "dp": 4, "sequence_parallel": True, "kernels": "fused"}
    found = _traffic(ONE_NODE, layout | {"ep": 2, "experts_over_tp": True})
    assert "ep" not in found
    assert found["dp"].gpu == pytest.approx(_traffic(ONE_NODE, layout)["dp"].gpu)


@pytest.mark.parametrize("ep", [3, 6])
def test_experts_over_tp_ranks_take_whole_replicas(ep: int) -> None:
    with pytest.raises(ConfigError, match=rf"ep={ep} with experts_over_tp.*Set ep to tp times a divisor of dp"):
        estimate(tp=2, dp=4, ep=ep, experts_over_tp=True)


def test_stages_hold_their_part_of_the_experts() -> None:
    whole, shared = (estimate(dp=4, pp=2, ep=ep).memory_bytes["weights"] for ep in (1, 4))
    assert whole - shared == pytest.approx(2 * 4 * 8 * EXPERT * 3 / 4, rel=0.2)


def test_each_axis_sends_its_bytes() -> None:
    layout = {"dp": 8, "ep": 4, "num_microbatches": 2}
    found = _traffic(ONE_NODE, layout)
    tokens, passes, blocks, copies = SEQ_LEN, 2, 8, 2
    message = 2 * tokens * copies * 1024 * 3 / 4  # bf16, to three of four ranks
    assert found["ep"].gpu == pytest.approx(4 * message * passes * blocks)  # there and back, forward and backward
    own = 8 * 8 * EXPERT / 4
    dense = profile_of(CONFIG).parameters - 8 * 8 * EXPERT
    assert found["dp"].gpu == pytest.approx(2 * 4 * (dense * 7 / 8 + own / 2), rel=1e-3)
    assert "ep" not in _traffic(ONE_NODE, layout | {"ep": 1})


def test_recomputation_sends_tokens_again() -> None:
    once, again = (_traffic(ONE_NODE, {"dp": 8, "ep": 4, "recompute": how})["ep"].gpu for how in ("none", "full"))
    assert again == pytest.approx(1.5 * once)


def test_experts_of_every_node_are_summed_between_nodes_and_those_of_one_are_not() -> None:
    inside = _traffic(TWO_NODES, {"dp": 8, "ep": 4})
    across = _traffic(TWO_NODES, {"dp": 8, "ep": 8})
    assert inside["ep"].node == 0
    assert across["ep"].node > 0
    dense = profile_of(CONFIG).parameters - 8 * 8 * EXPERT
    # Dense gradients are summed inside a node first: each of four ranks sends a quarter to the other node.
    assert across["dp"].node == pytest.approx(4 * dense, rel=1e-3)
    assert inside["dp"].node == pytest.approx(4 * dense + 4 * 8 * 8 * EXPERT, rel=1e-3)


def _traffic(cluster: Cluster, layout: dict[str, Any]) -> Any:
    spec = placed(profile_of(CONFIG), cluster, layout_of(layout, cluster), SEQ_LEN)
    return traffic(profile_of(CONFIG), cluster, spec, SEQ_LEN)


def test_messages_of_tokens_take_time_and_a_faster_network_takes_less() -> None:
    slow, fast = Cluster(2, 4, "h100", inter_gbit_s=100), Cluster(2, 4, "h100", inter_gbit_s=1600)
    assert estimate(fast, ep=8).step_s < estimate(slow, ep=8).step_s
    assert estimate(ep=8).exposed_communication_s > 0
    # Tokens that stay in a node, for each micro-batch, are worth a sum of experts between nodes, once a step.
    assert estimate(slow, ep=4, num_microbatches=64).step_s < estimate(slow, ep=8, num_microbatches=64).step_s
    assert estimate(slow, ep=4, num_microbatches=1).step_s > estimate(slow, ep=8, num_microbatches=1).step_s


def test_products_of_experts_have_more_tokens_where_more_ranks_send_theirs() -> None:
    thin = replace_config(intermediate_size=256, num_local_experts=64)
    near = Cluster(1, 8, "h100", intra_gb_s=1e6)
    layout = {"dp": 8, "num_microbatches": 2, "overlap_dp": True}
    alone, shared = (hf_parallel.predict(thin, near, layout | {"ep": ep}, seq_len=512).step_s for ep in (1, 8))
    assert shared < alone


def replace_config(**changes: int) -> MixtralConfig:
    return MixtralConfig(**(CONFIG.to_dict() | changes))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"dp": 8, "ep": 3}, r"ep=3: neighbouring replicas share the experts.*divisor of dp=8"),
        ({"dp": 8, "ep": 0}, r"ep=0: expected an integer of 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(layout: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layout_of(layout)


def test_a_model_without_experts_and_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ep=2: the model has no experts.*Set ep to 1"):
        hf_parallel.predict(LlamaConfig(), ONE_NODE, {"dp": 8, "ep": 2}, seq_len=128)
    with pytest.raises(ConfigError, match=r"ep=8: the model has 4 experts.*Set ep to 4 or"):
        hf_parallel.predict(replace_config(num_local_experts=4), ONE_NODE, {"dp": 8, "ep": 8}, seq_len=128)
    with pytest.raises(ConfigError, match=r"ep=2: the model has no experts"):
        hf_parallel.plan(LlamaConfig(), ONE_NODE, seq_len=128, global_batch=8, layout={"ep": 2})


def test_settings_and_layouts_mean_each_other() -> None:
    config = HFParallelConfig.from_mapping({"ep_size": 2, "pp_size": 2, "zero": {"stage": 1}})
    spec = layout_of(mapping_of(config, 8, rows=8))
    assert (spec.dp, spec.ep) == (4, 2)
    assert settings_of(spec).ep_size == 2
    assert layout_of(mapping_of(settings_of(spec), 8, rows_of(spec))) == spec


def test_the_search_shares_experts_where_copies_of_all_do_not_fit() -> None:
    mixtral = MixtralConfig()
    plans = hf_parallel.plan(mixtral, Cluster(8, 8, "h100"), seq_len=4096, global_batch=128, layout={"tp": 1, "pp": 1})
    assert any(one.spec.ep > 1 for one in plans)
    for one in plans:
        if one.spec.ep > 1:
            settings_of(one.spec)  # this package runs it
    assert all(one.spec.ep == 1 for one in hf_parallel.plan(LlamaConfig(), ONE_NODE, seq_len=512, global_batch=64))
    given = hf_parallel.plan(mixtral, Cluster(8, 8, "h100"), seq_len=4096, global_batch=128, layout={"ep": 8})
    assert all(one.spec.ep == 8 for one in given)


def test_one_rank_for_all_experts_is_the_estimate_without_the_key() -> None:
    assert estimate(ep=1) == estimate()
    assert layout_of({"dp": 8, "ep": 1}) == layout_of({"dp": 8})
