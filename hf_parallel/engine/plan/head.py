"""Whether the loss of a model is computed without its logits: tried on a small batch, against the model's own way."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.engine.plan.forms import Forms
from hf_parallel.engine.plan.setup import Setup, StandIn
from hf_parallel.errors import PlanError
from hf_parallel.head.defer import LogitsDeferral
from hf_parallel.head.tiles import Tiling
from hf_parallel.mesh.one_rank import on_rank_zero
from hf_parallel.model.tensors import only_tensor
from hf_parallel.pipeline_parallel.plan.verify_stages import loss_of
from hf_parallel.tensor_parallel.plan.trace import find_linears, replaced, run, undisturbed
from hf_parallel.tensor_parallel.plan.vocab_plan import find_ends
from hf_parallel.tensor_parallel.shard_plan import TPPlan


TOLERANCE = 1e-5  # relative, of a gradient's norm
TILES = 3  # of the small batch


@dataclass(frozen=True)
class HeadPlan:
    """Whether logits are made for the loss.

    Args:
        name: The head, a linear layer; "" if the model has none.
        why: Why its logits are made; "" if they are not.
        is_asked: Whether the settings ask for a loss without them.
    """

    name: str = ""
    why: str = ""
    is_asked: bool = False

    @property
    def is_deferred(self) -> bool:
        """Whether they are not."""
        return self.is_asked and not self.why

    def describe(self) -> list[str]:
        """A line about it, where it is asked for."""
        if not self.is_asked:
            return []
        if self.why:
            return [f"loss: the logits are made for it ({self.why})"]
        return [f"loss: computed from what {self.name} is given, for a few tokens at a time; the logits are not made"]


class _RefusedError(Exception):
    """A loss that needs logits; the message says why."""


def plan_head(setup: Setup, forms: Forms, shards: TPPlan | None, stand_in: StandIn | None) -> HeadPlan:
    """Whether the logits are made, the same on every rank; collective where it has to be tried.

    Args:
        setup: The whole model.
        forms: The smaller models that stand for it.
        shards: Sharding of its layers.
        stand_in: For a model without values.

    Raises:
        PlanError: `chunked_loss: true`, and the logits have to be made.
    """
    if not setup.config.chunks_loss:
        return HeadPlan()

    def look() -> HeadPlan:
        of = "" if shards is None else shards.fingerprint()
        if isinstance(known := setup.verdicts.get("head", of), str):
            return HeadPlan(known, is_asked=True)
        setup.watchdog.runs("tries the loss without logits")
        # The head and its gradients in fp32 are larger than all else of a start: the smallest form that has the loss is tried.
        smallest = next(forms.from_narrow()) if stand_in is None else stand_in.model(forms.sample)
        found = judge_head(*smallest, shards)
        if stand_in is not None and found.name:  # it is without what PEFT wraps around the model
            found = replace(found, name=find_ends(setup.model).head)
        if found.is_deferred:
            setup.verdicts.put("head", found.name, of)
        return found

    plan = on_rank_zero(look, "tries the loss without logits", waiting=setup.watchdog.waiting)
    if setup.config.chunked_loss is True and plan.why:
        raise PlanError(
            f"chunked_loss: true, but the loss of {setup.name} needs its logits: {plan.why}. Set chunked_loss to auto, "
            "which makes them, or to false."
        )
    return plan


def judge_head(model: nn.Module, sample: Mapping[str, Any], shards: TPPlan | None = None) -> HeadPlan:
    """Try whether a model's loss and its gradients are the same without logits.

    Args:
        model: The whole model, with values; it is left as it was.
        sample: A small batch; `input_ids` serve as labels if there are none.
        shards: Planned sharding of its layers.
    """
    name = find_ends(model).head
    try:
        if not name:
            raise _RefusedError("the model has no output embedding")
        linear = None if shards is None else shards.linears.get(name)
        if shards is not None and linear is not None and linear.role != "vocab_head":
            raise _RefusedError(f"{name} is {shards.fallbacks.get(name, 'sharded otherwise')}")
        _check(model, model.get_submodule(name), sample)
    except _RefusedError as refusal:
        return HeadPlan(name, str(refusal), is_asked=True)
    except Exception as error:  # noqa: BLE001  the model's own code may raise anything; reported
        return HeadPlan(name, f"it raises {type(error).__name__}: {str(error).strip()[:100]}", is_asked=True)
    return HeadPlan(name, is_asked=True)


@dataclass
class _Tail:
    """The loss of one run from the head on, and what it was computed from."""

    loss: Tensor
    hidden: Tensor
    parameters: list[Tensor]

    @functools.cached_property
    def gradients(self) -> list[Tensor]:
        """Gradients of the loss with respect to what the head is given, and its parameters that are trained."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        return list(torch.autograd.grad(self.loss, [self.hidden, *trained]))


def _check(model: nn.Module, head: nn.Module, sample: Mapping[str, Any]) -> None:
    info = find_linears(head).get("")
    if info is None or info.transposed:
        raise _RefusedError("the head is not a linear module with one row a token")
    given = dict(sample)
    given.setdefault("labels", sample.get("input_ids"))
    own = own_parameters(head)
    parameters = [_leaf(p, p.requires_grad) for p in (own["weight"], own.get("bias")) if p is not None]
    with undisturbed(model):
        plain = _run_tail(model, head, given, None, parameters, F.linear)
        tokens = math.prod(plain.hidden.shape[:-1])
        deferral = LogitsDeferral(Tiling(rows=-(-tokens // TILES)))
        tiled = _run_tail(model, head, given, plain.hidden.detach(), parameters, deferral.logits)
    reads = deferral.last
    if reads.made:
        raise _RefusedError(f"its forward reads them ({reads.made[0]})")
    if reads.tiled != 1:
        raise _RefusedError(f"one forward computes {reads.tiled} cross-entropies of them")
    if not _close(tiled.loss, plain.loss) or not all(map(_close, tiled.gradients, plain.gradients)):
        raise _RefusedError("without them it comes out different")


def _run_tail(
    model: nn.Module,
    head: nn.Module,
    given: Mapping[str, Any],
    hidden: Tensor | None,
    parameters: list[Tensor],
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor | None],
) -> _Tail:
    """Run the model with autograd from the head on, on its own input or on `hidden`; in fp32 if it is in half."""
    inputs: list[Tensor] = []

    def forward(*args: Tensor, **named: Tensor) -> Tensor | None:
        inputs.append(_leaf(only_tensor(args, named) if hidden is None else hidden))
        torch.set_grad_enabled(True)
        return product(inputs[-1], parameters[0], parameters[1] if len(parameters) > 1 else None)

    with replaced(head, "forward", forward), torch.no_grad():
        loss = loss_of(run(model, given))
    if len(inputs) != 1:
        raise _RefusedError(f"one forward calls the head {len(inputs)} times")
    if not loss.requires_grad:
        raise _RefusedError("its loss is not computed from them")
    return _Tail(loss, inputs[0], parameters)


def _leaf(tensor: Tensor, is_trained: bool = True) -> Tensor:
    return (tensor.detach().float() if tensor.dtype.itemsize < 4 else tensor.detach()).requires_grad_(is_trained)


def _close(value: Tensor, reference: Tensor) -> bool:
    size = float(reference.detach().norm())
    return math.isfinite(size) and float((value - reference).detach().norm()) <= TOLERANCE * max(size, 1e-30)
