"""No stream, and no host thread, uses a tensor before what it depends on is over: torch.cuda._sanitizer on soft devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_runner import run_ranks
from trainer_cases import Case

from softcuda.soft_cases import FAULTS, raced


PP2 = {"pp_size": 2, "num_microbatches": 2}
RECOMPUTED = {"activation_checkpointing": {"every": 1, "offload": True}}
CASES = {
    case.name: case
    for case in (
        Case("recomputed", parallel=RECOMPUTED, device="cuda", steps=2),
        Case("pp2_recomputed", parallel={**PP2, **RECOMPUTED}, device="cuda", steps=2),
        Case("compressed", parallel={"gradient_compression": {"method": "int8"}}, device="cuda", steps=2),
        Case("offloaded", parallel={"zero": {"stage": 1, "offload_optimizer": "cpu"}}, device="cuda", steps=2),
        Case("late", parallel={"zero": {"stage": 1, "overlap_gather": True}}, device="cuda", steps=2),
        Case("tp2", parallel={"tp_size": 2}, device="cuda", steps=2),
    )
}
SEEN_IN = {
    "down starts early": "recomputed",
    "used before it is up": "recomputed",
    "lane starts early": "compressed",
    "host does not wait": "offloaded",
}

pytestmark = [pytest.mark.softcuda, pytest.mark.timeout(300)]


def races(case: Case, fault: str | None, folder: Path) -> list[list[str]]:
    return run_ranks(raced, 2, case, str(folder / "run"), fault, tmp_path=folder, timeout=120)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_no_access_is_unordered(case: Case, tmp_path: Path) -> None:
    for found in races(case, None, tmp_path):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_that_is_taken_away_is_missed(fault: str, tmp_path: Path) -> None:
    found = races(CASES[SEEN_IN[fault]], fault, tmp_path)
    assert all(found)
    assert all(any("hf_parallel" in race for race in one) for one in found)
