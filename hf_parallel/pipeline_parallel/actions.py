"""Schedules as data: one action a (stage, direction, microbatch), a text form, and the checker of whole schedules.

A schedule is a list of actions for each rank. The runtime interprets it, the simulator times it and `check_schedule`
proves, without a process group, that it is complete and cannot deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hf_parallel.errors import ScheduleError


Kind: TypeAlias = Literal["F", "B"]
ACTION_TEXT = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """Forward ("F") or backward ("B") of one microbatch on one stage; its text is ``2F0``: stage, kind, microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that ``text`` ("2F0") names.

        Raises:
            ScheduleError: If the text is no action.
        """
        match = ACTION_TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"action {text.strip()!r}: an action is <stage><F|B><microbatch>, such as 2F0. Correct the text."
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), "F" if kind == "F" else "B", int(microbatch))


Schedule: TypeAlias = Sequence[Sequence[Action]]


def format_schedule(schedule: Schedule) -> str:
    """Return the schedule as text: one line a rank, actions separated by commas."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule)


def parse_schedule(text: str) -> list[list[Action]]:
    """Return the schedule that `format_schedule` wrote; blanks around actions and empty cells are ignored.

    Raises:
        ScheduleError: If a cell is no action.
    """
    return [[Action.parse(cell) for cell in line.split(",") if cell.strip()] for line in text.splitlines()]


def input_of(action: Action, num_stages: int) -> Action | None:
    """Return the action on a neighbour stage whose message ``action`` waits for, or None at the pipeline's ends."""
    if action.kind == "F":
        return Action(action.stage - 1, "F", action.microbatch) if action.stage > 0 else None
    return Action(action.stage + 1, "B", action.microbatch) if action.stage < num_stages - 1 else None


def output_of(action: Action, num_stages: int) -> Action | None:
    """Return the action on a neighbour stage that receives what ``action`` sends, or None at the pipeline's ends."""
    if action.kind == "F":
        return Action(action.stage + 1, "F", action.microbatch) if action.stage < num_stages - 1 else None
    return Action(action.stage - 1, "B", action.microbatch) if action.stage > 0 else None


def check_schedule(
    actions_per_rank: Schedule,
    num_stages: int,
    num_microbatches: int,
    *,
    backward: bool = True,
    send_window: int = 2,
) -> None:
    """Prove that a schedule is complete, ordered and free of deadlock.

    The invariants: every (stage, kind, microbatch) exactly once, a stage on one rank only, forward before backward,
    neighbours in the same microbatch order (messages match in posting order), and an execution with blocking receives
    and at most ``send_window`` unreceived sends in each direction runs to its end.

    Args:
        actions_per_rank: The actions of each rank, in execution order.
        num_stages: Number of stages, at least 1.
        num_microbatches: Number of microbatches, at least 1.
        backward: Whether every forward has a backward; False checks a forward-only schedule.
        send_window: Sends that a rank may leave unreceived, in each direction, before it goes on.

    Raises:
        ScheduleError: If an invariant is broken; the message names the action.
    """
    kinds: tuple[Kind, ...] = ("F", "B") if backward else ("F",)
    rank_of = _check_each_once(actions_per_rank, num_stages, num_microbatches, kinds)
    for rank, actions in enumerate(actions_per_rank):
        forwarded = set()
        for action in actions:
            if action.kind == "F":
                forwarded.add((action.stage, action.microbatch))
            elif (action.stage, action.microbatch) not in forwarded:
                raise ScheduleError(
                    f"action {action} on rank {rank} comes before its forward {action.stage}F{action.microbatch}: "
                    "a backward needs the activations of its forward. Move it behind the forward."
                )
    for kind in kinds:
        _check_same_order(actions_per_rank, rank_of, num_stages, kind)
    _check_no_deadlock(actions_per_rank, num_stages, send_window)


def _check_each_once(
    schedule: Schedule, num_stages: int, num_microbatches: int, kinds: tuple[Kind, ...]
) -> dict[int, int]:
    """Return the rank of each stage, after checking that every action occurs exactly once, on one rank a stage."""
    seen: dict[Action, int] = {}
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.stage >= num_stages or action.microbatch >= num_microbatches or action.kind not in kinds:
                raise ScheduleError(
                    f"action {action} on rank {rank} is outside the schedule: {num_stages} stages, "
                    f"{num_microbatches} microbatches, kinds {'+'.join(kinds)}. Remove it."
                )
            if action in seen:
                raise ScheduleError(
                    f"action {action} occurs twice (ranks {seen[action]} and {rank}): every action runs exactly once. "
                    "Remove one of them."
                )
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"action {action} is on rank {rank} but stage {action.stage} is on rank {rank_of[action.stage]}: "
                    "a stage lives on one rank. Move it there."
                )
            seen[action] = rank
    for stage in range(num_stages):
        for kind in kinds:
            for microbatch in range(num_microbatches):
                if Action(stage, kind, microbatch) not in seen:
                    raise ScheduleError(
                        f"action {stage}{kind}{microbatch} is missing: every action runs exactly once "
                        f"({num_stages} stages, {num_microbatches} microbatches). Add it."
                    )
    return rank_of


def _check_same_order(schedule: Schedule, rank_of: dict[int, int], num_stages: int, kind: Kind) -> None:
    def order(stage: int) -> list[Action]:
        return [action for action in schedule[rank_of[stage]] if action.kind == kind and action.stage == stage]

    for stage in range(1, num_stages):
        for before, here in zip(order(stage - 1), order(stage), strict=True):
            if before.microbatch != here.microbatch:
                raise ScheduleError(
                    f"action {here} stands where stage {stage - 1} has {before}: neighbours exchange messages in "
                    "posting order, so all stages run the microbatches of one kind in the same order. Reorder one."
                )


class _Replay:
    """Executes a schedule in the abstract: blocking receives, a bounded number of unreceived sends a direction."""

    def __init__(self, schedule: Schedule, num_stages: int, send_window: int) -> None:
        self.schedule, self.num_stages, self.send_window = schedule, num_stages, send_window
        self.place = {action: (rank, i) for rank, actions in enumerate(schedule) for i, action in enumerate(actions)}
        self.position = [0] * len(schedule)
        self.done: set[Action] = set()
        self.sends: list[dict[Kind, list[Action]]] = [{"F": [], "B": []} for _ in schedule]

    def advance(self, rank: int) -> Action | None:
        """Execute the next action of ``rank``; return the action it waits for instead if it cannot finish it."""
        action = self.schedule[rank][self.position[rank]]
        sends = self.sends[rank][action.kind]
        if action not in self.done:
            source = input_of(action, self.num_stages)
            if source is not None and source not in self.done:
                return source
            self.done.add(action)
            receiver = output_of(action, self.num_stages)
            if receiver is not None and self.place[receiver][0] != rank:
                sends.append(receiver)
        if len(sends) > self.send_window:
            peer, index = self.place[sends[-1 - self.send_window]]
            if self.position[peer] < index:
                return sends[-1 - self.send_window]
        self.position[rank] += 1
        return None


def _check_no_deadlock(schedule: Schedule, num_stages: int, send_window: int) -> None:
    replay = _Replay(schedule, num_stages, send_window)
    waits: dict[int, Action] = {}
    moved = True
    while moved:
        moved = False
        waits.clear()
        for rank, actions in enumerate(schedule):
            while replay.position[rank] < len(actions):
                blocker = replay.advance(rank)
                if blocker is not None:
                    waits[rank] = blocker
                    break
                moved = True
    if waits:
        stuck = [
            f"rank {rank} stops at {schedule[rank][replay.position[rank]]}, waiting for {action}"
            for rank, action in waits.items()
        ]
        raise ScheduleError(f"schedule deadlocks: {'; '.join(stuck)}. Reorder so that each input is made first.")
