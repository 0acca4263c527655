"""What takes long is told once, what does not is not; the environment chooses the level; other ranks are quiet."""

from __future__ import annotations

import subprocess
import sys
import threading

from hf_parallel.logs import told_if_slow


def test_what_takes_long_is_told_once() -> None:
    told, seen = [], threading.Event()

    def tell() -> None:
        told.append(1)
        seen.set()

    with told_if_slow(tell, after_s=0.0):
        assert seen.wait(10)
    assert told == [1]


def test_what_ends_in_time_is_not_told() -> None:
    told: list[int] = []
    before = set(threading.enumerate())
    with told_if_slow(lambda: told.append(1), after_s=600.0):
        assert set(threading.enumerate()) > before
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert told == []


def shown(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path), **environment}
    )  # fmt: skip
    return done.stderr


def test_the_environment_chooses_the_level() -> None:
    code = (
        "import logging, hf_parallel; log = logging.getLogger('hf_parallel.x'); log.debug('table'); log.info('line')"
    )
    assert shown(code) == "line\n"
    assert shown(code, HF_PARALLEL_LOG="debug") == "table\nline\n"
    assert shown(code, HF_PARALLEL_LOG="warning") == ""


def test_other_packages_warn_on_rank_0_only() -> None:
    code = (
        "import sys, warnings; from hf_parallel.logs import quiet_other_ranks; quiet_other_ranks(int(sys.argv[1]))\n"
        "for where in ('torch.utils.data', 'torchdata', 'mine'):\n"
        "    warnings.warn_explicit(where + ' says', UserWarning, 'f.py', 1, module=where)"
    )
    for rank, packages in (("0", {"torch.utils.data", "torchdata", "mine"}), ("1", {"torchdata", "mine"})):
        text = shown(f"import sys; sys.argv = ['', '{rank}']\n{code}")
        assert {name for name in ("torch.utils.data", "torchdata", "mine") if f"{name} says" in text} == packages
