"""The monitor inside a Trainer: a callback of ours, the iterator of its batches, and the lines of its console."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler

from hf_parallel.engine.session import Session
from hf_parallel.monitor.recorder import Recorder
from hf_parallel.monitor.report.console import PREFIX, line_of
from hf_parallel.monitor.report.monitor import Monitor
from hf_parallel.trainer.flags import agree_on_flags


SHOWN = (PrinterCallback.on_log, ProgressCallback.on_log)  # what prints all keys of an entry


class MonitorCallback(TrainerCallback):
    """Begins and ends the measurements of a run.

    Args:
        session: The parallel run.
        handler: Has the callbacks that print to the console.
    """

    def __init__(self, session: Session, handler: CallbackHandler) -> None:
        self._session, self._handler = session, handler
        self.monitor: Monitor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model is parallelized by now."""
        session = self._session
        if session.config.monitor.metrics:
            for callback in self._handler.callbacks:
                shorten(callback)
        if session.engine is not None and session.engine.recorder.on:
            self.monitor = Monitor(session.engine, session.config, session.schedule, Path(str(args.output_dir)))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An optimizer step is over."""
        if self.monitor is not None:
            agree_on_flags(self._session, control, state, "should_log")
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


def shorten(callback: TrainerCallback) -> None:
    """Let a stock callback print its usual line and one of metrics below it; other callbacks stay as they are."""
    if getattr(type(callback), "on_log", None) not in SHOWN or "on_log" in vars(callback):
        return
    stock = callback.on_log

    @functools.wraps(stock)
    def on_log(
        args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> Any:
        if f"{PREFIX}step_s" not in logs:
            return stock(args, state, control, logs=logs, **kwargs)
        stock(args, state, control, logs={k: v for k, v in logs.items() if not k.startswith(PREFIX)}, **kwargs)
        is_printer = isinstance(callback, PrinterCallback)
        if state.is_local_process_zero if is_printer else state.is_world_process_zero:
            tqdm.write(line_of(logs, state.global_step, state.max_steps))  # beside a bar, if there is one
        return None

    vars(callback)["on_log"] = on_log


def monitor_of(trainer: Trainer) -> Monitor | None:
    """The monitor of a Trainer; None without one."""
    callbacks = trainer.callback_handler.callbacks
    return next((one.monitor for one in callbacks if isinstance(one, MonitorCallback)), None)


class Timed:
    """Batches of a loader, with the time that each was waited for.

    Args:
        batches: Iterator of the loader.
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
