"""Run a test function on several gloo ranks, one process each.

Ranks are forked from a fork server that imported torch, transformers and hf_parallel once (and `preloaded`, what a first run
would do late), so a launch costs tenths of a second where a fresh interpreter costs seconds. Ranks meet through a file store: no ports, no retries.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.pipelining",
    "transformers",
    "transformers.trainer",
    "accelerate",
    "pytest",
    "hf_parallel.trainer.callback",
    "hf_parallel.trainer.plugin",
    "tiny",
    "trainer_cases",
    "preloaded",
]
COLLECTIVE_TIMEOUT = timedelta(seconds=30)
# Several tests at a time share the cores.
PATIENCE = 3.0 if "PYTEST_XDIST_WORKER" in os.environ else 1.0


class RankError(AssertionError):
    """A rank raised, died or hung; the message holds the report of every rank that did."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    tmp_path: Path,
    timeout: float = 90.0,
    init_group: bool = True,
    env: dict[str, str] | None = None,
    grace: float = 0.5,
) -> list[Any]:
    """Return ``fn(rank, world_size, *args)`` of every rank, in rank order.

    ``fn`` must be a module-level function. With ``init_group=False`` there is no process group; a single rank then
    runs as a plain process, without launcher variables. After a failure the others have ``grace`` seconds to report.

    Raises:
        RankError: If a rank raises, exits early or is still running after ``timeout`` seconds.
    """
    timeout *= PATIENCE
    context = multiprocessing.get_context("forkserver")
    start_server()
    run_dir = tmp_path / os.urandom(4).hex()
    run_dir.mkdir(parents=True)
    processes, pending = [], {}
    for rank in range(world_size):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(writer, fn, rank, world_size, run_dir, timeout, init_group, env or {}, args),
            daemon=True,
        )
        process.start()
        writer.close()
        processes.append(process)
        pending[rank] = reader

    results: dict[int, Any] = {}
    failures: list[str] = []
    deadline = time.monotonic() + timeout
    while pending and not failures:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures = [f"rank {rank} still running after {timeout:g} s\n{_stacks(run_dir, rank)}" for rank in pending]
        for rank in [rank for rank, reader in pending.items() if reader in ready]:
            try:
                succeeded, payload = pending.pop(rank).recv()
            except EOFError:
                succeeded, payload = False, _exit_of(processes[rank])
            if succeeded:
                results[rank] = payload
            else:
                failures.append(f"rank {rank}: {payload}")
    # A rank that failed makes its peers fail a moment later; give those reports time to arrive.
    for rank, reader in list(pending.items()) if failures else []:
        if reader.poll(grace):
            try:
                failures.append(f"rank {rank}: {reader.recv()[1]}")
            except EOFError:
                failures.append(f"rank {rank}: {_exit_of(processes[rank])}")
    for process in processes:
        if failures:
            process.kill()
        process.join(10)
    if failures:
        raise RankError("\n".join(failures))
    return [results[rank] for rank in range(world_size)]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def start_server() -> None:
    """Start the fork server unless it runs; it finds `preloaded` beside this file."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    forkserver.set_forkserver_preload(PRELOAD)
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {"PYTHONPATH": path} if path else {}


def _exit_of(process: Any) -> str:
    process.join(5)
    return f"exited with code {process.exitcode} and no report"


def _stacks(run_dir: Path, rank: int) -> str:
    path = run_dir / f"stacks-{rank}.txt"
    return path.read_text() if path.exists() else "(no stacks)"


def _close_groups_that_nobody_holds() -> None:
    """Before a run makes its groups, close those of earlier runs of this process: each keeps three threads of gloo polling."""
    import torch.distributed as dist

    from hf_parallel.mesh.groups import Mesh

    gc.freeze()  # what was imported is not looked at again
    maps = dist.distributed_c10d._world.pg_map
    unused = dist.new_group()
    dist.barrier()  # a rank that closes it must not do so while another still connects
    unheld = sys.getrefcount(unused)
    del unused
    build = Mesh.build.__func__  # type: ignore[attr-defined]

    @functools.wraps(build)
    def build_alone(cls: type[Mesh], *args: Any, **kwargs: Any) -> Mesh:
        gc.collect()
        dist.barrier()  # nor one that the run made itself a moment ago
        found = [group for group in maps if group is not dist.group.WORLD]
        while found:
            group = found.pop()
            if sys.getrefcount(group) <= unheld:
                dist.destroy_process_group(group)
            del group
        mesh: Mesh = build(cls, *args, **kwargs)
        return mesh

    Mesh.build = classmethod(build_alone)  # type: ignore[assignment, method-assign]


def _rank_main(
    writer: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    run_dir: Path,
    timeout: float,
    init_group: bool,
    env: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist
    from shared_plans import share_plans

    share_plans()
    if init_group or world_size > 1:  # one process without a group is a plain `python script.py`
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= env
    os.chdir(run_dir)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with open(run_dir / f"stacks-{rank}.txt", "w") as stacks:
        faulthandler.dump_traceback_later(max(1.0, timeout - 2.0), file=stacks)
        try:
            if init_group:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{run_dir / 'store'}",
                    rank=rank,
                    world_size=world_size,
                    timeout=COLLECTIVE_TIMEOUT,
                )
                _close_groups_that_nobody_holds()
            result = fn(rank, world_size, *args)
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
        except BaseException:
            writer.send((False, traceback.format_exc()))
        else:
            writer.send((True, result))
        faulthandler.cancel_dump_traceback_later()
