"""`layout: auto` in files and in code: what it may stand beside, who cannot plan, and which machine it is planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_parallel import HFParallelConfig, HFParallelPlugin
from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.machine.facts import Gpu, Machine
from hf_parallel.planner.here import cluster_here, key_of, row_length
from hf_parallel.settings.launch import resolve_config
from hf_parallel.settings.recipes import load_recipe


def test_the_word_in_a_file_is_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "auto.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nparallelism_config:\n  hf_parallel: auto\n")
    assert load_recipe(path).layout == "auto"
    assert resolve_config("auto")[0] == load_recipe(path)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"pp_size": 2}, "pp_size=2 with layout=auto: the plan says it. Leave pp_size out, or set layout to given"),
        ({"zero": {"stage": 1}}, "zero=.* with layout=auto"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 with layout=auto"),
    ],
)
def test_what_a_plan_would_replace_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HFParallelConfig(layout="auto", **settings)


def test_guards_may_stand_beside_it() -> None:
    assert HFParallelConfig(layout="auto", monitor={"hang_timeout_s": 60}).monitor.hang_timeout_s == 60


def test_a_loop_of_ones_own_is_told_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"layout=auto in a loop of your own.*hf-parallel plan --write FILE"):
        HFParallelPlugin("auto")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_80"),
        ("NVIDIA A100-PCIE-40GB", "a100_40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
    ],
)
def test_drivers_names_of_gpus_are_known(name: str, key: str) -> None:
    assert key_of(name) == key


def test_an_unknown_gpu_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"GPU 'Radeon 9' is not in the hardware table.*nearest of"):
        key_of("Radeon 9")


def test_the_cluster_is_that_of_the_run() -> None:
    here = cluster_here(Machine((), 16 * 10**9), 4, 2, on_gpu=False)
    assert (here.nodes, here.gpus_per_node, here.gpu, here.gpu_bytes) == (2, 2, "cpu", 8e9)
    card = Gpu("NVIDIA GeForce RTX 3090", 25 * 10**9, (8, 6))
    there = cluster_here(Machine((card, card), 64 * 10**9), 2, 2, on_gpu=True)
    assert (there.nodes, there.gpu, there.gpu_bytes) == (1, "rtx3090", 25e9)


def test_rows_tell_how_long_they_are() -> None:
    assert row_length([{"input_ids": [1, 2, 3]}, {"input_ids": torch.zeros(5)}], 4096) == 5
    assert row_length([{"input_ids": [1] * 9}], 4) == 4
    assert row_length([{"text": "words"}], None) == 2048
