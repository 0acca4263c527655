"""The moment of a step in which a rank has most: sums by hand, and the peaks of dry runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import pytest

from hf_parallel.memory.activations import LOSS_CHUNK, Stages, stage_parts
from hf_parallel.memory.moments import Batch, Change, Part, Recorded, StageParts, fullest, moments_of, summed
from hf_parallel.memory.terms import Layout, ModelShape
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.settings.sections import ActivationCheckpointingConfig
from hf_parallel.tensor_parallel.run.vocab_loss import CHUNK_ELEMENTS


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from dry_run_peaks import SECTIONS, TYPES, difference


WITHIN: Final = 0.05


def test_a_part_takes_more_than_it_keeps() -> None:
    changes = (
        Change(0, 10, 0, whole=True),
        Change(0, 8, 1, whole=False),
        Change(0, -8, -1, whole=False),
        Change(100, 0, 0, whole=False),
        Change(40, 0, 0, whole=False, is_gradient=True),
    )
    assert summed(changes, Batch(2, 3)) == Part(most=20 + 140, kept=20, casts=100)
    assert summed(changes, Batch(2, 3, tp_size=2)) == Part(most=20 + 70, kept=20, casts=50)
    assert summed(changes, Batch(20, 3)).most == 200 + 20 * 11
    assert summed(changes, Batch(2, 3, tp_size=2, sequence_parallel=True)).kept == 10
    assert summed(changes, Batch(2, 3, with_fixed=False)).casts == 0


def test_keys_of_fewer_heads_than_ranks_are_on_several_of_these() -> None:
    change = Change(0, 12, 0, whole=False, parts=2)
    assert [summed([change], Batch(1, 1, tp_size=ranks)).kept for ranks in (1, 2, 4)] == [12, 6, 6]


def test_what_is_routed_to_whole_experts_is_on_every_rank() -> None:
    changes = [Change(80, 12, 0, whole=False, is_routed=True)]
    for whole, kept in ((False, 3), (True, 12)):
        found = summed(changes, Batch(1, 1, tp_size=4, whole_experts=whole))
        assert (found.kept, found.casts) == (kept, 80 * kept / 12)


def test_casts_of_products_that_send_do_not_stay() -> None:
    """Of queries, keys and values the first one sums its input's gradient over the ranks; where they share the sequence all gather it."""
    casts = [Change(60, 0, 0, whole=False, is_cast=True, order=order) for order in (1, 2, 3, 0)]
    for sequence_parallel, tp, expected in ((False, 1, 240), (True, 1, 240), (False, 2, 90), (True, 2, 30)):
        batch = Batch(1, 1, tp_size=tp, sequence_parallel=sequence_parallel)
        assert summed(casts, batch).casts == expected


def test_ranks_that_share_the_sequence_keep_one_input_for_all_its_readers() -> None:
    inputs = [Change(0, 2, 0, whole=True, readers=3)] * 3
    for sequence_parallel, tp, expected in ((False, 2, 6), (True, 1, 6), (True, 2, 4 / 2)):
        batch = Batch(1, 1, tp_size=tp, sequence_parallel=sequence_parallel)
        assert summed(inputs, batch).kept == pytest.approx(expected)


def test_messages_that_a_schedule_receives_ahead_have_room() -> None:
    """The payload of a forward to come, and the gradient of what was sent; the last stage waits for no gradient, the first for no payload."""
    ahead = [
        max(one.arriving for one in moments_of(actions, [rank], 2 if rank == 2 else None))
        for rank, actions in enumerate(build_schedule("1f1b", 3, 6))
    ]
    assert ahead == [1, 2, 1]
    assert {one.arriving for one in moments_of(build_schedule("gpipe", 1, 1)[0], [0], 0)} == {0}


def test_what_is_sent_is_there_once_and_what_is_received_for_each_microbatch() -> None:
    """Blocks that run again: each stage holds the input of each of its blocks, the last one the last result, too."""
    tokens, hidden = 64, 8
    shape = ModelShape(9000, 9, hidden, 16, 100, 2, 2, 4, recorded=None)
    block = (Change(0, 4 * hidden, 0, whole=True),)  # what it gives
    recorded = Recorded((Change(0, 4 * hidden, 0, whole=True),), block, (), (), (), runs_again=True)
    again = ActivationCheckpointingConfig(every=1)
    layout = Layout(3, 3, pp_size=3, precision="autocast", recompute=again)
    stages = Stages(tokens, 64, (0, 1, 2), (3, 3, 3), (3.0, 3.0, 3.0))
    parts = [stage_parts(shape, recorded, layout, stages, rank, 0.0)[0] for rank in range(3)]
    each = 4.0 * tokens * hidden
    assert [one.kept / each for one in parts] == [3, 3, 4]
    assert [one.sent / each for one in parts] == [1, 1, 0]


def stage(**values: Any) -> StageParts:
    usual: dict[str, Any] = {"entering": 0, "casts": 0, "block": 0, "again": 0, "backward": 0}
    usual |= {"loss": Part(0, 0, 0), "head": Part(0, 0, 0)}
    return StageParts(**usual | values)


def most(schedule: str, pp: int, microbatches: int, stages: list[StageParts], sent: float = 0.0) -> list[float]:
    made = build_schedule(schedule, pp, microbatches)
    return [
        sum(fullest(moments_of(actions, [rank], len(stages) - 1), [stages[rank]], sent).values())
        for rank, actions in enumerate(made)
    ]


def test_gradients_are_there_when_activations_are_not() -> None:
    """One batch: either all activations, or all gradients, never both."""
    assert most("gpipe", 1, 1, [stage(kept=100, gradients=30)]) == [100]
    assert most("gpipe", 1, 1, [stage(kept=30, gradients=100)]) == [100]
    assert most("gpipe", 1, 1, [stage(kept=30, gradients=100)], sent=5) == [105]


def test_gradients_of_the_batch_before_are_there_too() -> None:
    assert most("1f1b", 1, 2, [stage(kept=100, gradients=30)]) == [130]


def test_a_schedule_says_how_many_microbatches_are_held_beside_gradients() -> None:
    stages = [stage(kept=10, gradients=7), stage(kept=10, gradients=7)]
    assert most("gpipe", 2, 4, stages) == [40 + 0, 40 + 0]
    assert most("1f1b", 2, 4, stages) == [20 + 7, 10 + 7]


def test_the_loss_is_there_before_gradients_are() -> None:
    own = stage(kept=100, gradients=30, table=20, loss=Part(60, 40, 0), head=Part(50, -40, 0))
    assert most("gpipe", 1, 1, [own]) == [100 + 40 + 50]


def test_one_of_several_losses_without_logits_keeps_its_gradients() -> None:
    own = stage(kept=100, gradients=0, loss=Part(60, 40, 0), head=Part(0, -40, 0), once=40)
    first = stage(kept=100, gradients=0)
    assert most("gpipe", 2, 4, [first, own])[1] == 400 + 60  # and not 3 * 40 more
    assert most("1f1b", 2, 4, [first, own])[1] == 100 + 60


def test_blocks_are_whole_while_they_run_and_not_while_the_loss_does() -> None:
    own = stage(kept=100, gradients=0, loss=Part(60, 40, 0), head=Part(50, -40, 0))
    for gathered, expected in ((30, 190), (130, 230)):
        moments = moments_of(build_schedule("gpipe", 1, 1)[0], [0], 0)
        assert sum(fullest(moments, [own], 0.0, gathered).values()) == expected


def test_chunks_of_the_loss_are_those_of_the_run() -> None:
    assert LOSS_CHUNK == CHUNK_ELEMENTS


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "section"), [("llama", "zero1"), ("gpt2", "recompute")])
def test_the_estimate_is_the_peak_of_a_dry_run(name: str, section: str) -> None:
    assert abs(difference(name, section, "autocast")) <= WITHIN


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["fp32", "autocast"])
@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", TYPES)
def test_every_estimate_is_the_peak_of_a_dry_run(name: str, section: str, precision: str) -> None:
    assert abs(difference(name, section, precision)) <= WITHIN
