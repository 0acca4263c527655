"""If these fail, a schedule may lose a microbatch, hold more activations than documented, or deadlock on real ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest

from hf_parallel.errors import ScheduleError
from hf_parallel.pipeline_parallel.schedule.actions import (
    Action,
    canonical,
    check_schedule,
    format_schedule,
    message_into,
    message_out_of,
    parse_schedule,
    placement_of,
    read_schedule,
    required_send_window,
    sends_of,
)
from hf_parallel.pipeline_parallel.schedule.schedules import (
    SCHEDULES,
    all_backwards,
    all_forwards,
    build_schedule,
    forward_only,
    gpipe,
    grouping,
    one_f_one_b,
    stages_of_ranks,
)
from hf_parallel.pipeline_parallel.schedule.simulate import peak_activations, peak_live, simulate


GRID = list(itertools.product(range(1, 9), range(1, 17)))
SINGLE = ("naive", "gpipe", "1f1b")
LOOPED = ("interleaved_1f1b", "interleaved_zero_bubble")
V_SHAPED = ("zbv_zero_bubble", "dualpipev")


@cache
def built(name: str, ranks: int, microbatches: int, stages: int | None = None) -> list[list[Action]]:
    return build_schedule(name, ranks, microbatches, stages_per_rank=stages)


def cases(names: tuple[str, ...] = tuple(SCHEDULES)) -> Iterator[tuple[str, int, int, int]]:
    """Every schedule, number of ranks, of microbatches and of stages a rank."""
    for name in names:
        family = SCHEDULES[name]
        for stages in (1, 2, 3) if family.fixed_stages_per_rank is None else (family.fixed_stages_per_rank,):
            yield from ((name, ranks, microbatches, stages) for ranks, microbatches in GRID)


def test_every_schedule_is_in_these_tests() -> None:
    assert sorted(SINGLE + LOOPED + V_SHAPED) == sorted(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_complete_ordered_and_free_of_deadlock(name: str) -> None:
    for _, ranks, microbatches, stages in cases((name,)):
        schedule = built(name, ranks, microbatches, stages)
        window = required_send_window(schedule, ranks * stages, microbatches)
        assert window == 2 or (name in LOOPED and window <= 8)
        if name in SINGLE:
            check_schedule(schedule, ranks, microbatches, send_window=1)
        kinds = {action.kind for actions in schedule for action in actions}
        assert kinds <= {"F", "B", "I", "W"} if SCHEDULES[name].splits_backward else kinds == {"F", "B"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_stand_where_the_placement_says(name: str) -> None:
    for _, ranks, microbatches, stages in cases((name,)):
        placement = stages_of_ranks(name, ranks, stages)
        rank_of = placement_of(built(name, ranks, microbatches, stages))
        assert tuple(tuple(s for s, r in enumerate(rank_of) if r == rank) for rank in range(ranks)) == placement
    expected = {"naive": (1,), "gpipe": (1,), "1f1b": (1,)} | dict.fromkeys(LOOPED, (1, 4)) | dict.fromkeys(
        V_SHAPED, (1, 4)
    )  # fmt: skip
    assert stages_of_ranks(name, 3)[1] == expected[name]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_phases_under_any_placement_are_valid_and_mirror_each_other(name: str) -> None:
    for ranks, microbatches in GRID:
        placement = stages_of_ranks(name, ranks)
        count = sum(map(len, placement))
        forwards, backwards = all_forwards(placement, microbatches), all_backwards(placement, microbatches)
        assert forwards == forward_only(placement, microbatches)
        check_schedule(forwards, count, microbatches, backward=False, send_window=1)
        check_schedule(backwards, count, microbatches, forward=False, send_window=1)
        both = [f + b for f, b in zip(forwards, backwards, strict=True)]
        check_schedule(both, count, microbatches, send_window=1)
        assert peak_live(forwards) == (0,) * ranks
        assert peak_live(both) == tuple(microbatches * len(own) for own in placement)
        times = [simulate(half, [1.0] * count, [1.0] * count).makespan for half in (forwards, backwards)]
        own = len(placement[0])
        if name == "zbv_zero_bubble":
            assert times == [2 * microbatches + 2 * (ranks - 1)] * 2
        elif own == 1 or microbatches % ranks == 0:
            assert times == [own * microbatches + ranks - 1] * 2
        assert times[0] == times[1]


@pytest.mark.parametrize("name", SINGLE)
def test_bubble_fraction_at_equal_costs_is_the_textbook_one(name: str) -> None:
    for ranks, m in GRID:
        result = simulate(built(name, ranks, m), [1.0] * ranks, [2.0] * ranks)
        bubble = 1 - 1 / ranks if name == "naive" else (ranks - 1) / (m + ranks - 1)
        assert result.bubble_fraction == pytest.approx(bubble, abs=1e-12)
        assert result.makespan == pytest.approx(3.0 * m / (1 - bubble))


def test_zbv_has_no_bubble_inside_where_its_three_parts_take_equal_time() -> None:
    for ranks in range(1, 9):
        for m in range(2 * ranks, 17):
            result = simulate(built("zbv_zero_bubble", ranks, m), [1.0] * 2 * ranks, [2.0] * 2 * ranks)
            assert result.makespan == 6 * m + ranks - 1
            spans = [(own[-1] - first[0]) for first, own in zip(result.starts, result.ends, strict=True)]
            assert spans == [6 * m] * ranks


def test_simulation_counts_two_hops_a_microbatch_for_1f1b() -> None:
    costs = [1 / 3, 1 / 3], [2 / 3, 2 / 3]
    plain = simulate(one_f_one_b(2, 16), *costs, latency=0.1 / 3)
    assert plain.makespan == pytest.approx(17.53, abs=0.01)


def test_simulation_of_one_stage_is_the_sum_of_its_costs() -> None:
    result = simulate(one_f_one_b(1, 5), [2.0], [3.0], latency=7.0)
    assert (result.makespan, result.busy, result.bubble_fraction) == (25.0, (25.0,), 0.0)


@pytest.mark.parametrize("name", LOOPED + V_SHAPED)
def test_stages_of_one_rank_exchange_without_a_hop(name: str) -> None:
    result = simulate(built(name, 1, 5), [1.0, 2.0], [3.0, 5.0], latency=7.0)
    assert (result.makespan, result.bubble_fraction) == (55.0, 0.0)


def test_simulation_splits_a_backward_as_told() -> None:
    schedule = parse_schedule("0F0,0I0,0W0\n1F0,1I0,1W0")
    result = simulate(schedule, [1.0, 1.0], [4.0, 4.0], weight_costs=[1.0, 3.0], latency=0.5)
    assert result.spans[Action(1, "I", 0)] == (2.5, 3.5)
    assert result.spans[Action(1, "W", 0)] == (3.5, 6.5)
    assert result.spans[Action(0, "I", 0)] == (4.0, 7.0)
    assert result.makespan == 8.0
    assert simulate(schedule, [1.0, 1.0], [4.0, 4.0]).spans[Action(1, "W", 0)] == (4.0, 6.0)


@pytest.mark.parametrize(
    ("forward", "backward", "weight", "message"),
    [
        ([1.0], [1.0, 1.0], None, "forward_costs has 1 entries and the schedule 2 stages"),
        ([1.0, 1.0], [1.0], None, "backward_costs has 1 entries"),
        ([1.0, 1.0], [1.0, 1.0], [1.0], "weight_costs has 1 entries"),
        ([1.0, 1.0], [1.0, 1.0], [1.0, 1.5], r"weight_costs\[1\]=1.5 is more than backward_costs\[1\]=1.0"),
    ],
)
def test_simulation_refuses_costs_that_do_not_fit(
    forward: list[float], backward: list[float], weight: list[float] | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(gpipe(2, 2), forward, backward, weight_costs=weight)


def test_simulation_names_where_a_schedule_stops() -> None:
    with pytest.raises(ScheduleError, match="deadlocks: rank 0 stops at 0B0"):
        simulate(parse_schedule("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), [1.0, 1.0], [1.0, 1.0])


def bound_of(name: str, p: int, m: int, v: int, rank: int) -> int:
    """The documented most (stage, microbatch) pairs that a rank holds."""
    group = grouping(p, m)[1]
    return {
        "naive": 1,
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved_1f1b": min(m * v, (v - 1) * group + 2 * (p - rank) - 1),
        "interleaved_zero_bubble": min(m * v, (v - 1) * group + p),
        "zbv_zero_bubble": min(2 * m, 2 * p),
        "dualpipev": min(2 * m, 2 * p + 1),
    }[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_holds_what_is_documented(name: str) -> None:
    reached = set()
    for _, p, m, v in cases((name,)):
        schedule = built(name, p, m, v)
        bounds = tuple(bound_of(name, p, m, v, rank) for rank in range(p))
        peaks = peak_live(schedule)
        if name in SINGLE:
            assert peaks == bounds
        assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True)), (p, m, v, peaks, bounds)
        reached |= {p for peak, bound in zip(peaks, bounds, strict=True) if peak == bound}
        assert peak_activations(schedule) == tuple(peak / v for peak in peaks)
    assert reached == set(range(1, 9))


@pytest.mark.parametrize("name", ["1f1b", *V_SHAPED])
def test_what_a_rank_holds_does_not_grow_with_the_microbatches(name: str) -> None:
    for p in range(1, 9):
        assert peak_live(built(name, p, 2 * p + 2)) == peak_live(built(name, p, 40))


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_round_trip_is_exact(name: str) -> None:
    for ranks, microbatches in GRID:
        schedule = built(name, ranks, microbatches)
        assert parse_schedule(format_schedule(schedule)) == schedule


def test_text_reads_as_documented() -> None:
    assert format_schedule(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert parse_schedule("0F0, 0B0,\n2I0,2W0") == [
        [Action(0, "F", 0), Action(0, "B", 0)],
        [Action(2, "I", 0), Action(2, "W", 0)],
    ]


@pytest.mark.parametrize("text", ["2X0", "F0", "2F", "", "-1F0", "2F0B"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="an action is <stage>"):
        Action.parse(text)


def test_messages_go_to_the_neighbour_stage_in_canonical_form() -> None:
    into = {text: message_into(Action.parse(text), 3) for text in ("0F4", "1F4", "2B4", "1I4", "0B4", "1W4")}
    out_of = {text: message_out_of(Action.parse(text), 3) for text in ("0F4", "2F4", "2B4", "1I4", "0B4", "1W4")}
    assert {k: str(v) for k, v in into.items() if v} == {"1F4": "0F4", "1I4": "2B4", "0B4": "1B4"}
    assert {k: str(v) for k, v in out_of.items() if v} == {"0F4": "1F4", "2B4": "1B4", "1I4": "0B4"}
    assert [str(canonical(Action.parse(text))) for text in ("1F2", "1B2", "1I2", "1W2")] == [
        "1F2",
        "1B2",
        "1B2",
        "1W2",
    ]


def test_sends_share_one_order_a_direction_and_skip_messages_inside_a_rank() -> None:
    schedule = parse_schedule("0F0,3F0,3I0,0I0,3W0,0W0\n1F0,2F0,2I0,1I0,1W0,2W0")
    check_schedule(schedule, 4, 1)
    assert [str(action) for action in sends_of(schedule, 0, 1)] == ["0F0", "3B0"]
    assert [str(action) for action in sends_of(schedule, 1, 0)] == ["2F0", "1B0"]
    assert sends_of(schedule, 0, 0) == ()


@pytest.mark.parametrize("name", SCHEDULES)
def test_checker_names_every_dropped_and_every_duplicated_action(name: str) -> None:
    for ranks, microbatches in [(1, 1), (2, 3), (4, 5)]:
        schedule = built(name, ranks, microbatches)
        count = len(placement_of(schedule))
        for rank, actions in enumerate(schedule):
            for index, action in enumerate(actions):
                others = [list(other) for other in schedule]
                del others[rank][index]
                with pytest.raises(ScheduleError, match=f"action {action} is missing"):
                    check_schedule(others, count, microbatches)
                others[rank].append(action)
                others[rank].append(action)
                with pytest.raises(ScheduleError, match=f"action {action} occurs twice"):
                    check_schedule(others, count, microbatches)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1", "0B0 on rank 0 comes before its forward 0F0"),
        ("0I0,0F0,0W0,0F1,0B1\n1F0,1B0,1F1,1B1", "0I0 on rank 0 comes before its forward 0F0"),
        ("0F0,0W0,0I0,0F1,0B1\n1F0,1B0,1F1,1B1", "0W0 on rank 0 comes before 0I0"),
        ("0F0,0I0,0F1,0B1\n1F0,1B0,1F1,1B1", "0W0 is missing"),
        ("0F0,0W0,0F1,0B1\n1F0,1B0,1F1,1B1", "0I0 is missing"),
        ("0F0,0F1,0B1\n1F0,1B0,1F1,1B1", "0B0 is missing"),
        ("0F0,0B0,0W0,0F1,0B1\n1F0,1B0,1F1,1B1", "0W0 stands beside 0B0"),
        ("0F0,0B0,0I0,0F1,0B1\n1F0,1B0,1F1,1B1", "0I0 stands beside 0B0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlocks: rank 0 stops at 0B0, waiting for 1B0; rank 1 stops at 1F1"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1I0,1W0,1B1", "rank 0 stops at 0B0, waiting for 1I0; rank 1 stops at 1F1"),
        ("1F0,0F0,1B0,0B0,0F1,1F1,1B1,0B1", "deadlocks: rank 0 stops at 1F0, waiting for 0F0"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n1F1,1B1", "1F1 is on rank 2 but stage 1 is on rank 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1,2F0", "2F0 on rank 1 is outside the schedule"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1F2", "1F2 on rank 1 is outside the schedule"),
        ("1F0,1F1,1B0,1B1", "stage 0 has no action but stage 1 has"),
    ],
)
def test_checker_names_the_action_that_breaks_the_rule(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule(parse_schedule(text), 2, 2)


@pytest.mark.parametrize("text", ["0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1", "0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0"])
def test_neighbours_may_order_microbatches_differently(text: str) -> None:
    check_schedule(parse_schedule(text), 2, 2, send_window=1)


def test_a_later_message_takes_the_earlier_ones_out_of_the_window() -> None:
    reverse = parse_schedule("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F3,1F0,1F1,1F2,1B0,1B1,1B2,1B3")
    check_schedule(reverse, 2, 4, send_window=0)


def test_checker_finds_a_deadlock_that_only_bounded_sends_cause() -> None:
    # Rank 1 receives 1 only after its backward of 0; with no send left unreceived, rank 0 never takes that gradient.
    crossed = parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    check_schedule(crossed, 2, 2, send_window=1)
    with pytest.raises(ScheduleError, match="deadlocks: rank 0 stops at 0F1, waiting for 1F1"):
        check_schedule(crossed, 2, 2, send_window=0)


def test_required_send_window_is_the_smallest_that_passes() -> None:
    stages, count = stages_of_ranks("interleaved_1f1b", 2), 12
    rows = [[Action(s, "F", i) for s in own for i in range(count)] for own in stages]
    rows = [row + back for row, back in zip(rows, all_backwards(stages, count), strict=True)]
    window = required_send_window(rows, 4, count)
    assert window > 2
    check_schedule(rows, 4, count, send_window=window)
    with pytest.raises(ScheduleError, match="deadlocks"):
        check_schedule(rows, 4, count, send_window=window // 2)
    with pytest.raises(ScheduleError, match="deadlocks"):
        required_send_window(parse_schedule("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), 2, 2)


def test_a_written_schedule_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    for name in SCHEDULES:
        path.write_text(format_schedule(built(name, 4, 6)))
        assert read_schedule(path) == built(name, 4, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "mine.csv, line 2, cell 2: action '1X0'"),
        ("0F0,0B0\n\n1F0,1B0\n", "mine.csv, line 2: no action for rank 1"),
        ("", "mine.csv: holds no action"),
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1\n", "mine.csv: action 0B1 is missing"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "mine.csv: schedule deadlocks: rank 0 stops at 0B0"),
    ],
)
def test_a_bad_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_schedule(tmp_path / "mine.csv")
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_schedule(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages", "message"),
    [
        ("2f2b", 2, 2, None, r"schedule '2f2b' is unknown\. Did you mean '1f1b'\? Known: naive, gpipe, 1f1b"),
        ("1f1b", 2, 2, 2, "stages_per_rank=2: schedule 1f1b needs exactly 1 a rank"),
        ("dualpipev", 2, 2, 3, "stages_per_rank=3: schedule dualpipev needs exactly 2 a rank"),
        ("interleaved_1f1b", 2, 2, 0, "stages_per_rank=0: schedule interleaved_1f1b needs at least one stage a rank"),
        ("zbv_zero_bubble", 0, 2, None, "num_stages=0"),
        ("interleaved_zero_bubble", 2, 0, None, "num_microbatches=0"),
    ],
)
def test_what_no_schedule_supports_is_refused(
    name: str, ranks: int, microbatches: int, stages: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, ranks, microbatches, stages_per_rank=stages)


def test_a_schedule_without_stages_or_microbatches_is_refused() -> None:
    with pytest.raises(ScheduleError, match="num_stages=0"):
        gpipe(0, 1)
    with pytest.raises(ScheduleError, match="num_microbatches=0"):
        one_f_one_b(1, 0)


def in_order(actions: list[Action]) -> bool:
    """Whether every F comes before its backward and every I before its W."""
    place = {action: index for index, action in enumerate(actions)}
    before = {"B": "F", "I": "F", "W": "I"}
    return all(
        place[Action(action.stage, before[action.kind], action.microbatch)] < index
        for action, index in place.items()
        if action.kind in before
    )


def runs_to_its_end(schedule: list[list[Action]], check: Callable[[list[list[Action]]], object]) -> bool:
    try:
        check(schedule)
    except ScheduleError as error:
        return "deadlocks: rank" not in str(error)
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_checker_and_simulator_agree_on_which_shuffled_schedules_deadlock(name: str) -> None:
    random = Random(0)
    seen = set()
    for _ in range(300):
        schedule = [list(actions) for actions in built(name, 3, 4)]
        count = len(placement_of(schedule))
        for actions in random.choices(schedule, k=2):
            index = random.randrange(len(actions))
            actions.insert(random.randrange(max(0, index - 6), len(actions)), actions.pop(index))
        costs = [1.0] * count, [1.0] * count
        if not all(in_order(actions) for actions in schedule):
            continue
        verdicts = [
            runs_to_its_end(schedule, lambda s: check_schedule(s, count, 4, send_window=1000)),
            runs_to_its_end(schedule, lambda s: simulate(s, *costs)),
        ]
        assert verdicts[0] == verdicts[1], format_schedule(schedule)
        seen.add(verdicts[0])
    assert seen == {True, False}
