"""What the planner is told: machines from the table, layouts from mappings, and what is refused with which words."""

from __future__ import annotations

from typing import get_args

import numpy
import pytest

from hf_parallel.errors import ConfigError
from hf_parallel.planner.hardware import Cluster, gpu_table
from hf_parallel.planner.layout import LayoutSpec, layout_of
from hf_parallel.planner.predict import COMPRESSED, predict
from hf_parallel.planner.recipe import mapping_of
from hf_parallel.planner.search import plan
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.replica_sections import Method


def test_every_card_names_its_source() -> None:
    assert {"h100", "a100_80", "a100_40", "rtx3090", "cpu"} <= set(gpu_table())
    for name, card in gpu_table().items():
        assert card.source, name
        assert min(card.peak, card.attention, card.memory, card.bandwidth, card.pcie, card.network) > 0, name
        assert card.fp32 <= card.peak, name


def test_none_is_the_value_of_the_table() -> None:
    usual = Cluster(2, 8, "h100")
    assert (usual.num_gpus, usual.intra_bytes_s, usual.inter_bytes_s) == (16, 450e9, 400e9)
    given = Cluster(2, 8, "h100", intra_gb_s=10, inter_gbit_s=80, gpu_memory_gb=40, ram_gb=100, disk_gb_s=1)
    assert (given.intra_bytes_s, given.inter_bytes_s, given.gpu_bytes) == (10e9, 10e9, 40e9)
    assert (given.ram_bytes, given.disk_bytes_s) == (100e9, 1e9)


def test_a_card_that_is_seldom_bridged_has_pcie_unless_nvlink_is_said() -> None:
    assert Cluster(1, 2, "rtx3090").intra_bytes_s == gpu_table()["rtx3090"].pcie
    assert Cluster(1, 2, "rtx3090", intra="nvlink").intra_bytes_s == gpu_table()["rtx3090"].nvlink


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "rtx3091"}, "gpu='rtx3091': unknown. Did you mean rtx3090"),
        ({"gpu": "A100"}, "Did you mean a100_80 or a100_40"),
        ({"gpu": "rtx3091", "nodes": 0, "ram_gb": -1}, r"(?s)nodes=0.*rtx3090.*ram_gb=-1"),
        ({"nodes": 0}, "nodes=0: expected an integer of 1 or more"),
        ({"gpus_per_node": True}, "gpus_per_node=true"),
        ({"intra": "nvlnk"}, "Did you mean nvlink"),
        ({"intra_gb_s": -1}, "intra_gb_s=-1: expected a number above 0"),
        ({"inter_gbit_s": float("inf")}, "inter_gbit_s"),
        ({"ram_gb": "64"}, "ram_gb='64'"),
        ({"gpu": "rtx4090", "intra": "nvlink"}, "has no NVLink"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster(**{"nodes": 1, "gpus_per_node": 2, "gpu": "h100", **arguments})  # type: ignore[arg-type]


def test_a_layout_has_defaults_and_those_of_its_schedule() -> None:
    spec = layout_of(
        {"tp": 2, "pp": 2, "dp": 4, "schedule": "interleaved_1f1b", "micro_batch": 2}, Cluster(2, 8, "h100")
    )
    assert (spec.stages_per_rank, spec.num_stages, spec.global_batch, spec.zero) == (2, 4, 8, 0)
    assert layout_of({"pp": 2, "schedule": "zbv_zero_bubble"}).stages_per_rank == 2
    assert layout_of({}).states == (2, 2, 12)
    assert layout_of({"dtype": "fp32"}).states == (4, 4, 8)
    assert layout_of({"state_bytes": (2, 4, 12)}).states == (2, 4, 12)


def test_the_defaults_may_be_written_out() -> None:
    optional = dict.fromkeys(("engine", "offload_param", "offload_optimizer", "compression", "state_bytes"))
    written = {"tp": 1, "pp": 1, "dp": 1, "sp": 1, "stages_per_rank": 1, **optional}
    assert layout_of(written) == layout_of({}) == LayoutSpec()
    assert layout_of({"pp": 2, "schedule": "dualpipev", "stages_per_rank": 1}).stages_per_rank == 2
    assert layout_of({"zero": 3, "engine": None}).engine == layout_of({"zero": 3}).engine == "fsdp2"


def test_numbers_of_a_table_are_numbers() -> None:
    size = numpy.int64(2)
    assert layout_of({"tp": size, "zero": size, "state_bytes": [numpy.float64(2), 4, 12]}).zero == 2
    assert Cluster(size, size, "h100", inter_gbit_s=numpy.float64(400)).num_gpus == 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tpp": 2}, "tpp: unknown key of a layout. Did you mean tp"),
        ({"zero": 4}, "zero=4: unknown. Did you mean 3"),
        ({"zero": True}, "zero=true: expected one of 0, 1, 2, 3"),
        ({"schedule": "1f2b"}, "Did you mean 1f1b"),
        ({"pp": 0}, "pp=0: expected an integer of 1 or more"),
        ({"overlap_dp": 1}, "overlap_dp=1: expected true or false"),
        ({"state_bytes": (1, 2)}, "state_bytes=.*three numbers"),
        ({"pp": 2, "stages_per_rank": 3}, "stages_per_rank=3: schedule 1f1b has 1 on each rank"),
        ({"stages_per_rank": 2}, "with pp=1 there is one stage"),
        ({"tp": 2, "dp": 4}, "dp=4 \\* tp=2 \\* pp=1 \\* sp=1 = 8 ranks.*16 GPUs"),
        ([("tp", 2)], "expected a mapping"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(layout, Cluster(2, 8, "h100"))  # type: ignore[arg-type]


def test_all_problems_of_a_layout_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)tpp: unknown.*zero=9: unknown.*pp=0"):
        layout_of({"tpp": 2, "zero": 9, "pp": 0})


def test_all_arguments_are_checked_together() -> None:
    with pytest.raises(ConfigError, match=r"(?s)seq_len=0.*tpp: unknown"):
        predict(None, Cluster(1, 1, "h100"), {"tpp": 1}, seq_len=0)
    with pytest.raises(ConfigError, match=r"(?s)seq_len=0.*global_batch=0.*objective='fast'.*tpp: unknown"):
        plan(None, Cluster(1, 1, "h100"), seq_len=0, global_batch=0, objective="fast", layout={"tpp": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cluster='h100': expected a Cluster"):
        predict(None, "h100", {}, seq_len=1)  # type: ignore[arg-type]


def test_every_codec_of_the_package_has_its_share_of_the_wire() -> None:
    assert set(COMPRESSED) == set(get_args(Method))


def test_a_config_is_the_layout_that_it_asks_for() -> None:
    values = {"tp_size": 2, "pp_size": 2, "pipeline": {"schedule": "interleaved_1f1b", "num_microbatches": 4}}
    values |= {"zero": {"stage": 1}, "activation_checkpointing": {"every": 1}, "gradient_accumulation_steps": 3}
    layout = mapping_of(HFParallelConfig.from_mapping(values), 8, rows=8)
    spec = layout_of(layout, Cluster(1, 8, "h100"))
    assert (spec.tp, spec.pp, spec.dp, spec.zero, spec.stages_per_rank) == (2, 2, 2, 1, 2)
    assert (spec.micro_batch, spec.num_microbatches, spec.recompute, spec.engine) == (2, 12, "full", "native")
    assert spec.global_batch == 2 * 8 * 3
    alone = layout_of(mapping_of(HFParallelConfig.from_mapping({"zero": {"stage": 3}}), 4, rows=8))
    assert alone.states == (4, 4, 8)
    assert (alone.micro_batch, alone.num_microbatches, alone.engine) == (8, 1, "fsdp2")
