"""What a console shows of an entry of the log: the line of stock, and one compact line of the monitor."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.text import Text
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_parallel.monitor.report.console import duration, line_of
from hf_parallel.trainer.monitoring import shorten


STOCK = {"loss": 2.5, "grad_norm": 0.25, "learning_rate": 1e-3, "epoch": 0.5}
METRICS = {
    "monitor/tokens_per_s": 4480.0,
    "monitor/step_s": 0.5,
    "monitor/bubble": 0.35,
    "monitor/bubble_planned": 0.2,
    "monitor/bubble/pp_0": 0.3,
    "monitor/exposed_s/pp": 0.05,
    "monitor/data_wait_s": 0.01,
    "monitor/memory_gb": 0.4,
    "monitor/memory_expected_gb": 0.5,
}
LINE = "step 20/60  4,480 tokens/s  0.5 s a step  bubble 35% (planned 20%)  waits 12% (most for pp)  0.4 GB (expected 0.5)  20 s left"


def shown(
    callback: TrainerCallback, logs: dict[str, Any], capsys: pytest.CaptureFixture[str], *, is_first: bool = True
) -> list[str]:
    """The lines that a callback prints of an entry."""
    args = TrainingArguments("unused", use_cpu=True, report_to=[])
    state = TrainerState(max_steps=60, is_local_process_zero=is_first, is_world_process_zero=is_first)
    control = TrainerControl()
    callback.on_train_begin(args, state, control)
    state.global_step = 20
    capsys.readouterr()
    callback.on_log(args, state, control, logs=logs)
    lines = capsys.readouterr().out.replace("\r", "\n").splitlines()
    callback.on_train_end(args, state, control)
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("kind", [PrinterCallback, ProgressCallback])
def test_a_console_has_the_line_of_stock_and_one_line_below_it(
    kind: type[TrainerCallback], capsys: pytest.CaptureFixture[str]
) -> None:
    stock = shown(kind(), dict(STOCK), capsys)
    assert len(stock) == 1
    callback = kind()
    shorten(callback)
    shorten(callback)  # in the next call of train()
    logs = {**STOCK, **METRICS}
    assert shown(callback, logs, capsys) == [*stock, LINE]
    assert logs == {**STOCK, **METRICS}  # what comes after the callback, such as trackers, has all keys
    assert shown(callback, logs, capsys, is_first=False) == []


def test_entries_without_metrics_and_callbacks_of_users_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(PrinterCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            print(sorted(logs))

    mine, stock = Mine(), PrinterCallback()
    shorten(mine)
    shorten(stock)
    assert shown(mine, {**STOCK, **METRICS}, capsys) == [str(sorted({**STOCK, **METRICS}))]
    evaluated = {"eval_loss": 1.5, "total_flos": 3}
    assert shown(stock, evaluated, capsys) == ["{'eval_loss': '1.5'}"]
    assert "total_flos" not in evaluated  # as stock does it


def test_a_terminal_gets_the_same_line_in_colours() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    line = line_of(METRICS, 20, 60, Terminal())
    assert line != LINE
    assert Text.from_ansi(line).plain == LINE
    assert line_of(METRICS, 20, 60, io.StringIO()) == LINE


def test_a_line_says_only_what_is_known() -> None:
    bare = {k: METRICS[k] for k in ("monitor/tokens_per_s", "monitor/step_s")}
    bare |= {"monitor/data_wait_s": 0.0, "monitor/memory_gb": 0.4, "monitor/memory_expected_gb": 0.0}
    assert line_of(bare, 1, 2, io.StringIO()) == "step 1/2  4,480 tokens/s  0.5 s a step  0.4 GB  0 s left"
    assert "MFU 41.2%" in line_of({**bare, "monitor/mfu": 0.412}, 1, 2, io.StringIO())


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5940, "99 min"), (11100, "3 h 05 min")]
)
def test_durations_are_in_units_that_one_would_say(seconds: float, words: str) -> None:
    assert duration(seconds) == words
