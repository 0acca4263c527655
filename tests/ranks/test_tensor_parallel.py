"""Tensor-parallel ranks must compute what one process computes: loss, every gradient, and the optimizer's steps."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tp_models import (
    Counter,
    assert_equal_to_one_process,
    backward,
    check_on_ranks,
    gathered,
    grads,
    plan_sample,
    tiny_batch,
    tiny_model,
)

from hf_parallel.activation_checkpointing.recompute import recompute_blocks
from hf_parallel.errors import PlanError
from hf_parallel.pipeline_parallel.run.weight_gradients import WeightGradients, accumulate
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.share import plan_on_one_rank
from hf_parallel.tensor_parallel.run import functions
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.shard_plan import TPPlan


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
MODELS = ["llama", "llama_tied", "llama_kv1", "llama_heads3", "llama_odd", "smollm2", "gpt2", "qwen3", "phi3"]


def sharded(case: str, tp_rank: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, TPPlan]:
    model = tiny_model(case, dtype)
    plan = plan_tensor_parallel(model, dist.get_world_size(), plan_sample())
    apply_tensor_parallel(model, plan, dist.group.WORLD, tp_rank, lambda name: True)
    return model, plan


def parity(rank: int, world_size: int, cases: list[str], num_batches: int) -> None:
    for dtype, tolerance in TOLERANCE.items():
        for case in cases:
            reference = tiny_model(case, dtype)
            expected = backward(reference, num_batches)
            model, plan = sharded(case, rank, dtype)
            losses = backward(model, num_batches)
            assert losses == pytest.approx(expected, rel=tolerance), case
            assert_equal_to_one_process(gathered(plan, grads(model)), grads(reference), tolerance)


def accumulation_parity(rank: int, world_size: int) -> None:
    parity(rank, world_size, ["qwen3", "llama_kv1"], 2)


def gradients_of_all_models(rank: int, world_size: int) -> None:
    parity(rank, world_size, MODELS, 1)


def test_loss_and_gradients_on_two_ranks_equal_one_process(tmp_path: Path) -> None:
    run_ranks(gradients_of_all_models, 2, tmp_path=tmp_path)


def test_accumulated_gradients_equal_one_process(tmp_path: Path) -> None:
    run_ranks(accumulation_parity, 2, tmp_path=tmp_path)


def four_ranks(rank: int, world_size: int) -> None:
    parity(rank, world_size, ["llama_kv4", "llama_kv1", "llama", "smollm2"], 1)


def test_loss_and_gradients_on_four_ranks_equal_one_process(tmp_path: Path) -> None:
    run_ranks(four_ranks, 4, tmp_path=tmp_path)


def one_optimizer_run(case: str, rank: int) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            model(**tiny_batch(seed), use_cache=False).loss.backward()
            optimizer.step()

    reference = tiny_model(case)
    steps(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3, foreach=False, eps=1e-4))
    model = tiny_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, eps=1e-4)
    before = list(model.parameters())
    plan = plan_tensor_parallel(model, 2, plan_sample())
    apply_tensor_parallel(model, plan, dist.group.WORLD, rank, lambda name: True)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    steps(model, optimizer)
    got = gathered(plan, {name: p.detach() for name, p in model.named_parameters()})
    for name, p in reference.named_parameters():
        torch.testing.assert_close(
            got[name], p.detach(), rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name} {text}"
        )


def optimizer_built_before(rank: int, world_size: int) -> None:
    for case in ("llama", "gpt2"):
        one_optimizer_run(case, rank)


def test_an_optimizer_built_before_still_trains_the_model(tmp_path: Path) -> None:
    run_ranks(optimizer_built_before, 2, tmp_path=tmp_path)


def count_collectives(rank: int, world_size: int) -> None:
    for case, num_pairs, head, extra in [("llama", 4, 1, 0), ("gpt2", 4, 0, 0), ("phi3", 4, 1, 0), ("qwen3", 4, 1, 2)]:
        model, plan = sharded(case, rank)
        assert len(plan.pairs) == num_pairs
        with Counter("all_reduce") as reduces, Counter("all_gather") as gathers:
            loss = model(**tiny_batch(), use_cache=False).loss
            # One per pair; a block of attention and MLP is two pairs.
            assert (reduces.calls, gathers.calls) == (num_pairs, head), case
            reduces.calls = 0
            loss.backward()
            # One per pair, one for the gathered head, one for the partial parameters of a pair.
            assert (reduces.calls, gathers.calls) == (num_pairs + head + extra, head), case
        with torch.no_grad(), Counter("all_reduce") as reduces:
            model(**tiny_batch(), use_cache=False)
            assert reduces.calls == num_pairs


def test_a_block_costs_two_all_reduces_forward_and_two_backward(tmp_path: Path) -> None:
    run_ranks(count_collectives, 2, tmp_path=tmp_path)


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def checkpointing(rank: int, world_size: int) -> None:
    for case in ("llama", "qwen3", "gpt2"):
        expected = tiny_model(case)
        losses = backward(expected, 2)
        for reentrant in (False, True):
            model, plan = sharded(case, rank)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            without_dropout(model.train())
            assert backward(model, 2) == pytest.approx(losses, rel=1e-5)
            assert_equal_to_one_process(gathered(plan, grads(model)), grads(expected), 1e-5)


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path: Path) -> None:
    run_ranks(checkpointing, 2, tmp_path=tmp_path)


def repeated_collectives(rank: int, world_size: int) -> None:
    for case, stack, extra in [("llama", "model.layers", 1), ("gpt2", "transformer.h", 0)]:
        # The second run of what is checkpointed ends with the last tensor the backward needs, before the last sum.
        for mode, repeats in [("torch", 2), ("reentrant", 4), ("blocks", 2), ("pair of blocks", 3)]:
            model, plan = sharded(case, rank)
            if mode in ("torch", "reentrant"):
                model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
                without_dropout(model.train())  # behind the last sum it needs its mask, and so the sum
            else:
                recompute_blocks(model, stack, [range(2)] if mode == "pair of blocks" else [range(1), range(1, 2)])
            loss = model(**tiny_batch(), use_cache=False).loss
            with Counter("all_reduce") as reduces, Counter("all_gather") as gathers:
                loss.backward()
            assert (reduces.calls, gathers.calls) == (len(plan.pairs) + extra + repeats, 0), (case, mode)


def test_a_checkpointed_block_repeats_one_all_reduce(tmp_path: Path) -> None:
    run_ranks(repeated_collectives, 2, tmp_path=tmp_path)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


def copies_and_memory(rank: int, world_size: int) -> None:
    model, plan = sharded("qwen3", rank)
    backward(model)
    first = gathered(plan, grads(model))
    copied = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    copied.zero_grad(set_to_none=True)
    backward(copied)
    assert grads(model) == {}
    assert_equal_to_one_process(gathered(plan, grads(copied)), first, 1e-6)
    counts = []
    for _ in range(8):
        model.zero_grad(set_to_none=True)
        backward(model)
        counts.append(live_tensors())
        shared = model.get_submodule("lm_head").tp_linear.copy
        assert shared._copy is None, "the backward pass must let go of the activation"
    # gloo's thread may let go of the last collective's tensor a moment later; one tensor a step would make six.
    assert counts[-1] - counts[1] <= 1, f"tensors leak from step to step: {counts}"


def test_a_deepcopy_trains_itself_and_no_tensor_outlives_its_step(tmp_path: Path) -> None:
    run_ranks(copies_and_memory, 2, tmp_path=tmp_path)


def stages_and_errors(rank: int, world_size: int) -> None:
    model = tiny_model("llama")
    full = {name: p.shape for name, p in model.named_parameters()}
    plan = plan_tensor_parallel(model, 2, plan_sample())
    apply_tensor_parallel(model, plan, dist.group.WORLD, rank, lambda name: "layers.1." in name)
    specs = plan.shard_specs()
    for name, p in model.named_parameters():
        assert (p.shape != full[name]) == (name in specs and "layers.1." in name), name
    with pytest.raises(PlanError, match="already tensor parallel"):
        apply_tensor_parallel(model, plan, dist.group.WORLD, rank, lambda name: True)
    with pytest.raises(PlanError, match=r"tp_size=4.*group has 2 ranks"):
        apply_tensor_parallel(tiny_model("llama"), replace(plan, tp_size=4), dist.group.WORLD, rank, lambda name: True)
    with pytest.raises(PlanError, match="expects 32 positions"):
        apply_tensor_parallel(tiny_model("smollm2"), plan, dist.group.WORLD, rank, lambda name: True)
    check_on_ranks(tiny_model("llama"), plan, dist.group.WORLD, rank, plan_sample())
    qwen3 = tiny_model("qwen3")
    damaged = plan_tensor_parallel(qwen3, 2, plan_sample())
    damaged = replace(damaged, pairs=tuple(replace(pair, partial=()) for pair in damaged.pairs))
    with pytest.raises(PlanError, match="q_norm"):
        check_on_ranks(qwen3, damaged, dist.group.WORLD, rank, plan_sample())


def test_only_held_parameters_are_touched_and_misuse_is_refused(tmp_path: Path) -> None:
    run_ranks(stages_and_errors, 2, tmp_path=tmp_path)


def one_plan_for_all(rank: int, world_size: int) -> None:
    made = []

    def make() -> TPPlan:
        made.append(rank)
        return plan_tensor_parallel(tiny_model("smollm2"), world_size, plan_sample())

    plan = plan_on_one_rank(make)
    assert made == ([0] if rank == 0 else [])
    assert plan == plan_tensor_parallel(tiny_model("smollm2"), world_size, plan_sample())

    def fail() -> TPPlan:
        raise PlanError("no plan fits")

    with pytest.raises(PlanError, match="no plan fits"):
        plan_on_one_rank(fail)


def test_the_plan_is_made_on_one_rank_and_failures_reach_all(tmp_path: Path) -> None:
    run_ranks(one_plan_for_all, 2, tmp_path=tmp_path)


class Events(TorchDispatchMode):
    """The order of collectives and of matrix products of a backward pass: start, wait, and the shape of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self._start = functions.all_reduce_flat

    def all_reduce(self, tensor: Tensor, group: Any) -> Any:
        self.seen.append("start")
        work: Any = self._start(tensor, group)
        return mock.Mock(wait=lambda: (self.seen.append("wait"), work.wait()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.seen.append(tuple(out.shape))
        return out


def overlap(rank: int, world_size: int) -> None:
    for case in ("llama", "gpt2", "phi3"):
        model, plan = sharded(case, rank)
        loss = model(**tiny_batch(), use_cache=False).loss
        with Events() as events, mock.patch.object(functions, "all_reduce_flat", events.all_reduce):
            loss.backward()
        names = {name: tuple(p.shape) for name, p in model.named_parameters()}
        first_columns = {names[f"{pair.columns[0]}.weight"] for pair in plan.pairs}
        starts = [i for i, event in enumerate(events.seen) if event == "start"]
        assert len(starts) == events.seen.count("wait") == len(plan.pairs) + (case != "gpt2")
        for i in starts:
            # Between start and wait the gradient of a weight is made, and nothing else.
            assert events.seen[i + 2] == "wait", events.seen
            shape = events.seen[i + 1]
            assert shape in first_columns | {names.get("lm_head.weight")}, (shape, first_columns)


def test_the_all_reduce_of_a_column_layer_runs_during_its_weight_gradient(tmp_path: Path) -> None:
    run_ranks(overlap, 2, tmp_path=tmp_path)


def deferred(rank: int, world_size: int) -> None:
    for case in ("llama", "gpt2", "llama_kv1", "qwen3"):
        for autocast in (False, True):
            expected, plan = sharded(case, rank)
            model = tiny_model(case)
            weights = WeightGradients(model)
            apply_tensor_parallel(model, plan, dist.group.WORLD, rank, lambda name: True, deferral=weights)
            for seed in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    expected_loss = expected(**tiny_batch(seed), use_cache=False).loss
                    loss = model(**tiny_batch(seed), use_cache=False).loss
                assert torch.equal(loss, expected_loss)
                expected_loss.backward()
                with weights.deferring() as pending:
                    loss.backward()
                waiting = {id(weight) for weight, _, _ in pending}
                accumulate(pending)
            linears = {name for name in plan.linears if f"{name}.weight" in dict(model.named_parameters())}
            put_off = {name for name in linears if id(model.get_submodule(name)._parameters["weight"]) in waiting}
            columns = {name for name in linears if plan.linears[name].role == "column"}
            summed = {name for name in columns if not all(s.sharded for s in plan.linears[name].weight.sections)}
            assert put_off == linears - summed, "not those alone whose gradient is summed over the ranks"
            got, want = grads(model), grads(expected)
            assert got.keys() == want.keys()
            for name, grad in want.items():
                torch.testing.assert_close(
                    got[name], grad, rtol=2e-2 if autocast else 1e-5, atol=1e-3 if autocast else 1e-6
                )


def test_weight_gradients_of_sharded_layers_can_be_put_off(tmp_path: Path) -> None:
    run_ranks(deferred, 2, tmp_path=tmp_path)
