"""Proof of a whole plan: loss-like outputs and every gradient of the sharded model against the plain one.

Pairs are verified one at a time; this check sees what only shows when they meet. The ranks are threads of one process
on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_peft import base_model
from hf_parallel.errors import PlanError
from hf_parallel.model.copies import deep_copy, rebind_forwards
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.random_streams import generators_of
from hf_parallel.model.tensors import map_tensors, tensors_in
from hf_parallel.tensor_parallel.plan.trace import NOISE_SEED, perturb, run, undisturbed, widen
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_virtual_ranks, virtual_groups
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.run.functions import VirtualGroup
from hf_parallel.tensor_parallel.run.reads import in_lockstep
from hf_parallel.tensor_parallel.shard_plan import TPPlan


RANK_TIMEOUT_S = 300.0  # ranks that disagree on the number of collectives wait for each other

# What is in training mode: nothing, all modules (without dropout), or the model without its modules.
Mode = Literal["evaluation", "training", "outer"]
Result = tuple[list[Tensor], dict[str, Tensor | None]]


def verify_model(model: nn.Module, plan: TPPlan, sample: Mapping[str, Any], *, defers_logits: bool = False) -> None:
    """Run all ranks of `plan` on copies of `model` in this process and compare with the plain model.

    Pure. Needs memory for `tp_size + 1` copies (in fp32 where the model is in half precision) and runs on the CPU, so
    it is meant for a small copy of the model. Constant parameters are perturbed, the same way in all copies.

    Args:
        model: The full model, before the plan is applied.
        plan: Its plan.
        sample: Keyword arguments of a forward pass.
        defers_logits: Whether logits stay unmade, see `apply_tensor_parallel`.

    Raises:
        PlanError: If an output or a gradient differs; names the first ones.
    """
    # On a GPU one autograd thread would serve all ranks, and wait for itself in their collectives.
    sample = {key: map_tensors(lambda _, tensor: tensor.cpu(), value) for key, value in sample.items()}
    modes = _modes(model, plan, sample)
    whole = _copied(model)
    with torch.random.fork_rng(devices=[]):
        expected = [_outputs_and_grads(whole, sample, mode) for mode in modes]
    del whole
    if plan.tp_size == 1:
        return
    groups = virtual_groups(plan.tp_size, RANK_TIMEOUT_S)
    shards = [_copied(model) for _ in groups]
    for rank, group in enumerate(groups):
        apply_tensor_parallel(shards[rank], plan, group, rank, lambda name: True, defers_logits=defers_logits)
    with torch.random.fork_rng(devices=[]):  # other ranks, which do not check, draw the same numbers afterwards
        for mode, reference in zip(modes, expected, strict=True):
            _verify(plan, shards, groups, sample, mode, reference)


def _modes(model: nn.Module, plan: TPPlan, sample: Mapping[str, Any]) -> tuple[Mode, ...]:
    """Evaluation; and training, where the model computes something else then: its loss on parts of the vocabulary, or its own.

    What draws numbers in training cannot be compared; its loss is, with modules that do not know that they are trained.
    """
    if plan.tp_size == 1:
        return ("evaluation",)
    by_parts = sample.get("labels") is not None and any(one.role == "vocab_head" for one in plan.linears.values())
    device = next(model.parameters()).device
    there = {key: map_tensors(lambda _, tensor: tensor.to(device), value) for key, value in sample.items()}
    trained, again = (_tried(model, there, "training", seed) for seed in (0, 1))
    if trained is not None and _alike(trained, again):
        differs = by_parts or not _alike(trained, _tried(model, there, "evaluation"))
        return ("evaluation", "training") if differs else ("evaluation",)
    # It draws, or refuses to train on this sample.
    return ("evaluation", "outer") if by_parts and _tried(model, there, "outer") is not None else ("evaluation",)


def _tried(model: nn.Module, sample: Mapping[str, Any], mode: Mode, seed: int = 0) -> list[Tensor] | None:
    """Run a forward pass; gives what it returns, or None if it raises."""
    with undisturbed(model), torch.no_grad():
        for generator in generators_of(model):
            generator.manual_seed(seed)
        try:
            with _in_mode(model, mode):
                return tensors_in(run(model, sample))
        except Exception:  # noqa: BLE001  the model's own code, in a mode that it may not know
            return None


def _alike(one: Sequence[Tensor], other: Sequence[Tensor] | None) -> bool:
    return other is not None and len(one) == len(other) and all(map(torch.equal, one, other))


def _in_mode(model: nn.Module, mode: Mode) -> AbstractContextManager[object]:
    """Set a mode, for code inside of what is returned."""
    model.train(mode == "training")
    if mode == "outer":
        model.training = base_model(model).training = True
    return NoDropout() if mode == "training" else nullcontext()


def _verify(
    plan: TPPlan,
    shards: Sequence[nn.Module],
    groups: Sequence[VirtualGroup],
    sample: Mapping[str, Any],
    mode: Mode,
    reference: Result,
) -> None:
    try:
        results = run_virtual_ranks(groups, lambda rank: _outputs_and_grads(shards[rank], sample, mode))
    except Exception as error:  # the model's own code, on shards: may raise anything
        raise PlanError(
            f"the sharded model does not run: {type(error).__name__}: {error}. Keep the modules in question whole ('gather' in "
            "tensor_parallel.plan), or set tp_size to 1."
        ) from error
    _compare(
        plan, mode, reference, [values for values, _ in results], lambda name: [grads[name] for _, grads in results]
    )


def _copied(model: nn.Module) -> nn.Module:
    away = {
        id(p): nn.Parameter(p.detach().cpu(), p.requires_grad)
        for p in model.parameters()
        if p.device.type != "cpu" and type(p) is nn.Parameter
    }
    with undisturbed(model):
        copied = deep_copy(model, away)
        rebind_forwards(copied, model)
        copied = widen(copied.cpu()).eval()
    perturb(copied, only_constant=True)
    return copied


def _outputs_and_grads(model: nn.Module, sample: Mapping[str, Any], mode: Mode) -> Result:
    parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    with torch.enable_grad(), in_lockstep(model), _in_mode(model, mode):
        output = run(model, sample)
        # Logits of training may be of this rank's part of the vocabulary.
        compared = output if mode == "evaluation" or sample.get("labels") is None else output["loss"]
        outputs = [t for t in tensors_in(compared) if t.is_floating_point() and t.requires_grad]
        generator = torch.Generator().manual_seed(NOISE_SEED)
        total = sum((t * torch.randn(t.shape, generator=generator).to(t.device, t.dtype)).sum() for t in outputs)
        torch.as_tensor(total).backward()
    grads = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return [t.detach() for t in outputs], grads


def _error(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Relative difference of two tensors, inf where they cannot be compared.

    Measured by the norm of the difference: a wrong layout changes a gradient by its own magnitude, while fp32 rounding,
    1e-6 in one block, grows with depth (2e-5 in 30 blocks of trained weights).

    Args:
        value: The tensor to judge.
        reference: The tensor to compare with.
        floor: Root mean square below which a gradient is itself rounding noise.
    """
    if value.shape != reference.shape:
        return math.inf
    size = max(float(reference.norm()), floor * max(reference.numel(), 1) ** 0.5, torch.finfo(reference.dtype).tiny)
    if math.isfinite(size) and torch.equal(value, reference):  # spares their difference
        return 0.0
    error = float((value - reference).norm()) / size
    return math.inf if math.isnan(error) else error


def _compare(
    plan: TPPlan,
    mode: Mode,
    reference: Result,
    outputs: list[list[Tensor]],
    grads_of: Callable[[str], list[Tensor | None]],
) -> None:
    values, expected = reference
    # The loss of transformers is fp32 in an fp64 model too, and so are the gradients that it alone makes.
    tolerance = 1e-6 if any(value.dtype == torch.float64 for value in values) else 1e-3
    wrong = [
        f"output {i} of tp rank {rank} (relative error {error:.1e})"
        for rank, mine in enumerate(outputs)
        for i, (value, other) in enumerate(zip(values, mine, strict=True))
        if (error := _error(other.to(value.device), value)) > tolerance
    ]
    present = [grad for grad in expected.values() if grad is not None and grad.numel()]
    floor = 1e-3 * max((float(grad.norm()) / grad.numel() ** 0.5 for grad in present), default=0.0)
    specs = plan.shard_specs()
    for name, grad in expected.items():
        parts = [part for part in grads_of(name) if part is not None]
        if grad is None or len(parts) < plan.tp_size:
            if grad is not None or parts:
                wrong.append(f"gradient of {name} (present on {len(parts)} of {plan.tp_size} ranks)")
            continue
        spec = specs.get(name)
        whole = parts if spec is None else [spec.assemble(parts)]
        error = max(_error(part.to(grad.device), grad, floor) for part in whole)
        if error > tolerance:
            wrong.append(f"gradient of {name} (relative error {error:.1e})")
    if wrong:
        raise PlanError(
            f"tp_size={plan.tp_size}: {'' if mode == 'evaluation' else 'in training mode, '}the sharded model differs from the plain one in {len(wrong)} quantities by "
            f"more than {tolerance:.0e}: {', '.join(wrong[:5])}. Set tensor_parallel.plan to gather the modules involved, "
            "or report the model type."
        )
