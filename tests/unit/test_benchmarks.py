"""If these fail, a benchmark does not run, or its guard against other load does not tell clean samples from others."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_runner import start_server
from transformers import LlamaConfig


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from timing import ENOUGH_ROUNDS, Rounds, Sample, check_agreement, shuffled  # noqa: E402


pytestmark = pytest.mark.long


# Half of the benchmarks run in `make test-long`, those whose smoke run shows something of the product too (bytes, bounds,
# equal gradients) and one that times stages; of the others it shows that they run, and their numbers mean nothing.
SHOWS_THAT_IT_RUNS = pytest.mark.slow


def run(script: str, output: Path, *arguments: str) -> Any:
    """The report of a benchmark at its tiny size. It runs in this process: its ranks are forked as those of tests are."""
    start_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, "--smoke", "--output", str(output), *arguments])
        assert not importlib.import_module(script.removesuffix(".py")).main()
    report: Any = json.loads(output.read_text())
    return report


def run_alone(script: str, output: Path, *arguments: str) -> Any:
    """As `run`, in a process of its own: the benchmark handles signals, or sets variables that ranks inherit."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--smoke", "--output", str(output), *arguments]
    subprocess.run(
        command, check=True, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    report: Any = json.loads(output.read_text())
    return report


def test_the_pipeline_benchmark_runs(tmp_path: Path) -> None:
    report = run("bench_pipeline.py", tmp_path / "report.json")
    assert [row["microbatches"] for row in report["summary"]] == [2, 4]
    assert all(min(row["seconds"].values()) > 0 for row in report["summary"])


def test_the_benchmark_of_the_hosts_time_runs(tmp_path: Path) -> None:
    (row,) = run("bench_host.py", tmp_path / "report.json")["rows"]
    assert row["calls"][0] > row["calls"][1]


@SHOWS_THAT_IT_RUNS
def test_the_benchmark_of_a_trainer_runs(tmp_path: Path) -> None:
    report = run_alone("bench_trainer.py", tmp_path / "report.json")
    (row,) = report["summary"]
    assert min(row["seconds"].values()) > 0
    ours, alone = ([s for s in report["samples"] if s["variant"] == name] for name in ("trainer", "one process"))
    assert len(ours) == len(alone) == 2
    assert all(len(spans) for sample in ours for spans in sample["spans"])


@SHOWS_THAT_IT_RUNS
def test_the_benchmark_of_starts_runs(tmp_path: Path) -> None:
    rows = run_alone("bench_attach.py", tmp_path / "report.json")["rows"]
    assert [row["layout"] for row in rows] == ["pp2", "tp2"]
    assert all(min(row["seconds"].values()) > 0 for row in rows)


def test_ranks_that_share_a_sequence_keep_their_part_of_its_activations(tmp_path: Path) -> None:
    rows = run_alone("bench_ulysses.py", tmp_path / "report.json")
    assert [(row["model"], row["sp"], row["attention"]) for row in rows[:3]] == [
        *(("llama", 1, ""), ("llama", 2, "ulysses"), ("llama", 2, "ring")),
    ]
    assert all(row["share"] <= 0.6 for row in rows if row["sp"] == 2)


@SHOWS_THAT_IT_RUNS
def test_the_benchmark_of_asynchronous_schedules_runs(tmp_path: Path) -> None:
    report = run("bench_async.py", tmp_path / "report.json")
    names = ["1f1b", "pipedream_2bw", "1f1b", "pipedream", "pipedream, vertical_sync: false"]
    assert [row["schedule"] for row in report["idle"]] == names
    assert {len(losses) for row in report["loss"] for losses in row["losses"].values()} == {1}


def test_the_benchmark_of_sequence_parallelism_runs(tmp_path: Path) -> None:
    for row in run("bench_sequence.py", tmp_path / "report.json", "--models", "llama"):
        whole, _, shared, with_sequence = row["bytes"]
        assert whole > shared > with_sequence


@pytest.mark.slow
def test_the_benchmark_of_guards_runs(tmp_path: Path) -> None:
    report = run_alone("bench_guards.py", tmp_path / "report.json", "--layouts", "pp2", "zero1")
    assert [row["layout"] for row in report["rows"]] == ["pp2", "zero1"]
    assert all(row["inside_cpu_s"] > 0 for row in report["rows"]), "a guard that was renamed is not measured"


def test_bugs_note_that_they_ran_in_the_folders_of_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs, jobs = importlib.import_module("forked_proofs"), []
    monkeypatch.setattr(proofs, "prove", lambda job, *_: jobs.append(job))
    prover = object.__new__(proofs.Prover)
    prover.verify(LlamaConfig(num_hidden_layers=2), {"pp_size": 2}, tmp_path)
    assert jobs[0].home is None  # nor is what they leave in the folder in which the suite is started


def samples(foreign: list[float]) -> list[Sample]:
    return [Sample(name, 4, number, 1.0 + number, load, 0.5) for number, load in enumerate(foreign) for name in "ab"]


@pytest.mark.parametrize(
    ("foreign", "used", "clean"),
    [
        ([0.0] * 5, 5, True),
        ([0.0] * ENOUGH_ROUNDS + [0.9, 0.9], ENOUGH_ROUNDS, True),
        ([0.0] * (ENOUGH_ROUNDS - 1) + [0.9, 0.9], 4, False),
    ],
)
def test_unclean_rounds_are_left_out_or_named(foreign: list[float], used: int, clean: bool) -> None:
    rounds = Rounds.of(samples(foreign), 4, 0.15)
    assert (len(rounds.used), rounds.clean) == (used, clean)
    assert rounds.verdict == f"{used} {'clean' if clean else 'UNCLEAN'}, {0.0 if clean else 0.45:.2f}"


def test_one_unclean_sample_makes_its_round_unclean() -> None:
    given = samples([0.0] * 4)
    given[1].foreign = 0.5
    assert [group["a"].round for group in Rounds.of(given, 4, 0.15).used] == [1, 2, 3]


def test_every_second_order_is_the_other_way_and_neighbours_change() -> None:
    orders = ["".join(shuffled("abc", number)) for number in range(20)]
    assert all(second == first[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert {order[at : at + 2] for order in orders for at in (0, 1)} == {"ab", "ba", "ac", "ca", "bc", "cb"}
    assert orders == ["".join(shuffled("abc", number)) for number in range(20)]


def test_variants_that_differ_are_refused() -> None:
    check_agreement({"a": (1.0, None), "b": (1.00001, 2.0)}, "a")
    with pytest.raises(RuntimeError, match="variant b gives"):
        check_agreement({"a": (1.0,), "b": (1.1,)}, "a")


@SHOWS_THAT_IT_RUNS
def test_the_schedule_benchmark_runs(tmp_path: Path) -> None:
    report = run("bench_schedules.py", tmp_path / "report.json")
    assert len(report["schedules"]) == 2 * 7
    for row in report["schedules"]:
        assert 0 < row["simulated_bubble"] < 1
        assert 0 < row["measured_bubble"] < 1
        assert row["bubble_error"] == pytest.approx(row["measured_bubble"] - row["simulated_bubble"])
    assert {row["cut"] for row in report["cuts"]} >= {"even", "balanced"}
    assert set(report["bounds"]) == {"even", "balanced", "measured"}


@SHOWS_THAT_IT_RUNS
def test_the_benchmark_against_device_map_runs(tmp_path: Path) -> None:
    report = run("bench_device_map.py", tmp_path / "report.json")
    assert [(row["training"], row["schedule"], row["ranks"]) for row in report["rows"]] == [
        (kind, name, ranks)
        for kind in ("full", "lora")
        for name, ranks in (("whole", 2), ("naive", 2), ("1f1b", 2), ("1f1b", 4))
    ]
    for row in report["rows"]:
        assert row["simulated"] == (row["ranks"] == 4)
        if row["schedule"] == "1f1b":
            assert 1 < (row["times_as_fast_as_naive"] if row["simulated"] else row["simulator_says"]) < row["ranks"]


@SHOWS_THAT_IT_RUNS
def test_the_benchmark_of_unequal_ranks_runs(tmp_path: Path) -> None:
    report = run("bench_unequal.py", tmp_path / "report.json")
    assert [row["cut"] for row in report["rows"]] == ["even", "balanced", "by speed"]
    assert max(report["speeds"]) == 1.0


def test_the_benchmark_of_zero_runs_and_holds_its_bounds(tmp_path: Path) -> None:
    report = run("bench_zero.py", tmp_path / "report.json")
    assert report["passed"]
    assert [row["name"] for row in report["rows"]] == ["dp 2", "native 2", "fsdp2 3, offload"]
    for row in report["rows"]:
        assert row["difference"] <= report["tolerance"] == 1e-5
        assert row["measured"] == pytest.approx(row["formula"], rel=report["share"])
    whole, native, offloaded = (row["measured"] for row in report["rows"])
    assert native["gradients"] == pytest.approx(whole["gradients"] / 2, rel=0.01)
    assert (offloaded["weights"], offloaded["gradients"], offloaded["optimizer state"]) == (0, 0, 0)


def test_the_tensor_parallel_benchmark_runs(tmp_path: Path) -> None:
    report = run("bench_tp.py", tmp_path / "report.json")
    assert [row["variant"] for row in report["speed"]] == ["hf_parallel", "native", "one"]
    assert all(row["seconds"] > 0 and row["cpu"] > 0 for row in report["speed"])
    # Bytes, unlike times, mean the same at any size.
    assert [row["dtype"] for row in report["memory"]] == ["torch.float32", "torch.bfloat16"]
    assert all(0 < 2 * max(row["ranks"]) <= row["one"] for row in report["memory"])


@pytest.mark.slow
def test_the_benchmark_of_the_wire_runs(tmp_path: Path) -> None:
    report = run_alone("bench_wire.py", tmp_path / "report.json")
    if "skipped" in report:
        pytest.skip(report["skipped"])
    rows = {(row["layout"], row["way"]): row for row in report["rows"]}
    assert {layout for layout, _ in rows} == {"2x1", "2x2"}
    assert all(row["seconds"] > 0 for row in rows.values())
    for (_, way), row in rows.items():
        if way != "no exchange":
            assert row["sent_mb"] > row["formula_mb"] > 0, way
    # Headers and barriers weigh more than at full size; what the product counts must be there all the same.
    ratios = {way: rows["2x1", way]["formula_mb"] for way in ("none", "fp16", "int8", "int4")}
    assert ratios["none"] > ratios["fp16"] > ratios["int8"] > ratios["int4"]
    assert not {name for name in namespaces() if name.startswith("hfp")}


@pytest.mark.slow
def test_the_benchmark_of_the_order_of_axes_runs(tmp_path: Path) -> None:
    report = run_alone("bench_topology.py", tmp_path / "report.json")
    if "skipped" in report:
        pytest.skip(report["skipped"])
    rows = {(row["case"], row["way"]): row for row in report["rows"]}
    assert rows["pp 2 x dp 2, wide model", "auto"]["order"] == [2, False]
    assert rows["pp 2 x dp 2, long rows", "auto"]["order"] == [1, False]
    assert rows["dp 4", "auto"]["order"] == [1, True]
    for row in rows.values():
        assert 0.98 * row["planned_mb"] < row["counted_mb"]
    assert not {name for name in namespaces() if name.startswith("hfp")}


def namespaces() -> list[str]:
    return os.listdir("/run/netns") if os.path.isdir("/run/netns") else []


def test_the_benchmark_of_the_reducer_runs_and_both_reduce_to_the_same_gradients(tmp_path: Path) -> None:
    report = run("bench_reducer.py", tmp_path / "report.json")
    rivals = ("ddp_tuned", "ddp", "one")
    pairs = [*(("hf_parallel", rival) for rival in rivals), ("ddp_twin", "ddp_tuned")]
    expected = [(size, *pair) for size in (25.0, 0.05) for pair in pairs]
    expected += [(size, "hf_parallel_zero", "zero_redundancy") for size in (25.0, 0.05)]
    expected += [(size, "hf_parallel_sharded", "fully_shard") for size in (25.0, 0.05)]
    assert [(row["bucket_mb"], row["timed"], row["rival"]) for row in report["rows"]] == expected
    assert all(min(row["seconds"], row["rival_seconds"]) > 0 for row in report["rows"])


@pytest.mark.slow
def test_the_benchmark_of_convergence_runs(tmp_path: Path) -> None:
    report = run_alone("bench_compression.py", tmp_path / "report.json", "--page", str(tmp_path / "no_page.md"))
    rows = {row["method"]: row for row in report["rows"]}
    assert rows["none"]["changes"] == [0.0]
    assert 3.5 < rows["int8"]["ratio"] < 4
    assert 50 < rows["local H=8, int4"]["ratio"] < 62


def test_a_section_of_the_page_of_results_is_replaced_and_no_other(tmp_path: Path) -> None:
    from results_page import PAGE, write_section

    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    before = page.read_text()
    write_section(page, "wire", "a table")
    write_section(page, "wire", "another table")
    after = page.read_text()
    assert "another table" in after
    assert "a table" not in after
    assert after.partition("<!-- wire")[0] == before.partition("<!-- wire")[0]
    with pytest.raises(ValueError, match="does not have one section"):
        write_section(page, "unknown", "text")


def test_every_benchmark_writes_a_report_of_its_targets_name() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^(bench-[a-z-]+):.*\n.*(benchmarks/\w+\.py)", makefile, re.MULTILINE)
    assert len(targets) > 15
    for target, script in targets:
        text = (ROOT / script).read_text()
        assert f"{target}.json" in text or f'"{target}"' in text, target
