"""Real launches of which ranks or a whole machine are killed: the launcher starts them again and the run goes on where it was.

If a test fails here, `--max_restarts` ends in an error, or begins again from the first step. Twenty rounds are in `make restart-test`.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from restart_cases import STEPS, Kill, RestartJob, differences, end_tree, wait_for


pytestmark = [pytest.mark.slow, pytest.mark.launch, pytest.mark.timeout(900)]

SECTION = {"pp_size": 2, "pipeline": {"num_microbatches": 2}, "global_batch_size": 8}
IN_MEMORY = {**SECTION, "checkpoint": {"memory_steps": 1}}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RestartJob:
    job = RestartJob(tmp_path_factory.mktemp("straight"), IN_MEMORY, save_steps=0)
    assert job.run() == 0, job.log[-3000:]
    assert not job.memory.exists()
    return job


@pytest.mark.parametrize(
    ("kills", "first"),
    [
        ([Kill(2, 5, "forward"), Kill(0, 7, "snapshot", attempt=1)], [6, 7]),
        ([Kill(3, 3, "begin")], [4]),
    ],
    ids=["twice_and_in_a_snapshot", "between_steps"],
)
def test_a_launched_run_goes_on_by_itself_on_the_same_trajectory(
    kills: list[Kill], first: list[int], straight: RestartJob, tmp_path: Path
) -> None:
    job = RestartJob(tmp_path, IN_MEMORY, kills)
    assert job.run() == 0, job.log[-3000:]
    assert differences(job, straight) == []
    assert [job.first_step(attempt + 1) for attempt in range(len(kills))] == first
    assert "hf_parallel: restart 1: the run goes on after step" in job.log
    assert not job.memory.exists()
    print("seconds until the next step:", job.seconds_until_training())


def test_a_run_goes_on_with_the_machine_that_is_left(straight: RestartJob, tmp_path: Path) -> None:
    """Two launchers of two ranks each; one is killed with its ranks, and one replica is left, with all rows of a step."""
    job = RestartJob(tmp_path, SECTION, [Kill(2, 5, "begin"), Kill(3, 5, "begin")], save_steps=2)
    conf = "store_type=file,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = ("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3")
    meeting = ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "meeting", "--rdzv-conf", conf)
    launchers = [job.launch((*command, *meeting), name) for name in ("log", "other")]
    try:
        wait_for(lambda: any("killed" in entry for entry in job.diary))
        pids = {entry["rank"]: entry["launcher"] for entry in job.diary if "killed" in entry}
        lost = next(each for each in launchers if each.pid in pids.values())
        end_tree(lost)
        left = next(each for each in launchers if each is not lost)
        assert left.wait(300) == 0, (job.folder / ("log.txt" if left is launchers[0] else "other.txt")).read_text()[
            -3000:
        ]
    finally:
        for launcher in launchers:
            end_tree(launcher)
    assert differences(job, straight) == []
    worlds = {entry["ended"]: entry["world"] for entry in job.diary if "ended" in entry}
    assert (worlds[1], worlds[STEPS]) == (4, 2)
    assert not any(psutil.pid_exists(launcher.pid) for launcher in launchers)
