"""What the monitor measures of a run is what ran: every action, every byte, on every rank; and it changes nothing."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_parallel import HFParallelCallback
from hf_parallel.monitor.recorder import Recorder, StepRecord


STEPS, ROWS = 4, 4
ON = {"report": True, "trace_steps": [2, 3]}


def trained(
    folder: str, settings: dict[str, Any], callbacks: Sequence[TrainerCallback] = (), model: str = "llama"
) -> Trainer:
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=ROWS, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(
        tiny.MODELS[model](), args, train_dataset=tiny.rows(64), data_collator=tiny.collate, callbacks=[HFParallelCallback(settings), *callbacks]
    )  # fmt: skip
    trainer.train()
    return trainer


def session_of(trainer: Trainer) -> Any:
    return trainer.accelerator.hf_parallel  # type: ignore[attr-defined]


def measured(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = trained(folder, settings)
    session = session_of(trainer)
    engine = session.engine
    runtime = getattr(engine, "runtime", None)
    session.watchdog.stop()
    return {
        "logs": trainer.state.log_history,
        "printed": [line for line in printed.getvalue().splitlines() if line.startswith(("{", "step "))],
        "sent": {
            "pp": 0 if runtime is None else runtime.counters.bytes_sent,
            "dp": engine.gradients.replicas.sent_bytes,
        },
        "mine": [str(action) for action in session.schedule.training(ROWS)[engine.mesh.pp_rank]],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": [p.detach().tolist() for p in engine.attachment.parameters.values()],
    }


def check_trace(folder: str, results: list[dict[str, Any]]) -> None:
    """Two steps of every rank, without an action too many or too few, and no message that came before it was sent."""
    trace = json.loads((Path(folder) / "hf_parallel_trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == set(range(len(results)))
    error = max(clock["error_s"] for clock in trace["otherData"]["clocks"])
    for rank, result in enumerate(results):
        own = [event for event in events if event["pid"] == rank]
        ran = Counter(
            f"{event['args']['stage']}{event['cat']}{event['args']['microbatch']}"
            for event in own
            if event["tid"] == 0
        )
        assert ran == dict.fromkeys(result["mine"], 2)
        assert {event["args"]["step"] for event in own} == {2, 3}
    sent = {(e["pid"], e["name"], e["args"]["step"]): e["ts"] for e in events if e["cat"].startswith("send")}
    for event in events:
        if event["cat"].startswith("receive"):
            what, _, source = event["name"].removeprefix("receive ").partition(" from ")
            started = sent[int(source), f"send {what} to {event['pid']}", event["args"]["step"]]
            assert event["ts"] + event["dur"] >= started - 4e6 * error


@pytest.mark.timeout(300)
def test_metrics_trace_and_report_of_pp2_x_dp2_hold_what_ran(tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    settings = {"pp_size": 2, "pipeline": {"num_microbatches": ROWS}, "monitor": ON}
    results = run_ranks(
        measured, 4, folder, settings, tmp_path=tmp_path, env={"ACCELERATE_USE_CPU": "true"}, timeout=200
    )
    check_trace(folder, results)
    logs = [entry for entry in results[0]["logs"] if "loss" in entry]
    assert len(logs) == STEPS
    for axis in ("pp", "dp"):
        sent = sum(entry[f"monitor/sent_mb/{axis}"] for entry in logs)
        assert sent == pytest.approx(sum(result["sent"][axis] for result in results) / 1e6, rel=1e-3)
    for entry in logs:
        assert 0 < entry["monitor/bubble"] < 1
        assert entry["monitor/bubble_planned"] == pytest.approx(0.2, abs=0.1)
        assert entry["monitor/tokens_per_s"] > 0
        assert entry["monitor/tflops"] == entry["monitor/hardware_tflops"] > 0
        assert "monitor/mfu" not in entry
        assert 0 < entry["monitor/memory_gb"] < 0.2  # Python and torch, which are not of the training, take more
    assert [[entry for entry in result["logs"] if "loss" in entry] for result in results[1:]] == [logs] * 3
    console = results[0]["printed"]
    assert [line.split()[1] for line in console if line.startswith("step ")] == [f"{n}/{STEPS}" for n in (1, 2, 3, 4)]
    assert not any("monitor/" in line for line in console)
    assert not any(line.startswith("step ") for result in results[1:] for line in result["printed"])
    report = json.loads((Path(folder) / "hf_parallel_report.json").read_text())
    assert report["layout"] == {"dp_size": 2, "pp_size": 2, "tp_size": 1}
    for rank, result in enumerate(results):
        for what in ("planned", "measured"):
            bars = [bar for bar in report["timeline"][what] if bar["rank"] == rank and bar["kind"] in "FBIW"]
            assert sorted(bar["label"] for bar in bars) == sorted(action[1:] for action in result["mine"])
    page = (Path(folder) / "hf_parallel_report.html").read_text()
    assert page.count("<svg") == 4  # a step, memory, the tokens of each second, scaling
    assert "http" not in page.replace("http-equiv", "")
    messages = Counter((m["source"], m["target"], m["label"]) for m in report["timeline"]["messages"])
    pairs = [(0, 1, "F{} of stage 0"), (1, 0, "B{} of stage 1"), (2, 3, "F{} of stage 0"), (3, 2, "B{} of stage 1")]
    assert messages == Counter((a, b, label.format(n)) for a, b, label in pairs for n in range(ROWS))
    assert page.count("class='message'") == len(messages)
    assert [one["ranks"] for one in report["scaling"]] == [1, 2, 4]
    assert report["scaling"][0]["speed_up"] == pytest.approx(1.0)


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize(
    "schedule",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpipe", "interleaved_1f1b", "dualpipev")),
        *("1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"),
    ],
)
def test_a_trace_has_every_action_of_every_schedule(schedule: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    pipeline = {"schedule": schedule, "num_microbatches": ROWS}
    settings = {"pp_size": 2, "pipeline": pipeline, "monitor": {"metrics": False, "trace_steps": [2, 3]}}
    results = run_ranks(
        measured, 2, folder, settings, tmp_path=tmp_path, env={"ACCELERATE_USE_CPU": "true"}, timeout=200
    )
    check_trace(folder, results)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings", [{"pp_size": 2}, pytest.param({"zero": {"stage": 1}}, marks=pytest.mark.long)], ids=["pp2", "zero1"]
)
def test_training_is_the_same_with_and_without_the_monitor(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    found = [
        run_ranks(measured, 2, folder, {**settings, "monitor": monitor}, tmp_path=tmp_path, env={"ACCELERATE_USE_CPU": "true"}, timeout=200)
        for monitor in ({"trace_steps": [2, 3]}, {"metrics": False})
    ]  # fmt: skip
    for watched, bare in zip(*found, strict=True):
        assert watched["losses"] == bare["losses"]
        assert watched["weights"] == bare["weights"]
        dicts = [line for line in watched["printed"] if line.startswith("{") and "train_runtime" not in line]
        assert dicts == [line for line in bare["printed"] if "train_runtime" not in line]
        stock = {key for entry in bare["logs"] for key in entry}
        assert not any(key.startswith("monitor/") for key in stock)
        timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
        kept = [{k: v for k, v in entry.items() if k in stock and k not in timed} for entry in watched["logs"]]
        assert kept == [{k: v for k, v in entry.items() if k not in timed} for entry in bare["logs"]]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[tuple[int, str]] = []
        self.step = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((self.step, record.getMessage()))


def slowed(
    rank: int, world_size: int, folder: str, settings: dict[str, Any], work: dict[int, float], steps: int = 20
) -> list[tuple[int, str]]:
    """Warnings of a run.

    Args:
        work: Of each rank: what its blocks compute more in their forward; above 1 matrix products, else seconds.
    """
    kept = Kept()
    logging.getLogger("hf_parallel").addHandler(kept)
    model, own = tiny.llama(), work[rank]
    matrix = torch.eye(160)

    def busy(module: Any, args: Any) -> None:
        if own > 1:
            for _ in range(int(own)):
                matrix @ matrix
            return
        end = time.perf_counter() + own
        while time.perf_counter() < end:
            pass

    for layer in model.model.layers:
        layer.register_forward_pre_hook(busy)
    args = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=500,
    )  # fmt: skip
    trainer = Trainer(
        model, args, train_dataset=tiny.rows(16), data_collator=tiny.collate, callbacks=[HFParallelCallback(settings)]
    )
    trainer.train()
    session_of(trainer).watchdog.stop()
    return kept.found


@pytest.mark.timeout(300)
def test_a_rank_that_takes_twice_as_long_is_named_within_20_steps(tmp_path: Path) -> None:
    found = run_ranks(
        slowed,
        2,
        str(tmp_path / "out"),
        {},
        {0: 0.02, 1: 0.04},
        tmp_path=tmp_path,
        env={"ACCELERATE_USE_CPU": "true"},
        timeout=200,
    )
    named = [text for _, text in found[0] if "times as long" in text]
    assert len(named) == 1
    assert "hf_parallel: rank 1 (dp 1 of 2) computes" in named[0]
    assert not found[1]


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "work", "named"),
    [
        ({}, {0: 400, 1: 150}, "dp 0 of 2"),
        ({"sp_size": 2}, {0: 400, 1: 150}, "sp 0 of 2"),
        ({"tp_size": 2}, {0: 400, 1: 150}, "tp 0 of 2"),
        ({}, {0: 0.055, 1: 0.04}, "dp 0 of 2"),  # 1.3 times as long with all that blocks do
        ({}, {0: 0.044, 1: 0.04}, ""),
    ],
    ids=["dp2_products", "sp2_products", "tp2_products", "by_a_third", "by_a_tenth"],
)
def test_the_rank_that_computes_more_is_named_and_no_other(
    settings: dict[str, Any], work: dict[int, float], named: str, tmp_path: Path
) -> None:
    launch: dict[str, Any] = {"tmp_path": tmp_path, "env": {"ACCELERATE_USE_CPU": "true"}, "timeout": 200}
    found = run_ranks(slowed, 2, str(tmp_path / "out"), settings, work, **launch)
    texts = [text for _, text in found[0] if "times as long" in text]
    assert len(texts) == bool(named)
    assert all(f"hf_parallel: rank 0 ({named}) computes" in text for text in texts)


def counted(
    rank: int, world_size: int, folder: str, settings: dict[str, Any], model: str
) -> tuple[list[dict[str, float]], list[int]]:
    """Logs of a run, and the bytes that its layers hand to collectives over shards in each step."""
    import torch.distributed as dist

    from hf_parallel.compat import private_collectives
    from hf_parallel.tensor_parallel.run import functions
    from hf_parallel.ulysses import exchange

    handed, steps = [0], []
    gathers = [(functions, "all_gather_new"), (exchange, "all_gather_new")]
    places = [(dist, "all_reduce"), (private_collectives, "_SumOfTwo"), (dist, "all_to_all_single"), *gathers]
    for place, name in places:
        own = getattr(place, name)

        def counting(*args: Any, own: Any = own, name: str = name, **kwargs: Any) -> Any:
            tensor = args[1] if name == "all_to_all_single" else args[0]
            # Else it is no layer's: losses, norms, digests.
            if name == "all_to_all_single" or (tensor.ndim > 1 and tensor.dtype == torch.float32):
                handed[0] += tensor.nbytes
            return own(*args, **kwargs)

        setattr(place, name, counting)

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            handed[0] = 0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append(handed[0])

    trainer = trained(folder, settings, callbacks=[Steps()], model=model)
    session_of(trainer).watchdog.stop()
    return [entry for entry in trainer.state.log_history if "loss" in entry], steps


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("axis", "settings", "model"),
    [
        pytest.param(
            "tp", {"tp_size": 2, "tensor_parallel": {"vocab_parallel_loss": False}}, "llama", marks=pytest.mark.long
        ),
        pytest.param("sp", {"sp_size": 2}, "llama", marks=pytest.mark.long),
        pytest.param("ep", {"ep_size": 2}, "mixtral", marks=pytest.mark.long),
    ],
    ids=["tp", "sp", "ep"],
)
def test_bytes_of_layers_are_those_that_collectives_got(
    axis: str, settings: dict[str, Any], model: str, tmp_path: Path
) -> None:
    arguments = str(tmp_path / "out"), {**settings, "monitor": ON}, model
    found = run_ranks(
        counted, 2, *arguments, tmp_path=tmp_path, env={"ACCELERATE_USE_CPU": "true"}, timeout=200
    )  # fmt: skip
    for place, entry in enumerate(found[0][0]):
        handed = sum(steps[place] for _, steps in found)
        assert handed > 0
        assert entry[f"monitor/sent_mb/{axis}"] == pytest.approx(handed / 1e6, rel=1e-3)
        assert entry[f"monitor/exposed_s/{axis}"] > 0
    report = json.loads((tmp_path / "out" / "hf_parallel_report.json").read_text())
    assert report["axes"][axis]["bytes_a_step"] > 0
    trace = json.loads((tmp_path / "out" / "hf_parallel_trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"] if event.get("cat") == axis} == {0, 1}


def sent_by_zero3(rank: int, world_size: int, folder: str) -> tuple[list[dict[str, float]], int, int]:
    """Logs of a run, and the parameters of its blocks and of the rest."""
    model = tiny.llama()
    # Rows are shared out evenly, with one of zeros in a vocabulary of 99.
    sizes = {name: parameter.numel() // len(parameter) * (len(parameter) + len(parameter) % 2) for name, parameter in model.named_parameters()}  # fmt: skip
    args = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=ROWS, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    callbacks = [HFParallelCallback({"zero": {"stage": 3}})]
    trainer = Trainer(model, args, train_dataset=tiny.rows(64), data_collator=tiny.collate, callbacks=callbacks)
    trainer.train()
    session_of(trainer).watchdog.stop()
    blocks = sum(size for name, size in sizes.items() if ".layers." in name)
    return [entry for entry in trainer.state.log_history if "loss" in entry], blocks, sum(sizes.values()) - blocks


@pytest.mark.timeout(300)
@pytest.mark.long
def test_bytes_of_zero_3_are_those_of_its_gathers_and_scatters(tmp_path: Path) -> None:
    found = run_ranks(
        sent_by_zero3, 2, str(tmp_path / "out"), tmp_path=tmp_path, env={"ACCELERATE_USE_CPU": "true"}, timeout=200
    )
    logs, blocks, rest = found[0]
    assert len(logs) == STEPS
    # Of each rank: its half of a block twice and of the rest once, and all gradients once, in fp32.
    handed = 4 * ((2 * blocks + rest) / 2 + blocks + rest)
    for entry in logs:
        assert entry["monitor/sent_mb/dp"] == pytest.approx(2 * handed / 1e6, rel=1e-4)


class Late(Recorder):
    """On a GPU the last step has not been read when the next one begins."""

    is_settled = False

    def settle(self) -> None:
        self.is_settled = True

    def finished(self) -> list[StepRecord]:
        last = [] if self.is_settled or not self._pending else [self._pending.pop()]
        found, self._pending, self.is_settled = super().finished(), last, False
        return found


class Chatty(TrainerCallback):
    """Logs a loss of its own."""

    trainer: Trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.log({"loss": 0.5, "mine": 1.0})


def counting(rank: int, world_size: int, folder: str, kinds: dict[str, Any], settings: dict[str, Any]) -> list[Any]:
    import hf_parallel.engine.parallelize as parallelize
    import hf_parallel.monitor.report.monitor as monitor

    steps: list[float] = []
    tokens: list[float] = []
    genuine = monitor.metrics_of

    def counts(job: Any) -> dict[str, float]:
        steps.extend({one.steps for one in job.told})
        tokens.extend({one.tokens for one in job.told})
        return genuine(job)

    monitor.metrics_of = counts  # type: ignore[assignment]
    if rank == 1:
        parallelize.Recorder = Late  # type: ignore[misc]
    if rank == 0 and settings.get("report"):
        (Path(folder) / "hf_parallel_report.json").mkdir(parents=True)  # where no file can be written
    args = TrainingArguments(
        folder, per_device_train_batch_size=ROWS, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **kinds
    )  # fmt: skip
    chatty = Chatty()
    callbacks = [HFParallelCallback({"monitor": settings}), chatty]
    trainer = Trainer(tiny.llama(), args, train_dataset=tiny.rows(80), data_collator=tiny.collate, callbacks=callbacks)  # fmt: skip
    chatty.trainer = trainer
    trainer.train()
    session_of(trainer).watchdog.stop()
    logged = [
        ("monitor/step_s" in entry) != ("mine" in entry) for entry in trainer.state.log_history if "loss" in entry
    ]
    return [steps, sorted(set(tokens)), logged]


@pytest.mark.parametrize(
    ("kinds", "settings", "steps"),
    [
        # two that warm up are left out of the report
        pytest.param({"logging_steps": 15, "max_steps": 32}, {"report": True}, [15, 15, 30], marks=pytest.mark.long),
        pytest.param(
            {"logging_strategy": "epoch", "num_train_epochs": 2},
            {"trace_steps": [2, 3]},
            [10, 10],
            marks=pytest.mark.long,
        ),
        ({"logging_steps": 3, "max_steps": 3}, {"trace_steps": [3, 9]}, [3]),
    ],
    ids=["steps", "epoch", "ends_in_a_trace"],
)
def test_metrics_are_of_all_steps_since_the_last_log_however_late_they_are_read(
    kinds: dict[str, Any], settings: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    for found in run_ranks(counting, 2, str(tmp_path), kinds, settings, tmp_path=tmp_path)[:1]:
        assert found[0] == steps
        assert found[1] == [ROWS * len(tiny.rows(1)[0]["input_ids"])]
        assert all(found[2])
    assert (tmp_path / "hf_parallel_trace.json").is_file() == ("trace_steps" in settings)
