"""Bytes on links, the picture of a speed-up, and the rule of thumb beside a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hf_parallel.cli.plan_plot import draw_scaling, refuse_plot
from hf_parallel.errors import ConfigError
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.planner.collectives import groups_of, orders_of, stays_on_node
from hf_parallel.planner.guide import guide, rule_for
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.links import Traffic, traffic
from hf_parallel.planner.predict import predict
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of, rows_of, settings_of
from hf_parallel.planner.scaling import scaling
from hf_parallel.planner.search import plan
from hf_parallel.settings.config import HFParallelConfig


CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=1024
)


def sent(cluster: Cluster, **layout: object) -> dict[str, Traffic]:
    return traffic(profile_of(CONFIG), cluster, layout_of(layout, cluster), 128)


def test_replicas_send_twice_their_gradients_but_one_part() -> None:
    size = 4 * profile_of(CONFIG).parameters  # summed in fp32
    inside = sent(Cluster(1, 4, "h100"), dp=4)["dp"]
    assert inside.gpu == pytest.approx(2 * 3 / 4 * size)
    assert inside.node == 0
    ring = sent(Cluster(2, 2, "h100"), dp=4, kernels="fused", dtype="fp32")["dp"]
    assert ring.gpu == ring.node == pytest.approx(2 * 3 / 4 * size)  # one rank a node sends out
    across = sent(Cluster(2, 2, "h100"), dp=4)["dp"]
    assert across.gpu == across.node == pytest.approx(size)  # inside, and of each half by its rank between nodes
    three, fp32 = Cluster(3, 1, "h100"), {"dp": 3, "dtype": "fp32"}
    assert sent(three, **fp32)["dp"] == sent(three, **fp32, kernels="fused")["dp"]  # nothing to sum inside
    sharded = sent(Cluster(1, 4, "h100"), dp=4, zero=1)["dp"]
    assert sharded.gpu == pytest.approx(3 / 4 * (size + size / 2))  # reduced to parts, gathered in bf16


def test_replicas_of_every_tp_rank_share_the_network() -> None:
    own = sent(Cluster(2, 2, "h100"), dp=2, tp=2)["dp"]
    alone = sent(Cluster(2, 1, "h100"), dp=2)["dp"]
    assert own.gpu == 0
    assert own.node == pytest.approx(alone.node)  # two rings with half of the gradients each


def test_tp_ranks_reduce_four_times_a_block_and_stages_send_what_passes() -> None:
    passed = 2 * 128 * 256
    assert sent(Cluster(1, 2, "h100"), tp=2, num_microbatches=3)["tp"].gpu == pytest.approx(3 * 4 * 4 * passed)
    # One of two stages sends results, the other gradients; one between two others sends both.
    assert sent(Cluster(1, 2, "h100"), pp=2, num_microbatches=3)["pp"].gpu == pytest.approx(3 * passed)
    assert sent(Cluster(2, 1, "h100"), pp=2, num_microbatches=3)["pp"].node == pytest.approx(3 * passed)
    assert sent(Cluster(1, 4, "h100"), pp=4, num_microbatches=3)["pp"].gpu == pytest.approx(2 * 3 * passed)


def test_stages_that_go_round_send_from_the_last_rank_to_the_first() -> None:
    passed, m = 2 * 128 * 256, 4
    round_ = {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "num_microbatches": m}
    # Rank 0 of two sends the results of two stages and the gradients of one.
    assert sent(Cluster(2, 1, "h100"), pp=2, **round_)["pp"].node == pytest.approx(3 * m * passed)
    # Two nodes of four ranks, whose second rank sends two results, and whose first one the gradient of the third round.
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 8})
    spec, cluster = layout_of({"pp": 4, **round_}), Cluster(2, 2, "h100")
    assert traffic(profile_of(config), cluster, spec, 128)["pp"].node == pytest.approx(3 * m * passed)
    v_shaped = {"schedule": "zbv_zero_bubble", "stages_per_rank": 2, "num_microbatches": m}
    assert sent(Cluster(2, 1, "h100"), pp=2, **v_shaped)["pp"].node == pytest.approx(2 * m * passed)


def test_a_tied_table_has_a_gradient_on_both_ends_of_a_pipeline() -> None:
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True})
    cluster, passed, table = Cluster(2, 1, "h100"), 2 * 128 * 256, 1024 * 256

    def node(**layout: object) -> float:
        spec = layout_of({"pp": 2, **layout}, cluster)
        return traffic(profile_of(config), cluster, spec, 128)["pp"].node

    assert node() == pytest.approx(passed + 2 * table)  # bf16
    assert node(dtype="fp32") == pytest.approx(2 * passed + 4 * table)
    assert node(adapters=1000) == pytest.approx(passed)
    assert node(schedule="zbv_zero_bubble", stages_per_rank=2) == pytest.approx(2 * passed)
    tied, apart = (predict(one, cluster, {"pp": 2}, seq_len=128).exposed_communication_s for one in (config, CONFIG))
    assert tied > apart


def test_gradients_travel_in_fp32_unless_it_is_said_otherwise_and_with_zero_2_in_every_pass() -> None:
    cluster, size = Cluster(1, 2, "h100"), profile_of(CONFIG).parameters

    def of_dp(**layout: object) -> float:
        return sent(cluster, dp=2, **layout)["dp"].gpu

    assert of_dp() == of_dp(dtype="fp32") == of_dp(param_dtype="fp32") == pytest.approx(4 * size)
    assert of_dp(reduce_dtype="bf16") == of_dp(engine="deepspeed") == pytest.approx(2 * size)
    assert of_dp(zero=1, num_microbatches=3) == pytest.approx((4 + 2) / 2 * size)
    assert of_dp(zero=2, num_microbatches=3) == pytest.approx((3 * 4 + 2) / 2 * size)
    mapping = mapping_of(HFParallelConfig(data_parallel={"reduce_dtype": "bfloat16"}), 2, 1)
    assert mapping["reduce_dtype"] == "bf16"
    assert settings_of(layout_of(mapping)).data_parallel.reduce_dtype == "bfloat16"


def test_stages_pass_on_what_the_parameters_are_wide_and_every_tp_rank_all_of_it() -> None:
    passed, cluster = 128 * 256, Cluster(2, 2, "h100")
    for layout, width in (({}, 2), ({"param_dtype": "fp32"}, 4), ({"dtype": "fp32"}, 4)):
        assert sent(cluster, pp=2, dp=2, dp_inside=2, **layout)["pp"].node == pytest.approx(2 * width * passed)
        for shared in (True, False):
            found = sent(cluster, pp=2, tp=2, sequence_parallel=shared, **layout)["pp"].node
            assert found == pytest.approx(2 * width * passed)
    fused = sent(cluster, pp=2, tp=2, kernels="fused")["pp"].node
    assert fused == pytest.approx(2 * passed)  # other systems send parts


def test_fewer_bits_and_seldom_sums_send_less() -> None:
    cluster = Cluster(2, 1, "h100")
    usual = sent(cluster, dp=2)["dp"].node
    assert sent(cluster, dp=2, compression="int8")["dp"].node < usual
    assert sent(cluster, dp=2, local_steps=8)["dp"].node == pytest.approx(usual / 8)
    assert sent(cluster, dp=2, adapters=1000)["dp"].node == pytest.approx(2 * 4 / 2 * 1000)
    assert sent(Cluster(1, 1, "h100")) == {}


@pytest.mark.parametrize("name", ["speed.svg", "speed.png"])
def test_the_speed_up_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = scaling(CONFIG, Cluster(1, 4, "h100"), seq_len=128, global_batch=16, layout={"tp": 1, "pp": 1})
    draw_scaling(rows, tmp_path / name)
    begun = (tmp_path / name).read_bytes()[:200]
    assert b"<?xml" in begun if name.endswith("svg") else begun.startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"expected a file that ends in \.svg or \.png"):
        refuse_plot(tmp_path / "speed.jpg")


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (Cluster(1, 1, "h100"), "no parallelism"),
        (Cluster(1, 4, "h100"), "plain replicas"),
        (Cluster(1, 4, "h100", gpu_memory_gb=0.035), "ZeRO 1 or 2"),
        (Cluster(1, 4, "h100", gpu_memory_gb=0.02), "ZeRO 3"),
        (Cluster(1, 4, "h100", gpu_memory_gb=0.01), "tensor parallelism"),
        (Cluster(4, 4, "h100", gpu_memory_gb=0.012, inter_gbit_s=1), "tp inside of a node, stages between nodes"),
    ],
)
def test_the_rule_of_thumb_is_the_row_of_model_and_cluster(cluster: Cluster, words: str) -> None:
    assert words in rule_for(profile_of(CONFIG), cluster).say


def test_a_plan_that_differs_from_the_rule_is_said_to() -> None:
    cluster = Cluster(1, 4, "h100")
    assert guide(CONFIG, cluster, layout_of({"dp": 4})).endswith("so is the first plan")
    assert "also uses tp; it does without" not in guide(CONFIG, cluster, layout_of({"dp": 4}))
    assert "the first plan also uses tp" in guide(CONFIG, cluster, layout_of({"tp": 2, "dp": 2}))
    assert "it does without replicas" in guide(CONFIG, cluster, layout_of({"tp": 4}))


def test_the_stages_of_a_copy_are_neighbours_as_ranks_of_the_mesh_are() -> None:
    """Two nodes of four: a copy of four stages is on one node, and only gradients leave it."""
    spec, cluster = layout_of({"pp": 4, "dp": 2}), Cluster(2, 4, "h100")
    shape = MeshShape(dp_size=2, pp_size=4, tp_size=1)
    nodes = {rank: rank // cluster.gpus_per_node for rank in range(shape.world_size)}
    assert {nodes[shape.rank_at(0, stage, 0)] for stage in range(4)} == {0}
    assert {nodes[shape.rank_at(copy, 0, 0)] for copy in range(2)} == {0, 1}
    assert stays_on_node(spec, cluster)
    assert groups_of(spec, cluster)["dp"].nodes == 2
    found = sent(cluster, pp=4, dp=2)
    assert (found["pp"].node, found["dp"].gpu) == (0, 0)
    assert found["dp"].node > 0


def test_replicas_whose_ranks_share_rows_lie_as_this_package_lays_them() -> None:
    config = HFParallelConfig(pp_size=2, sp_size=2, topology={"dp_inside": 2})
    cluster = Cluster(2, 4, "h100")
    spec = layout_of(mapping_of(config, 8, 4, "fp32"), cluster)
    found = traffic(profile_of(CONFIG), cluster, spec, 128)
    assert (found["dp"].node, found["sp"].node) == (0, 0)
    assert found["pp"].node > 0
    assert orders_of(replace(spec, dp_inside=0), cluster) == (1, 2)


def test_stages_of_other_systems_are_apart_and_their_replicas_neighbours() -> None:
    spec, cluster = layout_of({"pp": 2, "dp": 4, "kernels": "fused"}), Cluster(2, 4, "h100")
    assert groups_of(spec, cluster)["dp"].nodes == 1
    assert not stays_on_node(spec, cluster)


def test_one_stage_of_a_node_sends_to_the_next_node() -> None:
    passed = 2 * 128 * 256
    found = sent(Cluster(2, 2, "h100"), pp=4)["pp"]
    assert found.gpu == found.node == pytest.approx(passed)  # forward from one of its ranks, back from the other
    assert sent(Cluster(2, 2, "h100"), pp=2, tp=2)["pp"].node == pytest.approx(2 * passed)


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "dp"), [(4, 1, 2, 8), (4, 2, 2, 4), (8, 1, 4, 8), (2, 1, 2, 4), (4, 1, 8, 2)]
)
def test_a_stage_lies_on_the_nodes_that_the_mesh_gives_it(gpus: int, tp: int, pp: int, dp: int) -> None:
    for inside in (count for count in range(1, dp + 1) if dp % count == 0):
        layout = {"tp": tp, "pp": pp, "dp": dp, "dp_inside": inside}
        cluster = Cluster(tp * pp * dp // gpus, gpus, "rtx3090")
        spec, shape = layout_of(layout, cluster), MeshShape(dp, pp, tp, dp_inside=inside)
        nodes = [[shape.rank_at(one, stage, 0) // gpus for one in range(dp)] for stage in range(pp)]
        assert groups_of(spec, cluster)["dp"].on_node == max(own.count(node) for own in nodes for node in own)
        stays = all(len(set(own)) == 1 for own in zip(*nodes, strict=True))
        assert stays_on_node(spec, cluster) == stays


SLOW = Cluster(2, 4, "rtx3090", inter_gbit_s=1)


def test_replicas_are_neighbours_where_the_network_is_too_slow_for_gradients() -> None:
    best = plan(CONFIG, SLOW, seq_len=128, global_batch=32, layout={"pp": 2, "dp": 4})[0]
    assert best.spec.dp_inside == best.layout["dp_inside"] == 4
    assert "dp" not in best.links or best.links["dp"].node == 0
    apart = predict(CONFIG, SLOW, {**best.layout, "dp_inside": 1}, seq_len=128)
    left = predict(CONFIG, SLOW, {key: value for key, value in best.layout.items() if key != "dp_inside"}, seq_len=128)
    assert best.estimate.step_s == left.step_s < apart.step_s
    assert settings_of(best.spec).topology.dp_inside == 4
    assert mapping_of(settings_of(best.spec), 8, rows_of(best.spec))["dp_inside"] == 4


def test_where_replicas_lie_is_not_said_where_it_does_not_matter() -> None:
    for cluster, layout in (
        (Cluster(1, 8, "rtx3090"), {"pp": 2, "dp": 4}),
        (SLOW, {"dp": 8}),
        (SLOW, {"tp": 4, "dp": 2}),
    ):
        best = plan(CONFIG, cluster, seq_len=128, global_batch=32, layout=layout)[0]
        assert "dp_inside" not in best.layout
        assert settings_of(best.spec).topology.dp_inside == "auto"


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"pp": 2, "dp": 4, "dp_inside": 3}, "dp_inside=3: .*Set dp_inside to a divisor of dp=4"),
        ({"dp": 4, "dp_inside": 2}, "dp_inside=2: with pp=1 .*Leave it out"),
        ({"pp": 2, "dp": 4, "dp_inside": 2, "kernels": "fused"}, "dp_inside=2: .*other systems.*Leave it out"),
    ],
)
def test_neighbours_that_cannot_be_are_refused(layout: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layout_of(layout)
