"""The watchdog looks at what other threads are in while they go on."""

from __future__ import annotations

import threading
import types

import torch.distributed.distributed_c10d as c10d

from hf_parallel.compat.private_collectives import blocked_collective


def test_no_thread_s_callers_are_followed() -> None:
    """`f_back` of a thread that goes on reads freed memory in CPython 3.11: the process dies with SIGSEGV."""
    code = [blocked_collective.__code__]
    for one in code:
        code.extend(const for const in one.co_consts if isinstance(const, types.CodeType))
    assert not any("f_back" in one.co_names for one in code)


def test_a_thread_in_a_collective_is_found_and_one_beside_is_not() -> None:
    entered, leave = threading.Event(), threading.Event()

    def collective(entered: threading.Event, acquire: object) -> None:
        entered.set()
        acquire()  # type: ignore[operator]

    lock = threading.Lock()
    inside = types.FunctionType(collective.__code__, vars(c10d), "collective")
    lock.acquire()
    beside = threading.Thread(target=leave.wait, daemon=True)
    beside.start()
    assert blocked_collective() == (None, None)
    thread = threading.Thread(target=inside, args=(entered, lock.acquire), daemon=True)
    thread.start()
    assert entered.wait(10)
    first, name = blocked_collective()
    for _ in range(1000):  # `set` itself may still be the innermost
        if first is not None:
            break
        first, name = blocked_collective()
    again, _ = blocked_collective()
    lock.release()
    leave.set()
    thread.join(10)
    beside.join(10)
    assert name == "collective"
    assert first == again
    assert blocked_collective() == (None, None)
