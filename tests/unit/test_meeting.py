"""Ranks that are told to do something else next meet in the store, and say who was told what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_parallel.errors import ParallelError
from hf_parallel.guards.meeting import Meeting, topic_of_its_own


def agree(meeting: Meeting, flags: str) -> None:
    meeting.agree(flags, 7)


def answers(
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str | None],
    bound_s: float,
    come_to: Callable[[Meeting, str], None] = agree,
) -> list[str]:
    """What each rank is told when it comes with these flags after step 7; those with None do not come."""
    store, place = dist.HashStore(), threading.local()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: place.rank)

    def come(rank: int) -> str:
        place.rank = rank
        meeting = Meeting([f"rank {one}" for one in range(len(flags))], bound_s, topic="flags")
        meeting._store = store
        try:
            come_to(meeting, str(flags[rank]))
        except ParallelError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(flags)) as pool:
        return list(pool.map(come, [rank for rank, flag in enumerate(flags) if flag is not None]))


def test_ranks_with_the_same_flags_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, ["should_save", "should_save", "should_save"], 30.0) == ["", "", ""]


def test_other_flags_are_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = answers(monkeypatch, ["should_save", "should_evaluate"], 30.0)
    assert "TrainerControl has should_save after step 7 on rank 0 and should_evaluate after step 7 on rank 1:" in one
    assert "TrainerControl has should_evaluate after step 7 on rank 1 and should_save after step 7 on rank 0:" in other
    assert "Set it on every rank" in one


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told = answers(monkeypatch, ["should_training_stop", None, "should_training_stop"], 0.1)
    for text in told:
        assert (
            "TrainerControl has should_training_stop after step 7 on rank 0, rank 2 and for 0.1 s not on rank 1:"
            in text
        )


def test_ranks_that_meet_in_different_calls_are_told_both(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str | None] = ["model.save_pretrained()", "accelerator.get_state_dict()"]
    one, other = answers(monkeypatch, calls, 30.0, Meeting.meet)
    assert (
        "model.save_pretrained() was called where rank 1 called accelerator.get_state_dict(): each rank holds a part"
        in one
    )
    assert "accelerator.get_state_dict() was called where rank 0 called model.save_pretrained()" in other
    assert "Take it out of `if accelerator.is_main_process:`" in one


def test_ranks_that_meet_in_the_same_call_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, ["model.save_pretrained()"] * 3, 30.0, Meeting.meet) == ["", "", ""]


def test_a_second_model_of_a_process_meets_under_keys_of_its_own() -> None:
    one, other = (SimpleNamespace(group_name=name) for name in ("4", "5"))
    made: Any = [topic_of_its_own("copy", group) for group in (one, one, other, None, None)]  # type: ignore[arg-type]
    assert len(set(made)) == 5
