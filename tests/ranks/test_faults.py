"""Whatever happens to one rank, every rank ends, names it, and nobody is left behind.

If a test fails here, a job hangs until its time limit, or processes of a job that has ended hold their GPUs.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import RankError, is_gone, run_ranks
from trainer_cases import Case, at_step, make_trainer


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 4}
TP2 = {"tp_size": 2}
DP2: dict[str, Any] = {}
ZERO3 = {"zero": {"stage": 3}}
LAYOUTS = {"pp2": PP2, "tp2": TP2, "dp2": DP2, "zero3": ZERO3}


def trainer_on(parallel: dict[str, Any], folder: str, **case: Any) -> Any:
    return make_trainer(Case("faults", steps=4, parallel=parallel, **case), Path(folder), 2)


# -- a rank that raises, dies, stops, is killed or hangs ---------------------------------------------------------------


def raise_gloo() -> None:
    raise RuntimeError("our gloo wrapper says: [gloo/transport] no such file")


def failing_main(rank: int, world_size: int, folder: str, layout: str, fault: str, where: str) -> None:
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    sys.stderr = open(Path(folder) / f"stderr{rank}.txt", "w", buffering=1)  # noqa: SIM115  for the process's life
    trainer = trainer_on({**LAYOUTS[layout], "monitor": {"hang_timeout_s": 2.0}}, folder)
    acts = {
        "exit": lambda: os._exit(3),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "sleep": lambda: time.sleep(60),
        "raise": lambda: [][1],
        "raise gloo": raise_gloo,
    }
    if rank == 1:
        at_step(trainer, where, acts[fault], step=2, batches=3, layer="layers.3.mlp")
    trainer.train()


def fail(layout: str, fault: str, where: str, folder: Path) -> tuple[dict[str, str], str, str]:
    """What each rank reported, and what each wrote to stderr."""
    with pytest.raises(RankError) as caught:
        run_ranks(failing_main, 2, str(folder), layout, fault, where, tmp_path=folder, env=ENV, timeout=60, grace=15)
    of_rank = dict(re.findall(r"(?ms)^rank (\d): (.*?)(?=^rank \d: |\Z)", str(caught.value)))
    return of_rank, (folder / "stderr0.txt").read_text(), (folder / "stderr1.txt").read_text()


NAME = {"pp2": r"rank 1 \(pp 1 of 2\)", "tp2": r"rank 1 \(tp 1 of 2\)", "dp2": r"rank 1 \(dp 1 of 2\)"}
NAME["zero3"] = NAME["dp2"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "where"),
    [
        ("dp2", "collator"),
        pytest.param("pp2", "forward", marks=SLOW),
        pytest.param("tp2", "callback", marks=SLOW),
        pytest.param("zero3", "forward", marks=SLOW),
    ],
)
def test_a_stopped_rank_is_marked_and_does_not_outlive_the_job(layout: str, where: str, tmp_path: Path) -> None:
    reports, stderr, _ = fail(layout, "stop", where, tmp_path)
    assert "exited with code 86" in reports["0"]
    assert "exited with code -9" in reports["1"]  # killed by rank 0: nobody else is there to do it
    assert re.search(rf"The job waits for: {NAME[layout]}\.", stderr), stderr
    assert re.search(rf"  {NAME[layout]}: silent \(stopped\); last seen: ", stderr), stderr


@pytest.mark.parametrize(("layout", "where"), [("dp2", "collator"), pytest.param("pp2", "forward", marks=SLOW)])
def test_a_rank_that_hangs_in_its_own_code_ends_when_another_gives_up(layout: str, where: str, tmp_path: Path) -> None:
    reports, stderr, theirs = fail(layout, "sleep", where, tmp_path)
    assert "exited with code 86" in reports["0"]
    assert "exited with code 86" in reports["1"]
    assert re.search(rf"The job waits for: {NAME[layout]}\.", stderr), stderr
    assert re.search(rf"{NAME[layout]} ends, because rank 0 \(.*\) gave up: ", theirs), theirs


@pytest.mark.parametrize(
    ("layout", "fault", "where"),
    [
        ("pp2", "kill", "collator"),
        pytest.param("tp2", "exit", "forward", marks=SLOW),
        pytest.param("dp2", "kill", "callback", marks=SLOW),
    ],
)
def test_a_rank_that_dies_is_named_and_nobody_is_left(layout: str, fault: str, where: str, tmp_path: Path) -> None:
    reports, _, _ = fail(layout, fault, where, tmp_path)
    assert f"exited with code {-9 if fault == 'kill' else 3}" in reports["1"]
    assert re.search(rf"RankFailure: rank 0 .*lost {NAME[layout]}", reports["0"]), reports["0"]
    assert all(is_gone(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


@pytest.mark.parametrize(("layout", "where"), [("pp2", "forward"), pytest.param("dp2", "forward", marks=SLOW)])
def test_an_error_of_user_code_that_speaks_of_gloo_stays_what_it_is(layout: str, where: str, tmp_path: Path) -> None:
    reports, _, _ = fail(layout, "raise gloo", where, tmp_path)
    assert "our gloo wrapper says" in reports["1"]
    assert "RankFailure" not in reports["1"]
    assert "RankFailure" in reports["0"]


# -- whatever rank 0 raises for all ---------------------------------------------------------------------------------


def told(rank: int, function: Any, **options: Any) -> str:
    from hf_parallel.mesh.one_rank import on_rank_zero

    try:
        return repr(on_rank_zero(function, "tries", **options))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def raising(error: BaseException) -> Any:
    def function() -> None:
        raise error

    return function


def one_rank_main(rank: int, world_size: int) -> list[str]:
    from hf_parallel.errors import ConfigError, UnsupportedError

    return [
        told(rank, lambda: {"rank": dist.get_rank()}),
        told(rank, raising(UnsupportedError("not this one"))),
        told(rank, raising(KeyError("hidden_size"))),
        told(rank, raising(MemoryError())),
        told(rank, raising(torch.OutOfMemoryError("CUDA out of memory"))),
        told(rank, lambda: lambda: None),  # no result that can be sent
        told(rank, raising(KeyError("x")), explain=lambda what: ConfigError(f"costs: {what}")),
        told(rank, raising(KeyboardInterrupt())),
        told(rank, raising(SystemExit(3))),
        told(rank, lambda: 7),
    ]


def test_what_rank_0_does_or_raises_for_all_reaches_all(tmp_path: Path) -> None:
    here, there = run_ranks(one_rank_main, 2, tmp_path=tmp_path)
    assert here[0] == "{'rank': 0}"
    assert here[1] == "UnsupportedError: not this one"
    assert here[2] == "PlanError: rank 0, which tries, failed with KeyError: 'hidden_size'"
    assert here[3].startswith("PlanError: rank 0, which tries, failed with MemoryError")
    assert "CUDA out of memory" in here[4]
    assert "pickle" in here[5].lower()
    assert here[6] == "ConfigError: costs: rank 0, which tries, failed with KeyError: 'x'"
    assert here[9] == "7"
    assert here[:7] == there[:7]
    assert [here[7], here[8]] == ["KeyboardInterrupt: ", "SystemExit: 3"]
    assert there[7].startswith("RankFailure: rank 0, which tries, failed with KeyboardInterrupt")
    assert there[8].startswith("RankFailure: rank 0, which tries, failed with SystemExit")


PLACES = {
    "check_split": ("hf_parallel.engine.plan.self_check", {"pp_size": 2, "pipeline": {"self_check": "on"}}),
    "verify_model": ("hf_parallel.engine.plan.self_check", {"tp_size": 2, "tensor_parallel": {"self_check": "on"}}),
    "measure_costs": ("hf_parallel.engine.plan.stages", {"pp_size": 2, "costs": "measured"}),
    "plan_model": ("hf_parallel.engine.plan.shards", {"tp_size": 2}),
}
KINDS = {"MemoryError": MemoryError("no room"), "KeyError": KeyError("x")}


def planning_main(rank: int, world_size: int, folder: str) -> dict[str, str]:
    import importlib

    from accelerate.state import AcceleratorState

    from hf_parallel.errors import ScheduleError

    heard = {}
    for place, (module, settings) in PLACES.items():
        for kind, error in {**KINDS, "ours": ScheduleError("no such action")}.items():
            AcceleratorState._reset_state()
            home = importlib.import_module(module)
            genuine = getattr(home, place)
            try:
                trainer = trainer_on(settings, f"{folder}/{place}{kind}")

                def fails(*args: Any, error: Exception = error, **options: Any) -> Any:
                    raise error

                if rank == 0:
                    setattr(home, place, fails)
                trainer.train()
                heard[f"{place} {kind}"] = "nothing was raised"
            except Exception as raised:
                heard[f"{place} {kind}"] = f"{type(raised).__name__}: {raised}"
            finally:
                setattr(home, place, genuine)
    return heard


def test_a_plan_or_a_check_that_fails_on_rank_0_fails_alike_on_all(tmp_path: Path) -> None:
    here, there = run_ranks(planning_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV, timeout=120)
    assert here == there
    assert len(here) == len(PLACES) * 3
    for name, text in here.items():
        place, kind = name.split()
        assert text.startswith("ScheduleError: no such action" if kind == "ours" else "PlanError: "), (place, text)
        assert kind == "ours" or str(KINDS[kind]) in text, (place, text)


# -- two runs in one process -------------------------------------------------------------------------------------------


def two_runs_main(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import gc

    from accelerate.state import AcceleratorState

    def threads() -> list[str]:
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("hf_parallel"))

    first = trainer_on(PP2, f"{folder}/first")
    first.train()
    # From here on a bound so short that it would end the job while the second run waits, if the first still watched.
    first.accelerator.hf_parallel.watchdog._timeout_s = 0.8
    found: dict[str, Any] = {"first": threads()}
    AcceleratorState._reset_state()
    second = trainer_on(TP2, f"{folder}/second")
    found["second"] = threads()
    if rank == 1:
        time.sleep(2.5)
    dist.barrier()  # rank 0 waits for longer than the first run would have allowed
    second.train()
    steps = [first.state.global_step, second.state.global_step]
    first.accelerator.hf_parallel.watchdog._timeout_s = 60.0
    found["again"] = [first.evaluate()["eval_loss"] > 0, threads()]
    second.evaluate()
    del first
    gc.collect()
    found["dropped"] = threads()
    second.accelerator.hf_parallel.watchdog.stop()
    found["steps"], found["stopped"] = steps, threads()
    return found


def test_the_second_run_of_a_process_takes_over_from_the_first(tmp_path: Path) -> None:
    both = ["hf_parallel-notes", "hf_parallel-watchdog"]
    for found in run_ranks(two_runs_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV):
        assert found["steps"] == [4, 4]
        assert found["first"] == found["second"] == found["dropped"] == both
        assert found["again"] == [True, both]
        assert found["stopped"] == []


def dropped_main(rank: int, world_size: int, folder: str) -> list[str]:
    import gc

    from hf_parallel import HFParallelConfig, PipelineConfig
    from hf_parallel.engine.session import Session
    from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice

    schedule = ScheduleChoice(PipelineConfig(), pp_size=1)
    session = Session.start(HFParallelConfig(), schedule, "a test")
    del session
    gc.collect()
    return [t.name for t in threading.enumerate() if t.name.startswith("hf_parallel")]


def test_a_run_that_is_dropped_is_not_watched_any_more(tmp_path: Path) -> None:
    assert run_ranks(dropped_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV) == [[], []]
