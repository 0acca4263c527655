"""How axes lie on links: bytes of each kind of link by hand, the order that spares the slowest, and the map that says it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hf_parallel.errors import ConfigError
from hf_parallel.mesh.links import FAST, NETWORK, NODE, Links
from hf_parallel.mesh.placement import Placement, map_of, place
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import check_accelerate
from hf_parallel.trainer.placing import sent_by


TWO_BY_TWO = Links(2, 2, 2)
PAIRS = Links(1, 4, 2)


def always(copies: int) -> bool:
    return True


def never(copies: int) -> bool:
    return False


def test_links_between_ranks() -> None:
    links = Links(2, 4, 2)
    assert [links.between(0, other) for other in range(1, 8)] == [FAST, NODE, NODE, *[NETWORK] * 4]
    assert [TWO_BY_TWO.between(0, other) for other in range(1, 4)] == [NODE, NETWORK, NETWORK]
    assert [one.differ for one in (links, TWO_BY_TWO, PAIRS, Links(1, 4, 4))] == [True, True, True, False]


def test_a_ring_over_two_nodes_crosses_the_network_once_each_way_and_sums_inside_nodes_less() -> None:
    flat, summed = (place(MeshShape(4, 1, 1), TWO_BY_TWO, {"dp": 1.5}, sums=sums) for sums in (never, always))
    assert flat.carried("dp") == {NETWORK: 1.5, NODE: 1.5}
    # A ring over four sends 2 * 3/4 of the gradients. Inside, 2 * 1/2 of them; between, of each half 2 * 1/2, by two ranks.
    assert summed.carried("dp") == {NETWORK: pytest.approx(1.0), NODE: pytest.approx(1.0)}


def test_eight_replicas_on_four_nodes_and_on_two() -> None:
    # 2 * 7/8 in one ring; inside 2 * 1/2, between four nodes 2 * 3/4
    summed = place(MeshShape(8, 1, 1), Links(4, 2, 2), {"dp": 1.75}, sums=always)
    assert summed.carried("dp") == {NETWORK: pytest.approx(1.5), NODE: pytest.approx(1.0)}
    # inside 2 * 3/4, between two nodes 2 * 1/2
    summed = place(MeshShape(8, 1, 1), Links(2, 4, 4), {"dp": 1.75}, sums=always)
    assert summed.carried("dp") == {NETWORK: pytest.approx(1.0), NODE: pytest.approx(1.5)}


def test_stages_send_forward_and_back_and_parts_of_a_sequence_to_all_others() -> None:
    stages = Placement(MeshShape(1, 4, 1), TWO_BY_TWO, sums_in_nodes=False, sent={"pp": 2.0})
    assert stages.carried("pp") == {NETWORK: 1.0, NODE: 1.0}
    parts = Placement(MeshShape(1, 1, 1, 4), TWO_BY_TWO, sums_in_nodes=False, sent={"sp": 3.0})
    assert parts.carried("sp") == {NETWORK: 4.0, NODE: 1.0}  # two ranks of a node, each to two of the other


@pytest.mark.parametrize(
    ("sent", "inside"),
    [({"pp": 1.0, "dp": 100.0}, 2), ({"pp": 100.0, "dp": 1.0}, 1), ({"pp": 1.0, "dp": 1.0}, 2), (None, 1)],
    ids=["gradients", "activations", "alike", "unknown"],
)
@pytest.mark.parametrize("links", [TWO_BY_TWO, PAIRS], ids=["two nodes", "pairs"])
def test_the_axis_with_most_bytes_gets_the_fastest_link(
    sent: dict[str, float] | None, inside: int, links: Links
) -> None:
    # One replica inside: two groups of replicas cross, each with what a rank sends. Two inside: two stages cross with half of it.
    placement = place(MeshShape(2, 2, 1), links, sent, sums=always)
    assert placement.shape == MeshShape(2, 2, 1, dp_inside=inside)


def test_stages_may_lie_between_replicas_inside_a_node_and_those_on_other_nodes() -> None:
    # Two nodes of eight ranks, four of which have fast links; four stages. All replicas of a stage inside: stages cross the network.
    # One inside: replicas cross the slow links of a node. Two inside: two stages do, which is less.
    sent, links = {"pp": 40.0, "dp": 20.0}, Links(2, 8, 4)
    costs = {count: place(MeshShape(4, 4, 1), links, sent, sums=always, inside=count).cost[:2] for count in (1, 2, 4)}
    between = 8 * (4 / 3 * 20) / 4  # every rank half of its half
    assert costs[1] == (pytest.approx(between), pytest.approx(4 * (4 / 3 * 20) / 2))
    assert costs[2] == (pytest.approx(between), 40.0)
    assert costs[4] == (80.0, pytest.approx(80.0))
    assert place(MeshShape(4, 4, 1), links, sent, sums=always).shape.dp_inside == 2


def test_what_is_given_is_taken_and_without_stages_or_with_experts_nothing_is_chosen() -> None:
    sent = {"pp": 1.0, "dp": 100.0}
    assert place(MeshShape(2, 2, 1), TWO_BY_TWO, sent, sums=always, inside=1).shape.dp_inside == 1
    assert place(MeshShape(4, 1, 1), TWO_BY_TWO, sent, sums=always, inside=4).shape.dp_inside == 1
    assert place(MeshShape(2, 2, 1, ep_size=2), TWO_BY_TWO, sent, sums=always).shape.dp_inside == 1
    assert place(MeshShape(2, 2, 1), Links(1, 4, 4), sent, sums=always).shape.dp_inside == 1


def test_nodes_suit_a_sum_inside_where_each_has_as_many_copies() -> None:
    assert MeshShape(4, 1, 1).copies_in_nodes(2) == 2
    assert MeshShape(2, 1, 2).copies_in_nodes(2) == 1
    assert MeshShape(2, 2, 1, dp_inside=2).copies_in_nodes(2) == 1  # all of a stage are on one node
    assert MeshShape(4, 2, 1).copies_in_nodes(2) == 1
    assert MeshShape(4, 2, 1, dp_inside=2).copies_in_nodes(2) == 2
    assert MeshShape(2, 1, 1, 2).copies_in_nodes(2) == 2  # the parts of a sequence hold the same weights
    assert MeshShape(2, 3, 1).copies_in_nodes(3) == 1
    assert MeshShape(3, 2, 1).copies_in_nodes(3) == 1  # uneven


def test_the_busiest_node_counts_and_not_the_busiest_one_of_each_axis() -> None:
    # Three nodes of two ranks. With one replica inside, the ends have the gradients of the middle stage, and the middle node both
    # chains: no node has both. With two inside, the middle stage sends results and gradients of two replicas each way.
    sent, links = {"pp": 16.0, "dp": (2.0, 16.0, 2.0)}, Links(3, 2, 2)
    stages, replicas = (place(MeshShape(2, 3, 1), links, sent, sums=never, inside=count) for count in (1, 2))
    assert (stages.cost[0], replicas.cost[0]) == (8.0 + 16.0 + 2.0, 32.0)
    assert stages.carried("pp")[NETWORK] + stages.carried("dp")[NETWORK] == 34.0
    assert place(MeshShape(2, 3, 1), links, sent, sums=never).shape.dp_inside == 1


def test_sums_inside_nodes_that_are_asked_for_need_an_order_that_has_them() -> None:
    sent, links = {"pp": 1.0, "dp": 100.0}, Links(2, 4, 4)
    assert place(MeshShape(4, 2, 1), links, sent, sums=always).shape.dp_inside == 4  # each stage on a node of its own
    asked = place(MeshShape(4, 2, 1), links, sent, sums=always, in_nodes=True)
    assert (asked.shape.dp_inside, asked.sums_in_nodes) == (1, True)
    assert place(MeshShape(4, 2, 1), Links(4, 2, 2), None, sums=always, in_nodes=True).shape.dp_inside == 2
    assert (
        place(MeshShape(2, 2, 1), TWO_BY_TWO, sent, sums=always, in_nodes=True).shape.dp_inside == 2
    )  # there is none


def test_uneven_stages_each_send_their_own_gradients_and_the_ends_of_a_pipeline_what_they_share() -> None:
    sent = {"pp": 2.0, "dp": (10.0, 3.0), "ends": 5.0}
    stages, replicas = (place(MeshShape(2, 2, 1), TWO_BY_TWO, sent, sums=never, inside=count) for count in (1, 2))
    assert (stages.carried("dp"), stages.carried("pp")) == ({NETWORK: 13.0}, {NODE: 6.0})
    assert (replicas.carried("dp"), replicas.carried("pp")) == ({NODE: 10.0}, {NETWORK: 12.0})
    assert place(MeshShape(2, 2, 1), TWO_BY_TWO, sent, sums=never).shape.dp_inside == 2


def test_the_map_says_which_axis_crosses_which_links() -> None:
    sent = {"tp": 8e9, "pp": 4e8, "dp": 6e6}
    assert map_of(place(MeshShape(2, 2, 2), Links(2, 4, 2), sent, sums=always)) == [
        "links: 2 nodes of 4 ranks, fast links join 2; neighbours are the stages of a replica",
        "  tp 2: fast links 8 GB",
        "  pp 2: links inside a node 0.4 GB",
        "  dp 2: network 24 MB; summed in one ring",
        "  sent in a step, by the planner: on fast links of a rank, on links inside a node of the 2 ranks that fast links join, on "
        "network of a node",
    ]
    assert map_of(place(MeshShape(4, 1, 1), TWO_BY_TWO, {"dp": 1.5e9}, sums=always))[1:] == [
        "  dp 4: links inside a node 1 GB, network 1 GB; summed inside each node, then between nodes",
        "  sent in a step, by the planner: on links inside a node of a rank, on network of a node",
    ]


def test_the_map_does_without_bytes_and_is_empty_where_links_are_alike() -> None:
    assert map_of(place(MeshShape(2, 2, 1), TWO_BY_TWO, None, sums=always, inside=2), "as parts") == [
        "links: 2 nodes of 2 ranks; neighbours are the replicas of a stage",
        "  pp 2: network",
        "  dp 2: links inside a node",
    ]
    assert (
        map_of(place(MeshShape(2, 1, 1), Links(2, 1, 1), None, sums=always), "as parts")[1]
        == "  dp 2: network; summed as parts"
    )
    assert map_of(place(MeshShape(4, 1, 1), Links(1, 4, 4), None, sums=always)) == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"nodes": 1, "gpus_per_node": 1}, r"topology\.nodes=1 .* one process has no links.*Remove topology\."),
        ({"fast": 1}, r"topology\.fast=1: expected neighbours .* an integer of 2 or more .*Set topology\.fast to 2\."),
        ({"fast": 0}, r"topology\.fast=0: expected neighbours .*Set topology\.fast to 2\."),
        ({"gpus_per_node": 8, "fast": 3}, r"topology\.fast=3 does not divide topology\.gpus_per_node=8.*Remove it\."),
        ({"gpus_per_node": 8, "fast": 6}, r"topology\.fast=6 does not divide .*Set it to 2\."),
        ({"dp_inside": 2}, r"topology\.dp_inside=2 with pp_size=1 has no effect.*Remove topology\.dp_inside\."),
        ({"nodes": 0}, r"topology\.nodes=0: expected nodes of the run"),
        ({"node": 2}, r"topology\.node: unknown key\. Did you mean nodes\?"),
        ("automatic", r"topology='automatic': expected 'auto' or a mapping"),
    ],
)
def test_what_cannot_be_is_refused(section: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HFParallelConfig.from_mapping({"topology": section})


def test_shards_that_span_nodes_and_other_sums_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tp_size=4 with topology\.gpus_per_node=2: .*Set tp_size to 2, and pp_size to what"
    ):
        HFParallelConfig(tp_size=4, topology={"gpus_per_node": 2})
    with pytest.raises(
        ConfigError, match=r"tp_size=4 with topology\.nodes=4 with num_processes=8: .*Set tp_size to 2"
    ):
        HFParallelConfig(tp_size=4, topology={"nodes": 4}).dp_size(8)
    for other in (
        {"zero": {"stage": 1}},
        {"gradient_compression": {"method": "int8"}},
        {"local_sgd": {"sync_every": 2}},
    ):
        with pytest.raises(
            ConfigError, match=r"topology\.reduction=hierarchical with .* has no effect.*Remove topology\.reduction"
        ):
            HFParallelConfig.from_mapping({"topology": {"reduction": "hierarchical"}, **other})
    with pytest.raises(ConfigError, match=r"topology\.dp_inside=2 with layout=auto: the plan says the sizes"):
        HFParallelConfig(layout="auto", topology={"dp_inside": 2})
    assert HFParallelConfig(layout="auto", topology={"fast": 2}).topology.fast == 2


def test_numbers_that_do_not_fit_the_processes_are_refused() -> None:
    both = HFParallelConfig(topology={"nodes": 2, "gpus_per_node": 2})
    assert both.dp_size(4) == 4
    for processes in (1, 8):
        with pytest.raises(
            ConfigError, match=r"topology\.nodes=2 \* topology\.gpus_per_node=2 = 4, but num_processes=\d.*Correct"
        ):
            both.dp_size(processes)
    with pytest.raises(
        ConfigError, match=r"topology\.gpus_per_node=4 does not divide num_processes=6.*a multiple of it"
    ):
        HFParallelConfig(topology={"gpus_per_node": 4}).dp_size(6)
    with pytest.raises(
        ConfigError, match=r"topology\.dp_inside=4 does not divide the 2 replicas of num_processes=4\. Set it to 2"
    ):
        HFParallelConfig(pp_size=2, topology={"dp_inside": 4}).dp_size(4)


@pytest.mark.parametrize(
    ("settings", "processes", "ranks_per_node", "message"),
    [
        (
            {"topology": {"reduction": "hierarchical"}},
            4,
            4,
            r"topology\.reduction=hierarchical with 1 node of 4 ranks, 4 replicas: ",
        ),
        (
            {"pp_size": 4, "topology": {"reduction": "hierarchical"}},
            4,
            2,
            r"2 nodes of 2 ranks, 1 replica: it needs several nodes",
        ),
        ({"pp_size": 2, "topology": {"reduction": "hierarchical"}}, 4, 2, r"Set topology\.reduction to auto\."),
        (
            {"pp_size": 2, "topology": {"reduction": "hierarchical", "dp_inside": 4}},
            8,
            4,
            r"4 replicas and topology\.dp_inside=4: it needs",
        ),
        (
            {"pp_size": 2, "gradient_compression": {"method": "int8", "topology": "hierarchical"}},
            6,
            3,
            r"gradient_compression\.topology=hierarchical with .*Set gradient_compression\.topology to auto\.",
        ),
        (
            {"local_sgd": {"sync_every": 2, "compression": {"method": "int8", "topology": "hierarchical"}}},
            4,
            4,
            r"local_sgd\.compression\.topology=hierarchical with .*Set local_sgd\.compression\.topology to auto\.",
        ),
    ],
)
def test_sums_inside_nodes_that_no_order_has_are_refused(
    settings: dict[str, Any], processes: int, ranks_per_node: int, message: str
) -> None:
    config = HFParallelConfig.from_mapping(settings)
    with pytest.raises(ConfigError, match=message):
        config.check_links(processes, ranks_per_node)
    file = {"num_processes": processes, "num_machines": processes // ranks_per_node, "distributed_type": "MULTI_GPU"}
    with pytest.raises(ConfigError, match=message):
        check_accelerate(config, file)
    config.check_links(1, 1)  # a trial on one process


def test_sums_inside_nodes_that_some_order_has_are_not_refused() -> None:
    asked = {"topology": {"reduction": "hierarchical"}}
    HFParallelConfig.from_mapping(asked).check_links(4, 2)
    HFParallelConfig.from_mapping({"pp_size": 2, **asked}).check_links(8, 4)
    HFParallelConfig.from_mapping({"layout": "auto", **asked}).check_links(4, 4)  # which has no sizes yet
    HFParallelConfig.from_mapping({"pp_size": 2, "gradient_compression": {"method": "int8"}}).check_links(6, 3)


def test_a_file_whose_machines_the_topology_contradicts_is_refused() -> None:
    config, file = (
        HFParallelConfig(topology={"gpus_per_node": 8}),
        {"num_processes": 16, "distributed_type": "MULTI_GPU"},
    )
    check_accelerate(config, {**file, "num_machines": 2})
    check_accelerate(config, file)
    with pytest.raises(
        ConfigError, match=r"topology says 8 ranks on a node, but the launcher started 4 on each machine"
    ):
        check_accelerate(config, {**file, "num_machines": 4})


def test_links_are_those_of_the_launch_unless_they_are_given() -> None:
    assert HFParallelConfig().topology.links(8, 4) == Links(2, 4, 4)
    assert HFParallelConfig(topology="auto").topology.links(8, 8) == Links(1, 8, 8)
    assert HFParallelConfig(topology={"nodes": 4, "fast": 2}).topology.links(8, 8) == Links(4, 2, 2)
    assert HFParallelConfig(topology={"gpus_per_node": 2}).topology.links(8, 4) == Links(4, 2, 2)
    with pytest.raises(
        ConfigError, match=r"topology says 8 ranks on a node, but the launcher started 4 on each machine"
    ):
        HFParallelConfig(topology={"gpus_per_node": 8}).topology.links(16, 4)
    with pytest.raises(ConfigError, match=r"topology\.fast=4 does not divide 2 ranks on a node.*Set it to 2"):
        HFParallelConfig(topology={"fast": 4}).topology.links(4, 2)


def test_auto_and_nothing_are_the_same_settings() -> None:
    assert HFParallelConfig.from_mapping({"topology": "auto"}) == HFParallelConfig()
    assert "topology" not in HFParallelConfig(topology="auto").to_yaml_section()
    given = HFParallelConfig(topology={"nodes": 2, "fast": 2})
    assert HFParallelConfig.from_mapping(given.to_yaml_section()) == given


def test_a_model_that_the_planner_does_not_know_leaves_stages_together_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer: Any = SimpleNamespace(model=nn.Linear(2, 2), args=None)
    with caplog.at_level(logging.INFO, "hf_parallel"):
        assert sent_by(trainer, HFParallelConfig(pp_size=2), None, TWO_BY_TWO) is None
        assert sent_by(trainer, HFParallelConfig(), None, TWO_BY_TWO) is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert (
        "no model with a config when it is made), so the stages of a replica are neighbours; set topology.dp_inside"
        in caplog.text
    )
