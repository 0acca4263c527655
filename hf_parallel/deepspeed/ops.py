"""The ops that DeepSpeed compiles when they are first used: which a run needs, whether they can be built, and building them.

A build takes minutes and is made once for each user (TORCH_EXTENSIONS_DIR, else ~/.cache/torch_extensions). Processes
that need the same op wait for a lock file. A killed build leaves it behind, and then every later run would wait for ever.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Iterable
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import extensions_folder, stale_locks
from hf_parallel.settings.config import HFParallelConfig


SHARED_MEMORY: Final = "deepspeed_shm_comm"  # collectives of CPU processes
CPU_ADAM: Final = "cpu_adam"
ASYNC_IO: Final = "async_io"
PIN_MEMORY: Final = "pin_memory"  # async_io is linked to it
BUILDERS: Final = {SHARED_MEMORY: "ShareMemCommBuilder", CPU_ADAM: "CPUAdamBuilder", ASYNC_IO: "AsyncIOBuilder"}
COMPILERS: Final = ("g++", "ninja")


def needed_ops(config: HFParallelConfig, *, on_cpu: bool) -> list[str]:
    """Ops that a run with these settings compiles, if it can."""
    zero = config.zero
    wanted = {
        SHARED_MEMORY: on_cpu,
        CPU_ADAM: zero.offload_optimizer != "none",
        ASYNC_IO: "nvme" in (zero.offload_optimizer, zero.offload_param),
    }
    return [name for name, needed in wanted.items() if needed]


def missing_compilers() -> list[str]:
    """Tools that builds need and that are not installed."""
    return [name for name in COMPILERS if shutil.which(name) is None]


def unbuilt(names: Iterable[str]) -> list[str]:
    """The ops among `names` that the first process to need them will compile."""
    version: Any = importlib.import_module("deepspeed.git_version_info")
    return [
        name
        for name in names
        if not version.installed_ops.get(name, False) and not any(extensions_folder().glob(f"**/{name}/{name}.so"))
    ]


def refuse_locks(names: Iterable[str], before: float | None = None) -> None:
    """Refuse to wait for a build of these ops that may have been killed.

    Args:
        names: Ops.
        before: Only locks made before this time, in seconds since the epoch, count: later ones are of this very run.

    Raises:
        ConfigError: Names each lock file.
    """
    ops = {*names, PIN_MEMORY}
    locks = [lock for lock in stale_locks(extensions_folder()) if lock.parent.name in ops]
    locks = [lock for lock in locks if before is None or lock.stat().st_mtime < before]
    if locks:
        ages = "; ".join(f"{lock} ({(time.time() - lock.stat().st_mtime) / 60:.0f} minutes old)" for lock in locks)
        raise ConfigError(
            f"zero.engine=deepspeed: a build of DeepSpeed's ops has left {ages}, and every process would wait for it, without a "
            f"word. If no build is running: rm {' '.join(map(str, locks))}"
        )


def refuse_missing_aio() -> None:
    """Refuse files without the library that writes them.

    Raises:
        ConfigError: DeepSpeed cannot build its async_io op here.
    """
    if missing_compilers() or not _builder(ASYNC_IO).is_compatible(verbose=False):
        raise ConfigError(
            "zero.offload_optimizer or zero.offload_param=nvme: DeepSpeed's async_io op cannot be built on this machine "
            f"(needs {', '.join(COMPILERS)} and the headers of libaio). Run apt-get install g++ ninja-build libaio-dev, or name "
            "an unpacked libaio in CFLAGS and LDFLAGS; or set the offload to cpu."
        )


def build(names: Iterable[str]) -> dict[str, float]:
    """Build ops that are not built yet, one after another, in this process; op -> seconds.

    Raises:
        ConfigError: An earlier build left its lock, or a compiler is missing.
    """
    names = list(names)
    refuse_locks(names)
    missing = missing_compilers()
    if names and missing:
        raise ConfigError(
            f"{', '.join(missing)}: not found, and {', '.join(names)} must be compiled. Run apt-get install g++ ninja-build."
        )
    seconds = {}
    for name in names:
        start = time.perf_counter()
        _builder(name).load()
        seconds[name] = time.perf_counter() - start
    return seconds


def _builder(name: str) -> Any:
    accelerator: Any = importlib.import_module("deepspeed.accelerator")
    return accelerator.get_accelerator().create_op_builder(BUILDERS[name])


def without_shared_memory() -> None:
    """Let CPU processes talk through gloo alone: without a compiler DeepSpeed would fail at its first call."""
    ops: Any = importlib.import_module("deepspeed.ops")
    ops.__compatible_ops__[SHARED_MEMORY] = False


def start_of_launch() -> float:
    """Time at which the process that started this one was started, in seconds since the epoch."""
    import psutil

    return float(psutil.Process(os.getppid()).create_time())
