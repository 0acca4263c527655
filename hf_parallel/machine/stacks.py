"""Tells from the main thread's stack, in words, what this process does: loads data, saves, evaluates, compiles.

Stacks are written by `faulthandler`, which walks them in one go: following `f_back` of a thread that goes on meanwhile may read
freed memory (CPython 3.11).
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple


_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "/hf_parallel/")
SAVING = ("/hf_parallel/trainer/model_folder.py", "/hf_parallel/trainer/loop_state.py")
STARTS = ("__init__", "__iter__", "_get_iterator", "_reset")  # of torch's loader: once an epoch
MAX_SHOWN = 4


class Frame(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    name: str

    @property
    def is_users(self) -> bool:
        """Whether it is neither of an installed package nor of Python nor of hf_parallel."""
        return not any(part in self.file for part in LIBRARIES) and not self.file.startswith("<")


class Activity(NamedTuple):
    """Activity of a process, and whether the measured steps say how long that may take."""

    text: str
    is_measured: bool


def main_stack() -> list[Frame]:
    """The calls of the main thread, innermost first; empty where they cannot be written down."""
    main = threading.main_thread().ident
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return parse_stack(file.read().decode("utf-8", "replace"), main or 0)
    except OSError:
        return []


def parse_stack(text: str, thread: int) -> list[Frame]:
    """The calls of one thread in what `faulthandler` wrote, innermost first."""
    frames: list[Frame] = []
    is_inside = False
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            is_inside = int(head[1], 16) == thread
        frame = _FRAME.match(line) if is_inside else None
        if frame:
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return frames


def activity_of(stack: Sequence[Frame]) -> Activity | None:
    """The innermost known activity on a stack; None if none is known. It is measured only if all those around it are."""
    found = list(_activities(stack))
    return Activity(found[0].text, all(each.is_measured for each in found)) if found else None


def _activities(stack: Sequence[Frame]) -> Iterator[Activity]:
    inner: Frame | None = None
    for frame in stack:
        if frame.file.endswith(
            "/torch/_dynamo/eval_frame.py"
        ):  # calls what is compiled, or (`fully_shard`) what never is
            pass
        elif any(part in frame.file for part in ("/torch/_dynamo/", "/torch/_inductor/", "/triton/")):
            yield Activity("compiles", False)
        elif frame.file.endswith("/torch/utils/data/dataloader.py") and frame.name in STARTS:
            yield Activity("starts the data loader", False)
        elif "/torch/utils/data/" in frame.file or frame.file.endswith("accelerate/data_loader.py"):
            yield Activity("is in the data loader", True)
        elif "/hf_parallel/checkpoints/" in frame.file or frame.file.endswith(SAVING):
            yield Activity("saves or loads", False)
        elif frame.file.endswith("transformers/trainer_callback.py") and frame.name == "call_event":
            if inner is not None and inner.is_users:
                yield Activity(f"is in a callback ({inner.name})", False)
        elif frame.file.endswith("transformers/trainer.py"):
            if frame.name in ("_save_checkpoint", "save_model"):
                yield Activity("saves", False)
            elif frame.name in ("evaluate", "predict", "evaluation_loop"):
                yield Activity("evaluates", False)
        inner = frame


def shown_stack(stack: Sequence[Frame]) -> str:
    """The innermost calls, and the first of the user's own code if it is not among them, on one line."""
    first = list(stack[: MAX_SHOWN - 1])
    own = next((frame for frame in stack if frame.is_users), None)
    calls = [*first, *([own] if own is not None and own not in first else [])]
    return " < ".join(f"{frame.name} at {'/'.join(frame.file.split('/')[-2:])}:{frame.line}" for frame in calls)
