"""Published step times are predicted with the errors that were recorded when the constants were fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from benchmarks import bench_planner
from hf_parallel.planner.constants import constants
from hf_parallel.planner.profile import profile_of


# Mean error of a table as recorded, and a point.
RECORDED: Mapping[str, float] = {
    "sc21_t1": 0.03,
    "sc21_t2_ptd": 0.03,
    "korthikanti_t5": 0.085,
    "torchtitan": 0.045,
    "mosaic_h100_large": 0.055,
    "vtrain_multi": 0.10,
}


@pytest.fixture(scope="module")
def tables() -> Mapping[str, Sequence[bench_planner.Row]]:
    return bench_planner.load()


@pytest.mark.parametrize("table", RECORDED)
def test_a_table_is_predicted_as_well_as_recorded(
    tables: Mapping[str, Sequence[bench_planner.Row]], table: str
) -> None:
    assert bench_planner.mape(bench_planner.errors(tables[table], constants())) <= RECORDED[table]


def test_blocks_that_are_alike_are_built_once() -> None:
    from transformers import GPT2Config

    config = GPT2Config(n_embd=64, n_layer=3, n_head=2, n_inner=256, vocab_size=128)
    assert bench_planner.profile_for("gpt", "64", "3", "2", "2", "256", "128") == profile_of(config)


def test_the_chosen_layout_is_little_slower_than_the_best_measured_one(
    tables: Mapping[str, Sequence[bench_planner.Row]],
) -> None:
    assert bench_planner.show_regret(tables["vtrain_multi"], constants(), quiet=True) <= 0.02


def test_most_measured_steps_lie_in_the_band(tables: Mapping[str, Sequence[bench_planner.Row]]) -> None:
    rows = [row for table in RECORDED for row in tables[table]]
    inside = [one.low_s <= row.step_s <= one.high_s for row in rows for one in [row.estimate()]]
    assert sum(inside) >= 0.7 * len(inside)


def test_the_eight_fold_at_eight_is_no_sixteen_fold_at_two_nodes() -> None:
    """GPT-2 XL, plain replicas without accumulation: 8 GPUs give 8 x, two nodes with 100 Gbit/s each far less than 16 x."""
    profile = bench_planner.profile_for("gpt", "1600", "48", "25", "25", "6400", "50257")
    from hf_parallel.planner.hardware import Cluster
    from hf_parallel.planner.predict import predict

    def tokens(nodes: int, gpus: int, gbit: float) -> float:
        layout = {"dp": nodes * gpus, "micro_batch": 4, "attention": "flash"}
        return predict(profile, Cluster(nodes, gpus, "a100_80", inter_gbit_s=gbit), layout, seq_len=1024).tokens_per_s

    one = tokens(1, 1, 100)
    assert tokens(1, 8, 100) / one == pytest.approx(8, rel=0.1)
    assert tokens(2, 8, 25) / one < tokens(2, 8, 100) / one < 12
    assert tokens(2, 8, 1600) / one == pytest.approx(16, rel=0.12)
    assert math.isfinite(one)
