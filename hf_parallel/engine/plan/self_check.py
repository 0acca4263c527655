"""Proof before the first step: the planned stages and shards give the loss and the gradients of the whole model."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from hf_parallel.compat.torch_tools import stored_bytes
from hf_parallel.engine.plan.plans import Plans
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.engine.plan.shards import CHECKED, Shown
from hf_parallel.engine.plan.stages import Cut
from hf_parallel.errors import PlanError
from hf_parallel.machine.ram import free_ram
from hf_parallel.mesh.one_rank import on_rank_zero
from hf_parallel.model.fewer import Kept, fewer_blocks, with_blocks
from hf_parallel.model.narrow import narrow_model
from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.plan.verify_stages import check_split, shares_parameters
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, Span, spans_of
from hf_parallel.tensor_parallel.plan.repeated import Repetition, repeated, restricted
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.shard_plan import TPPlan


logger = logging.getLogger(__name__)

T = TypeVar("T")
SelfCheck: TypeAlias = Literal["auto", "on", "full", "off"]

# Of free memory; a self-check that needs more is skipped with `self_check: auto`, loudly.
SELF_CHECK_MEMORY_SHARE = 0.25
NO_NARROW = "the weights are read after the cut, and no narrow model is known to run as this one does."
OF_NARROW = (
    "This is of a narrow model of the same structure with random weights, since the weights are read after the cut. Set "
    "self_check of pipeline or tensor_parallel to full to read them first and compare the model itself, or to off to compare nothing."
)


def check_plans(setup: Setup, plans: Plans, probes: Probes, *, has_values: bool) -> bool:
    """Compare loss and gradients of the cut and of the sharded model with the whole one, on rank 0; all hear the verdict.

    Args:
        setup: The whole model, unchanged; its config has the `self_check` settings.
        plans: Planned cut and shards.
        probes: The batches to compare on.
        has_values: Whether the model has its weights; else a narrow one with random weights is compared, or nothing.

    Returns:
        Whether all was compared, on every rank.

    Raises:
        PlanError: They differ; nothing was changed.
    """
    model, config = setup.model, setup.config

    def check() -> bool:
        setup.watchdog.runs("compares the planned parts with the whole model")
        compared = []
        with probes.running():
            cut, shards = plans.cut, plans.tensor_parallel
            if cut is not None:
                facts = f"{cut.stages.fingerprint()} {cut.bounds} {cut.schedule.stages_of_ranks}"
                self_check = config.pipeline.self_check
                check_it = partial(_check_cut, model, cut, self_check, probes, has_values)
                compared.append(setup.verdicts.once("cut", facts, check_it))
            if shards is not None:
                self_check, defers = config.tensor_parallel.self_check, plans.head.is_deferred
                check_it = partial(
                    _check_plan, model, shards, plans.shown, self_check, probes.batch, defers, has_values
                )
                compared.append(setup.verdicts.once(CHECKED, shards.fingerprint(), check_it))
        if compared and not all(compared) and not has_values:
            logger.info(
                "hf_parallel: self_check=auto: skipped: %s Set it to full to compare the model itself.", NO_NARROW
            )
        return bool(compared) and all(compared)

    def checked() -> bool:
        try:
            return check()
        except PlanError as error:
            if has_values:
                raise
            raise PlanError(f"{error} {OF_NARROW}") from error

    return on_rank_zero(checked, "compares the planned parts with the whole model", waiting=setup.watchdog.waiting)


class _Cut(NamedTuple):
    """A model, its plan, and the bounds of its stages."""

    model: nn.Module
    plan: PipelinePlan
    bounds: list[int]


def _check_cut(model: nn.Module, cut: Cut, self_check: SelfCheck, probes: Probes, has_values: bool = True) -> bool:
    """Returns whether it was compared."""
    forms: list[tuple[_Cut, Sequence[Mapping[str, Any]]]]
    forms = [(_Cut(model, cut.stages, cut.bounds), probes.check)]
    narrow = None
    if self_check in ("auto", "on"):
        with suppress(PlanError):
            if (fewer := _fewer_to_cut(model, cut, probes.batch)) is not None:
                forms.insert(0, (fewer, probes.check))
        with suppress(PlanError) if has_values else nullcontext():  # else nothing larger has the last word
            narrow = _narrow_to_cut(forms[0][0], probes.check)
    if not has_values:
        forms.clear()
    if narrow is not None:
        forms.insert(0, narrow)
    placement = cut.schedule.stages_of_ranks
    return _on_smallest(forms, lambda form: _check_stages(form[0], self_check, placement, form[1]))


def _check_plan(
    model: nn.Module,
    plan: TPPlan,
    shown: Shown,
    self_check: SelfCheck,
    sample: Mapping[str, Any],
    defers: bool = False,
    has_values: bool = True,
) -> bool:
    """Returns whether it was compared."""
    forms: list[tuple[nn.Module, TPPlan, Mapping[str, Any]]] = [(model, plan, sample)] if has_values else []
    if self_check in ("auto", "on"):
        fewer = None if shown.kept is None or not has_values else _fewer_to_shard(model, plan, shown.kept)
        if fewer is not None:
            forms.insert(0, (*fewer, sample))
        if (narrow := shown.narrow) is not None:
            forms.insert(0, (narrow.shown.model, narrow.plan, narrow.shown.batch(sample)))
    return _on_smallest(forms, lambda form: _check_shards(*form[:2], self_check, form[2], defers))


def _on_smallest(forms: Sequence[T], check: Callable[[T], bool]) -> bool:
    """Check the first of a model's forms; where that fails it is for the next, larger one to say what is wrong, if anything is.

    A model without some of its trained blocks may overflow where the whole one does not. Returns whether one was compared.
    """
    failed: Exception | None = None
    for form in forms:
        try:
            if check(form):
                return True
            break
        except Exception as error:  # noqa: BLE001 - raised below, unless a larger form shows that all is well
            failed = failed or error
    if failed is not None:
        raise failed
    return False


def _narrow_to_cut(cut: _Cut, samples: Sequence[Mapping[str, Any]]) -> tuple[_Cut, Sequence[Mapping[str, Any]]] | None:
    """The same cut of a narrow model, and its batches; None where there is none that runs alike.

    Raises:
        PlanError: It cannot be cut, or its cut passes on or holds something else.
    """
    plan = cut.plan
    if plan.discovered_on != "meta":
        return None
    narrow = narrow_model(cut.model, plan.stack, samples[0])
    if narrow is None:
        return None
    small = PipelinePlan(narrow.model, narrow.record, samples[0], plan.discovered_on)
    made = _Cut(narrow.model, small, cut.bounds)
    for span in spans_of(cut.bounds):
        passed = [{*each.crossings(span.lo)} if span.lo else set() for each in (plan, small)]
        held = [_held(model, each, span) for model, each in ((cut.model, plan), (narrow.model, small))]
        if passed[0] != passed[1] or held[0] != held[1]:
            raise PlanError(
                f"the stage of blocks {span.lo} to {span.hi - 1} is to receive {len(passed[0])} tensors and to hold {len(held[0])}, and "
                f"that of a narrower copy of the model, which the cut is tried on, {len(passed[1])} and {len(held[1])}: "
                f"{_first_unlike(*held)}. Set self_check to full, which tries the model itself, or pp_size to 1."
            )
    return made, [narrow.batch(sample) for sample in samples]


def _first_unlike(one: set[str], other: set[str]) -> str:
    return f"they differ in {sorted(one ^ other)[0]}" if one != other else "they receive others"


def _fewer_to_cut(model: nn.Module, cut: Cut, sample: Mapping[str, Any]) -> _Cut | None:
    """Few blocks of each stage, cut as the whole model is; None where they do not show what all do.

    Raises:
        PlanError: They cannot be cut.
    """
    plan, spans = cut.stages, spans_of(cut.bounds)
    groups, is_on_meta = [range(span.lo, span.hi) for span in spans], plan.discovered_on == "meta"
    fewer = fewer_blocks(model, plan.record, sample, groups, is_on_meta=is_on_meta)
    if fewer is None:
        return None
    small, kept = PipelinePlan(fewer.model, fewer.record, sample, plan.discovered_on), fewer.kept.blocks
    made = _Cut(fewer.model, small, [bisect_left(kept, bound) for bound in cut.bounds])
    for here, there in zip(spans_of(made.bounds), spans, strict=True):
        lo = there.lo
        if lo and {replace(key, block=kept[key.block]) for key in small.crossings(here.lo)} != {*plan.crossings(lo)}:
            return None
        held = {name for name in _held(model, plan, there) if plan.block_of(name) in (None, *kept)}
        if _held(fewer.model, small, here, kept) != held:
            return None
    return made


def _held(model: nn.Module, plan: PipelinePlan, span: Span, kept: Sequence[int] | None = None) -> set[str]:
    """Names, in the whole model, of the tensors that a stage holds."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names = {name for name, _ in tensors if plan.holds(span, name)}
    if kept is None:
        return names
    start = f"{plan.stack}."
    moved = {}
    for name in names:
        block = plan.block_of(name)
        rest = name if block is None else name.removeprefix(start).partition(".")[2]
        moved[name] = name if block is None else f"{start}{kept[block]}.{rest}"
    return set(moved.values())


def _fewer_to_shard(model: nn.Module, plan: TPPlan, kept: Kept) -> tuple[nn.Module, TPPlan] | None:
    """The blocks that show what all do and their plan; None where the others have another plan."""
    fewer = with_blocks(model, kept.stack, kept.blocks)
    small = restricted(plan, kept.stack, kept.blocks, fewer)
    again = repeated(small, Repetition((kept.stack,), kept.shown_by), model)
    return (fewer, small) if again.fingerprint() == plan.fingerprint() else None


def _check_stages(
    cut: _Cut, self_check: SelfCheck, placement: Sequence[Sequence[int]], samples: Sequence[Mapping[str, Any]]
) -> bool:
    """Returns whether they were compared."""
    model = cut.model
    copies = len(samples) + (2 if shares_parameters(model, cut.plan) else 4)  # see `check_split`
    needed = copies * sum(map(stored_bytes, model.parameters()))
    if not _affordable(needed, next(model.parameters()).device, self_check, "pipeline"):
        return False
    try:
        check_split(*cut, samples, lambda copied: copied.forward, placement)
    except PlanError:
        if not _outer_patched(model, cut.plan.stack):
            raise
        # A function that was put over a forward may call the forward of this very model, not that of a copy.
        check_split(*cut, samples, lambda copied: _unpatched(copied, cut.plan.stack), placement)
        logger.warning("hf_parallel: model.forward is patched; the self-check compared the forward of its class.")
    return True


def _outer_patched(model: nn.Module, stack: str) -> list[nn.Module]:
    """The model and what it wraps (of adapters: the model that they are on), where a forward was put over the class's."""
    named = model.named_modules()
    return [module for name, module in named if not name.startswith(f"{stack}.") and "forward" in vars(module)]


def _unpatched(copied: nn.Module, stack: str) -> Callable[..., Any]:
    for module in _outer_patched(copied, stack):
        del module.forward
    return copied.forward


def _check_shards(
    model: nn.Module, shards: TPPlan, self_check: SelfCheck, sample: Mapping[str, Any], defers_logits: bool
) -> bool:
    """Returns whether they were compared."""
    wide = sum(p.numel() * max(p.element_size(), 4) for p in model.parameters())
    needed = 2 * (shards.tp_size + 1) * wide  # whole and of each rank, with gradients; on the CPU, see `verify_model`
    if not _affordable(needed, torch.device("cpu"), self_check, "tensor_parallel"):
        return False
    verify_model(model, shards, sample, defers_logits=defers_logits)
    return True


def _affordable(needed: int, device: torch.device, self_check: SelfCheck, section: str) -> bool:
    """Whether to run a self-check that needs so many bytes on a device."""
    if self_check != "auto":
        return self_check != "off"
    free = _free_bytes(device)
    if needed <= SELF_CHECK_MEMORY_SHARE * free:
        return True
    logger.warning(
        "hf_parallel: %s.self_check=auto: skipped, it needs %.1f GB for copies and %.1f GB are free. The plan was not "
        "compared with the whole model; set %s.self_check: on to insist.",
        section,
        needed / 1e9,
        free / 1e9,
        section,
    )
    return False


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_ram()
