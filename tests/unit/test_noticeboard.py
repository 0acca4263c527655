"""Notes travel through the store, nobody waits for it longer than they said, and its thread is gone before Python is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from hf_parallel.hangs import noticeboard
from hf_parallel.hangs.noticeboard import NoticeBoard
from hf_parallel.hangs.watchdog import Watchdog


NAMES = ["rank 0", "rank 1"]


class CutOff:
    """A store whose host does not answer: every question stays inside until `back` is set."""

    def __init__(self) -> None:
        self.inside, self.back = threading.Event(), threading.Event()

    def set(self, key: str, text: str) -> None:
        """What is sent waits in the socket."""

    def check(self, keys: list[str]) -> bool:
        self.inside.set()
        self.back.wait(60)
        raise RuntimeError("Connection reset by peer")

    def get(self, key: str) -> bytes:
        raise AssertionError("not reached")


OF_OTHER_TESTS: set[threading.Thread] = set()


def names_of_threads() -> list[str]:
    here = set(threading.enumerate()) - OF_OTHER_TESTS
    return sorted(thread.name for thread in here if thread.name.startswith("hf_parallel"))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> object:
    OF_OTHER_TESTS.clear()
    OF_OTHER_TESTS.update(threading.enumerate())
    yield
    assert names_of_threads() == []


def test_ranks_read_what_the_others_wrote_last() -> None:
    store = dist.HashStore()
    boards = [NoticeBoard(store, rank, 3) for rank in range(3)]
    for text in ("first", "last"):
        boards[1].write("heartbeat", text)
    assert boards[1].flush()
    assert boards[0].read("heartbeat") == {1: "last"}
    boards[2].end("rank 2 gave up")
    assert boards[2].flush()
    boards[0].write("heartbeat", "here")
    assert boards[0].flush()
    assert boards[0].ended == "rank 2 gave up"
    for board in boards:
        board.close()


def test_a_store_that_does_not_answer_keeps_nobody_waiting() -> None:
    store = CutOff()
    board = NoticeBoard(store, 0, 2)
    assert board.read("failed", 0.05) == {}
    assert store.inside.wait(10)
    for count in range(100):  # a heartbeat each tick: nothing piles up
        board.write("heartbeat", str(count))
    assert board.read("failed", 0.05) == {}
    assert not board.flush(0.05)
    assert len(board._notes) == 1
    deadline = time.monotonic() + 10
    while not board.trouble():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "has not answered for" in board.trouble()
    store.back.set()
    board.close()
    assert "cannot be reached (Connection reset by peer)" in board.trouble()
    assert board.read("failed", 5.0) == {}


def test_the_cause_of_a_lost_connection_does_not_wait_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noticeboard.NoticeBoard.read, "__defaults__", (0.05,))
    store = CutOff()
    guard = Watchdog(store, 0, NAMES, 60.0)
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    with pytest.raises(Exception, match="rank 0 lost rank 1"), guard.waiting("waits"):
        raise RuntimeError(text)
    store.back.set()
    guard._board.close()


def test_closing_joins_the_thread_and_a_later_note_starts_it_again() -> None:
    store = dist.HashStore()
    board = NoticeBoard(store, 0, 1)
    for text in ("one", "two"):
        board.write("heartbeat", text)
        board.close()
        assert names_of_threads() == []
        assert store.get("hf_parallel/heartbeat/0") == text.encode()


def test_a_fork_leaves_the_parent_s_connection_alone() -> None:
    board = NoticeBoard(dist.HashStore(), 0, 1)
    board.write("heartbeat", "parent")
    assert board.flush()
    pid = os.fork()
    if pid == 0:
        board.write("heartbeat", "child")
        told = board.read("heartbeat", 0.2)
        board.close()
        os._exit(1 if told or board._notes else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    board.close()


def test_a_stopped_watchdog_has_no_thread() -> None:
    guard = Watchdog(dist.HashStore(), 0, NAMES, 60.0)
    guard.start()
    assert names_of_threads() == ["hf_parallel-notes", "hf_parallel-watchdog"]
    guard.stop()
    assert names_of_threads() == []
    guard.waits("after the end")
    assert names_of_threads() == []


def test_of_two_runs_in_a_process_the_one_in_use_is_watched() -> None:
    store = dist.HashStore()
    first, second = (Watchdog(store, 0, NAMES, 60.0) for _ in range(2))

    def watched() -> list[Watchdog]:
        return [t.watchdog for t in threading.enumerate() if t.name == "hf_parallel-watchdog"]

    first.start()
    second.start()
    assert watched() == [second]
    assert len(names_of_threads()) == 2
    with first.waiting("waits for the loss"):
        assert watched() == [first]
    second.runs("stage 0 runs 0F0")
    assert watched() == [second]
    first.stop()
    assert watched() == [second]
    second.stop()
    first.runs()
    second.runs()
    assert watched() == []


def test_the_first_of_two_runs_does_not_overwrite_what_the_second_says() -> None:
    store = dist.HashStore()
    first, second = (Watchdog(store, 0, NAMES, 60.0) for _ in range(2))
    first.start()
    second.start()
    second.waits("waits for the loss")
    deadline = time.monotonic() + 20
    while "waits for the loss" not in store.get("hf_parallel/heartbeat/0").decode():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for _ in range(3):
        second._board.flush()
        assert "waits for the loss" in store.get("hf_parallel/heartbeat/0").decode()
        time.sleep(0.2)
    second.stop()
    first.stop()


AT_EXIT = """
import atexit, sys, threading
import torch.distributed as dist
left = []
def names():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("hf_parallel"))
# Registered first, so it runs last: what is there now is there when the interpreter is taken down.
atexit.register(lambda: print("at the end", names()))
from hf_parallel.hangs.watchdog import Watchdog
store = dist.TCPStore("127.0.0.1", 0, 1, True)
guard = Watchdog(store.clone(), 0, ["rank 0", "rank 1"], 60.0)
guard.start()
assert guard._board.flush(30.0)
print("running", names())
"""


def test_no_thread_is_in_the_store_when_python_ends() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["running ['hf_parallel-notes', 'hf_parallel-watchdog']", "at the end []"]
