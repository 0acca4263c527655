"""Proof, at split time, that the stages of a cut model give the unsplit model's loss and gradients.

The slice that finds crossings sees data flow of the forward. Control flow that depends on values, state kept on modules
and custom autograd functions are invisible to it; running both forms on two tiny batches is the guard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.errors import PlanError
from hf_parallel.model.copies import deep_copy
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.fewer import is_stock
from hf_parallel.model.samples import kind_of_output
from hf_parallel.model.tensors import largest
from hf_parallel.model.unchanged import frozen, unchanged
from hf_parallel.pipeline_parallel.run.stage import Stage, cut_stages
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


ForwardOf = Callable[[nn.Module], Callable[..., Any]]
Gradients = dict[str, Tensor | None]

# Largest difference allowed, relative to the largest element of the gradient. Stages run the same kernels on the same
# values, so only a parameter read on several stages differs: its gradient is summed in another order, one or two
# roundings. In bfloat16 (8 bits) that is up to 3e-2; a wrong cut is wrong by far more. float64 models may compute parts
# (norms, the loss) in float32.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FLOOR = 1e-3  # gradients smaller than this share of the largest one are compared at that scale


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output: its `loss`, or the first entry of a tuple.

    Raises:
        PlanError: There is none: the batch has no labels, or the model computes none.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.ndim:
        raise PlanError(
            f"pp_size above 1 with a forward that returns {kind_of_output(output)}: the last stage starts the backward pass from the "
            "model's own loss, a scalar, which is neither named loss nor first in a tuple (models with a value head return none). "
            "The samples of the self-check need 'labels', for which the forward returns it; or set pp_size to 1: tp_size and "
            "zero.stage train such a model."
        )
    return loss


def run_stages(stages: Sequence[Stage], inputs: Mapping[str, Any]) -> Tensor:
    """Forward and backward of one batch through all stages in this process; returns the loss."""
    received: list[tuple[Tensor, ...]] = []
    sent: list[tuple[Tensor, ...]] = []
    payload: tuple[Tensor, ...] = ()
    for stage in stages[:-1]:
        received.append(payload)
        sent.append(stage(payload, **inputs))
        payload = tuple(_as_received(tensor) for tensor in sent[-1])
    received.append(payload)
    loss = loss_of(stages[-1](payload, **inputs))
    loss.backward()
    for out, nxt in zip(reversed(sent), reversed(received[1:]), strict=True):
        pairs = [(o, n.grad) for o, n in zip(out, nxt, strict=True) if o.requires_grad and n.grad is not None]
        if pairs:  # none where everything before this cut is frozen
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return loss.detach()


def _as_received(tensor: Tensor) -> Tensor:
    """Copy a tensor as the next stage receives it: the values in new memory, outside this stage's graph."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def check_split(
    model: nn.Module,
    plan: PipelinePlan,
    bounds: Sequence[int],
    samples: Sequence[Mapping[str, Any]],
    forward_of: ForwardOf,
    placement: Sequence[Sequence[int]] | None = None,
) -> None:
    """Compare the loss and every gradient of the stages, run one after the other, with the unsplit model's.

    Each rank's stages are cut from one copy, as they will be on that rank. Works on copies, so `model`, its gradients
    and the random state stay as they are. Memory, in copies of the parameters: one for the gradients of the stages, one for
    each sample's expected gradients, one while they are compared; without `shares_parameters`, two for those of the stages.

    Args:
        model: the whole model, not cut.
        plan: its plan.
        bounds: block ranges of the stages.
        samples: tiny batches with labels, at least two of different (B, S), so that a size captured in discovery shows.
        forward_of: gives the genuine forward of a copy, e.g. `lambda m: m.forward`.
        placement: the stages of each rank, e.g. [(0, 3), (1, 2)]; one stage a rank by default.

    Raises:
        PlanError: A loss or a gradient differs; names how many and the first parameters.
    """
    with unchanged(model), NoDropout(), torch.enable_grad():
        reference = _pristine(model, plan)
        # Here and below: a function that somebody put over a forward may run the very model it was put on, also in a copy.
        with frozen(model):
            expected = [_unsplit(reference, forward_of(reference), sample) for sample in samples]
        del reference
        stages = _place(model, plan, bounds, forward_of, placement or [(index,) for index in range(len(bounds) - 1)])
        for index, (sample, (loss, gradients)) in enumerate(zip(samples, expected, strict=True)):
            if not loss.isfinite():
                raise PlanError(
                    f"cannot check the split of {plan.model_name}: the unsplit model's own loss on sample {index} of the "
                    f"self-check is {float(loss)}. Give samples (padding, labels) on which its loss is finite."
                )
            for one in _models_of(stages):
                one.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            with frozen(model):
                split_loss = run_stages(stages, sample)
            _compare_losses(plan.model_name, loss, split_loss)
            _compare_gradients(plan.model_name, gradients, _summed_gradients(stages, list(gradients)))


def _place(
    model: nn.Module,
    plan: PipelinePlan,
    bounds: Sequence[int],
    forward_of: ForwardOf,
    placement: Sequence[Sequence[int]],
) -> list[Stage]:
    """All stages in order, those of one rank cut from one copy."""
    if sorted(itertools.chain(*placement)) != list(range(len(bounds) - 1)):
        raise PlanError(
            f"placement={[list(rank) for rank in placement]} must name each of the stages 0 .. {len(bounds) - 2} once."
        )
    stages: dict[int, Stage] = {}
    for indices in placement:
        copied = _pristine(model, plan)
        stages |= cut_stages(copied, plan, bounds, indices, forward_of(copied))
    return [stages[index] for index in sorted(stages)]


def _models_of(stages: Sequence[Stage]) -> list[nn.Module]:
    """The models behind stages, each once."""
    return list({id(stage.model): stage.model for stage in stages}.values())


def shares_parameters(model: nn.Module, plan: PipelinePlan) -> bool:
    """Whether copies for the check have the memory of the model's parameters: only libraries' code, which writes to none."""
    return not plan.writes_parameters and not plan.written_since(model) and is_stock(model)


def _pristine(model: nn.Module, plan: PipelinePlan) -> nn.Module:
    """A copy without gradients."""
    shared: dict[int, Any] = {}
    if shares_parameters(model, plan):
        plain = (p for p in model.parameters() if type(p) is nn.Parameter)
        shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in plain}
    copied = deep_copy(model, shared)
    copied.zero_grad(set_to_none=True)
    return copied


def _unsplit(model: nn.Module, forward: Callable[..., Any], sample: Mapping[str, Any]) -> tuple[Tensor, Gradients]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = loss_of(forward(**sample))
    if not loss.requires_grad:
        raise PlanError(
            "the loss of a copy of the model depends on none of its trained parameters: all are frozen, adapters are merged, or its "
            "forward runs another model. Train a parameter that the forward reads, call unmerge_adapter(), or set pp_size to 1."
        )
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def _summed_gradients(stages: Sequence[Stage], names: Sequence[str]) -> Gradients:
    """Gradients by name in the unsplit model; a parameter that several models hold gets the sum of theirs."""
    total: Gradients = dict.fromkeys(names)
    for model in _models_of(stages):
        own = dict(model.named_parameters(remove_duplicate=False))
        for name in names:
            grad = own[name].grad if name in own else None
            if grad is not None:
                before = total[name]
                total[name] = (
                    grad if before is None else before.add_(grad)
                )  # the model's own, made anew for each sample
    return total


def _compare_losses(model_name: str, expected: Tensor, got: Tensor) -> None:
    tolerance = TOLERANCE.get(expected.dtype, 1e-5)
    difference = float((expected - got).abs())
    if not difference <= tolerance * max(1.0, float(expected.abs())):
        raise PlanError(
            f"cannot pipeline {model_name}: the split model's loss {float(got):.6g} differs from the unsplit model's "
            f"{float(expected):.6g} by {difference:.2g} (allowed: {tolerance:.0e} relative). Nothing was changed. Use "
            "tensor parallel or ZeRO instead, or other cuts."
        )


def _compare_gradients(model_name: str, expected: Gradients, got: Gradients) -> None:
    """Compare gradients; a missing one counts as zeros, since some parameters legitimately get either."""
    most = max((largest(g) for g in expected.values() if g is not None and g.numel()), default=0.0)
    wrong: list[tuple[str, float]] = []
    for name, grad in expected.items():
        other = got[name]
        if grad is None and other is None:
            continue
        some = grad if grad is not None else other
        if some is None or not some.numel():
            continue
        left = torch.zeros_like(some) if grad is None else grad
        right = torch.zeros_like(some) if other is None else other
        scale = max(largest(left), FLOOR * most)
        if math.isfinite(scale) and torch.equal(left, right):  # as most are; spares their difference
            continue
        difference = largest(left - right)
        if not difference <= TOLERANCE.get(some.dtype, 1e-5) * scale:
            wrong.append((name, difference / scale if scale else float("inf")))
    if wrong:
        shown = ", ".join(f"{name} (off by {error:.2g} relative)" for name, error in wrong[:3])
        raise PlanError(
            f"cannot pipeline {model_name}: the split model's gradients differ from the unsplit model's "
            f"({len(wrong)} of {len(expected)} parameters, first: {shown}); the blocks may run inside a custom autograd "
            "function or depend on state that does not cross the cut. Nothing was changed. Use tensor parallel or ZeRO "
            "instead."
        )
