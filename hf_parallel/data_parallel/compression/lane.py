"""One ordered lane for the work of a compressed exchange, beside the backward pass.

A job encodes, starts a collective, and is resumed when that is through. Jobs are generators: each yields the
collective it waits for. The lane resumes them in an order that depends on nothing but the order of submission, so all
ranks start their collectives alike; and a job is resumed only after AHEAD newer ones have started a collective, so that
some are on the wire while another is encoded or decoded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import torch

from hf_parallel.compat.private_collectives import Pending


Job: TypeAlias = Generator[Pending | None, None, None]
AHEAD = 2  # gloo works on two collectives of a group at once: both end together, and a third keeps the link busy then


@dataclass(slots=True)
class _Active:
    """A job that waits for a collective.

    Args:
        job: The job.
        work: The collective; None before the first.
        future: Future of the caller that waits for the job.
        age: Jobs that were taken since the collective was started.
    """

    job: Job
    work: Pending | None
    future: Future[None]
    age: int = 0


class Lane:
    """Runs jobs: in a thread of its own for the CPU, on a stream of its own for CUDA.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._active: list[_Active] = []
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> Callable[[], None]:
        """Queue a job; the function that is returned waits until it is done, and raises what it raised."""
        future: Future[None] = Future()
        if self._stream is None:
            self._command(lambda: self._take(job, future))
            return future.result
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._take(job, future)

        def wait() -> None:
            future.result()
            torch.cuda.current_stream().wait_stream(stream)

        return wait

    def flush(self) -> None:
        """No more jobs follow for now: finish those that wait for a successor."""
        if self._stream is None:
            self._command(self._drain)
            return
        with torch.cuda.stream(self._stream):
            self._drain()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._commands.put(None)
            self._thread.join()
            self._thread = None

    def _command(self, command: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="gradient-compression", daemon=True)
            self._thread.start()
        self._commands.put(command)

    @torch.no_grad()
    def _serve(self) -> None:
        while (command := self._commands.get()) is not None:
            command()

    def _take(self, job: Job, future: Future[None]) -> None:
        older, self._active = self._active, []
        self._resume(_Active(job, None, future))
        newest, self._active = self._active, []
        for item in older:
            item.age += 1
            if item.age < AHEAD:
                self._active.append(item)
            else:
                self._resume(item)
        self._active += newest

    def _drain(self) -> None:
        while self._active:
            older, self._active = self._active, []
            for item in older:
                self._resume(item)

    def _resume(self, item: _Active) -> None:
        """Run a job's next step; it stays active if it waits for another collective."""
        try:
            with torch.no_grad():
                if item.work is not None:
                    item.work.wait()
                self._active.append(_Active(item.job, next(item.job), item.future))
        except StopIteration:
            item.future.set_result(None)
        except BaseException as error:  # noqa: BLE001  raised by the caller that waits for the job
            item.future.set_exception(error)
