"""Slices of schedules that do not drain, and the settings around them: no process group, no model."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from hf_parallel.errors import ConfigError, ScheduleError
from hf_parallel.pipeline_parallel.schedule.actions import Action, required_send_window
from hf_parallel.pipeline_parallel.schedule.asynchronous import delay_of, delays_of, empty, next_slice, several_steps
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.pipeline_parallel.schedule.simulate import simulate
from hf_parallel.settings.asynchronous_rules import clipped_alone
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import check_accelerate


SIZES = [("pipedream_2bw", p, m) for p in (2, 3, 4, 8) for m in (p - 1, p, 2 * p)]
SIZES += [("pipedream", p, 1) for p in (2, 3, 4, 8)]


@pytest.mark.parametrize(("name", "pp_size", "count"), SIZES)
def test_ranks_follow_1f1b_through_all_steps_and_end_empty(name: str, pp_size: int, count: int) -> None:
    steps = 6
    schedule = several_steps(name, pp_size, count, steps)
    assert schedule == build_schedule("1f1b", pp_size, steps * count)
    required_send_window(schedule, pp_size, steps * count)


@pytest.mark.parametrize(("name", "pp_size", "count"), SIZES)
def test_a_rank_is_never_idle_between_the_begin_and_the_end(name: str, pp_size: int, count: int) -> None:
    steps = 12
    timed = simulate(several_steps(name, pp_size, count, steps), [1.0] * pp_size, [2.0] * pp_size)
    begin, end = 3 * pp_size, timed.makespan - 3 * pp_size
    for starts, ends in zip(timed.starts, timed.ends, strict=True):
        middle = [(a, b) for a, b in zip(starts, ends, strict=True) if a >= begin and b <= end]
        assert all(before[1] == after[0] for before, after in pairwise(middle))


@pytest.mark.parametrize(("name", "pp_size", "count"), SIZES)
def test_a_step_completes_its_window_and_begins_no_more_than_the_delay_allows(
    name: str, pp_size: int, count: int
) -> None:
    done, delay = empty(pp_size), delay_of(name, pp_size)
    for _ in range(5):
        found = next_slice(done, [count] * (delay + 1))
        for rank, actions in enumerate(found.schedule):
            kinds = Counter(action.kind for action in actions)
            forwards, backwards = done[rank][0] + kinds["F"], done[rank][1] + kinds["B"]
            assert count <= backwards <= forwards <= count * (delay + 1)
            assert forwards - backwards <= pp_size - rank, "activations of 1F1B"
            assert found.done[rank] == (forwards - count, backwards - count)
        done = found.done


@pytest.mark.parametrize("pp_size", [2, 3, 4, 8])
def test_without_vertical_sync_each_rank_ends_a_step_with_its_own_last_backward(pp_size: int) -> None:
    steps, done = 3 * pp_size, empty(pp_size)
    whole: list[list[Action]] = [[] for _ in range(pp_size)]
    delays = delays_of("pipedream", pp_size, vertical_sync=False)
    for step in range(steps):
        found = next_slice(done, [1] * min(pp_size, steps - step), vertical_sync=False)
        done = found.done
        for rank, (actions, delay) in enumerate(zip(found.schedule, delays, strict=True)):
            assert actions[-1] == Action(rank, "B", 0)
            # `step` updates were made before: a forward of a later window has weights that lack those between.
            newest = max((action.microbatch for action in actions if action.kind == "F"), default=-1)
            assert newest in (delay, -1), "the newest window has the newest weights, so that it lacks `delay` updates"
            whole[rank] += found.program(rank).shifted(step).actions
    assert delays == tuple(range(pp_size))[::-1]
    assert whole == build_schedule("1f1b", pp_size, steps)
    assert done == empty(pp_size)


def test_windows_may_differ_in_size_and_the_last_one_drains() -> None:
    first = next_slice(empty(2), [3, 1])
    second = next_slice(first.done, [1, 4])
    third = next_slice(second.done, [4])
    assert third.done == empty(2)
    assert sum(len(actions) for found in (first, second, third) for actions in found.schedule) == 2 * 2 * 8


def test_messages_of_a_slice_are_those_that_its_neighbours_send_in_it() -> None:
    found = next_slice(empty(3), [2, 2])
    assert found.program(1).incoming == {
        0: tuple(action for action in found.schedule[0] if action.kind == "F"),
        2: tuple(action for action in found.schedule[2] if action.kind == "B"),
    }
    assert found.program(0).shifted(7).actions[0] == Action(0, "F", 7)


def test_a_schedule_that_drains_has_no_delay() -> None:
    with pytest.raises(ScheduleError, match=r"'1f1b' has no delay\. Choose one of pipedream, pipedream_2bw"):
        delay_of("1f1b", 2)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero": {"stage": 2}}, r"zero.stage=2 with pipeline.schedule=pipedream_2bw is not available.*zero.stage to 1"),
    ({"zero": {"stage": 3}}, r"zero.stage=3 with pipeline.schedule=pipedream_2bw is not available.*zero.stage to 1"),
    ({"zero": {"stage": 1, "overlap_gather": True}}, r"overlap_gather=true with .*Set zero.overlap_gather to false"),
    (
        {"zero": {"engine": "deepspeed"}},
        r"zero.engine=deepspeed with pipeline.schedule=pipedream_2bw is not available",
    ),
    ({"local_sgd": {"sync_every": 4}}, r"local_sgd.sync_every=4 with .*Set local_sgd.sync_every to 1"),
    ({"gradient_compression": {"method": "int8"}}, r"method=int8 with .*Set gradient_compression.method to none"),
    (
        {"pipeline": {"compile_blocks": "aot_eager"}},
        r"compile_blocks=aot_eager with .*Set pipeline.compile_blocks to none",
    ),
    ({"pipeline": {"vertical_sync": False}}, r"vertical_sync=false with .* has no effect: only pipedream asks"),
    (
        {"pipeline": {"schedule": "pipedream", "num_microbatches": 4}},
        r"num_microbatches=4 with pipeline.schedule=pipedream: .*Set pipeline.num_microbatches to 1",
    ),
    (
        {"pipeline": {"schedule": "pipedream"}, "gradient_accumulation_steps": 2},
        r"gradient_accumulation_steps=2 with pipeline.schedule=pipedream",
    ),
    (
        {"pp_size": 4, "pipeline": {"num_microbatches": 1}, "gradient_accumulation_steps": 2},
        r"pp_size=4 and 2 microbatches in an optimizer step: .*pp_size - 1 = 3.*Raise pipeline.num_microbatches",
    ),
]


@pytest.mark.parametrize(("settings", "says"), REFUSED)
def test_what_an_asynchronous_schedule_cannot_have_is_refused_before_anything_starts(
    settings: dict[str, Any], says: str
) -> None:
    pipeline = {"schedule": "pipedream_2bw", **settings.get("pipeline", {})}
    with pytest.raises(ConfigError, match=says):
        HFParallelConfig(**{"pp_size": 2, **settings, "pipeline": pipeline})


def test_a_norm_of_all_gradients_is_refused_where_stages_step_at_different_times() -> None:
    apart = HFParallelConfig(pp_size=2, pipeline={"schedule": "pipedream", "vertical_sync": False}).pipeline
    (text,) = clipped_alone(apart, 1.0)
    assert "max_grad_norm=1 with pipeline.vertical_sync=false is not available" in text
    assert "Set max_grad_norm to 0, or pipeline.vertical_sync to true" in text
    assert not clipped_alone(apart, 0.0)
    assert not clipped_alone(HFParallelConfig(pp_size=2, pipeline={"schedule": "pipedream"}).pipeline, 1.0)


def test_a_loss_scale_is_refused_in_the_file_of_the_launcher() -> None:
    config = HFParallelConfig(pp_size=2, pipeline={"schedule": "pipedream_2bw"})
    file = {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp16"}
    with pytest.raises(
        ConfigError, match=r"mixed_precision=fp16 with pipeline.schedule=pipedream_2bw.*Set mixed_precision to bf16"
    ):
        check_accelerate(config, file)
    check_accelerate(config, {**file, "mixed_precision": "bf16"})


def test_a_step_of_pipedream_is_one_microbatch() -> None:
    config = HFParallelConfig(pp_size=4, pipeline={"schedule": "pipedream"})
    assert config.pipeline.parts_of_batch(4) == 1
    assert HFParallelConfig(pp_size=4, pipeline={"schedule": "pipedream_2bw"}).pipeline.parts_of_batch(4) == 8
