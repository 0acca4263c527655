"""If these fail, a pipeline trains something else than one process does, keeps too much alive, or hangs.

Only data moves between ranks and every stage does the arithmetic of one process in the same order, so losses and
gradients are compared bit for bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from thinning import in_turns
from torch import Tensor, nn

from hf_parallel.errors import PlanError, RankMismatchError, ScheduleError, UnsupportedError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.pipeline_parallel.run.links import neighbour_pairs
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.pipeline_parallel.run.transport import DirectTransport, HostTransport, connect, make_transport
from hf_parallel.pipeline_parallel.run.weight_gradients import WeightGradients
from hf_parallel.pipeline_parallel.schedule.actions import Action
from hf_parallel.pipeline_parallel.schedule.program import Program
from hf_parallel.pipeline_parallel.schedule.programs import Programs, ScheduleChoice
from hf_parallel.pipeline_parallel.schedule.schedules import SCHEDULES
from hf_parallel.pipeline_parallel.schedule.simulate import peak_live
from hf_parallel.settings.sections import PipelineConfig


WIDTH = 6
CPU = torch.device("cpu")
NORM = 97.0


class ToyStage(nn.Module):
    """One block. The payload holds the hidden state, a relayed tensor, indices, a constant and a tensor nobody reads."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == num_stages - 1
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.dead = nn.Parameter(torch.ones(WIDTH))

    def forward(self, payload: tuple[Tensor, ...], x: Tensor, **unused: Any) -> Any:
        if self.first:
            hidden, relayed, indices, constant = self.linear(x), torch.tanh(x * self.dead), x.argmax(-1), 2.0 * x
        else:
            hidden, relayed, indices, constant, _ = payload
            hidden.mul_(1.25)  # a block may modify its input in place
            hidden = torch.relu(self.linear(hidden)) + self.table(indices) * relayed + constant
        if self.last:
            return {"logits": hidden, "extra": [hidden.sum(-1)]}
        return hidden, relayed, indices, constant, (self.dead * hidden)[..., ::2]


class FrozenStart(ToyStage):
    """Its first block trains nothing, so its payload requires no gradient at all."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__(index, num_stages)
        if self.first:
            self.requires_grad_(False)


def build(stage_class: type[ToyStage], num_stages: int) -> list[ToyStage]:
    torch.manual_seed(3)
    return [stage_class(i, num_stages) for i in range(num_stages)]


def batch(rows: Sequence[int], length: int = 5) -> list[dict[str, Any]]:
    torch.manual_seed(11)
    return [{"x": torch.randn(n, length, WIDTH), "num_items": 7 * n, "flag": True} for n in rows]


def loss_of(output: dict[str, Any], index: int) -> Tensor:
    return (output["logits"] * (index + 1)).square().sum() / NORM


def through(stages: Sequence[nn.Module], inputs: dict[str, Any]) -> Any:
    payload: Any = ()
    for stage in stages:
        payload = stage(payload, **inputs)
    return payload


def reference(stages: Sequence[nn.Module], microbatches: list[dict[str, Any]], seed: float) -> list[Tensor]:
    losses = []
    for index, inputs in enumerate(microbatches):
        loss = loss_of(through(stages, inputs), index)
        (loss * seed).backward()
        losses.append(loss.detach())
    return losses


def runtime_for(
    stages: Mapping[int, Callable[..., Any]] | Callable[..., Any],
    rank: int,
    world_size: int,
    host: bool = False,
    placement: Sequence[int] | None = None,
    **options: Any,
) -> PipelineRuntime:
    """A runtime of several stages, or of one stage a rank."""
    placement = range(world_size) if placement is None else placement
    groups = channel_groups(tuple(neighbour_pairs(placement)), world_size)
    transports = {pair: make_transport("host" if host else "auto", CPU, group) for pair, group in groups.items()}
    assert all(isinstance(t, HostTransport if host else DirectTransport) for t in transports.values())
    mine = stages if isinstance(stages, Mapping) else {rank: stages}
    return PipelineRuntime(mine, placement, rank, transports, **options)


@functools.cache
def channel_groups(pairs: tuple[tuple[int, int], ...], pp_size: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    return Mesh.build(MeshShape(1, pp_size, 1), timeout=timedelta(seconds=30)).channel_groups(pairs)


def programs(rank: int, world_size: int, schedule: str = "1f1b", **settings: Any) -> Programs:
    return Programs(ScheduleChoice(PipelineConfig(schedule=schedule, **settings), world_size), rank)


def assert_same_gradients(mine: nn.Module, other: nn.Module, rtol: float = 0.0) -> None:
    for (name, a), b in zip(mine.named_parameters(), other.parameters(), strict=True):
        if a.grad is None or b.grad is None:
            # a leaf that nobody read gives zeros in a pipeline where one process gives None
            given = a.grad if a.grad is not None else b.grad
            assert given is None or not given.any(), name
        else:
            torch.testing.assert_close(
                a.grad, b.grad, rtol=0, atol=rtol * float(b.grad.abs().max()), msg=lambda m, n=name: f"{n}: {m}"
            )


def parity_rank(rank: int, world_size: int, name: str) -> None:
    choice = ScheduleChoice(PipelineConfig(schedule=name), world_size)
    mine, count_of_stages = choice.stages_of_ranks[rank], len(choice.placement)
    for stage_class in (ToyStage, FrozenStart) if count_of_stages > 1 else (ToyStage,):
        stages = build(stage_class, count_of_stages)
        own = nn.ModuleDict({str(s): copy.deepcopy(stages[s]) for s in mine})
        shared: dict[str, Any] = {"weights": WeightGradients(own), "placement": choice.placement}
        runtime, hosted = (
            runtime_for({s: own[str(s)] for s in mine}, rank, world_size, host, **shared) for host in (False, True)
        )
        for count in (1, 2, 3, 7):
            for engine, rows, length, seed in [(runtime, [2] * count, 5, 1.0), (runtime, [1, 3, 2, 4, 1, 2, 5][:count], 4, 8.0),
                                               (hosted, [2, 1, 1, 3, 1, 1, 1][:count], 3, 1.0)]:  # fmt: skip
                microbatches = batch(rows, length)
                for module in (*stages, own):
                    module.zero_grad()
                expected = reference(stages, microbatches, seed)
                program = Programs(choice, rank).training(count)
                losses = engine.run(microbatches, program, backward=True, loss_of=loss_of, seed=seed)
                assert losses == (expected if rank == choice.placement[-1] else []), (name, count, rows)
                assert all(not loss.requires_grad for loss in losses)
                for s in mine:
                    assert_same_gradients(own[str(s)], stages[s], rtol=1e-6 if choice.splits_backward else 0.0)
                assert engine.peak_live == peak_live(choice.training(count))[rank], (name, count, engine.peak_live)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_pipeline_equals_one_process_and_holds_what_the_schedule_promises(
    name: str, world_size: int, tmp_path: Path
) -> None:
    run_ranks(parity_rank, world_size, name, tmp_path=tmp_path)


def memory_rank(rank: int, world_size: int) -> list[list[int]]:
    stage = build(ToyStage, world_size)[rank]
    runtime = runtime_for(stage, rank, world_size)
    peaks = []
    for count in (4, 8, 16):
        program = programs(rank, world_size).training(count)
        runtime.run(batch([1] * count), program, backward=True, loss_of=loss_of)
        peaks.append(runtime.peak_live)
    return peaks


def test_memory_of_1f1b_does_not_grow_with_the_number_of_microbatches(tmp_path: Path) -> None:
    assert run_ranks(memory_rank, 2, tmp_path=tmp_path) == [[2, 2, 2], [1, 1, 1]]


def test_a_schedule_that_splits_backwards_needs_something_that_puts_weights_off() -> None:
    choice = ScheduleChoice(PipelineConfig(schedule="zbv_zero_bubble"), 1)
    runtime = PipelineRuntime(dict(enumerate(build(ToyStage, 2))), choice.placement)
    with pytest.raises(ScheduleError, match="the runtime has no `weights`"):
        runtime.run(batch([1]), Programs(choice, 0).training(1), backward=True, loss_of=loss_of)


def evaluation_and_split_rank(rank: int, world_size: int, name: str) -> None:
    choice = ScheduleChoice(PipelineConfig(schedule=name), world_size)
    stages = build(ToyStage, len(choice.placement))
    mine = nn.ModuleList([copy.deepcopy(stages[s]) for s in choice.stages_of_ranks[rank]])
    theirs = nn.ModuleList([stages[s] for s in choice.stages_of_ranks[rank]])
    held = dict(zip(choice.stages_of_ranks[rank], mine, strict=True))
    runtime = runtime_for(held, rank, world_size, placement=choice.placement)
    made = Programs(choice, rank)
    last = rank == choice.placement[-1]
    for rows in ([2, 2], [1, 3, 2], [4]):
        microbatches = batch(rows)
        outputs = runtime.run(microbatches, made.forwards(len(rows)), backward=False)
        assert len(outputs) == (len(rows) if last else 0)
        assert runtime.peak_live == 0
        for output, inputs in zip(outputs, microbatches, strict=False):
            assert torch.equal(output["logits"], through(stages, inputs)["logits"])
            assert not output["logits"].requires_grad
        losses = runtime.run(
            microbatches,
            made.forwards(len(rows)),
            backward=False,
            loss_of=loss_of,
        )
        for index, loss in enumerate(losses):
            assert torch.equal(loss, loss_of(outputs[index], index))
        assert all(p.grad is None for p in mine.parameters())

        state = runtime.forward_phase(microbatches, made.forwards(len(rows)))
        assert runtime.peak_live == len(rows) * len(mine)
        grads: list[list[Tensor | None]] = []
        for logits, extra in state.outputs:
            grads.append([2.0 * logits + 1.0, None])
            assert extra.shape == logits.shape[:-1]
        # an evaluation between the phases must not disturb the state
        runtime.run(microbatches, made.forwards(len(rows)), backward=False)
        runtime.backward_phase(state, made.backwards(len(rows)), grads if last else None)
        assert not state.live
        for inputs in microbatches:
            logits = through(stages, inputs)["logits"]
            (logits.square() + logits).sum().backward()
        assert_same_gradients(mine, theirs)
        for module in (*stages, mine):
            module.zero_grad()
    if last:
        with pytest.raises(ScheduleError, match="output gradients for none of 1 microbatches"):
            runtime.backward_phase(state, made.backwards(1), None)


@pytest.mark.parametrize(("name", "world_size"), in_turns(["1f1b", "interleaved_1f1b", "dualpipev"], [1, 2, 4]))
def test_evaluation_and_split_mode_equal_one_process(name: str, world_size: int, tmp_path: Path) -> None:
    run_ranks(evaluation_and_split_rank, world_size, name, tmp_path=tmp_path)


def header_rank(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    stage = build(ToyStage, world_size)[rank]
    runtime, made = runtime_for(stage, rank, world_size), programs(rank, world_size)
    seen = []

    def step(rows: list[int], length: int, backward: bool = True) -> None:
        program = made.training(len(rows)) if backward else made.forwards(len(rows))
        runtime.run(batch(rows, length), program, backward=backward, loss_of=loss_of)
        counters = runtime.counters
        seen.append((counters.headers_sent, counters.messages_sent, counters.messages_received))

    step([2, 2, 2], 5)
    step([2, 2, 2], 5)
    step([2, 2, 2], 4)
    step([2, 1, 2], 5)
    step([2, 1, 2], 5, backward=False)
    stage.eval()
    step([2, 1], 5, backward=False)
    step([2, 1], 5, backward=False)
    stage.train()
    step([2, 2, 2], 4)
    runtime.forget_headers()
    step([2, 2, 2], 4)
    return seen


def test_a_header_travels_only_at_the_first_sight_of_a_signature(tmp_path: Path) -> None:
    first, last = run_ranks(header_rank, 2, tmp_path=tmp_path)
    headers = [1, 1, 2, 3, 5, 7, 7, 7, 8]
    sent = [3, 6, 9, 12, 15, 17, 19, 22, 25]
    gradients = [3, 6, 9, 12, 12, 12, 12, 15, 18]
    assert first == list(zip(headers, sent, gradients, strict=True))
    assert last == list(zip([0] * 9, gradients, sent, strict=True))


def shape_of_data_rank(rank: int, world_size: int) -> None:
    """The payload's shape depends on the data."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, payload: tuple[Tensor, ...], x: Tensor, keep: Tensor) -> Any:
            return (x[: int(keep)] * self.weight,) if rank == 0 else payload[0] * self.weight

    stage = Growing()
    program = programs(rank, 2, "gpipe").training(2)
    microbatches = [{"x": torch.ones(4), "keep": torch.tensor(n)} for n in (1, 4)]
    if rank == 0:
        with pytest.raises(RankMismatchError, match=r"(?s)payload of microbatch 1 to stage 1.*pp_size: 1") as caught:
            runtime_for(stage, 0, 2).run(microbatches, Program(program.actions[:2], {}, 2), backward=True)
        assert "failed in action 0F1" in caught.value.__notes__[0]
    else:
        # takes what the failed run above had sent for microbatch 0
        first = Program((Action(1, "F", 0),), {0: (Action(0, "F", 0),)}, 2)
        runtime_for(stage, 1, 2).run(microbatches[:1], first, backward=False)


def test_payload_shapes_that_depend_on_the_data_are_refused(tmp_path: Path) -> None:
    run_ranks(shape_of_data_rank, 2, tmp_path=tmp_path)


def failing_rank(rank: int, world_size: int) -> None:
    class Failing(ToyStage):
        calls = 0

        def forward(self, payload: tuple[Tensor, ...], x: Tensor, **unused: Any) -> Any:
            self.calls += 1
            if rank == 1 and self.calls == 2:
                raise ValueError("planted")
            return super().forward(payload, x)

    runtime = runtime_for(Failing(rank, world_size), rank, world_size)
    runtime.run(batch([2, 2, 2]), programs(rank, world_size).training(3), backward=True, loss_of=loss_of)


def test_a_failing_action_is_named_with_its_stage_and_the_rank_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1.*planted.*pipeline stage 1 of 2 .*failed in action 1F1"):
        run_ranks(failing_rank, 2, tmp_path=tmp_path, timeout=25)


def observers_rank(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    stage = build(ToyStage, world_size)[rank]
    runtime = runtime_for(stage, rank, world_size)
    said: list[str] = []
    timed: list[str] = []
    runtime.probe.waits, runtime.probe.runs = lambda text, peer: said.append(f"{text} ({peer})"), said.append
    runtime.probe.trace = lambda name, wall, cpu: timed.append(name) if wall >= 0.0 and cpu >= 0.0 else None
    for (source, _), group in channel_groups(tuple(neighbour_pairs(range(world_size))), world_size).items():
        connect(make_transport("auto", CPU, group), sends=source == rank)
    runtime.run(batch([2, 2]), programs(rank, world_size).training(2), backward=True, loss_of=loss_of)
    return said, timed


def test_observers_hear_every_wait_and_every_action(tmp_path: Path) -> None:
    first, last = run_ranks(observers_rank, 2, tmp_path=tmp_path)
    computed = (
        "forward of microbatch 0",
        "backward of microbatch 0",
        "forward of microbatch 1",
        "backward of microbatch 1",
    )
    assert [text for text in last[0] if "runs" in text] == [f"runs the {action} at stage 1" for action in computed]
    assert "waits at stage 1 for the activation of microbatch 1 from stage 0 (0)" in last[0]
    assert "waits at stage 0 for the gradient of microbatch 1 from stage 1 (1)" in first[0]
    assert "waits at stage 0 for stage 1 to receive the activation of microbatch 1 (1)" in first[0]
    assert [name for name in first[1] if "F" in name or "B" in name] == ["0F0", "0F1", "0B0", "0B1"]


def actions(*wanted: Action) -> Program:
    return Program(wanted, {}, 2)


def misuse_rank(rank: int, world_size: int) -> None:
    with pytest.raises(UnsupportedError, match="has no transport from rank 0 to rank 1"):
        PipelineRuntime({rank: lambda payload: payload}, range(2), rank)
    with pytest.raises(UnsupportedError, match="'direct' cannot carry cuda tensors"):
        make_transport("direct", torch.device("cuda", 0), dist.new_group([0, 1], backend="cpu:gloo"))
    assert isinstance(make_transport("auto", torch.device("cuda", 0), dist.group.WORLD), HostTransport)
    runtime = runtime_for(lambda payload, **inputs: 5, rank, 2)
    with pytest.raises(ScheduleError, match="cannot run here"):
        runtime.run([{}], actions(Action(1 - rank, "F", 0)), backward=False)
    with pytest.raises(ScheduleError, match=f"{rank}B0 cannot run here"):
        runtime.run([{}], actions(Action(rank, "B", 0)), backward=False)
    if rank == 0:
        with pytest.raises(PlanError, match="returned int"):
            runtime.run(batch([1]), actions(Action(0, "F", 0)), backward=False)
    else:
        with pytest.raises(ScheduleError, match="no loss on the last stage"):
            runtime.run(batch([1]), actions(Action(1, "F", 0), Action(1, "B", 0)), backward=True)


def test_misuse_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    run_ranks(misuse_rank, 2, tmp_path=tmp_path)
