"""One entry of the zoo through the pipeline cut: what crosses, what is shared, and whether the stages are exact."""

from __future__ import annotations

import copy
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from stage_models import cut, summed, unsplit, zero_grad
from torch import Tensor, nn

from hf_parallel.errors import ParallelError
from hf_parallel.pipeline_parallel.plan.discover import PipelinePlan, discover_stages
from hf_parallel.pipeline_parallel.plan.verify_stages import check_split, loss_of, run_stages
from hf_parallel.pipeline_parallel.run.stage import Stage
from zoo.models import batch, build, quiet, why_not


STAGE_COUNTS = (2, 3, 4)
TOLERANCE = 1e-5  # relative, fp32
# Gradients below this share of the model's largest are rounding noise around 0 (a key's bias under softmax): they are
# compared at this scale.
FLOOR = 1e-3


@dataclass
class Split:
    """One entry cut into so many stages.

    Args:
        bounds: Block ranges.
        verdict: "exact"; "refused": the product said why not; "failed": a difference, or an error of another kind.
        difference: Largest relative difference of a loss or a gradient from the unsplit model's.
        evaluation: As `verdict`, for the logits and the loss in evaluation mode.
        note: What was said.
    """

    bounds: list[int]
    verdict: str = "failed"
    difference: float | None = None
    evaluation: str = ""
    note: str = ""


@dataclass
class Row:
    """What the sweep found out about one entry.

    Args:
        name: Type, or type@variant.
        class_name: Model class; empty where no model could be built.
        verdict: "exact" at every number of stages, "refused", "failed", or "unusable": the whole model cannot train.
        crossings: Per cut before block 1 .. L-1: kind of address -> number of tensors.
        share: Share of the parameters that lies inside the stack, 0 .. 1.
        shared: Parameters that both of two stages hold.
        splits: Number of stages -> result.
        ranks: Two training steps on two gloo ranks: "exact", or what was said; empty if not run.
        note: The refusal, the failure, or why the entry is unusable.
    """

    name: str
    class_name: str = ""
    verdict: str = "failed"
    crossings: list[dict[str, int]] = field(default_factory=list)
    share: float | None = None
    shared: list[str] = field(default_factory=list)
    splits: dict[int, Split] = field(default_factory=dict)
    ranks: str = ""
    note: str = ""


def cuts(num_blocks: int, num_stages: int) -> list[int]:
    """Uneven ranges: the first stages get the smaller parts."""
    return [j * num_blocks // num_stages for j in range(num_stages + 1)]


def samples_of(name: str, model: nn.Module) -> list[dict[str, Any]]:
    """Two batches of different shape: padded right and left."""
    return [batch(name, model, 2, 8), batch(name, model, 3, 11, left=True)]


def sweep(name: str, stage_counts: Sequence[int] = STAGE_COUNTS, seconds: int = 240) -> Row:
    """Everything about one entry; never raises.

    Args:
        name: Of `entries()`.
        stage_counts: Into how many stages to cut.
        seconds: After this time the entry counts as failed.
    """
    row = Row(name)
    try:
        with deadline(seconds), quiet():
            row.note = why_not(name) or ""
            if row.note:
                row.verdict = "unusable"
                return row
            model = build(name)
            examine(row, model, samples_of(name, model), stage_counts)
    except Exception as error:
        row.verdict, row.note = verdict_of(error)
    return row


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    def expire(*_: Any) -> None:
        raise TimeoutError(f"no result after {seconds} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def verdict_of(error: Exception) -> tuple[str, str]:
    if isinstance(error, ParallelError):
        return "refused", str(error)
    return "failed", f"{type(error).__name__}: {error}"


def examine(row: Row, model: nn.Module, samples: Sequence[dict[str, Any]], stage_counts: Sequence[int]) -> None:
    """Fill in the row of a model, cut into each number of stages."""
    row.class_name = type(model).__name__
    plan = discover_stages(model, samples[0])
    row.share = _share(model, plan)
    for boundary in range(1, plan.num_blocks):
        row.crossings.append(dict(Counter(key.kind for key in plan.crossings(boundary))))
    for count in stage_counts:
        split = row.splits[count] = Split(cuts(plan.num_blocks, count))
        try:
            shared = _compare(model, plan, split, samples)
            row.shared = shared if count == 2 else row.shared
        except Exception as error:
            split.verdict, split.note = verdict_of(error)
    worst = max(row.splits.values(), key=lambda s: ("exact", "refused", "failed").index(s.verdict))
    row.verdict, row.note = worst.verdict, worst.note


def _share(model: nn.Module, plan: PipelinePlan) -> float:
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(size for name, size in sizes.items() if plan.block_of(name) is not None) / sum(sizes.values())


def _compare(model: nn.Module, plan: PipelinePlan, split: Split, samples: Sequence[dict[str, Any]]) -> list[str]:
    """The product's own check, then an independent one; returns the parameters that several stages hold."""
    stages = cut(model, split.bounds, plan)
    held = Counter(parameter for stage in stages for parameter in stage.held)
    whole = copy.deepcopy(model)
    split.difference = max(difference(whole, stages, sample) for sample in samples)
    if split.difference <= TOLERANCE:
        split.verdict = "exact"
    else:
        split.note = f"differs by {split.difference:.2g} relative from the unsplit model"
    # The check has the last word: it must refuse what differs, and accept what does not.
    check_split(model, plan, split.bounds, samples, lambda copied: copied.forward)
    split.evaluation = _evaluation(whole, stages, samples[0])
    return sorted(parameter for parameter, holders in held.items() if holders > 1)


def difference(whole: nn.Module, stages: Sequence[Stage], sample: dict[str, Any]) -> float:
    """Largest difference of loss and gradients in one training step, relative to the unsplit model's.

    A gradient is compared by its largest element. None counts as zeros; a NaN counts as infinite.
    """
    torch.manual_seed(0)
    loss, expected = unsplit(whole, sample)
    zero_grad(stages)
    torch.manual_seed(0)
    got = run_stages(stages, sample)
    found = summed(stages, list(expected))
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None and g.numel())
    errors = [relative(loss, got, 0.0)]
    errors += [relative(grad, found[name], FLOOR * largest) for name, grad in expected.items()]
    return max(errors)


def relative(expected: Tensor | None, got: Tensor | None, floor: float) -> float:
    some = got if expected is None else expected
    if some is None or not some.numel():
        return 0.0
    left = torch.zeros_like(some) if expected is None else expected
    right = torch.zeros_like(some) if got is None else got
    error = float((left - right).abs().max()) / max(float(left.abs().max()), floor, 1e-30)
    return error if error == error else float("inf")


def _evaluation(whole: nn.Module, stages: Sequence[Stage], sample: dict[str, Any]) -> str:
    """Whether logits and loss in evaluation mode agree: "exact", or what went wrong."""
    whole.eval()
    for stage in stages:
        stage.model.eval()
    try:
        with torch.no_grad():
            expected = whole(**sample)
            payload: Any = ()
            for stage in stages:
                payload = stage(payload, **sample)
        pairs = [(expected.logits, payload.logits), (loss_of(expected), loss_of(payload))]
        error = max(relative(left, right, 0.0) for left, right in pairs)
    except Exception as error_:
        return ": ".join(verdict_of(error_))
    return "exact" if error <= TOLERANCE else f"failed: differs by {error:.2g} relative"
