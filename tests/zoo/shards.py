"""One entry of the zoo as tensor-parallel ranks: what is sharded how, and whether loss and gradients are exact."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_parallel.engine.plan.shards import vocabulary_modules
from hf_parallel.errors import ParallelError
from hf_parallel.tensor_parallel.plan.cost import flops_coverage
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.sequence_plan import shard_sequence
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_sharded
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary
from hf_parallel.tensor_parallel.shard_plan import TPPlan
from zoo.models import batch, build, quiet, why_not
from zoo.sweep import FLOOR, deadline, relative, verdict_of


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
Measured = tuple[Tensor, dict[str, Tensor | None]]


@dataclass
class ShardRow:
    """What the sweep found out about one entry at one number of ranks.

    Args:
        name: Type, or type@variant.
        tp_size: Number of ranks.
        verdict: "exact", "refused", "failed", or "unusable": the whole model cannot train.
        dtype: Precision in which it is exact: "fp32", else "fp64".
        difference: Largest relative difference of the loss or a gathered gradient from one process's, in fp32.
        paired, gathered, replicated: Shares of the parameters, without embedding and head.
        work: Share of the matrix products that the ranks split, head included.
        with_vocabulary: Share of all parameters that is sharded if embedding and head are.
        fully_paired: Whether something is paired, and in the numbered layers that the batch reaches nothing is gathered,
            no experts are whole, and no linear is whole because other code reads its weight.
        left: Kinds of modules that are not in a pair, and why.
        vocabulary: Whether it is exact in fp32 with the head, and the loss, sharded over the vocabulary.
        on_parts: Blocks that run on parts of the sequence, and those that run; (0, 0) without sequence parallelism.
        note: The refusal or the failure.
    """

    name: str
    tp_size: int
    verdict: str = "failed"
    dtype: str = ""
    difference: float | None = None
    paired: float = 0.0
    gathered: float = 0.0
    replicated: float = 0.0
    work: float = 0.0
    with_vocabulary: float = 0.0
    fully_paired: bool = False
    left: dict[str, str] = field(default_factory=dict)
    vocabulary: bool = False
    on_parts: tuple[int, int] = (0, 0)
    note: str = ""


def sweep_shards(name: str, tp_size: int, seconds: int = 240, *, sequence: bool = False) -> ShardRow:
    """Everything about one entry at `tp_size` ranks, with sequence parallelism on request; never raises."""
    row = ShardRow(name, tp_size)
    try:
        with deadline(seconds), quiet():
            row.note = why_not(name) or ""
            if row.note:
                row.verdict = "unusable"
            else:
                model = build(name)
                examine(row, model, batch(name, model), sequence=sequence)
    except Exception as error:
        row.verdict, row.note = verdict_of(error)
    return row


def examine(row: ShardRow, model: nn.Module, inputs: dict[str, Any], *, sequence: bool = False) -> None:
    """Fill in the row of a model, which may be cast to fp64."""
    sample = {k: v for k, v in inputs.items() if k != "labels"}
    plan = plan_tensor_parallel(model, row.tp_size, sample)
    whole = shard_vocabulary(model, plan, sample, "auto")
    if sequence:
        plan, whole = shard_sequence(model, plan, sample), shard_sequence(model, whole, sample)
    if plan.sequence is not None:
        row.on_parts = sum(not block.whole for block in plan.sequence.blocks), len(plan.sequence.blocks)
    _count(row, model, plan)
    row.difference = difference(model, whole, inputs)
    sharded = any(linear.role == "vocab_head" for linear in whole.linears.values())
    row.vocabulary = sharded and row.difference <= TOLERANCE[torch.float32]
    # In fp64 without the vocabulary: the sharded loss computes in fp32, as the model's own does.
    for dtype, name in ((torch.float32, "fp32"), (torch.float64, "fp64")):
        try:
            error = row.difference if dtype == torch.float32 else difference(_doubled(model), plan, _cast(inputs))
        except ParallelError:
            raise
        except Exception as failure:  # some models mix precisions and do not run in fp64
            row.note = f"differs by {row.difference:.1e} in fp32; in fp64 {type(failure).__name__}: {failure}"
            return
        if error <= TOLERANCE[dtype]:
            row.verdict, row.dtype, row.note = "exact", name, ""
            return
        row.note = f"differs by {row.difference:.1e} relative in fp32, {error:.1e} in {name}"


def _doubled(model: nn.Module) -> nn.Module:
    """`model` in fp64, with experts computed by products that know fp64."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    return model.double()


def _cast(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def _count(row: ShardRow, model: nn.Module, plan: TPPlan) -> None:
    vocabulary = vocabulary_modules(model)
    ends = {name for name in plan.numel if name.rpartition(".")[0] in vocabulary}
    specs = plan.shard_specs()
    gathered = {name for name, linear in plan.linears.items() if linear.role == "gather"}
    total = sum(numel for name, numel in plan.numel.items() if name not in ends)
    split = {n: numel * specs[n].sharded_share for n, numel in plan.numel.items() if n in specs and n not in ends}
    in_gathers = sum(value for name, value in split.items() if name.rpartition(".")[0] in gathered)
    row.gathered = in_gathers / total
    row.paired = sum(split.values()) / total - row.gathered
    row.replicated = 1.0 - row.paired - row.gathered
    everything = sum(plan.numel.values())
    row.with_vocabulary = (sum(split.values()) + everything - total) / everything
    work = flops_coverage(plan)
    row.work = work.paired + work.gathered
    row.left = {
        re.sub(r"\.\d+\.", ".N.", name): why
        for name, why in reversed(plan.fallbacks.items())
        if name not in vocabulary
    }
    inner = {n: why for n, why in plan.fallbacks.items() if re.search(r"\.\d+\.", n) and "not called" not in why}
    lost = ("gathered", "replicated: its parameter", "replicated: no parameter acts as a row")
    row.fully_paired = row.paired > 0 and not any(why.startswith(lost) for why in inner.values())


def difference(model: nn.Module, plan: TPPlan, inputs: dict[str, Any]) -> float:
    """Largest relative difference of loss and gathered gradients, ranks against one process, in training mode.

    Every rank must hold the whole gradient of what is replicated, and its very shard of what is not.
    """
    loss, expected = _measure(copy.deepcopy(model), inputs)
    ranks = run_sharded(lambda: copy.deepcopy(model), plan, 60.0, lambda sharded: _measure(sharded, inputs))
    specs = plan.shard_specs()
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None and g.numel())
    errors = []
    for rank, (mine, grads) in enumerate(ranks):
        errors.append(relative(loss, mine, 0.0))
        for name, grad in expected.items():
            part = grad
            if grad is not None and name in specs:
                part = specs[name].shard(grad, plan.tp_size, rank)
            # the scale is that of the whole gradient: a shard may hold small values alone
            size = 0.0 if grad is None or not grad.numel() else float(grad.abs().max())
            errors.append(relative(part, grads[name], max(size, FLOOR * largest)))
    return max(errors)


class AllDouble(TorchFunctionMode):
    """Lifts a model's own casts to fp32: what it computes in fp64 is then exact to fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double() if args[0].is_floating_point() else args[0].float()

        def lift(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(lift, args), **{key: lift(value) for key, value in (kwargs or {}).items()})


def _measure(model: nn.Module, inputs: dict[str, Any]) -> Measured:
    is_double = next(model.parameters()).dtype == torch.float64
    with AllDouble() if is_double else nullcontext():
        loss = model(**inputs).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def plan_without_partial_gradients(*args: Any, genuine: Callable[..., TPPlan] = plan_tensor_parallel) -> TPPlan:
    """As `plan_tensor_parallel`, in whose place a test may put it, but gradients that ranks have a part of are not summed: a bug that a sweep must find."""
    plan = genuine(*args)
    return replace(plan, pairs=tuple(replace(pair, partial=()) for pair in plan.pairs))
