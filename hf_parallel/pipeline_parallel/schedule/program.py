"""One rank's part of a schedule, ready to run: its actions, and what each other rank sends it, in which order.

Pure; made once for each number of microbatches and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_parallel.pipeline_parallel.schedule.actions import Action, Schedule, sends_of


@dataclass(frozen=True)
class Program:
    """The actions of one rank, and the messages that it receives.

    Attributes:
        actions: Its actions, in order.
        incoming: Other rank -> the messages it sends here, in the order it sends them.
        send_window: Sends to one rank that may be left unreceived.
    """

    actions: tuple[Action, ...]
    incoming: Mapping[int, tuple[Action, ...]]
    send_window: int

    def shifted(self, by: int) -> Program:
        """The same for microbatches whose numbers are larger by `by`."""
        incoming = {peer: _shifted(messages, by) for peer, messages in self.incoming.items()}
        return Program(_shifted(self.actions, by), incoming, self.send_window)


def _shifted(actions: tuple[Action, ...], by: int) -> tuple[Action, ...]:
    return tuple(Action(action.stage, action.kind, action.microbatch + by) for action in actions)


def program_of(schedule: Schedule, rank: int, send_window: int) -> Program:
    """Return the part of a schedule that `rank` executes.

    Args:
        schedule: The actions of each rank.
        rank: Pipeline rank.
        send_window: Result of `required_send_window` for the schedule.
    """
    peers = [peer for peer in range(len(schedule)) if peer != rank]
    incoming = {peer: sends_of(schedule, peer, rank) for peer in peers}
    return Program(tuple(schedule[rank]), {p: m for p, m in incoming.items() if m}, send_window)
