"""The moment of a step in which a rank has most: sums by hand, and the peaks of dry runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from hf_parallel.head import tiles
from hf_parallel.memory.activations import COLUMNS, LOSS_CHUNK, Stages, _parts_without_logits, stage_parts
from hf_parallel.memory.estimate import sending_of, steps_of
from hf_parallel.memory.moments import (
    Batch,
    Change,
    Part,
    Recorded,
    Sending,
    StageParts,
    fullest,
    moments_of,
    summed,
)
from hf_parallel.memory.terms import Layout, ModelShape, Work
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.settings.sections import ActivationCheckpointingConfig
from hf_parallel.tensor_parallel.run.vocab_loss import CHUNK_ELEMENTS


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from dry_run_draws import Draw, Found, peaks, predicted
from dry_run_peaks import SECTIONS, TYPES, difference


WITHIN: Final = 0.05
GATED_SMALL: Final = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
}
WIDER: Final = GATED_SMALL | {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
}


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
    change = Change(0, 12, 0, whole=False, heads=(2, 2))
    assert [summed([change], Batch(1, 1, tp_size=ranks)).kept for ranks in (1, 2, 4)] == [12, 6, 6]


def test_the_rank_with_most_heads_counts() -> None:
    """7 heads on 3 ranks: 3 of them; 8 groups of 4 queries on 3 ranks: 3 groups; 2 groups on 3 ranks: parts of the queries."""
    for heads, expected in (((7, 7), 3 / 7), ((32, 8), 12 / 32), ((8, 8), 3 / 8), ((8, 2), 3 / 8), ((2, 2), 1 / 2)):
        change = Change(0, 1, 0, whole=False, heads=heads)
        assert summed([change], Batch(1, 1, tp_size=3)).kept == pytest.approx(expected)


def test_ranks_that_exchange_heads_have_whole_rows_of_as_many_heads_on_each() -> None:
    """6 heads on 4 ranks: 2 on each, of which some are filled in; a mask of all heads is whole on each."""
    scores = Change(0, 0, 1, whole=False, heads=(6, 6))
    mask = Change(0, 0, 1, whole=False, is_gathered=True)
    for ranks, expected in ((1, [1, 1]), (2, [1, 2]), (3, [1, 3]), (4, [8 / 6, 4])):
        found = [summed([one], Batch(1, 1, exchanging=ranks)).kept for one in (scores, mask)]
        assert found == pytest.approx(expected)
    assert summed([scores], Batch(1, 1, tp_size=2, exchanging=2)).kept == pytest.approx(1 / 2 * 4 / 3)


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


ALONE = Sending()


def most(schedule: str, pp: int, microbatches: int, stages: list[StageParts], sent: Sending = ALONE) -> list[float]:
    made = build_schedule(schedule, pp, microbatches)
    return [
        sum(fullest(moments_of(actions, [rank], len(stages) - 1), [stages[rank]], sent).values())
        for rank, actions in enumerate(made)
    ]


def test_gradients_are_there_when_activations_are_not() -> None:
    """One batch: either all activations, or all gradients, never both."""
    assert most("gpipe", 1, 1, [stage(kept=100, gradients=30)]) == [100]
    assert most("gpipe", 1, 1, [stage(kept=30, gradients=100)]) == [100]
    assert most("gpipe", 1, 1, [stage(kept=30, gradients=100)], sent=Sending(0, 5)) == [105]


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
        assert sum(fullest(moments, [own], ALONE, gathered).values()) == expected


def test_chunks_of_the_loss_are_those_of_the_run() -> None:
    assert (LOSS_CHUNK, COLUMNS) == (CHUNK_ELEMENTS, tiles.COLUMNS)


def test_gradients_of_16_bit_that_were_sent_are_sums_in_fp32() -> None:
    """A message beside the last gradients, and twice as much of each that was sent."""
    assert most("gpipe", 1, 1, [stage(kept=30, gradients=100)], Sending(10, 20, 2.0)) == [220]
    assert most("gpipe", 1, 1, [stage(kept=30, gradients=100)], Sending(10, 20, 0.5)) == [70]


def test_gradients_that_fill_no_message_wait_for_the_last_one() -> None:
    """While the last block runs backward: 80 that are sent are 40 beside a message of 60, or are all there without one."""
    own = stage(kept=30, gradients=100, late=20, backward=50)
    for message, expected in ((50, 50 + 40 + 60), (90, 50 + 80)):
        assert most("gpipe", 1, 1, [own], Sending(60, 60, 0.5, message)) == [expected]


def test_a_message_has_its_gradients_beside_it_and_the_sum_after_these() -> None:
    shape = ModelShape(1000, 1, 8, 16, 100, 2, 2, 4, largest=10)
    for stage_of_zero, left in ((1, 1 / 4), (2, 1.0)):
        sending = sending_of(1000.0, shape, Layout(4, 4, stage=stage_of_zero, precision="fp32"))
        assert (sending.among, sending.last, sending.left) == (7000, 7000, left)  # 4 and 4 bytes, less a quarter of 4


def test_the_first_step_of_zero_2_has_whole_gradients_and_no_state_of_adam() -> None:
    shape = ModelShape(1000, 1, 8, 16, 100, 2, 2, 4, largest=10)
    layout = Layout(8, 8, stage=2, precision="fp32")
    states = {"weights": 4000.0, "gradients": 500.0, "optimizer state": 1000.0}
    usual, (first, sending) = steps_of(states, 1000.0, shape, layout, 2)
    assert usual[0] == states
    assert usual[1].left == 2.0  # the parts of the pass before, and of this one
    assert first == states | {"gradients": 4000.0, "optimizer state": 0.0}
    assert sending.left == 1.0
    half = replace(layout, precision="half")
    (_, (first, _)) = steps_of(states, 1000.0, shape, half, 1)
    assert first["gradients"] == 2000.0
    assert first["optimizer state"] == pytest.approx(1000 / 3)
    assert len(steps_of(states, 1000.0, shape, replace(layout, stage=0), 1)) == 1


def test_a_pipeline_has_whole_gradients_with_stage_2_too() -> None:
    shape = ModelShape(1000, 1, 8, 16, 100, 2, 2, 4, largest=10)
    states = {"weights": 4000.0, "gradients": 500.0, "optimizer state": 1000.0}
    usual, _ = steps_of(states, 1000.0, shape, Layout(16, 16, pp_size=2, stage=2, precision="fp32"), 1)
    assert usual[0]["gradients"] == 4000.0
    assert usual[1].left == 1 / 8


def test_a_message_of_a_large_table_is_as_large() -> None:
    shape = ModelShape(10**9, 1, 8, 16, 100, 2, 2, 4, largest=10**8)
    sending = sending_of(1e9, shape, Layout(2, 2, precision="fp32"))
    assert sending == Sending(25 * 2**20, 4e8, 1.0, 25 * 2**20)


def test_a_block_that_fills_rows_up_takes_whole_chunks() -> None:
    """Three quarters of what a token takes are of rows of 256, 512 and so on."""
    recorded = Recorded((), (Change(0, 8, 0, whole=False),), (), (), (), chunk=256, filled=0.75)
    for length, expected in ((256, 8 * 256), (257, 2 * 257 + 6 * 512), (512, 8 * 512)):
        assert recorded.parts(Batch(length, length)).forward.kept == pytest.approx(expected)


@pytest.mark.parametrize(("precision", "size", "logits"), [("fp32", 4, 4 * 256 + 32), ("half", 2, 12 * 256)])
def test_a_tile_of_the_loss_takes_what_its_logits_are_made_of(precision: Any, size: int, logits: int) -> None:
    """Two tiles, the second of 44 rows: the gradient of the weight begins with the product of the first one's gradient."""
    hidden, vocab, tokens = 8, 1000, 300
    shape = ModelShape(9000, 2, hidden, 16, vocab, 2, 2, 4)
    loss, _ = _parts_without_logits(shape, Layout(2, 2, pp_size=2, precision=precision), tokens, 0.0)
    weight, states = 4 * vocab * hidden, size * tokens * hidden
    assert loss.most == states + logits * vocab
    assert loss.kept == weight + states


def test_blocks_that_run_again_have_what_their_forward_passes() -> None:
    """Of two blocks the last one is at the end of its forward: it has what it will give back, which its backward has not."""
    shape = ModelShape(9000, 2, 8, 16, 100, 2, 2, 4)
    forward = (Change(0, 10, 0, whole=False), Change(0, 90, 0, whole=False), Change(0, -90, 0, whole=False))
    recorded = Recorded((), forward, (), (), (Change(0, 5, 0, whole=False), Change(0, -15, 0, whole=False)))
    layout = Layout(1, 1, precision="fp32", recompute=ActivationCheckpointingConfig(every=2))
    (part,) = stage_parts(shape, recorded, layout, Stages(4, 4, (0,), (2,), (2.0,)), 0, 0.0)
    assert (part.again, part.backward) == (2 * 40, 90 * 4)


def test_what_ranks_hand_to_each_other_is_made_again_by_selective_recomputation() -> None:
    """10 of each token are summed over the ranks, 30 are of a product that each has half of."""
    shape = ModelShape(9000, 2, 8, 16, 100, 2, 2, 4)
    forward = (Change(0, 10, 0, whole=True, is_sent=True), Change(0, 30, 0, whole=False))
    recorded = Recorded((), forward, (), (), (Change(0, 5, 0, whole=True),), runs_again=True)
    for mode, kept, backward in (("selective", 2 * 15, 5 + 10), ("block", 2 * (10 + 15), 5)):
        recompute = ActivationCheckpointingConfig(every=2, mode=mode)
        layout = Layout(2, 2, tp_size=2, precision="fp32", recompute=recompute)
        (part,) = stage_parts(shape, recorded, layout, Stages(1, 1, (0,), (2,), (2.0,)), 0, 0.0)
        assert (part.kept, part.backward) == (kept, backward)


# Set-ups in which predictions were wrong, each for a reason of its own.
STATES: Final = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "n_groups": 1,
    "num_heads": 8,
    "vocab_size": 1000,
}
ONE_KEY = {
    "hidden_size": 448,
    "num_hidden_layers": 8,
    "num_attention_heads": 7,
    "intermediate_size": 896,
    "num_key_value_heads": 1,
    "vocab_size": 8192,
}
SEEN: Final = {
    "queries that are scaled before attention are shared": Draw(
        "opt",
        {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_dim": 256,
            "word_embed_proj_dim": 128,
            "vocab_size": 1000,
        },
        "tp2",
        "fp32",
        "none",
        Work(4, 512),
        0,
        False,
    ),
    "a loss in tiles in fp32": Draw(
        "llama",
        GATED_SMALL | {"vocab_size": 32000},
        "pp2",
        "fp32",
        "none",
        Work(4, 512),
        0,
        True,
    ),
    "adapters of experts are added to whole stacks in fp32": Draw(
        "mixtral",
        GATED_SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "pp2",
        "autocast",
        "none",
        Work(4, 257),
        8,
        False,
    ),
    "frozen weights are not cast for long": Draw(
        "gpt_neox",
        {
            "hidden_size": 448,
            "num_hidden_layers": 8,
            "num_attention_heads": 7,
            "intermediate_size": 1344,
            "vocab_size": 1000,
        },
        "pp2",
        "autocast",
        "every 1",
        Work(4, 128),
        8,
        True,
    ),
    "the forward that runs again": Draw(
        "starcoder2",
        GATED_SMALL,
        "tp2",
        "half",
        "every 2",
        Work(8, 512),
        0,
        False,
    ),
    "sums of gradients in fp32": Draw("llama", WIDER, "dp2", "half", "none", Work(1, 128), 0, False),
    "the first step of zero2": Draw("llama", WIDER, "zero2 of 8", "fp32", "none", Work(1, 128), 0, False),
    "caps of logits in a loss in tiles": Draw(
        "gemma2",
        GATED_SMALL | {"head_dim": 64, "vocab_size": 32000},
        "pp2",
        "fp32",
        "none",
        Work(4, 257),
        0,
        True,
    ),
    "masks of all heads": Draw(
        "gemma2",
        GATED_SMALL | {"head_dim": 64, "sliding_window": 128, "num_key_value_heads": 2},
        "tp2",
        "fp32",
        "every 1",
        Work(4, 1000),
        0,
        False,
    ),
    "widths and heads that ranks do not divide": Draw(
        "llama",
        GATED_SMALL | {"num_attention_heads": 8, "num_key_value_heads": 8},
        "tp3",
        "fp32",
        "none",
        Work(4, 512),
        0,
        False,
    ),
    "a gradient of the head beside the sum of those before it": Draw(
        "llama",
        GATED_SMALL | {"vocab_size": 32000},
        "tp2 pp2",
        "autocast",
        "none",
        Work(4, 128),
        0,
        False,
    ),
    "scores of heads that ranks do not divide": Draw(
        "bloom",
        {"hidden_size": 320, "n_layer": 4, "n_head": 5, "vocab_size": 1000},
        "tp2",
        "fp32",
        "none",
        Work(4, 1000),
        0,
        False,
    ),
    "results that ranks gather are not kept": Draw(
        "olmo2",
        GATED_SMALL,
        "tp2",
        "fp32",
        "selective",
        Work(4, 512),
        0,
        False,
    ),
    "gradients that are sent in one message": Draw(
        "gpt2",
        {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000},
        "zero1",
        "fp32",
        "every 1",
        Work(4, 128),
        0,
        False,
    ),
    "scores and masks of ranks that exchange heads": Draw(
        "gemma2",
        GATED_SMALL | {"hidden_size": 384, "num_attention_heads": 6, "head_dim": 64, "sliding_window": 128},
        "sp4",
        "fp32",
        "none",
        Work(4, 512),
        0,
        False,
    ),
    "a norm over all that the last product reads": Draw(
        "mamba2",
        STATES,
        "tp2",
        "fp32",
        "none",
        Work(2, 257),
        0,
        False,
    ),
    "positions that every tp rank has whole": Draw(
        "opt",
        {
            "hidden_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "ffn_dim": 768,
            "word_embed_proj_dim": 384,
            "vocab_size": 8192,
        },
        "tp3 pp2",
        "fp32",
        "alternate",
        Work(4, 512),
        0,
        False,
    ),
    "inputs of keys that every rank has, of a shared sequence": Draw(
        "stablelm", ONE_KEY, "tp2 shared", "half", "none", Work(8, 257), 0, False
    ),
    "the same without casts": Draw("llama", ONE_KEY, "tp2 shared", "fp32", "none", Work(8, 257), 0, False),
    "a row of two chunks": Draw(
        "mamba2",
        STATES,
        "one",
        "fp32",
        "none",
        Work(2, 257),
        0,
        False,
    ),
}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SEEN)
def test_what_was_foreseen_wrongly_is_the_peak_of_a_dry_run(name: str) -> None:
    draw = SEEN[name]
    assert abs(Found(predicted(draw), peaks(draw)).difference) <= WITHIN


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
