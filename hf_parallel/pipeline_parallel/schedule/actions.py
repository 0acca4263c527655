"""Schedules as data: one action a (stage, kind, microbatch), a text form, and the checker of whole schedules.

A schedule is a list of actions for each rank; a rank may hold several stages. The runtime interprets it, the simulator
times it and `check_schedule` proves, without a process group, that it is complete and cannot deadlock.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from hf_parallel.errors import ScheduleError
from hf_parallel.settings.values import spelled


Kind: TypeAlias = Literal["F", "B", "I", "W"]
KIND_WORDS: Final = {"F": "forward", "B": "backward", "I": "input backward", "W": "weight backward"}
MAX_BYTES = 1 << 22  # of a schedule file: half a million actions
ACTION_TEXT = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Action:
    """A pass of one stage over one microbatch; its text is ``2F0``: stage, kind, microbatch.

    The kinds are forward ("F"), full backward ("B"), backward for the stage's inputs only ("I") and for its weights
    only ("W"). A microbatch of a stage has either one B, or one I and one W.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def words(self) -> str:
        """The action in words, without its stage: ``forward of microbatch 0``."""
        return f"{KIND_WORDS[self.kind]} of microbatch {self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that ``text`` ("2F0") names.

        Raises:
            ScheduleError: If the text is no action.
        """
        match = ACTION_TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"action {spelled(text.strip())}: an action is <stage><F|B|I|W><microbatch>, such as 2F0. Correct the text."
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), cast(Kind, kind), int(microbatch))


Schedule: TypeAlias = Sequence[Sequence[Action]]


def format_schedule(schedule: Schedule) -> str:
    """Return the schedule as text: one line a rank, actions separated by commas."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule)


def parse_schedule(text: str) -> list[list[Action]]:
    """Return the schedule that `format_schedule` wrote; blanks around actions and empty cells are ignored.

    Raises:
        ScheduleError: If a cell is no action; names the line and the cell.
    """
    schedule: list[list[Action]] = []
    for line, cells in enumerate(text.splitlines(), start=1):
        schedule.append([])
        for cell, content in enumerate(cells.split(","), start=1):
            if content.strip():
                try:
                    schedule[-1].append(Action.parse(content))
                except ScheduleError as error:
                    raise ScheduleError(f"line {line}, cell {cell}: {error}") from None
    return schedule


def read_schedule(path: str | Path) -> list[list[Action]]:
    """Read and check a schedule file: line n + 1 holds the actions of rank n; the sizes follow from the actions.

    Raises:
        ScheduleError: If the file cannot be read, a cell is no action or the schedule breaks a rule of
            `check_schedule`; names the file.
    """
    try:
        schedule = parse_schedule(_text_of(Path(path)))
    except (OSError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise ScheduleError(f"{path}, {error}") from None
        raise ScheduleError(f"{path}: cannot be read ({error}). Give a text file with one line a rank.") from None
    for line, actions in enumerate(schedule, start=1):
        if not actions:
            raise ScheduleError(f"{path}, line {line}: no action for rank {line - 1}. Fill or remove the line.")
    everything = [action for actions in schedule for action in actions]
    if not everything:
        raise ScheduleError(f"{path}: holds no action. Write one line a rank, such as 0F0,0B0.")
    num_stages = 1 + max(action.stage for action in everything)
    num_microbatches = 1 + max(action.microbatch for action in everything)
    try:
        required_send_window(schedule, num_stages, num_microbatches)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule


def _text_of(path: Path) -> str:
    """The text of a file that may be what it should not: a device, a pipe, endless."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(f"it has more than {MAX_BYTES} bytes")
    return content.decode("utf-8")


def canonical(action: Action) -> Action:
    """Return the action with "I" written as "B": both make the gradient that the stage before needs."""
    return Action(action.stage, "B", action.microbatch) if action.kind == "I" else action


def message_into(action: Action, num_stages: int) -> Action | None:
    """Return the canonical action whose output ``action`` needs from another stage, or None if it needs none."""
    if action.kind == "F":
        return Action(action.stage - 1, "F", action.microbatch) if action.stage > 0 else None
    if action.kind == "W" or action.stage == num_stages - 1:
        return None
    return Action(action.stage + 1, "B", action.microbatch)


def message_out_of(action: Action, num_stages: int) -> Action | None:
    """Return the canonical action on another stage that needs the output of ``action``, or None if there is none."""
    if action.kind == "F":
        return Action(action.stage + 1, "F", action.microbatch) if action.stage < num_stages - 1 else None
    return Action(action.stage - 1, "B", action.microbatch) if action.kind != "W" and action.stage > 0 else None


def placement_of(schedule: Schedule) -> tuple[int, ...]:
    """Return the rank of each stage; the index is the stage.

    Raises:
        ScheduleError: If a stage has no rank or two; names the action or the stage.
    """
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"action {action} is on rank {rank} but stage {action.stage} is on rank {rank_of[action.stage]}: "
                    "a stage lives on one rank. Move it there."
                )
    for stage in range(max(rank_of, default=-1) + 1):
        if stage not in rank_of:
            raise ScheduleError(
                f"stage {stage} has no action but stage {max(rank_of)} has: stages count from 0 without a gap. "
                f"Add the actions of stage {stage}."
            )
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def sends_of(schedule: Schedule, rank: int, peer: int) -> tuple[Action, ...]:
    """Return the canonical actions on ``rank`` whose output goes to a stage on ``peer``, in execution order.

    This is the order of the messages from ``rank`` to ``peer``; activations and gradients share it.
    """
    return _channels(schedule).get((rank, peer), ())


def _channels(schedule: Schedule) -> dict[tuple[int, int], tuple[Action, ...]]:
    """Return the messages of every channel (rank, peer) that has any, in sending order."""
    rank_of = placement_of(schedule)
    found: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            receiver = message_out_of(action, len(rank_of))
            if receiver is not None and rank_of[receiver.stage] != rank:
                found.setdefault((rank, rank_of[receiver.stage]), []).append(canonical(action))
    return {channel: tuple(messages) for channel, messages in found.items()}


def check_schedule(
    schedule: Schedule,
    num_stages: int,
    num_microbatches: int,
    *,
    forward: bool = True,
    backward: bool = True,
    send_window: int = 2,
) -> None:
    """Prove that a schedule is complete, ordered and free of deadlock.

    The invariants: a stage on one rank only; every (stage, microbatch) with F exactly once and with either one B or one
    I and one W; F before B and I, I before W; and an execution with blocking receives and at most ``send_window``
    unreceived sends from a rank to a peer runs to its end. A receiver takes the messages of a sender in sending order
    and keeps those that it needs later, so a message counts as received once its receiver stands at an action that
    needs it or a later message of that sender.

    Args:
        schedule: The actions of each rank, in execution order.
        num_stages: Number of stages, at least 1.
        num_microbatches: Number of microbatches, at least 1.
        forward: Whether the schedule has the forwards; False checks one of backwards whose forwards have run.
        backward: Whether every forward has a backward; False checks a forward-only schedule.
        send_window: Sends that a rank may leave unreceived by each peer before it goes on, at least 0.

    Raises:
        ScheduleError: If an invariant is broken; the message names the action.
    """
    _check_complete(schedule, num_stages, num_microbatches, forward, backward)
    for rank, actions in enumerate(schedule):
        _check_order(rank, actions, forward)
    _Replay(schedule, num_stages, send_window).run()


def required_send_window(
    schedule: Schedule, num_stages: int, num_microbatches: int, *, forward: bool = True, backward: bool = True
) -> int:
    """Return the smallest of 2, 4, 8, ... with which `check_schedule` passes; the arguments are the same.

    Raises:
        ScheduleError: If the schedule breaks an invariant or deadlocks with any window.
    """
    unbounded = sum(map(len, schedule))
    check_schedule(schedule, num_stages, num_microbatches, forward=forward, backward=backward, send_window=unbounded)
    window = 2
    while True:
        try:
            _Replay(schedule, num_stages, window).run()
        except ScheduleError:
            window *= 2
        else:
            return window


def _check_complete(schedule: Schedule, num_stages: int, num_microbatches: int, forward: bool, backward: bool) -> None:
    kinds = "F" * forward + "BIW" * backward
    seen: dict[Action, int] = {}
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
            seen[action] = rank
    placement_of(schedule)
    kinds_of: dict[tuple[int, int], str] = {}
    for action in seen:
        pair = action.stage, action.microbatch
        kinds_of[pair] = kinds_of.get(pair, "") + action.kind
    sizes = f"{num_stages} stages, {num_microbatches} microbatches"
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            present = "".join(sorted(kinds_of.get((stage, microbatch), ""), key="FBIW".index))
            _check_kinds(Action(stage, "F", microbatch), present, kinds, sizes)


def _check_kinds(forward: Action, present: str, kinds: str, sizes: str) -> None:
    """Check the kinds that one microbatch of one stage has, in the order of "FBIW"."""
    stage, microbatch = forward.stage, forward.microbatch
    missing = "F" if "F" in kinds and "F" not in present else ""
    if "B" in kinds and not missing and "B" not in present:
        missing = {"": "B", "I": "W", "W": "I"}.get(present.removeprefix("F"), "")
    if missing:
        raise ScheduleError(
            f"action {stage}{missing}{microbatch} is missing: every action runs exactly once ({sizes}). Add it."
        )
    if "B" in present and present[-1] != "B":
        raise ScheduleError(
            f"action {stage}{present[-1]}{microbatch} stands beside {stage}B{microbatch}: a backward is one B or one I "
            "and one W. Remove one of them."
        )


def _check_order(rank: int, actions: Sequence[Action], forward: bool) -> None:
    """Check that forwards come before backwards and I before W."""
    done: set[tuple[int, str, int]] = set()
    for action in actions:
        if action.kind == "W" and (action.stage, "I", action.microbatch) not in done:
            raise ScheduleError(
                f"action {action} on rank {rank} comes before {action.stage}I{action.microbatch}: weight gradients "
                "need what the backward for inputs leaves. Move it behind."
            )
        if forward and action.kind in "BI" and (action.stage, "F", action.microbatch) not in done:
            raise ScheduleError(
                f"action {action} on rank {rank} comes before its forward {action.stage}F{action.microbatch}: "
                "a backward needs the activations of its forward. Move it behind the forward."
            )
        done.add((action.stage, action.kind, action.microbatch))


class _Replay:
    """Executes a schedule in the abstract: blocking receives, a bounded number of unreceived sends a channel."""

    def __init__(self, schedule: Schedule, num_stages: int, send_window: int) -> None:
        self.schedule, self.num_stages, self.send_window = schedule, num_stages, send_window
        self.channels = _channels(schedule)
        self.place = {
            message: (channel, index)
            for channel, messages in self.channels.items()
            for index, message in enumerate(messages)
        }
        self.written = {canonical(action): action for actions in schedule for action in actions}
        self.position = [0] * len(schedule)
        self.done: set[Action] = set()
        self.sent = dict.fromkeys(self.channels, 0)
        self.taken = dict.fromkeys(self.channels, 0)
        self.progress = 0

    def run(self) -> None:
        """Execute everything.

        Raises:
            ScheduleError: If ranks wait for each other; names where each stops.
        """
        waits: dict[int, Action] = {}
        before = -1
        while self.progress > before:
            before = self.progress
            waits.clear()
            for rank, actions in enumerate(self.schedule):
                while self.position[rank] < len(actions):
                    blocker = self.advance(actions[self.position[rank]])
                    if blocker is not None:
                        waits[rank] = self.written.get(blocker, blocker)
                        break
                    self.position[rank] += 1
                    self.progress += 1
        if waits:
            stuck = [
                f"rank {rank} stops at {self.schedule[rank][self.position[rank]]}, waiting for {action}"
                for rank, action in waits.items()
            ]
            raise ScheduleError(f"schedule deadlocks: {'; '.join(stuck)}. Reorder so that each input is made first.")

    def advance(self, action: Action) -> Action | None:
        """Execute a rank's next action; return the canonical action it waits for instead if it cannot finish it."""
        output = canonical(action)
        channel, _ = self.place.get(output, (None, 0))
        if output not in self.done:
            source = message_into(action, self.num_stages)
            if source is not None:
                incoming, index = self.place.get(source, (None, 0))
                if incoming is not None:
                    self._take(incoming, index + 1)
                if source not in self.done:
                    return source
            self.done.add(output)
            self.progress += 1
            if channel is not None:
                self.sent[channel] += 1
        if channel is not None and self.sent[channel] - self.taken[channel] > self.send_window:
            return message_out_of(self.channels[channel][self.sent[channel] - 1 - self.send_window], self.num_stages)
        return None

    def _take(self, channel: tuple[int, int], count: int) -> None:
        if count > self.taken[channel]:
            self.taken[channel] = count
            self.progress += 1
