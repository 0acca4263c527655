"""The V-shaped schedules: rank r holds stages r and 2p - 1 - r, and weight gradients fill the bubble."""

from __future__ import annotations

from hf_parallel.pipeline_parallel.schedule.actions import Action, Kind


def zbv_zero_bubble(pp_size: int, num_microbatches: int) -> list[list[Action]]:
    """Return ZB-V (Qi et al. 2024, arXiv:2405.15362), without a bubble where F, I and W take equal time.

    A rank holds at most min(2 m, 2 p) stage inputs alive: 1F1B's worst rank, on every rank, whatever m is.
    """
    return [_zbv_rank(pp_size, rank, num_microbatches) for rank in range(pp_size)]


def dualpipev(pp_size: int, num_microbatches: int) -> list[list[Action]]:
    """Return DualPipeV, the half of DualPipe that one copy of the weights needs (DeepSeek-V3, arXiv:2412.19437).

    Forward and backward of opposite directions stand in pairs, for runtimes that overlap one's communication with the
    other's compute. A rank holds at most min(2 m, 2 p + 1) stage inputs alive, whatever m is.
    """
    return [_dualpipev_rank(pp_size, rank, num_microbatches) for rank in range(pp_size)]


class _Rank:
    """Writes the actions of a rank of the V; chunk 0 is the stage on the way down, chunk 1 the one on the way up."""

    def __init__(self, pp_size: int, rank: int) -> None:
        self.stages = rank, 2 * pp_size - 1 - rank
        self.actions: list[Action] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self._pending: list[Action] = []

    def forward(self, chunk: int) -> None:
        self._add(chunk, "F", self.forwards)

    def backward(self, chunk: int) -> None:
        self._add(chunk, "B", self.backwards)

    def inputs(self, chunk: int) -> None:
        self._pending.append(Action(self.stages[chunk], "W", self.backwards[chunk]))
        self._add(chunk, "I", self.backwards)

    def weights(self, chunk: int | None = None) -> None:
        """Add the weight gradients that wait longest, of one chunk or of either, if any do."""
        for action in self._pending:
            if chunk is None or action.stage == self.stages[chunk]:
                self._pending.remove(action)
                self.actions.append(action)
                return

    def kept(self, num_microbatches: int) -> list[Action]:
        return [action for action in self.actions if action.microbatch < num_microbatches]

    def _add(self, chunk: int, kind: Kind, counts: list[int]) -> None:
        self.actions.append(Action(self.stages[chunk], kind, counts[chunk]))
        counts[chunk] += 1


def _zbv_rank(pp_size: int, rank: int, num_microbatches: int) -> list[Action]:
    made_for = max(2 * pp_size - 1, num_microbatches)
    behind = pp_size - rank
    out = _Rank(pp_size, rank)
    for _ in range(2 * behind - 1):
        out.forward(0)
    for _ in range(rank):
        out.forward(1)
        out.forward(0)
    for _ in range(behind):
        out.forward(1)
        out.inputs(1)
        out.weights(1)
    while out.forwards[1] < made_for:
        if out.forwards[0] < made_for:
            out.forward(0)
        out.inputs(0)
        out.weights(0)
        out.forward(1)
        out.inputs(1)
        out.weights(1)
    for _ in range(rank):
        out.inputs(0)
        out.inputs(1)
    for _ in range(behind):
        out.inputs(0)
        out.weights(0)
    for chunk in (1, 0):
        for _ in range(rank):
            out.weights(chunk)
    return out.kept(num_microbatches)


def _dualpipev_rank(pp_size: int, rank: int, num_microbatches: int) -> list[Action]:
    made_for = max(2 * pp_size, num_microbatches)
    behind = pp_size - rank - 1
    out = _Rank(pp_size, rank)
    for _ in range(2 * behind):
        out.forward(0)
    for _ in range(rank + 1):
        out.forward(0)
        out.forward(1)
    for _ in range(behind):
        out.inputs(1)
        out.weights()
        out.forward(1)
    for _ in range(made_for - 2 * pp_size + rank + 1):
        out.forward(0)
        out.backward(1)
        out.forward(1)
        out.backward(0)
    for _ in range(behind):
        out.backward(1)
        out.forward(1)
        out.backward(0)
    _dualpipev_cooldown(out, rank, behind)
    return out.kept(num_microbatches)


def _dualpipev_cooldown(out: _Rank, rank: int, behind: int) -> None:
    """Add the last backwards; the second half of them leaves its weight gradients for later."""
    for i in range(2 * (rank + 1)):
        late = i > rank
        (out.inputs if late else out.backward)(1 - i % 2)
    for _ in range(behind):
        out.weights()
        out.inputs(0)
    for _ in range(rank + 1):
        out.weights()
