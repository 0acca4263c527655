"""Making a plan: one tiny forward of the whole model, on shapes alone where its code allows that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from hf_parallel.compat.private_transformers import eager_attention
from hf_parallel.model.fewer import Fewer, fewer_blocks, may_need_fewer
from hf_parallel.model.meta import inputs_on_meta, longer_on_meta, on_meta
from hf_parallel.model.record import Record, record_forward
from hf_parallel.model.samples import path_inputs
from hf_parallel.model.stack import candidate_stacks, choose_stack
from hf_parallel.model.unchanged import unchanged
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, count_tokens


def discover_stages(
    model: nn.Module,
    samples: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    forward: Callable[..., Any] | None = None,
    *,
    try_meta: bool = True,
    cost_tokens: tuple[int, int] | None = None,
    try_fewer: bool = True,
) -> PipelinePlan:
    """Find the block stack of a model and what a pipeline cut at each boundary must send.

    Pure: one tiny forward a sample (one more when the likeliest stack is not the one that runs), on shapes alone where
    the model's code allows that, with the random state forked, buffers and module state restored, gradients and the
    training flag untouched. Call it before the model is cut or sharded. The output flags and `config` must be those of
    training.

    Args:
        model: the whole model, on the device it will run on.
        samples: keyword arguments of a tiny batch, e.g. (2, 8) `input_ids`, `attention_mask`, `labels`, and
            `use_cache=False`; or several with different sets of inputs (see `probe_samples`). The plan is made from the
            first; the others are covered by it if they lead to the same plan.
        forward: called with the sample instead of `model`.
        try_meta: whether to try the `meta` device before the real one.
        cost_tokens: (B, S) of the batch whose FLOPs the plan tells, e.g. one sequence of real length, so that attention
            counts as it will; kept to the sample's where the model does not run on `meta`.
        try_fewer: whether the other samples may be tried with fewer blocks, where those show what all blocks do.

    Raises:
        PlanError: No stack of blocks runs at most once each in order.
    """
    run = model if forward is None else forward
    base, *others = [samples] if isinstance(samples, Mapping) else samples
    plan = _plan_on_meta(model, base, run) if try_meta else None
    if plan is None:
        device = next((t.device for t in [*model.parameters(), *model.buffers()]), "cpu")
        plan = _plan(model, base, run, str(device))
    plan.note_versions(model)
    is_on_meta = plan.discovered_on == "meta"
    fewer = fewer_blocks(model, plan.record, base, is_on_meta=is_on_meta) if try_fewer and forward is None else None
    tried, stack = plan, None
    if fewer is not None:
        model, run, plan.kept, stack = fewer.model, fewer.model, fewer.kept, plan.stack
        tried = PipelinePlan(model, fewer.record, base, plan.discovered_on)
    if cost_tokens is not None:
        _count_at_length(tried, model, base, run, cost_tokens)
        if fewer is not None:
            plan.flops, plan.num_tokens = _of_all_blocks(tried.flops, fewer), tried.num_tokens
    for sample in others:
        reason = _try_to_cover(tried, model, sample, run, stack)
        if reason is not None:
            plan.inputs.uncovered[path_inputs(sample)] = reason
    plan.inputs.covered, plan.zero_outputs = tried.inputs.covered, tried.zero_outputs
    return plan


def _of_all_blocks(flops: Mapping[int, float], fewer: Fewer) -> dict[int, float]:
    """Extend counts by epoch from a model with fewer blocks to the whole one."""
    count = len(fewer.kept.shown_by)
    epochs = {0: 0, 2 * count: 2 * len(fewer.kept.blocks)}
    for block, place in enumerate(fewer.kept.shown_by):
        epochs[2 * block + 1] = 2 * place + 1
        if block + 1 < count:
            epochs[2 * block + 2] = 2 * place + 2
    return {epoch: flops[there] for epoch, there in epochs.items() if there in flops}


def _plan(
    model: nn.Module, sample: Mapping[str, Any], run: Callable[..., Any], where: str, known: str | None = None
) -> PipelinePlan:
    candidates = candidate_stacks(model) if known is None else [known]

    def record_at(stack: str) -> Record:
        # Numbers are compared where blocks may be left out.
        with_scalars = may_need_fewer(model, stack)
        with unchanged(model):
            return record_forward(model, stack, candidates, run, sample, with_scalars=with_scalars)

    record = record_at(candidates[0])
    stack = choose_stack(model, candidates, record.calls)
    if stack != record.stack:
        record = record_at(stack)
    return PipelinePlan(model, record, sample, where)


def _plan_on_meta(
    model: nn.Module, sample: Mapping[str, Any], run: Callable[..., Any], known: str | None = None
) -> PipelinePlan | None:
    """None where the model's code needs values (`.item()`, a branch on data) or a kernel that meta does not have."""
    try:
        with unchanged(model), on_meta(model):
            return _plan(model, inputs_on_meta(sample), run, "meta", known)
    except Exception:  # noqa: BLE001 - model code may raise anything; what is really wrong shows on the real device
        return None


def _count_at_length(
    plan: PipelinePlan,
    model: nn.Module,
    sample: Mapping[str, Any],
    run: Callable[..., Any],
    tokens: tuple[int, int],
) -> None:
    """Replace the FLOPs of a plan by those of a batch of the given (B, S).

    With eager attention, which costs the same products: others look at values of the mask.
    """
    longer = longer_on_meta(sample, *tokens)
    try:
        with unchanged(model), on_meta(model), eager_attention(model):
            record = record_forward(model, plan.stack, [plan.stack], run, longer)
    except Exception:  # noqa: BLE001 - e.g. a length that the model refuses
        return
    plan.flops, plan.num_tokens = record.flops, count_tokens(longer)


def _try_to_cover(
    plan: PipelinePlan, model: nn.Module, sample: Mapping[str, Any], run: Callable[..., Any], known: str | None
) -> str | None:
    """Plan with one more sample; returns why the plan does not cover it."""
    other = _plan_on_meta(model, sample, run, known) if plan.discovered_on == "meta" else None
    try:
        other = other or _plan(model, sample, run, plan.discovered_on, known)
    except Exception as error:  # noqa: BLE001 - model code may raise anything on inputs it does not take
        return f"{type(error).__name__}: {error}"
    return plan.also_covers(other)
