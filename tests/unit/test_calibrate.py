"""A machine is measured, its report is read back, and the planner plans with it."""

from __future__ import annotations

import atexit
import dataclasses
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_parallel.cli.main import app
from hf_parallel.errors import ConfigError
from hf_parallel.memory.layers import with_layers
from hf_parallel.planner.calibrate import BLOCK_LENGTH, BLOCK_ROWS, Calibration, config_of_text
from hf_parallel.planner.cost import Place, block_pass
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.measured import MeasuredCluster
from hf_parallel.planner.predict import predict
from hf_parallel.planner.processes import run_ranks, step_file, wait_for
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.search import plan


CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000
)
REPORT = Calibration(
    device="cpu",
    name="",
    ranks=2,
    threads=1,
    products=60e9,
    half_products=60e9,
    attention=40e9,
    moved=8e9,
    kernel_s=4e-6,
    update_s=5e-9,
    blocks_s=(0.12, 0.25, 0.52, 1.1),
    reduce_s=1e-4,
    reduce_bytes_s=1e9,
    hop_s=5e-5,
    hop_bytes_s=1.5e9,
)


@pytest.mark.parametrize(("rows", "seconds"), list(zip(BLOCK_ROWS, REPORT.blocks_s, strict=True)))
def test_a_measured_block_takes_as_long_as_it_did(rows: int, seconds: float) -> None:
    cluster = MeasuredCluster(1, 2, "cpu", calibration=REPORT)
    profile = profile_of(with_layers(config_of_text(REPORT.model), 2))
    constants = cluster.constants(rows * BLOCK_LENGTH)
    place = Place(LayoutSpec(micro_batch=rows, dtype="fp32"), cluster, BLOCK_LENGTH, constants)
    assert block_pass(profile, profile.kinds[0], place).both == pytest.approx(seconds, rel=1e-3)


def test_gradients_of_several_passes_are_summed_at_the_rate_of_memory_not_of_caches() -> None:
    """A block that was measured in caches says nothing of the gradients, which are read and written beside it."""
    steps = []
    for moved in (8e9, 4e9):
        report = dataclasses.replace(REPORT, moved=moved, blocks_s=(1e-3, 2e-3, 4e-3, 8e-3))
        cluster = MeasuredCluster(1, 2, "cpu", calibration=report)
        passes = {"dp": 2, "micro_batch": 1, "dtype": "fp32"}
        one, two = (
            predict(CONFIG, cluster, passes | {"num_microbatches": count}, seq_len=128).step_s for count in (1, 2)
        )
        steps.append(two - 2 * one)
    assert cluster.constants(128).e_bw > 1
    parameters = profile_of(CONFIG).parameters
    assert steps[1] - steps[0] == pytest.approx(12 * parameters / 2 * 2 * (1 / 4e9 - 1 / 8e9), rel=0.3)


def test_slower_links_make_slower_steps() -> None:
    layout = {"tp": 2, "micro_batch": 4, "dtype": "fp32"}
    steps = []
    for rate in (1e9, 1e8):
        report = dataclasses.replace(REPORT, reduce_bytes_s=rate)
        cluster = MeasuredCluster(1, 2, "cpu", calibration=report)
        steps.append(predict(CONFIG, cluster, layout, seq_len=128).step_s)
    hidden = 4 * 4 * (4 * 128 * 256 * 4)  # bytes: four all-reduces of each of 4 blocks
    assert steps[1] - steps[0] == pytest.approx(hidden * (1e-8 - 1e-9), rel=0.2)


def test_every_rate_of_attention_is_the_measured_one() -> None:
    card = MeasuredCluster(1, 2, "cpu", calibration=REPORT).card
    assert card.flash == card.attention != Cluster(1, 2, "cpu").card.flash


def test_ranks_that_wait_leave_the_others_what_they_share() -> None:
    """Rates are measured with all ranks at once: where half of them compute twice as fast, a pipeline's waiting is hidden."""
    layout = {"pp": 2, "num_microbatches": 2, "dtype": "fp32"}
    alike, faster, twice, more = (
        predict(
            CONFIG,
            MeasuredCluster(1, 2, "cpu", calibration=dataclasses.replace(REPORT, half_block_s=seconds)),
            layout,
            seq_len=128,
        )
        for seconds in (0.25, 0.1875, 0.125, 0.1)
    )
    assert alike.bubble > 0.2
    assert twice.bubble == pytest.approx(0, abs=1e-9)
    assert faster.step_s == pytest.approx((alike.step_s + twice.step_s) / 2)
    # Ranks that crowd each other's caches lose more than their part of the cores: with half of them, more is done in all.
    assert alike.step_s - more.step_s == pytest.approx(1.2 * (alike.step_s - twice.step_s))
    assert more.bubble == 0.0


def test_the_optimizer_takes_its_measured_time() -> None:
    steps = []
    for seconds in (1e-9, 11e-9):
        cluster = MeasuredCluster(1, 2, "cpu", calibration=dataclasses.replace(REPORT, update_s=seconds))
        steps.append(predict(CONFIG, cluster, {"tp": 2, "dtype": "fp32"}, seq_len=128).step_s)
    assert steps[1] - steps[0] == pytest.approx(10e-9 * profile_of(CONFIG).parameters / 2, rel=0.1)


def test_blocks_of_another_model_and_length_are_fitted_as_well() -> None:
    model = json.dumps({"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 100})
    report = dataclasses.replace(REPORT, model=model, length=64, blocks_s=(0.01, 0.02, 0.04, 0.08))
    cluster, profile = (
        MeasuredCluster(1, 2, "cpu", calibration=report),
        profile_of(with_layers(config_of_text(model), 2)),
    )
    place = Place(LayoutSpec(micro_batch=4, dtype="fp32"), cluster, 64, cluster.constants(4 * 64))
    assert block_pass(profile, profile.kinds[0], place).both == pytest.approx(0.04, rel=1e-3)


def test_the_search_works_on_a_measured_cluster() -> None:
    cluster = MeasuredCluster(1, 2, "cpu", calibration=REPORT)
    for objective in ("tokens", "min-gpus"):
        plans = plan(CONFIG, cluster, seq_len=128, global_batch=8, objective=objective, layout={"dtype": "fp32"})
        assert plans[0].cluster.card.fp32 == REPORT.products
    stock = predict(CONFIG, Cluster(1, 2, "cpu"), {"dp": 2, "dtype": "fp32"}, seq_len=128)
    assert stock.step_s != predict(CONFIG, cluster, {"dp": 2, "dtype": "fp32"}, seq_len=128).step_s


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    REPORT.write(tmp_path / "report.json")
    assert Calibration.read(tmp_path / "report.json") == REPORT


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 1}, "expected a report of version 3. Write one with `hf-parallel calibrate`"),
        ({"products": "fast"}, "products='fast': expected a number of 0 or more. Write the file again"),
        ({"moved": -1}, "moved=-1: expected a number"),
        ({"blocks_s": [1.0]}, r"blocks_s=\[1.0\]: expected 4 numbers of 0 or more"),
        ({"model": {}}, r"model=\{\}: expected a model's config"),
        ({"device": "tpu"}, "device='tpu': expected cpu or cuda"),
    ],
)
def test_what_is_no_report_is_refused(change: dict[str, object], match: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    REPORT.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=match):
        Calibration.read(path)


def test_a_report_of_a_cpu_says_nothing_of_a_gpu(tmp_path: Path) -> None:
    REPORT.write(tmp_path / "report.json")
    CONFIG.save_pretrained(tmp_path)
    options = ["--seq", "128", "--batch", "8", "--calibrate", str(tmp_path / "report.json")]
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), "--gpu", "h100", *options])
    assert result.exit_code == 1
    assert "gpu=h100 with a report of device cpu" in result.output


def test_a_rank_that_does_not_end_is_named_with_its_step(tmp_path: Path) -> None:
    hanging = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    hanging.start()
    step_file(tmp_path, 0).write_text("measured messages")
    try:
        with pytest.raises(
            ConfigError, match=r"not done after 0\.2 s: rank 0 while it measured messages\. Measure when"
        ):
            wait_for([hanging], tmp_path, 0.2)
    finally:
        hanging.kill()
        hanging.join(10)


def test_a_rank_that_fails_ends_the_wait_for_the_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=one, args=(value,), daemon=True) for one, value in ((time.sleep, 600), (os._exit, 3))
    ]
    for one in started:
        one.start()
    try:
        with pytest.raises(ConfigError, match=r"rank 1 ended with code 3 before it had started Python\. Look at"):
            wait_for(started, tmp_path, 60)
    finally:
        for one in started:
            one.kill()
            one.join(10)


def aborts_later(rank: int, folder: str) -> None:
    """Writes what it measured; what runs when Python ends fails, as a thread does that is in gloo at that time."""
    Path(folder, str(rank)).write_text("measured")
    atexit.register(os.abort)


def test_a_rank_that_has_measured_is_done(tmp_path: Path) -> None:
    run_ranks(2, aborts_later, (str(tmp_path),), tmp_path, 60)
    assert [Path(tmp_path, name).read_text() for name in "01"] == ["measured"] * 2


@pytest.mark.slow
def test_the_command_measures_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["calibrate", str(path), "--ranks", "2", "--use-cpu"])
    assert result.exit_code == 0, result.output
    found = Calibration.read(path)
    assert (found.device, found.ranks) == ("cpu", 2)
    assert (
        min(found.products, found.moved, *found.blocks_s, found.reduce_s, found.reduce_bytes_s, found.hop_bytes_s) > 0
    )
