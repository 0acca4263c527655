"""Runs that are killed and started again, for the tests and for `make kill-test`."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rank_runner import PRELOAD, _rank_main
from resume_cases import ENV, Job, StateAgain, make_trainer
from transformers import TrainerCallback

from hf_parallel.checkpoints.folders import NAME, newest


RANKS = 2
ENDS_WITHIN_S = 60.0  # a rank that lost its peer
FORCED_SHARE = 0.4  # of kills that come inside a save
# Where a rank kills itself during a save: function of the module, and which of its calls in one save.
POINTS = {
    "tensors": ("torch.distributed.checkpoint.filesystem", "_write_item", 3),
    "index": ("hf_parallel.trainer.checkpoints", "record", 1),
    "listed": ("hf_parallel.trainer.checkpoints", "publish", 1),
    "published": ("hf_parallel.trainer.checkpoints", "rotate", 1),
    "removing": ("hf_parallel.checkpoints.folders", "_remove", 2),
}


@dataclass(frozen=True)
class Kill:
    """What happens to an attempt.

    Args:
        ranks: Who is killed.
        after_s: Seconds after training began.
        point: Instead, a name in `POINTS`: the rank kills itself there.
        save: Then, in which save of the attempt, from 1.
    """

    ranks: tuple[int, ...]
    after_s: float = 0.0
    point: str = ""
    save: int = 1


class Diary(TrainerCallback):
    """Appends every loss to a file as soon as it is known, and says when training begins."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        (self.folder / f"began-{self.rank}").touch()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.rank == 0 and logs and "loss" in logs:
            with (self.folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps([state.global_step, logs["loss"], logs["grad_norm"]]) + "\n")


def arm(kill: Kill, rank: int, trainer: Any) -> None:
    """Let this rank kill itself at a point of a save."""
    import importlib

    if not kill.point or rank not in kill.ranks:
        return
    module_name, name, which = POINTS[kill.point]
    module = importlib.import_module(module_name)
    original = getattr(module, name)
    seen = {"calls": 0, "step": -1, "saves": 0}

    def die_here(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step != seen["step"]:
            seen.update(calls=0, step=trainer.state.global_step, saves=seen["saves"] + 1)
        seen["calls"] += 1
        if seen["saves"] == kill.save and seen["calls"] == which:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(module, name, die_here)


def life_main(rank: int, world_size: int, job: Job, kill: Kill | None) -> int:
    """One start of the same command: resume if there is anything to resume from, else begin."""
    out = Path(job.folder)
    trainer = make_trainer(job)
    trainer.remove_callback(StateAgain)
    trainer.add_callback(Diary(out.parent, rank))
    if kill is not None:
        arm(kill, rank, trainer)
    resume = out.is_dir() and any(
        NAME.match(path.name) or path.name.startswith(".checkpoint-") for path in out.iterdir()
    )
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.accelerator.hf_parallel.watchdog.stop()
    return int(trainer.state.global_step)


class Attempt:
    """The ranks of one start.

    Args:
        job: What they run.
        kill: What will happen to them; None for nothing.
    """

    def __init__(self, job: Job, kill: Kill | None) -> None:
        self.job, self.kill = job, kill
        self.folder = Path(job.folder).parent
        for rank in range(RANKS):
            (self.folder / f"began-{rank}").unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context.set_forkserver_preload(PRELOAD)
        run_dir = self.folder / f"ranks-{os.urandom(4).hex()}"
        run_dir.mkdir(parents=True)
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            reader, writer = context.Pipe(duplex=False)
            arguments = (writer, life_main, rank, RANKS, run_dir, 300.0, True, ENV, (job, kill))
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            writer.close()
            self.pipes.append(reader)
            self.processes.append(process)

    def end(self) -> list[Any]:
        """Do what is to happen, and wait for all ranks; what each returned, or None."""
        if self.kill is not None and not self.kill.point:
            self._strike(self.kill)
        deadline = time.monotonic() + (ENDS_WITHIN_S if self.kill else 300.0)
        results: list[Any] = [None] * RANKS
        left = dict(enumerate(self.pipes))
        while left and time.monotonic() < deadline:
            ready = wait(list(left.values()), timeout=max(0.0, deadline - time.monotonic()))
            for rank in [rank for rank, pipe in left.items() if pipe in ready]:
                try:
                    succeeded, payload = left.pop(rank).recv()
                except EOFError:
                    continue
                results[rank] = payload if succeeded else None
                if not succeeded and self.kill is None:
                    raise AssertionError(f"rank {rank}: {payload}")
        hung = sorted(left)
        for process in self.processes:
            process.kill()
            process.join(10)
        assert not hung, f"ranks {hung} were still running {ENDS_WITHIN_S:g} s after {self.kill}"
        return results

    def _strike(self, kill: Kill) -> None:
        deadline = time.monotonic() + 120.0
        while not all((self.folder / f"began-{rank}").exists() for rank in range(RANKS)):
            assert time.monotonic() < deadline, "training did not begin"
            if not any(process.is_alive() for process in self.processes):
                return  # it has nothing left to do
            time.sleep(0.01)
        time.sleep(kill.after_s)
        for rank in kill.ranks:
            self.processes[rank].kill()


def lives_of(job: Job, kills: Iterator[Kill | None]) -> Iterator[dict[str, Any]]:
    """Start a job again and again until it has ended; one report an attempt.

    Raises:
        AssertionError: A checkpoint was lost: the newest complete one is older than before.
    """
    out, known = Path(job.folder), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    while True:
        kill = next(kills, None)
        results = Attempt(job, kill).end()
        found, _ = newest(out)
        if found is None and out.is_dir():  # a kill in the middle of replacing one
            spare = sorted(out.glob(".checkpoint-*.replaced"))
            found = spare[-1] if spare else None
        step = int("".join(filter(str.isdigit, found.name))) if found is not None else 0
        assert step >= known, f"{kill}: the newest complete checkpoint is of step {step}, before it was {known}"
        known, ended = step, all(result == job.arguments["max_steps"] for result in results)
        yield {"kill": None if kill is None else vars(kill), "checkpoint": step, "ended": ended}
        if ended:
            return


def random_kills(seed: int) -> Iterator[Kill]:
    """Kills without end: of one rank or of all, at random moments, some inside a save."""
    source = random.Random(seed)
    while True:
        ranks = source.choice([(0,), (1,), (0, 1)])
        if source.random() < FORCED_SHARE:
            point = source.choice(list(POINTS))
            rank = source.choice([0, 1]) if point in ("tensors", "index") else 0
            yield Kill((rank,), point=point, save=source.randint(1, 3))
        else:
            yield Kill(ranks, after_s=source.uniform(0.0, 1.2))


def diary(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm) of every step that any attempt took."""
    path = folder / "losses.jsonl"
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def make_job(layout: str, folder: Path, steps: int, **parallel: Any) -> Job:
    arguments = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    return Job(layout, str(folder / "out"), model="uneven_dropout", arguments=arguments, parallel=parallel)
