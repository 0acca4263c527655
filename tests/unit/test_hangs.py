"""Who waits for whom is followed to the rank that holds up the job, and a stack says what a rank does."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rank_runner import run_ranks

from hf_parallel.compat.private_collectives import record_collectives, record_prefix, write_record
from hf_parallel.hangs.blame import agreed_bound, blame, chain, is_measured, listed, moves, report
from hf_parallel.machine.processes import birth_of, state_of
from hf_parallel.machine.stacks import Frame, activity_of, main_stack, parse_stack, shown_stack
from hf_parallel.mesh.shape import MeshShape


def waits(*awaits: int, age: float = 20.0, **more: Any) -> dict[str, Any]:
    return {"waits": True, "text": "waits", "age": age, "awaits": list(awaits) or None, "measured": True, **more}


def runs(text: str = "works", age: float = 21.0, **more: Any) -> dict[str, Any]:
    return {"waits": False, "text": text, "age": age, "awaits": None, "measured": True, **more}


@pytest.mark.parametrize(
    ("lines", "path", "stuck"),
    [
        ({0: waits(1), 1: waits(2), 2: runs(), 3: runs()}, [0, 1, 2], [2]),  # rank 3 is nobody's reason
        ({0: waits(1, 2, 3), 1: waits(3), 2: waits(0), 3: runs()}, [0, 3], [3]),
        ({0: waits(), 1: runs(age=1.0), 2: runs(age=30.0), 3: waits(0)}, [0, 2], [1, 2]),  # the longer one first
        ({0: waits(), 1: runs(age=50.0), 2: runs(age=1.0, silent=True), 3: waits(0)}, [0, 2], [1, 2]),
        ({0: waits(1), 1: waits(3), 2: waits(3)}, [0, 1, 3], [3]),  # one that never reported
        ({0: waits(1), 1: waits(0), 2: runs(), 3: runs()}, [], []),
    ],
    ids=["chain", "group", "unknown", "silent", "unseen", "circle"],
)
def test_waits_are_followed_to_whom_nobody_holds_up(lines: Any, path: list[int], stuck: list[int]) -> None:
    assert blame(lines, 0, 4) == (path, stuck)


def test_the_sentence_names_everybody_on_the_way_and_the_stack_of_the_last() -> None:
    lines = {0: waits(1), 1: waits(2), 2: runs("is in the data loader", stack="collate at train.py:3")}
    assert chain(["rank 0", "rank 1", "rank 2"], [0, 1, 2], lines) == (
        "rank 0 waits, held up by rank 1, which waits since 20.0 s, held up by rank 2, which is in the data loader since 21.0 s "
        "(stack: collate at train.py:3)."
    )
    silent = {0: waits(1), 1: runs("silent (stopped); last seen: works", silent=True)}
    assert "held up by rank 1, which is silent (stopped); last seen: works since" in chain(
        ["rank 0", "rank 1"], [0, 1], silent
    )


def test_ranks_that_do_the_same_share_a_line() -> None:
    lines = {0: waits(age=3.0), 1: runs(), 2: waits(age=5.0)}
    assert listed(["a", "b", "c", "d"], lines, "never seen") == [
        "  a, c: waits, since 5.0 s",
        "  b: works, since 21.0 s",
        "  d: never seen",
    ]


def test_the_bound_is_the_largest_that_any_rank_measured_and_the_time_out_at_most() -> None:
    assert agreed_bound({0: waits(bound=15.0), 1: runs(bound=40.0)}, 600.0) == 40.0
    assert agreed_bound({0: waits(bound=15.0), 1: runs(bound=None)}, 600.0) == 15.0  # it wrote before its third step
    assert agreed_bound({0: waits(bound=None)}, 600.0) == 600.0
    assert agreed_bound({0: waits(bound=15.0), 1: runs(bound=40.0)}, 20.0) == 20.0


def test_only_what_steps_do_is_measured() -> None:
    assert is_measured({0: waits(1), 1: runs()}, 0, [1])
    assert not is_measured({0: waits(1), 1: runs(measured=False)}, 0, [1])
    assert not is_measured({0: waits(1, measured=False), 1: runs()}, 0, [1])
    assert not is_measured({0: waits(1)}, 0, [1])
    assert is_measured({0: waits(1), 1: waits(0)}, 0, [])
    assert not is_measured({0: waits(1), 1: waits(0, measured=False)}, 0, [])


def test_who_has_just_begun_something_else_is_slow_and_does_not_hang() -> None:
    assert moves({0: waits(1), 1: runs(age=0.4)}, [1])
    assert not moves({0: waits(1), 1: runs(age=21.0)}, [1])
    assert not moves({0: waits(1), 1: {**runs(age=0.4), "silent": True}}, [1])
    assert not moves({0: waits(1)}, [1])


def test_axes_of_a_group_are_those_along_which_its_ranks_differ() -> None:
    shape = MeshShape(2, 2, 2)
    assert [shape.axes_of(ranks) for ranks in ([0, 1], [0, 2], [0, 4], [0, 1, 2, 3], [3], [])] == [
        "tp",
        "pp",
        "dp",
        "pp, tp",
        "",
        "",
    ]


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("does", "state"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "stopped"),
        ("sys.stdin.read()", ""),
    ],
)
def test_what_became_of_a_process_is_known_until_its_parent_asks(does: str, state: str) -> None:
    code = f"import os, signal, sys; {does}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        birth, deadline = birth_of(process.pid), time.monotonic() + 30
        assert state_of(process.pid, (birth or 0) + 1) == "ended"  # another process has its number
        while state_of(process.pid, birth) != state and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state_of(process.pid, birth) == state
        process.kill()
    assert state_of(process.pid, birth) == "ended"


# -- stacks ------------------------------------------------------------------------------------------------------------

LIB = "/usr/lib/python3.11/site-packages"
USER = Frame("/home/me/train.py", 31, "collate")
STEP = Frame(f"{LIB}/transformers/trainer.py", 2000, "_run_epoch")
LOADER = Frame(f"{LIB}/torch/utils/data/dataloader.py", 700, "__next__")
EVENT = Frame(f"{LIB}/transformers/trainer_callback.py", 500, "call_event")


@pytest.mark.parametrize(
    ("stack", "text", "measured"),
    [
        ([USER, LOADER, STEP], "is in the data loader", True),
        ([USER, LOADER, STEP, Frame(f"{LIB}/transformers/trainer.py", 9, "evaluate")], "is in the data loader", False),
        ([USER, LOADER._replace(name="_get_iterator"), LOADER], "starts the data loader", False),
        ([Frame("/home/me/train.py", 7, "on_step_end"), EVENT, STEP], "is in a callback (on_step_end)", False),
        ([Frame(f"{LIB}/torch/_dynamo/convert_frame.py", 1, "compile"), STEP], "compiles", False),
        ([Frame(f"{LIB}/transformers/trainer.py", 9, "_save_checkpoint"), STEP], "saves", False),
        ([Frame("/a/hf_parallel/checkpoints/weights/write.py", 1, "write_weights"), STEP], "saves or loads", False),
        ([Frame("/a/hf_parallel/trainer/model_folder.py", 1, "save"), STEP], "saves or loads", False),
    ],
    ids=[
        "loader",
        "loader_of_an_evaluation",
        "start_of_a_loader",
        "callback",
        "compiles",
        "saves",
        "writes",
        "exports",
    ],
)
def test_a_stack_says_what_a_rank_does(stack: list[Frame], text: str, measured: bool) -> None:
    assert activity_of(stack) == (text, measured)


def test_a_stack_without_known_calls_says_nothing() -> None:
    assert activity_of([USER, STEP]) is None
    assert (
        activity_of([Frame(f"{LIB}/torch/_dynamo/eval_frame.py", 1, "_fn"), STEP]) is None
    )  # what was compiled, or never is
    assert activity_of([]) is None


def test_the_users_own_call_is_shown_however_deep_the_library_is() -> None:
    deep = [Frame(f"{LIB}/torch/a{n}.py", n, f"f{n}") for n in range(5)]
    assert (
        shown_stack([*deep, USER, STEP])
        == "f0 at torch/a0.py:0 < f1 at torch/a1.py:1 < f2 at torch/a2.py:2 < collate at me/train.py:31"
    )
    assert shown_stack([USER, *deep]).startswith("collate at me/train.py:31 < f0")


def test_the_main_thread_is_found_from_another_one() -> None:
    found: list[Frame] = []
    thread = threading.Thread(target=lambda: found.extend(main_stack()))
    thread.start()
    thread.join()
    assert any(frame.name == "test_the_main_thread_is_found_from_another_one" for frame in found)
    assert parse_stack('Thread 0x1 (most recent call first):\n  File "a", line 1 in b\n', 2) == []


# -- what torch records of collectives ---------------------------------------------------------------------------------


def test_collectives_are_recorded_unless_the_user_has_chosen() -> None:
    environment: dict[str, str] = {}
    assert record_prefix(environment) is None
    record_collectives(environment)
    assert environment == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert str(record_prefix(environment)).endswith("/nccl_trace_rank_")
    chosen = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    record_collectives(chosen)
    assert chosen == {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert record_prefix(chosen) is None
    assert record_prefix({"TORCH_FR_BUFFER_SIZE": "9", "TORCH_FR_DUMP_TEMP_FILE": "/logs/rank_"}) == "/logs/rank_"


def recorded_main(rank: int, world_size: int, folder: str) -> bool:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(2))
    return write_record(f"{folder}/rank_{rank}")


def test_what_was_recorded_is_written_for_each_rank(tmp_path: Path) -> None:
    env = {"TORCH_FR_BUFFER_SIZE": "100"}
    assert run_ranks(recorded_main, 2, str(tmp_path), tmp_path=tmp_path, env=env) == [True, True]
    for rank in range(2):
        assert "version" in pickle.loads((tmp_path / f"rank_{rank}").read_bytes())


def test_ranks_that_wait_for_each_other_are_told_what_makes_them_disagree() -> None:
    lines = {0: waits(1), 1: waits(0)}
    text = report(["rank 0", "rank 1"], 0, "waits for the gradients", 12.0, lines, "monitor.hang_timeout_s=12")
    assert "Every rank waits for others: they disagree about what comes next" in text
    assert "replicas read unequal numbers of batches" in text
    assert "If that rank is only slow" not in text
    slow = report(["rank 0", "rank 1"], 0, "waits", 12.0, {0: waits(1), 1: runs()}, "monitor.hang_timeout_s=12")
    assert "If that rank is only slow" in slow
