"""How a Trainer drives the monitor: a callback of ours, and the iterator of its batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_parallel.engine.session import Session
from hf_parallel.monitor.recorder import Recorder
from hf_parallel.monitor.report.monitor import Monitor


# What a line on the screen has of ours; trackers, `trainer_state.json` and the report have all of it.
ON_SCREEN: Final = (
    "monitor/tokens_per_s",
    "monitor/step_s",
    "monitor/bubble",
    "monitor/memory_gb",
    "compression/ratio",
)


class MonitorCallback(TrainerCallback):
    """Begins and ends the measurements of a run.

    Args:
        session: The parallel run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.monitor: Monitor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model is parallelized by now."""
        session = self._session
        if session.engine is not None and session.engine.recorder.on:
            self.monitor = Monitor(session.engine, session.config, session.schedule, Path(str(args.output_dir)))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An optimizer step is over."""
        if self.monitor is not None:
            self.monitor.end_step(state.global_step, logs=control.should_log)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An epoch is over; some Trainers log then alone."""
        if self.monitor is not None and control.should_log:
            self.monitor.end_epoch(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write what is to be written."""
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.end()


def monitor_of(trainer: Trainer) -> Monitor | None:
    """What measures the training of a Trainer that runs now."""
    callbacks = trainer.callback_handler.callbacks
    return next((one.monitor for one in callbacks if isinstance(one, MonitorCallback)), None)


def shorten_screen(callbacks: Sequence[TrainerCallback]) -> None:
    """Let the Trainer's own callbacks that print show few of our numbers; what users and trackers see is whole.

    Args:
        callbacks: Of a Trainer.
    """
    for one in callbacks:
        if type(one) in (PrinterCallback, ProgressCallback) and "on_log" not in vars(one):
            vars(one)["on_log"] = partial(_print_few, one.on_log)


def _print_few(on_log: Callable[..., None], *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
    ours = [name for name in logs or () if name.startswith(("monitor/", "compression/")) and name not in ON_SCREEN]
    if logs is not None and ours:
        logs = {name: value for name, value in logs.items() if name not in ours}
    on_log(*args, logs=logs, **kwargs)


class Timed:
    """Batches of a loader, with the time that each was waited for.

    Args:
        batches: It.
        recorder: Takes the times.
    """

    def __init__(self, batches: Iterator[Any], recorder: Recorder) -> None:
        self._batches, self._recorder = batches, recorder

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        start = time.perf_counter()
        batch = next(self._batches)
        self._recorder.add_on_host("data", start)
        return batch
