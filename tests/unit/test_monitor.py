"""The records of steps, what they add up to, who is slow, and what a trace and a page say of them."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from hf_parallel.engine.run.expected import Expected
from hf_parallel.errors import ConfigError
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.monitor.recorder import MOST_PENDING, Recorder, Span, StepRecord, silent
from hf_parallel.monitor.report.metrics import Job, exposed_s, metrics_of
from hf_parallel.monitor.report.page import _scaling, write_report
from hf_parallel.monitor.report.scaling import Scaled
from hf_parallel.monitor.report.slow import slow_ranks, words
from hf_parallel.monitor.report.told import Told, decoded, encoded, summed
from hf_parallel.monitor.report.trace import Offset, chrome_trace, name_of
from hf_parallel.monitor.sums import Sums
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.simulate import simulate
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.sections import PipelineConfig


CPU = torch.device("cpu")


def test_a_recorder_keeps_the_spans_of_steps_alone() -> None:
    recorder = Recorder(CPU)
    recorder.add("F", 0, 0, recorder.mark())  # no step has begun
    recorder.begin_step(7)
    start = recorder.mark()
    recorder.add("F", 1, 2, start)
    recorder.add_on_host("data", time.perf_counter())
    recorder.end_step()
    recorder.add("B", 1, 2, start)
    (record,) = recorder.finished()
    assert [(span.kind, span.number, span.microbatch) for span in record.spans] == [("F", 1, 2), ("data", -1, -1)]
    assert record.number == 7
    assert record.start <= record.spans[0].start <= record.spans[0].end <= record.end
    assert recorder.finished() == []


def test_a_silent_recorder_keeps_nothing() -> None:
    recorder = silent()
    recorder.begin_step(1)
    with recorder.span("optimizer"):
        pass
    recorder.count("tp", 5)
    recorder.end_step()
    assert (recorder.finished(), recorder.is_open, recorder.sent["tp"]) == ([], False, 0)


def test_steps_that_nobody_reads_are_dropped() -> None:
    recorder = Recorder(CPU)
    for number in range(MOST_PENDING + 5):
        recorder.begin_step(number)
        recorder.end_step()
    assert [record.number for record in recorder.finished()] == list(range(5, MOST_PENDING + 5))


def records_of(forward: list[float], backward: list[float], count: int, choice: ScheduleChoice) -> list[StepRecord]:
    """What ranks would record that run a schedule exactly as the simulator times it."""
    timed = simulate(choice.training(count), forward, backward)
    found = []
    for actions, starts, ends in zip(timed.schedule, timed.starts, timed.ends, strict=True):
        spans = [Span(a.kind, a.stage, a.microbatch, s, e) for a, s, e in zip(actions, starts, ends, strict=True)]
        whole = [Span("schedule", -1, -1, 0.0, ends[-1]), Span("loss", -1, -1, ends[-1], timed.makespan)]
        found.append(StepRecord(3, 0.0, timed.makespan, [*spans, *whole]))
    return found


def job_of(records: list[StepRecord], choice: ScheduleChoice, tokens: float = 32.0, flops: float = 0.0) -> Job:
    rows = []
    for record, stages in zip(records, choice.stages_of_ranks, strict=True):
        sums = Sums()
        sums.add(record)
        told = summed(sums, sums.computing, tokens=tokens, flops=flops, hardware_flops=2 * flops, peak=100.0)
        rows.append(decoded(encoded(told, sums, stages, 2), stages))
    forward, backward = (1.0,) * len(choice.placement), (2.0,) * len(choice.placement)
    expected = Expected(forward, backward, forward, 0.25)
    shape = MeshShape(1, len(records), 1)
    return Job(shape, choice, expected, [told for told, _ in rows], [stages for _, stages in rows])


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("1f1b", 2), ("gpipe", 2), ("interleaved_1f1b", 4), ("zbv_zero_bubble", 4), ("interleaved_zero_bubble", 4)],
)
def test_ranks_that_run_as_simulated_have_the_simulated_bubble_and_no_exposed_messages(
    schedule: str, stages: int
) -> None:
    choice = ScheduleChoice(PipelineConfig(schedule=schedule), 2)
    forward, backward = [1.0, 1.5, 1.0, 2.0][:stages], [2.0, 2.0, 3.0, 2.5][:stages]
    timed = simulate(choice.training(4), forward, backward)
    job = job_of(records_of(forward, backward, 4, choice), choice)
    found = metrics_of(job)
    assert found["monitor/bubble"] == pytest.approx(timed.bubble_fraction, rel=1e-3)
    assert found["monitor/bubble_of_stages"] == pytest.approx(timed.bubble_fraction, rel=1e-3)
    assert exposed_s(job)["pp"] == pytest.approx(0.0, abs=1e-9)
    for rank, busy in enumerate(timed.busy):
        assert found[f"monitor/bubble/pp_{rank}"] == pytest.approx(1 - busy / timed.makespan, rel=1e-3)
    for stage in range(stages):
        split = found.get(f"monitor/weight_ms/stage_{stage}", 0.0)
        assert found[f"monitor/forward_ms/stage_{stage}"] == pytest.approx(1e3 * forward[stage])
        assert found[f"monitor/backward_ms/stage_{stage}"] + split == pytest.approx(1e3 * backward[stage])


def test_nothing_is_planned_for_a_step_that_runs_into_the_next(tmp_path: Path) -> None:
    choice = ScheduleChoice(PipelineConfig(schedule="pipedream_2bw"), 2)
    records = records_of([1.0, 1.0], [2.0, 2.0], 4, choice)
    job = job_of(records, choice)
    found = metrics_of(job)
    assert "monitor/bubble" in found
    assert not {"monitor/bubble_planned", "monitor/bubble_of_stages", "monitor/exposed_s/pp"} & found.keys()
    path = write_report(tmp_path, job, records, [Offset(0.0, 0.0)] * 2, [], {})
    report = json.loads(path.with_suffix(".json").read_text())
    assert not report["timeline"]["planned"]


def test_utilisation_is_of_the_flops_of_the_job_over_the_peaks_of_its_ranks() -> None:
    choice = ScheduleChoice(PipelineConfig(), 2)
    job = job_of(records_of([1.0, 1.0], [1.0, 1.0], 2, choice), choice, tokens=60.0, flops=6.0)
    found = metrics_of(job)  # both ranks read the same 60 tokens, in 6 seconds
    assert found["monitor/tokens_per_s"] == pytest.approx(10.0)
    assert found["monitor/mfu"] == pytest.approx(10.0 * 6.0 / 2 / 100)
    assert found["monitor/hfu"] == pytest.approx(10.0 * 12.0 / 2 / 100)


@pytest.mark.parametrize(
    ("shape", "seconds", "shares", "named"),
    [
        (MeshShape(4, 1, 1), [1.0, 1.0, 1.21, 1.0], [1.0], [(2, False)]),
        (MeshShape(4, 1, 1), [1.0, 1.0, 1.19, 1.0], [1.0], []),
        (MeshShape(2, 2, 1), [1.0, 3.0, 1.0, 6.0], [0.2, 0.8], [(3, False)]),
        (MeshShape(1, 2, 1), [1.0, 3.0], [0.25, 0.75], []),
        (MeshShape(1, 3, 1), [1.0, 2.5, 1.0], [1.0, 1.0, 1.0], [(1, True)]),
        (MeshShape(1, 3, 1), [1.0, 1.5, 1.0], [1.0, 1.0, 1.0], []),  # the plan may be that wrong
        (MeshShape(1, 1, 1), [1.0], [1.0], []),
        (MeshShape(2, 1, 1), [0.0, 0.0], [1.0], []),
    ],
)
def test_a_rank_is_slow_by_its_replicas_or_else_by_its_share_of_the_plan(
    shape: MeshShape, seconds: list[float], shares: list[float], named: list[tuple[int, bool]]
) -> None:
    found = slow_ranks(seconds, shares, shape, 1.2)
    assert [(slow.rank, slow.by_plan) for slow in found] == named
    assert all(f"rank {slow.rank}" in words(slow, shape, seconds) for slow in found)


def test_ranks_of_a_sequence_count_as_copies_that_exchange_gradients() -> None:
    choice = ScheduleChoice(PipelineConfig(), 2)
    job = dataclasses.replace(
        job_of(records_of([1.0, 1.0], [1.0, 1.0], 2, choice), choice), shape=MeshShape(1, 1, 1, 2)
    )
    assert "monitor/exposed_s/dp" in metrics_of(job)
    scaled = [Scaled(1, "tp 1 x pp 1 x dp 1", 100.0, 1.0, 2e9)]
    page = _scaling(job, scaled)
    assert "this run: tp 1 x pp 1 x sp 2 x dp 1" in page


def test_a_trace_puts_all_clocks_on_that_of_rank_0() -> None:
    first = StepRecord(3, 10.0, 11.0, [Span("F", 0, 2, 10.0, 10.5), Span("send F", 0, 2, 10.5, 10.6)])
    second = StepRecord(3, 110.0, 111.0, [Span("receive F", 1, 2, 110.1, 110.7), Span("reduce", 3, -1, 110.7, 110.8)])
    trace = chrome_trace([[first], [second]], [Offset(0.0, 0.0), Offset(100.0, 1e-4)], MeshShape(1, 2, 1), (0, 1))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = [(event["pid"], event["name"], round(event["ts"]), round(event["dur"])) for event in events]
    assert named == [
        (0, "F2", 0, 500_000),
        (0, "send F2 to 1", 500_000, 100_000),
        (1, "receive F2 from 0", 100_000, 600_000),
        (1, "reduce bucket 3", 700_000, 100_000),
    ]
    json.dumps(trace, allow_nan=False)
    assert name_of(first.spans[0], names_stage=True) == "0F2"
    # Between two ranks with several stages a microbatch goes more than once.
    assert name_of(Span("send F", 2, 1, 0.0, 1.0), True, 1) == "send 2F1 to 1"
    assert name_of(Span("receive F", 3, 1, 0.0, 1.0), True, 0) == "receive 2F1 from 0"
    assert name_of(Span("receive B", 2, 1, 0.0, 1.0), True, 1) == "receive 3B1 from 1"


def test_a_report_is_complete_json_and_a_page_without_outside_links(tmp_path: Path) -> None:
    choice = ScheduleChoice(PipelineConfig(), 2)
    records = records_of([0.01, 0.02], [0.02, 0.02], 4, choice)
    job = job_of(records, choice)
    history = [{"step": float(n), "monitor/tokens_per_s": 5.0 * n} for n in (1, 2, 3)]
    records[0].spans.append(Span("send F", 0, 0, 0.01, 0.011))
    records[1].spans.append(Span("receive F", 1, 0, 100.0, 100.013))
    scaled = [Scaled(1, "tp 1 x pp 1 x dp 1", 100.0, 1.0, 2e9), Scaled(2, "tp 1 x pp 2 x dp 1", 190.0, 1.9, 1e9)]
    clocks = [Offset(0.0, 0.0), Offset(100.0, 0.0)]
    records[1] = StepRecord(
        3, 100.0, 101.0, [Span(*span[:3], *(t + 100.0 * (t < 100.0) for t in span[3:])) for span in records[1].spans]
    )
    path = write_report(tmp_path / "new", job, records, clocks, history, {"pp_size": 2, "a": "<b>"}, scaled)
    report = json.loads((tmp_path / "new" / "hf_parallel_report.json").read_text())
    assert [len(report["timeline"][what]) for what in ("planned", "measured")] == [
        16,
        19,
    ]  # the loss and a message are waited for
    (message,) = report["timeline"]["messages"]
    assert (message["source"], message["target"], message["label"]) == (0, 1, "F0 of stage 0")
    assert (message["sent"], message["taken"]) == (pytest.approx(0.01), pytest.approx(0.013))
    assert report["scaling"][1]["speed_up"] == 1.9
    page = path.read_text()
    assert page.count("class='message'") == 1
    assert "this run: tp 1 x pp 2 x dp 1" in page
    assert page.count("<div class='wide'><svg") == page.count("<svg") == 4  # each scrolls where a screen is narrow
    assert "http" not in page
    assert "&lt;b&gt;" in page
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "hf_parallel_report.html",
        "hf_parallel_report.json",
    ]


def test_settings_of_the_monitor_that_have_no_effect_or_no_order_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"monitor\.trace_steps=\[4, 3\]: .* ascending order"):
        HFParallelConfig(monitor={"trace_steps": [4, 3]})
    with pytest.raises(ConfigError, match=r"monitor\.slow_rank_factor=2\.0 with monitor\.metrics=false has no effect"):
        HFParallelConfig(monitor={"slow_rank_factor": 2, "metrics": False})
    with pytest.raises(ConfigError, match=r"monitor\.trace_steps has 101 entries: .*100 steps"):
        HFParallelConfig(monitor={"trace_steps": list(range(1, 102))})
    with pytest.raises(ConfigError, match=r"monitor\.slow_rank_factor=1: expected a number above 1"):
        HFParallelConfig(monitor={"slow_rank_factor": 1})
    assert not HFParallelConfig(monitor={"metrics": False}).monitor.records
    assert HFParallelConfig(monitor={"metrics": False, "trace_steps": [2]}).monitor.records
    assert Told().bubble == 0.0
