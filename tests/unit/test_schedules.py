"""If these fail, a schedule may lose a microbatch, hold more activations than documented, or deadlock on real ranks."""

from __future__ import annotations

import itertools

import pytest

from hf_parallel.errors import ScheduleError
from hf_parallel.pipeline_parallel.actions import Action, check_schedule, format_schedule, parse_schedule
from hf_parallel.pipeline_parallel.schedules import SCHEDULES, forward_only, gpipe, one_f_one_b
from hf_parallel.pipeline_parallel.simulate import peak_live, simulate


GRID = list(itertools.product(range(1, 9), range(1, 17)))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("send_window", [1, 2])
def test_schedules_are_complete_ordered_and_free_of_deadlock(name: str, send_window: int) -> None:
    for stages, microbatches in GRID:
        schedule = SCHEDULES[name](stages, microbatches)
        check_schedule(schedule, stages, microbatches, send_window=send_window)
        assert sum(map(len, schedule)) == 2 * stages * microbatches


def test_extra_warmup_is_valid_and_costs_one_live_microbatch_a_forward() -> None:
    for (stages, microbatches), extra in itertools.product(GRID, (1, 2)):
        schedule = one_f_one_b(stages, microbatches, extra_warmup=extra)
        check_schedule(schedule, stages, microbatches)
        bound = [stages - s + extra for s in range(stages - 1)] + [1]
        assert peak_live(schedule) == tuple(min(microbatches, b) for b in bound)


def test_forward_only_is_valid_and_holds_nothing() -> None:
    for stages, microbatches in GRID:
        schedule = forward_only(stages, microbatches)
        check_schedule(schedule, stages, microbatches, backward=False)
        assert peak_live(schedule) == (0,) * stages


def test_one_f_one_b_holds_at_most_stages_left_activations() -> None:
    for stages, microbatches in GRID:
        expected = tuple(min(microbatches, stages - s) for s in range(stages))
        assert peak_live(one_f_one_b(stages, microbatches)) == expected


def test_gpipe_holds_every_microbatch() -> None:
    for stages, microbatches in GRID:
        assert peak_live(gpipe(stages, microbatches)) == (microbatches,) * stages


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_bubble_fraction_at_equal_costs_is_the_textbook_one(name: str) -> None:
    for stages, microbatches in GRID:
        result = simulate(SCHEDULES[name](stages, microbatches), [1.0] * stages, [2.0] * stages)
        assert result.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-12)
        assert result.makespan == pytest.approx(3.0 * (microbatches + stages - 1))


def test_simulation_counts_two_hops_a_microbatch_for_plain_1f1b_and_hides_them_with_extra_warmup() -> None:
    costs = [1 / 3, 1 / 3], [2 / 3, 2 / 3]
    plain = simulate(one_f_one_b(2, 16), *costs, latency=0.1 / 3)
    warm = simulate(one_f_one_b(2, 16, extra_warmup=1), *costs, latency=0.1 / 3)
    assert plain.makespan == pytest.approx(17.53, abs=0.01)
    assert warm.makespan == pytest.approx(17.07, abs=0.01)


def test_simulation_of_one_stage_is_the_sum_of_its_costs() -> None:
    result = simulate(one_f_one_b(1, 5), [2.0], [3.0], latency=7.0)
    assert (result.makespan, result.busy, result.bubble_fraction) == (25.0, (25.0,), 0.0)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_text_round_trip_is_exact(name: str) -> None:
    for stages, microbatches in GRID:
        schedule = SCHEDULES[name](stages, microbatches)
        assert parse_schedule(format_schedule(schedule)) == schedule


def test_text_reads_as_documented() -> None:
    assert format_schedule(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert parse_schedule("0F0, 0B0,\n") == [[Action(0, "F", 0), Action(0, "B", 0)]]


@pytest.mark.parametrize("text", ["2X0", "F0", "2F", "", "-1F0", "2F0B"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="an action is <stage>"):
        Action.parse(text)


def test_checker_names_every_dropped_and_every_duplicated_action() -> None:
    for name, (stages, microbatches) in itertools.product(SCHEDULES, [(1, 1), (2, 3), (4, 5)]):
        schedule = SCHEDULES[name](stages, microbatches)
        for rank, actions in enumerate(schedule):
            for index, action in enumerate(actions):
                others = [list(other) for other in schedule]
                del others[rank][index]
                with pytest.raises(ScheduleError, match=f"action {action} is missing"):
                    check_schedule(others, stages, microbatches)
                others[rank].append(action)
                others[rank].append(action)
                with pytest.raises(ScheduleError, match=f"action {action} occurs twice"):
                    check_schedule(others, stages, microbatches)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1", "0B0 on rank 0 comes before its forward 0F0"),
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1", "1F1 stands where stage 0 has 0F0"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0", "1B1 stands where stage 0 has 0B0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlocks: rank 0 stops at 0B0, waiting for 1B0; rank 1 stops at 1F1"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n1F1,1B1", "1F1 is on rank 2 but stage 1 is on rank 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1,2F0", "2F0 on rank 1 is outside the schedule"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1F2", "1F2 on rank 1 is outside the schedule"),
    ],
)
def test_checker_names_the_action_that_breaks_the_rule(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule(parse_schedule(text), 2, 2)


def test_checker_finds_a_deadlock_that_only_bounded_sends_cause() -> None:
    # Rank 1 receives 1 only after its backward of 0; with no send left unreceived, rank 0 never takes that gradient.
    crossed = parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    check_schedule(crossed, 2, 2, send_window=1)
    with pytest.raises(ScheduleError, match="deadlocks: rank 0 stops at 0F1, waiting for 1F1"):
        check_schedule(crossed, 2, 2, send_window=0)


def test_a_schedule_without_stages_or_microbatches_is_refused() -> None:
    with pytest.raises(ScheduleError, match="num_stages=0"):
        gpipe(0, 1)
    with pytest.raises(ScheduleError, match="num_microbatches=0"):
        one_f_one_b(1, 0)
