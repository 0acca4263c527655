"""Numeric proof that a module of experts computes the same on several ranks, all of them threads of this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.expert_parallel.apply import spread_experts
from hf_parallel.expert_parallel.expert_plan import ExpertModule
from hf_parallel.model.copies import deep_copy
from hf_parallel.model.dropout import NoDropout
from hf_parallel.tensor_parallel.plan.trace import NOISE_SEED, agree, perturb
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_virtual_ranks, virtual_groups


RANK_TIMEOUT_S = 60.0
TOKENS = 24  # of the first rank; the others have fewer
Given = dict[str | int, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class _Outcome:
    """Output, and gradients of what is given and of parameters, of one run."""

    output: Tensor
    hidden: Tensor
    weights: Tensor | None
    parameters: dict[str, Tensor | None]


def refusal(module: nn.Module, made: ExpertModule, ep_size: int, arguments: Arguments) -> str:
    """Why a module is not spread as proposed; "" if outputs and gradients equal those of the whole one.

    Args:
        module: The whole module; not changed.
        made: The proposal.
        ep_size: Ranks.
        arguments: Arguments of a call of the module.
    """
    whole = deep_copy(module).to("cpu", _precise(arguments, made))
    perturb(whole, only_constant=True)
    whole.requires_grad_(True)
    for trains, crowded in itertools.product((False, True), (False, True)):
        whole.train(trains)
        batches = [_batch(arguments, made, rank, crowded=crowded) for rank in range(ep_size)]
        try:
            if trains and _draws(whole, made, batches[0], arguments):
                return ""  # what it draws in training is not comparable
            expected = [_run(deep_copy(whole), made, batch, arguments) for batch in batches]
            found = _spread(whole, made, batches, arguments)
        except Exception as error:  # noqa: BLE001 - the module's own code, called as nobody called it before
            return f"it raises {type(error).__name__}: {str(error).strip()[:150]}"
        why = _difference(made, expected, found)
        if why:
            return why
    return ""


def _draws(whole: nn.Module, made: ExpertModule, batch: Mapping[str, Tensor], arguments: Arguments) -> bool:
    """Whether its output depends on random numbers, other than those of dropout."""
    outputs = []
    with torch.random.fork_rng(devices=[]):
        for seed in (0, 1):
            torch.manual_seed(seed)
            outputs.append(_run(deep_copy(whole), made, batch, arguments).output)
    return not torch.equal(*outputs)


def _batch(arguments: Arguments, made: ExpertModule, rank: int, *, crowded: bool) -> dict[str, Tensor]:
    """Tokens of a rank: other numbers on each, experts drawn for each token, or the first ones for all of them."""
    given, rule = _given(arguments), made.routing
    hidden, index, weights = (given[key] for key in (rule.hidden, rule.index, rule.weights))
    generator = torch.Generator().manual_seed(NOISE_SEED + rank)
    count, choices = max(1, TOKENS - 7 * rank), index.shape[-1]
    rows = torch.randn(*(1,) * (hidden.ndim - 2), count, hidden.shape[-1], generator=generator)
    known = max(rule.experts, int(index.max()) + 1 if index.numel() else 0)  # what lies beyond means no expert
    drawn = torch.rand(count, known, generator=generator).topk(choices).indices
    drawn = torch.arange(choices).expand(count, choices).contiguous() if crowded else drawn
    factors = torch.rand(count, choices, generator=generator) + 0.1
    return {
        "hidden": rows.to(_precise(arguments, made)),
        "index": drawn.to(index.dtype),
        "weights": factors.to(weights.dtype),
    }


def _precise(arguments: Arguments, made: ExpertModule) -> torch.dtype:
    """The type that a module is tried in: its own, if that is no coarser than fp32."""
    hidden: Tensor = _given(arguments)[made.routing.hidden]
    return torch.promote_types(hidden.dtype, torch.float32)


def _given(arguments: Arguments) -> Given:
    args, kwargs = arguments
    return dict([*enumerate(args), *kwargs.items()])


def _run(module: nn.Module, made: ExpertModule, batch: Mapping[str, Tensor], arguments: Arguments) -> _Outcome:
    given, rule = _given(arguments), made.routing
    hidden, weights = (batch[key].clone().requires_grad_(True) for key in ("hidden", "weights"))
    given[rule.hidden], given[rule.index], given[rule.weights] = hidden, batch["index"], weights
    args, kwargs = arguments
    parameters = dict(module.named_parameters())
    with torch.enable_grad(), NoDropout():
        output = module(*(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(NOISE_SEED))
        total = (output * cotangent.to(output.dtype)).sum()
    wanted = [hidden, weights, *parameters.values()]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    first = torch.zeros_like(hidden) if gradients[0] is None else gradients[0]
    return _Outcome(output.detach(), first, gradients[1], dict(zip(parameters, gradients[2:], strict=True)))


def _spread(
    whole: nn.Module, made: ExpertModule, batches: list[dict[str, Tensor]], arguments: Arguments
) -> list[_Outcome]:
    groups = virtual_groups(len(batches), RANK_TIMEOUT_S)
    modules = [deep_copy(whole) for _ in groups]
    for rank, (module, group) in enumerate(zip(modules, groups, strict=True)):
        spread_experts(module, made, group, rank)
    main: Callable[[int], _Outcome] = lambda rank: _run(modules[rank], made, batches[rank], arguments)  # noqa: E731
    return run_virtual_ranks(groups, main)


def _difference(made: ExpertModule, expected: list[_Outcome], found: list[_Outcome]) -> str:
    """Describe the first difference in words; "" if there is none."""
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        for what, whole, part in (
            ("its output", one.output, other.output),
            ("the gradient of the hidden states", one.hidden, other.hidden),
            ("the gradient of the weights of the experts", one.weights, other.weights),
        ):
            if whole is None and part is not None:
                whole = torch.zeros_like(part)
            if whole is not None and (part is None or not agree(part, whole)):
                return f"{what} differs on rank {rank}"
    size = len(expected)
    for name in expected[0].parameters:
        grads = [one.parameters[name] for one in expected]
        total = sum((grad for grad in grads if grad is not None), torch.zeros(()))
        parts = [one.parameters[name] for one in found]
        spec = made.sliced.get(name)
        if spec is None:  # whole on every rank, where it sees the tokens of this rank's experts
            summed = sum((part for part in parts if part is not None), torch.zeros(()))
            if not agree(summed, total):
                return f"the gradient of {name} differs"
            continue
        for rank, part in enumerate(parts if total.ndim else []):
            if part is None or not agree(part, spec.shard(total, size, rank)):
                return f"the gradient of {name} differs on rank {rank}"
    return ""
