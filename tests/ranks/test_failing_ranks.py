"""A rank that raises, dies or hangs ends the run by name.

If a test fails here, a user sees a hang without a cause.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_runner import RankError, run_ranks
from trainer_cases import Case, at_step, make_trainer


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 4}
TP2 = {"tp_size": 2}
DP2: dict[str, Any] = {}
HANG_TIMEOUT_S = 2.0
# What the documentation of the watchdog promises.
BOUND_S = HANG_TIMEOUT_S + 2 + HANG_TIMEOUT_S / 4


def bad_row() -> None:
    raise ValueError("a bad row")


def failing_main(rank: int, world_size: int, folder: str, parallel: dict[str, Any], failure: str) -> None:
    sys.stderr = open(Path(folder) / f"stderr{rank}.txt", "w", buffering=1)  # noqa: SIM115  for the process's life
    monitor = {"hang_timeout_s": HANG_TIMEOUT_S}
    trainer = make_trainer(Case("failing", steps=6, parallel={**parallel, "monitor": monitor}), Path(folder), 2)
    actions: dict[str, tuple[str, Callable[[], Any]]] = {
        "raise": ("collator", bad_row),
        "die": ("forward", lambda: os._exit(3)),
        "hang": ("forward", lambda: time.sleep(60)),
        "stop": ("forward", lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    }
    if rank == 1 and failure in actions:
        at_step(trainer, *actions[failure], step=2, batches=3, layer="layers.3.mlp")  # after plans and checks
    if rank == 1 and failure == "hang_early":
        trainer.create_optimizer = lambda *args: time.sleep(60)  # type: ignore[method-assign]
    trainer.train()


def run_failing(parallel: dict[str, Any], failure: str, folder: Path, grace: float) -> tuple[str, str]:
    """The report of all ranks, and what rank 0 wrote to stderr."""
    with pytest.raises(RankError) as caught:
        run_ranks(failing_main, 2, str(folder), parallel, failure, tmp_path=folder, env=ENV, timeout=40, grace=grace)
    return str(caught.value), (folder / "stderr0.txt").read_text()


@pytest.mark.parametrize(
    ("failure", "parallel"),
    [
        pytest.param(failure, parallel, marks=() if alone else pytest.mark.long, id=f"{failure}-{name}")
        for failure, name, parallel, alone in (
            *(("raise", "pp2", PP2, True), ("raise", "tp2", TP2, False), ("raise", "dp2", DP2, False)),
            *(("die", "pp2", PP2, False), ("die", "tp2", TP2, True), ("die", "dp2", DP2, True)),
        )
    ],
)
def test_a_rank_that_is_gone_ends_the_others_by_name(failure: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    report, _ = run_failing(parallel, failure, tmp_path, grace=15)
    of_rank = dict(re.findall(r"(?ms)^rank (\d): (.*?)(?=^rank \d: |\Z)", report))
    assert ("a bad row" if failure == "raise" else "exited with code 3") in of_rank["1"]
    axis = "pp 1 of 2" if "pp_size" in parallel else "tp 1 of 2" if "tp_size" in parallel else "dp 1 of 2"
    assert re.search(rf"RankFailure: rank 0 .*lost rank 1 \({axis}\)", of_rank["0"]), of_rank["0"]


@pytest.mark.parametrize(
    ("failure", "parallel"),
    [
        pytest.param("hang", PP2, id="pp2"),
        pytest.param("hang", TP2, id="tp2", marks=pytest.mark.long),
        pytest.param("hang", DP2, id="dp2", marks=pytest.mark.long),
        pytest.param("stop", PP2, id="stopped"),
        pytest.param("hang_early", PP2, id="before_the_model_is_cut", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_hangs_is_named_within_the_bound(failure: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    report, stderr = run_failing(parallel, failure, tmp_path, grace=0.1)
    assert "rank 0: exited with code 86" in report
    axis = "pp 1 of 2" if "pp_size" in parallel else "tp 1 of 2" if "tp_size" in parallel else "dp 1 of 2"
    assert f"The job waits for: rank 1 ({axis})." in stderr
    waited = re.search(r"gave up: .*, for ([\d.]+) s \(monitor\.hang_timeout_s=2\)", stderr)
    assert waited is not None
    assert float(waited[1]) <= BOUND_S
