"""The process that starts the runs of a job and judges them: `python -m hf_parallel.proof.start FOLDER`.

It imports everything once and forks: the ranks of the layout together with the reference, then the perturbed references, then
the judge. It never computes itself, so no thread of torch exists when it forks.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import is_deepspeed_available

from hf_parallel.errors import ConfigError, PlanError, RankMismatchError, UnsupportedError
from hf_parallel.proof.bisect import first_divergence, first_step
from hf_parallel.proof.compare import AGAIN, PERTURBED, REFERENCE, Comparison, compare, perturbed_of
from hf_parallel.proof.job import Job
from hf_parallel.proof.record import RUN
from hf_parallel.proof.script import train_script
from hf_parallel.proof.ties import SCORES
from hf_parallel.proof.train import train


JOB, ERROR, LOG, JUDGED, PLACE = "job.json", "error.json", "output.log", "judged.json", "place.json"
REFUSED, NOTICED = "refused", "noticed"  # how a rank failed
COMPARED, TRACED, JUDGE = "compared", "traced", "judge"
SILENT = "ended and left no report"
GRACE = 3.0  # s, for the others of a layout in which a rank failed
LONGEST = 1800.0  # s, of a run
TIMEOUT = timedelta(seconds=60)


def main(folder: Path, kept: Path | None = None) -> None:
    """Run a job, compare, and run it once more with traces if it differs; leaves `judged.json`, or errors of the runs.

    Args:
        folder: Folder of the job.
        kept: Folder of references for other jobs on the same model and batches; None: they are not kept.
    """
    _import_what_runs_import()
    job = Job.load(folder / JOB)
    compared, traced = folder / COMPARED, folder / TRACED
    if not _references(job, compared, kept):
        return
    ended = _layout(job, compared)
    if not ended and (_is(REFUSED, compared) or not _can_judge(compared)):
        return
    found = _judged(job, folder)
    if found is not None and ended and not found.ok and found.is_near and _more_references(job, compared, kept):
        found = _judged(job, folder)
    if found is None or (ended and found.ok):
        return
    again = _to_trace(job, compared, first_step(found))
    is_traced = _references(again, traced, kept)
    if is_traced:
        _layout(again, traced)  # what a rank noted before it failed counts as well

    def place() -> None:
        part = first_divergence(again, found, traced if is_traced else None)
        (folder / PLACE).write_text(json.dumps(part))

    _run_all(folder, {PLACE.removesuffix(".json"): place})


def _import_what_runs_import() -> None:
    """Import once, for all runs, what a Trainer's first training imports; none looks for garbage among it."""
    if is_deepspeed_available():  # accelerate asks of every model whether it is DeepSpeed's
        importlib.import_module("deepspeed")
    gc.collect()
    gc.freeze()


def _judged(job: Job, folder: Path) -> Comparison | None:
    """Compare the runs in a process of its own; None if that failed."""
    ended = _run_all(folder, {JUDGE: lambda: compare(job, folder / COMPARED).dump(folder / JUDGED)})
    return Comparison.load(folder / JUDGED) if ended else None


def _to_trace(job: Job, folder: Path, steps: int) -> Job:
    """The job that finds where the runs part, with the sizes of the batches that a script chose."""
    sizes = {}
    if job.script is not None:
        run = json.loads((folder / REFERENCE / RUN).read_text())
        sizes = {"rows": run["rows"] // job.replicas, "accumulation": run["accumulation"]}
    return dataclasses.replace(job, steps=steps, trace=True, **sizes)


def _references(job: Job, folder: Path, kept: Path | None) -> bool:
    """Train in one process, and in some with perturbed weights; whether all ended well."""
    places = {REFERENCE: 0} | {f"perturbed{number}": number for number in range(1, PERTURBED + 1)}
    if kept is None:
        runs = {place: _perturbed(job, folder / place, number) for place, number in places.items()}
        ended = _run_all(folder, runs, job.home)
        if not ended or not (folder / REFERENCE / SCORES).exists():
            return ended
        last = f"perturbed{PERTURBED}"  # again, with near ties of what the others chose turned
        return _run_all(folder, {last: runs[last]}, job.home)
    home = kept / job.reference_key
    done = home / "done"
    ended = done.exists() or _references(job, home, None)
    if ended:
        done.touch()
    folder.mkdir(parents=True, exist_ok=True)
    for place in places:
        (folder / place).symlink_to(home / place)
    return ended


def _more_references(job: Job, folder: Path, kept: Path | None) -> bool:
    """Train in one process with weights perturbed in other ways; whether all ended well."""
    home = folder if kept is None else kept / job.reference_key
    numbers = [n for n in range(PERTURBED + 1, AGAIN + 1) if not (home / f"perturbed{n}" / RUN).exists()]
    ended = all(
        _run_all(home, {f"perturbed{n}": _perturbed(job, home / f"perturbed{n}", n)}, job.home) for n in numbers
    )
    for place in perturbed_of(home):
        if not (folder / place.name).exists():
            (folder / place.name).symlink_to(place)
    return ended


def _layout(job: Job, folder: Path) -> bool:
    """Train in the layout; whether all ranks ended well."""
    return _run_all(folder, {f"rank{r}": _rank(job, folder, r, job.processes) for r in range(job.processes)}, job.home)


def _is(what: str, folder: Path) -> bool:
    """Whether a rank of the layout failed so."""
    return any(json.loads(path.read_text()).get(what) for path in folder.glob(f"rank*/{ERROR}"))


def _can_judge(folder: Path) -> bool:
    """Whether a layout that failed left something to compare, or noticed by itself, in the first step, that it goes wrong."""
    return (folder / "rank0" / "gradients-0.json").exists() or _is(NOTICED, folder)


def _perturbed(job: Job, folder: Path, number: int) -> Callable[[], None]:
    if job.script is None:
        return lambda: train(job, folder, layout=False, perturbed=number)
    return lambda: train_script(job, folder, layout=False, perturbed=number)


def _rank(job: Job, folder: Path, rank: int, world: int) -> Callable[[], None]:
    def run() -> None:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world, timeout=TIMEOUT
        )
        if job.script is None:
            train(job, folder / f"rank{rank}", layout=True)
        else:
            train_script(job, folder / f"rank{rank}", layout=True)
        dist.barrier()
        dist.destroy_process_group()

    return run


def _run_all(folder: Path, runs: dict[str, Callable[[], None]], home: str | None = None) -> bool:
    """Fork a process for each, and wait; when one fails, or after `LONGEST`, the others are ended. Whether all ended well."""
    started = {_fork(folder / name, run, home): name for name, run in runs.items()}
    failed_at: float | None = None
    deadline = time.monotonic() + LONGEST
    while started:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid in started:
            name = started.pop(pid)
            if status:
                _leave(folder / name, "RankFailure", f"{SILENT} (wait status {status})")
                failed_at = failed_at or now
            continue
        if now > deadline or (failed_at is not None and now > failed_at + GRACE):
            for each, name in started.items():
                os.kill(each, signal.SIGKILL)
                _leave(folder / name, "RankFailure", SILENT)
            failed_at = now
        time.sleep(0.02)
    return failed_at is None


def _fork(folder: Path, run: Callable[[], None], home: str | None) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(folder / LOG, "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(home or folder)
        torch.set_num_threads(1)
        run()
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reads it
        traceback.print_exc()
        refused = isinstance(error, (ConfigError, PlanError, UnsupportedError))
        _leave(folder, type(error).__name__, str(error), refused=refused, noticed=isinstance(error, RankMismatchError))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _leave(folder: Path, kind: str, text: str, **how: bool) -> None:
    if not (folder / ERROR).exists():
        how = {REFUSED: False, NOTICED: False} | how
        (folder / ERROR).write_text(json.dumps({"kind": kind, "text": text, **how}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
