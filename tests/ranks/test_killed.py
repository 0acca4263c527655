"""A job that is killed goes on from its newest complete checkpoint, on the same trajectory.

If this fails, a node that dies costs the run, or goes on with other numbers. Fifty kills are in `make kill-test`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_cases import Kill, diary, lives_of, make_job


pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

STEPS = 10
KILLS = [Kill((0,), point="listed", save=2), Kill((1,), point="tensors", save=2), Kill((0, 1), after_s=0.1)]


def test_a_killed_job_loses_no_checkpoint_and_stays_on_its_trajectory(tmp_path: Path) -> None:
    list(lives_of(make_job("zero1", tmp_path / "straight", STEPS), iter(())))
    expected = {step: rest for step, *rest in diary(tmp_path / "straight")}
    reports = list(lives_of(make_job("zero1", tmp_path / "killed", STEPS), iter(KILLS)))
    assert [report["ended"] for report in reports[:2]] == [False, False]
    assert [report["checkpoint"] for report in reports[:2]] == [2, 4]
    assert reports[-1] == {"kill": reports[-1]["kill"], "checkpoint": STEPS, "ended": True}
    taken = diary(tmp_path / "killed")
    assert {step for step, *_ in taken} == set(range(1, STEPS + 1))
    assert all(found == expected[step] for step, *found in taken)
    left = sorted(path.name for path in (tmp_path / "killed" / "out").iterdir())
    assert left == ["checkpoint-10", "checkpoint-8"]
