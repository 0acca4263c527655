"""What the planner is told: machines from the table, layouts from mappings, and what is refused with which words."""

from __future__ import annotations

from typing import get_args

import numpy
import pytest
from transformers import GPT2Config

from hf_parallel.errors import ConfigError
from hf_parallel.planner.hardware import Cluster, gpu_table
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.predict import COMPRESSED, predict
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of
from hf_parallel.planner.search import plan
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.replica_sections import Method
from hf_parallel.settings.schedule_names import STAGES_PER_RANK


def test_every_card_names_its_source() -> None:
    assert {"h100", "a100_80", "a100_40", "rtx3090", "cpu"} <= set(gpu_table())
    for name, card in gpu_table().items():
        assert card.source, name
        assert min(card.peak, card.attention, card.memory, card.bandwidth, card.pcie, card.network) > 0, name
        assert card.fp32 <= card.peak, name
        assert card.attention <= card.flash <= card.peak, name


def test_cards_whose_clock_exceeds_that_of_their_peak_reach_it() -> None:
    reached = {name for name, card in gpu_table().items() if card.achievable > 0.95}
    assert reached == {"rtx3090", "rtx4090"}  # others have less power for each product


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
        ({"zero": 10**400}, "unknown. Did you mean 3"),
        ({"tpp": 2, "zero": "x", "dtype": None, "overlap_tp": "yes"}, "(?s)tpp: .*zero=.*dtype=.*overlap_tp="),
        ({"zero": True}, "zero=true: expected one of 0, 1, 2, 3"),
        ({"schedule": "1f2b"}, "Did you mean 1f1b"),
        ({"pp": 0}, "pp=0: expected an integer of 1 or more"),
        ({"overlap_dp": 1}, "overlap_dp=1: expected true or false"),
        ({"state_bytes": (1, 2)}, "state_bytes=.*three numbers"),
        ({"state_bytes": (float("inf"), 1, 1)}, "state_bytes=.*three numbers of 0 to 1024"),
        ({"state_bytes": (10**400, 1, 1)}, "state_bytes=.*three numbers of 0 to 1024"),
        ({"micro_batch": 10**400}, "micro_batch=.*expected at most 1000000000000"),
        ({"pp": 2, "stages_per_rank": 3}, "stages_per_rank=3: schedule 1f1b has 1 on each rank"),
        ({"stages_per_rank": 2}, "with pp=1 there is one stage"),
        ({"tp": 2, "dp": 4}, "dp=4 \\* tp=2 \\* pp=1 \\* sp=1 = 8 ranks.*16 GPUs"),
        ([("tp", 2)], "expected a mapping"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(layout, Cluster(2, 8, "h100"))  # type: ignore[arg-type]


def small(heads: int = 4, layers: int = 4) -> GPT2Config:
    return GPT2Config(n_embd=heads * 8, n_layer=layers, n_head=heads, vocab_size=64)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 8, "dp": 2}, "tp=8: attention has 4 heads to share. Set tp to 4 or less"),
        ({"sp": 8, "dp": 2}, "sp=8: .*4 heads do not divide into tp=1 \\* sp=8 parts"),
        ({"tp": 2, "sp": 4, "dp": 2}, "4 heads do not divide into tp=2 \\* sp=4 parts"),
        ({"pp": 16}, r"16 stages, and the model has\s+4 blocks. Lower pp"),
        ({"tp": 16}, "tp=16: attention has 4 heads"),
    ],
)
def test_a_layout_that_the_model_does_not_fit_is_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict(small(), Cluster(2, 8, "h100"), layout, seq_len=128)


def test_ranks_of_a_sequence_share_it_evenly() -> None:
    with pytest.raises(ConfigError, match="sp=2 does not divide seq_len=127"):
        predict(small(), Cluster(1, 2, "h100"), {"sp": 2}, seq_len=127)


def test_heads_that_tp_does_not_divide_cost_what_the_fullest_rank_has() -> None:
    """The engine shares 25 heads as 13 and 12."""
    odd, even = (GPT2Config(n_embd=1600, n_layer=4, n_head=heads, vocab_size=64) for heads in (25, 20))
    layout = {"tp": 4, "micro_batch": 4, "attention": "flash"}
    uneven, smooth = (predict(one, Cluster(1, 4, "a100_80"), layout, seq_len=4096).step_s for one in (odd, even))
    assert uneven > smooth


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
@pytest.mark.parametrize("stages", [None, 1])
def test_every_schedule_is_predicted(schedule: str, stages: int | None) -> None:
    layout: dict[str, object] = {"pp": 4, "num_microbatches": 9, "schedule": schedule}
    if stages is not None and STAGES_PER_RANK[schedule][0] == 1:
        layout["stages_per_rank"] = stages
    found = predict(small(layers=14), Cluster(1, 4, "h100"), layout, seq_len=128)
    assert 0 < found.low_s <= found.step_s <= found.high_s <= 3 * found.low_s
    assert 0 <= found.bubble < 1


def test_a_block_a_stage_is_predicted() -> None:
    """92 blocks in 4 times 23 stages, as in the README of Megatron-LM."""
    layout = {
        "pp": 4,
        "num_microbatches": 16,
        "schedule": "interleaved_1f1b",
        "stages_per_rank": 23,
        "kernels": "fused",
    }
    assert predict(small(layers=92), Cluster(1, 4, "h100"), layout, seq_len=128).step_s > 0


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("tp", (1, 2), (0, -1, 1.5, "2", None, True)),
        ("pp", (1, 2), (0, -1, "2", None)),
        ("dp", (1, 2), (0, -2, "2", None)),
        ("sp", (1, 2), (0, -2, "2", None)),
        ("zero", (0, 1, 2, 3), (-1, 4, "1", 1.5, None, True)),
        ("micro_batch", (1, 7), (0, -1, "1", 0.5, None)),
        ("num_microbatches", (1, 7), (0, -1, "1", None)),
        ("schedule", tuple(STAGES_PER_RANK), ("zbvv", "1F1B", 1, None, "")),
        ("stages_per_rank", (1,), (0, -1, "1", 1.5)),
        ("recompute", ("none", "selective", "full"), ("some", True, None)),
        ("sequence_parallel", (True, False), (1, 0, "true", None)),
        ("dtype", ("bf16", "fp16", "fp8", "fp32"), ("float32", 16, None)),
        ("kernels", ("eager", "compiled", "fused"), ("triton", None)),
        ("attention", ("eager", "sdpa", "flash"), ("flash2", None)),
        ("loss", ("auto", "logits", "fused", None), ("chunks", True)),
        ("overlap_dp", (True, False), (1, "no", None)),
        ("overlap_gather", (True, False), (1, "no", None)),
        ("overlap_tp", (True, False), (1, "no", None)),
        ("overlap_pp", (True, False), (1, "no", None)),
        (
            "state_bytes",
            ((2, 4, 12), [4, 4, 8], None),
            ((2, 4), (2, -4, 12), "2;4;12", (2, "4", 12), 16, (float("nan"), 2, 2)),
        ),
        ("engine", ("native", "fsdp2", "deepspeed", None), ("fsdp", 1)),
        ("offload_param", ("none", "cpu", "nvme", None), ("disk", True)),
        ("offload_optimizer", ("none", "cpu", "nvme", None), ("disk", True)),
        ("compression", (*get_args(Method), None), ("zip", 1)),
        ("local_steps", (1, 8), (0, -1, "8", None)),
        ("dp_inside", ("auto", None), (0, -1, "8", True)),
    ],
)
def test_every_key_takes_its_values_and_no_others(key: str, good: tuple[object, ...], bad: tuple[object, ...]) -> None:
    for value in good:
        layout_of({key: value})
    for value in bad:
        with pytest.raises(ConfigError, match=key):
            layout_of({key: value})


def test_local_steps_expect_replicas_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"local_steps=8: .*Set zero to 0 and compression to none"):
        layout_of({"local_steps": 8, "zero": 1})
    cluster, model = Cluster(2, 1, "a100_80", inter_gbit_s=0.01), small()
    often, seldom = (predict(model, cluster, {"dp": 2, "local_steps": n}, seq_len=128).step_s for n in (1, 8))
    assert seldom < often


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
