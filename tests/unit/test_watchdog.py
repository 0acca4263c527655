"""A rank that waits too long ends the job with a report that names who is waited for; a rank that works is let alone."""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_runner import RankError, run_ranks

from hf_parallel.compat.private_collectives import blocked_collective, wait_for
from hf_parallel.errors import ConfigError, RankFailure
from hf_parallel.hangs.blame import report
from hf_parallel.hangs.heartbeats import IDLE, Heartbeats, Line, Seen, Stay
from hf_parallel.hangs.noticeboard import NoticeBoard
from hf_parallel.hangs.watchdog import EXIT_CODE, Watchdog


NAMES = ["rank 0 (pp 0 of 2)", "rank 1 (pp 1 of 2)"]
LOST = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")

# One process plays rank 0; `OTHER` does what rank 1 would have done.
SCRIPT = """
import torch.distributed as dist
store = dist.HashStore()
other = Watchdog(store, 1, NAMES, 0.8)
guard = Watchdog(store, 0, NAMES, 0.8)
OTHER
guard.start()
GUARDED
"""


def play(rank: int, world_size: int, script: str, stderr: str) -> str:
    with open(stderr, "w", buffering=1) as sys.stderr:
        exec(script, {"Watchdog": Watchdog, "Line": Line, "Seen": Seen, "NAMES": NAMES, "threading": threading})
    return "survived"


def end_of(guarded: str, folder: Path, other: str = "pass") -> str:
    """What a rank that must end itself wrote to stderr."""
    script = SCRIPT.replace("OTHER", other).replace("GUARDED", guarded)
    with pytest.raises(RankError, match=rf"exited with code {EXIT_CODE} "):
        run_ranks(play, 1, script, str(folder / "stderr.txt"), tmp_path=folder, init_group=False, timeout=30)
    return (folder / "stderr.txt").read_text()


def test_the_report_names_the_waiting_and_the_missing_rank_and_the_setting() -> None:
    heartbeats = {
        0: {"waits": True, "text": "waits for the loss of the last stage", "age": 4.0},
        1: {"waits": False, "text": "runs the forward of microbatch 0 at stage 1", "age": 5.0},
        2: {"waits": True, "text": "waits for the loss of the last stage", "age": 4.0},
    }
    names = [f"rank {rank} (pp {rank} of 4)" for rank in range(4)]
    lines = report(
        names, 0, "waits for the loss of the last stage", 4.04, heartbeats, "monitor.hang_timeout_s=4"
    ).splitlines()
    assert lines[0] == (
        "hf_parallel: rank 0 (pp 0 of 4) gave up: waits for the loss of the last stage, for 4.0 s "
        "(monitor.hang_timeout_s=4)."
    )
    assert lines[1] == "The job waits for: rank 1 (pp 1 of 4), rank 3 (pp 3 of 4)."
    assert (
        lines[2]
        == "rank 0 (pp 0 of 4) waits for the loss of the last stage, held up by rank 3 (pp 3 of 4), which never reported."
    )
    assert lines[3] == "  rank 0 (pp 0 of 4), rank 2 (pp 2 of 4): waits for the loss of the last stage, since 4.0 s"
    assert lines[4] == "  rank 1 (pp 1 of 4): runs the forward of microbatch 0 at stage 1, since 5.0 s"
    assert lines[5] == "  rank 3 (pp 3 of 4): never seen"
    assert "raise monitor.hang_timeout_s" in lines[6]


def test_a_report_of_ranks_that_all_wait_blames_nobody() -> None:
    heartbeats = {rank: {"waits": True, "text": "waits", "age": 3.0} for rank in range(2)}
    assert "The job waits for" not in report(NAMES, 0, "waits", 3.0, heartbeats, "2 s")


def test_the_status_is_restored_after_a_wait_also_when_it_fails() -> None:
    guard = Watchdog(None, 0, NAMES, 1.0)
    guard.runs("stage 0 runs 0F1")
    with guard.waiting("outer"):
        with pytest.raises(ValueError, match="inner"), guard.waiting("inner"):
            raise ValueError(guard._line[1])
        assert guard._line[:2] == (True, "outer")
    assert guard._line[:2] == (False, "stage 0 runs 0F1")


def test_after_a_call_into_the_engine_a_rank_works_for_itself() -> None:
    guard = Watchdog(None, 0, NAMES, 1.0)
    with guard.engaged():
        guard.waits("waits at stage 0 for stage 1 to receive the activation of microbatch 3")
    assert guard._line[:2] == (False, IDLE)


def test_a_call_into_the_engine_that_every_step_makes_is_named_while_it_lasts() -> None:
    guard = Watchdog(None, 0, NAMES, 1.0)
    with pytest.raises(ValueError, match="runs the backward pass"), guard.engaged("runs the backward pass"):
        raise ValueError(guard._line[1])
    assert guard._line[:2] == (False, IDLE)


def test_a_lost_connection_becomes_the_name_of_the_rank() -> None:
    guard = Watchdog(None, 0, NAMES, 1.0)
    with (
        pytest.raises(
            RankFailure, match=r"rank 0 .* lost rank 1 \(pp 1 of 2\)\. It waits for the loss.*reset by peer"
        ),
        guard.waiting("waits for the loss"),
    ):
        raise LOST


def test_a_rank_that_said_why_it_failed_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    names = [f"rank {rank} (pp {rank} of 3)" for rank in range(3)]
    guards = [Watchdog(store, rank, names, 60.0) for rank in range(3)]
    with (
        pytest.raises(RankFailure, match=r"lost a rank, one of rank 1 \(pp 1 of 3\), rank 2"),
        guards[0].lost.named(),
    ):
        raise LOST
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    guards[2].lost.name_uncaught_exceptions()
    sys.excepthook(ValueError, ValueError("a bad row"), None)
    with pytest.raises(RankFailure, match=r"lost rank 2 \(pp 2 of 3\), which failed with ValueError: a bad row"):  # noqa: SIM117
        with guards[0].lost.named():
            raise LOST


def test_an_uncaught_exception_is_followed_by_the_name_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    for _ in range(2):  # a second run in one process names the rank once
        Watchdog(None, 1, NAMES, 1.0).start()
    sys.excepthook(ValueError, ValueError("a bad row"), None)
    assert capsys.readouterr().err == "hf_parallel: rank 1 (pp 1 of 2) failed: ValueError: a bad row\n"


@pytest.mark.parametrize("error", [ValueError("gloo"), RuntimeError("shapes differ"), ConfigError("gloo")])
def test_other_errors_pass_unchanged(error: Exception) -> None:
    guard = Watchdog(None, 0, NAMES, 1.0)
    with pytest.raises(type(error)) as caught, guard.waiting("waits"):
        raise error
    assert caught.value is error


def wait_in_it(wait: Callable[..., bool]) -> None:
    wait(True, 30)  # of a lock: no Python code inside, as in the wait of a collective


def test_a_thread_inside_a_collective_is_found_and_only_there() -> None:
    from torch.distributed import distributed_c10d

    # What makes a collective is the module whose globals its frame has.
    collective = types.FunctionType(wait_in_it.__code__, vars(distributed_c10d))
    lock, stay = threading.Lock(), Stay()
    lock.acquire()
    assert stay.look()[0] is None
    thread = threading.Thread(target=collective, args=(lock.acquire,))
    thread.start()
    end = time.monotonic() + 30
    while stay.look()[0] is None and time.monotonic() < end:
        time.sleep(0.01)
    first, second = stay.look(), stay.look()
    lock.release()
    thread.join()
    assert first == second
    assert first[0] == "wait_in_it"
    assert stay.look()[0] is None


def test_a_thread_that_waits_for_a_collective_it_began_is_found() -> None:
    lock, stay = threading.Lock(), Stay()
    lock.acquire()
    work = types.SimpleNamespace(wait=functools.partial(lock.acquire, True, 30))
    thread = threading.Thread(target=wait_for, args=(work,))
    thread.start()
    end = time.monotonic() + 30
    while stay.look()[0] is None and time.monotonic() < end:
        time.sleep(0.01)
    found = stay.look()
    lock.release()
    thread.join()
    assert found[0] == "a collective"
    assert stay.look()[0] is None


def test_callers_of_a_thread_that_goes_on_are_not_followed() -> None:
    """`f_back` of such a thread may read freed memory in CPython 3.11: the process would end in SIGSEGV."""
    assert "f_back" not in blocked_collective.__code__.co_names


def test_a_rank_gives_up_a_wait_within_the_bound(tmp_path: Path) -> None:
    stderr = end_of('guard.waits("waits for the activation"); threading.Event().wait(20)', tmp_path)
    assert "rank 0 (pp 0 of 2) gave up: waits for the activation" in stderr
    assert "The job waits for: rank 1 (pp 1 of 2)." in stderr
    waited = re.search(r"for ([\d.]+) s \(monitor\.hang_timeout_s=0\.8\)", stderr)
    assert waited is not None
    assert 0.8 <= float(waited[1]) <= 0.8 + 2 + 0.8 / 4


def test_a_rank_that_is_silent_while_it_waits_is_named(tmp_path: Path) -> None:
    written = 'other._beats.publish(Seen(Line(True, "waits for the header", 0.0), True, ""), 0.0, None)'
    stderr = end_of('guard.waits("waits for the activation"); threading.Event().wait(20)', tmp_path, written)
    assert "The job waits for: rank 1 (pp 1 of 2)." in stderr
    assert "rank 1 (pp 1 of 2): silent; last seen: waits for the header" in stderr


def test_ranks_that_give_up_together_blame_nobody(tmp_path: Path) -> None:
    written = 'other._beats.publish(Seen(Line(True, "waits for the gradient", 0.0), True, ""), 0.8, None, last=True)'
    stderr = end_of('guard.waits("waits for the activation"); threading.Event().wait(20)', tmp_path, written)
    assert "The job waits for" not in stderr
    assert "rank 1 (pp 1 of 2): waits for the gradient, since 0.8 s" in stderr


def test_a_report_comes_also_when_the_store_is_gone(tmp_path: Path) -> None:
    broken = """
class Broken:
    def set(self, *args): raise RuntimeError("no store")
    check = get = set
guard._store = Broken()
"""
    stderr = end_of('guard.waits("waits for the loss"); threading.Event().wait(20)', tmp_path, broken)
    assert "gave up: waits for the loss" in stderr


def test_a_slow_rank_that_works_is_not_killed(tmp_path: Path) -> None:
    guarded = """
guard.runs("stage 0 runs 0F0"); threading.Event().wait(2)
for _ in range(5):
    guard.waits("waits"); threading.Event().wait(0.4); guard.runs()
guard.waits("waits"); guard.stop(); threading.Event().wait(1.2)
"""
    script = SCRIPT.replace("OTHER", "pass").replace("GUARDED", guarded)
    assert run_ranks(play, 1, script, str(tmp_path / "e"), tmp_path=tmp_path, init_group=False) == ["survived"]


def test_two_ranks_that_ask_at_the_same_moment_do_not_take_each_other_for_silent() -> None:
    store = dist.HashStore()
    ranks = [Heartbeats(NoticeBoard(store, rank, 2), rank) for rank in range(2)]
    together = threading.Barrier(2)

    def read(rank: int) -> dict[int, dict[str, Any]]:
        ranks[rank].publish(Seen(Line(True, "waits", time.monotonic()), True, ""), 1.0, None)
        ranks[rank].board.flush()
        together.wait()
        return ranks[rank].read()

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(read, range(2)))
    for rank in range(2):
        assert not any(line.get("silent") for line in both[rank].values()), both
        ranks[rank].board.close()
