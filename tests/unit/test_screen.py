"""What a Trainer prints of a step has few of our numbers; every other callback gets all of them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_parallel.trainer.monitoring import ON_SCREEN, shorten_screen


LOGS = {
    "loss": 2.0,
    "epoch": 1.0,
    "monitor/step_s": 0.5,
    "monitor/forward_ms/stage_0": 3.0,
    "compression/wire_mb": 7.0,
}


class _Bar:
    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text)


class _OwnPrinter(PrinterCallback):
    """Of a user, who gets what a user gets."""


class _Tracker(TrainerCallback):
    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen = dict(logs)


def test_the_screen_shows_few_and_trackers_get_all(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bar, progress, own, tracker = _Bar(), ProgressCallback(), _OwnPrinter(), _Tracker()
    progress.training_bar = bar  # type: ignore[assignment]
    callbacks = [tracker, progress, PrinterCallback(), own]
    for _ in range(2):  # at every log: once is enough, and twice does not change it
        shorten_screen(callbacks)
    args, state, logs = TrainingArguments(str(tmp_path), use_cpu=True), TrainerState(), dict(LOGS)
    state.is_world_process_zero = state.is_local_process_zero = True
    for one in callbacks:
        one.on_log(args, state, TrainerControl(), logs=logs)
    by_printer, by_own = capsys.readouterr().out.splitlines()
    for text in (*bar.written, by_printer):
        assert "'loss': '2'" in text
        assert "'monitor/step_s': '0.5'" in text
        assert "forward_ms" not in text
        assert "wire_mb" not in text
    assert len(bar.written) == 1
    assert "forward_ms" in by_own
    assert tracker.seen == logs == LOGS


def test_what_is_shown_is_measured() -> None:
    """A renamed metric would silently leave the screen."""
    from pathlib import Path

    pages = "".join(
        (Path(__file__).resolve().parents[2] / "docs" / name).read_text() for name in ("monitor.md", "compression.md")
    )
    assert [name for name in ON_SCREEN if name.partition("/")[2] not in pages] == []
