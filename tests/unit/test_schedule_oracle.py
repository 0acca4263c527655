"""If this fails, a schedule with stages or backwards split is slower or holds more than torch's of the same name."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.pipelining.stage import PipelineStage

from hf_parallel.pipeline_parallel.schedule.actions import Action
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.pipeline_parallel.schedule.simulate import peak_live, simulate


TORCH_NAMES = {
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
COSTS = [(1.0, 2.0, 1.0), (1.0, 2.5, 0.75), (2.0, 3.0, 2.0)]


def torch_schedule(name: str, ranks: int, microbatches: int, stages: int) -> list[list[Action]]:
    schedule = []
    stage = mock.create_autospec(PipelineStage, instance=True)
    for rank in range(ranks):
        stage.group_rank, stage.group_size, stage.num_stages, stage.submod = rank, ranks, ranks * stages, None
        order = get_schedule_class(TORCH_NAMES[name])([stage] * stages, microbatches).pipeline_order[rank]
        # an overlapped pair counts as its forward, then its backward
        parts = [part for action in order if action is not None for part in action.sub_actions or (action,)]
        schedule.append([Action(p.stage_index, KINDS[p.computation_type.name], p.microbatch_index) for p in parts])
    return schedule


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *((name, 2) for name in TORCH_NAMES),
        *(pytest.param(f"interleaved_{kind}", 3, marks=pytest.mark.long) for kind in ("1f1b", "zero_bubble")),
    ],
)
def test_bubble_and_memory_are_torchs_or_better(name: str, stages: int) -> None:
    compared = 0
    for ranks, microbatches in itertools.product((1, 2, 3, 4, 8), range(1, 17)):
        try:
            theirs = torch_schedule(name, ranks, microbatches, stages)
        except ValueError:
            continue  # torch takes only some numbers of microbatches
        ours = build_schedule(name, ranks, microbatches, stages_per_rank=stages)
        for (forward, backward, weight), latency in itertools.product(COSTS, (0.0, 0.25)):
            costs = [forward] * ranks * stages, [backward] * ranks * stages
            times = [
                simulate(actions, *costs, weight_costs=[weight] * ranks * stages, latency=latency).makespan
                for actions in (ours, theirs)
            ]
            assert times[0] <= times[1] + 1e-9, (ranks, microbatches, times)
        held = zip(peak_live(ours), peak_live(theirs), strict=True)
        assert all(mine <= other for mine, other in held), (ranks, microbatches)
        compared += 1
    assert compared >= 49
