"""Proof before the first step: the model on parts of the sequence computes what the plain model does.

Models that mix tokens outside of the attention registry (recurrences, convolutions, ALiBi, sums over tokens) run on parts of a
sequence as well, and are wrong. So every model is tried: all ranks of a sequence run it plainly and in parts, and compare the
loss, the logits, every gradient, and on the way what enters and leaves each module, which names the one where they part.

Modules that make numbers of positions alone see those of whole rows in any case. Two causes have cures that are right for any
model, so they are tried before it is refused: a loss that is a mean over labels is weighted by their number, and modules that are
given counted positions see whole rows (see `whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.compat.private_torch import accumulation_hooks
from hf_parallel.errors import ParallelError, PlanError
from hf_parallel.head.labelled import LabelledOutput
from hf_parallel.model.copies import deep_copy, rebind_forwards
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.random_streams import generators_of
from hf_parallel.model.samples import kind_of_output
from hf_parallel.model.unchanged import in_mode
from hf_parallel.ulysses.attention import Shared, share_attention
from hf_parallel.ulysses.exchange import SequenceGroup
from hf_parallel.ulysses.forward import last_position, share_forward, tokens_of
from hf_parallel.ulysses.trail import Counts, Trail, watched
from hf_parallel.ulysses.whole import Place, blocks_of, may_see_whole_rows


TOLERANCE = 1e-4  # of the norm, in fp32: a token that is missing somewhere changes more
# Of modules: what is wrong there may still cancel out, so they only name the place.
NOISE = 1e-6  # of the norm, in fp32: the same computation in another order
FAR = 2**16  # positions of a model that does not say how many it has
FIX_OF_RING = "Set sp_attention to ulysses, or sp_size to 1; tp_size and pp_size shard this model instead"
FIX = "Set sp_size to 1; tp_size and pp_size shard this model instead"


@dataclass
class Found:
    """Results of one run.

    Args:
        loss: The loss (0-d).
        logits: f[B S V].
        gradients: Gradients by name of the parameter; None where there is none.
        trail: Trail of the run's forward.
    """

    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor | None]
    trail: Trail


def verify_model(
    model: nn.Module,
    shared: Shared,
    samples: Sequence[Mapping[str, Any]],
    is_mean: Callable[[nn.Module], bool] | None = None,
) -> None:
    """Compare `model` on parts of the sequence with itself; collective over the ranks that share it.

    The model is as before when this returns. Needs memory for two sets of gradients, and for a copy in fp32 of a model in half
    precision.

    Args:
        model: The whole model, or some blocks of it that show what all do.
        shared: The group, and what the model's attention will know.
        samples: Batches with labels.
        is_mean: Whether a model's own loss is a mean over its labels. With it, cures are tried, and written to `shared`.

    Raises:
        PlanError: They differ, or the model does not run; names the module. On every rank.
    """
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        given, model = model, deep_copy(model).float()
        rebind_forwards(model, given)
    passed = 0
    while passed < len(samples):
        plain = _run(model, model.forward, samples[passed], Trail(shared.whole))
        shared.whole.tables = tuple(_tables(model, plain.trail))
        problem, trail = _tried(model, shared, samples[passed], plain)
        if not agreed(shared, problem):
            refuse(model, shared, _counts_tokens(model, samples[passed], plain))
            passed += 1
        elif is_mean is not None and _cured(model, shared, plain, trail, is_mean):
            passed = 0
        else:
            refuse(model, shared, problem)


def _counts_tokens(model: nn.Module, sample: Mapping[str, Any], plain: Found) -> str:
    """The block of which the numbers that it counts its tokens with reach what it computes, in words; "" if there is none.

    In short rows they may do nothing yet (Llama 4 scales queries from token 8192 on), so they are spread over all positions that
    the model has. A range that indexes the row itself cannot be, and raises.
    """
    if not plain.trail.counted:
        return ""
    far = Trail(plain.trail.whole)
    try:
        _run(model, model.forward, sample, far, spread=max(1, (last_position(model) or FAR) // _length(sample)))
    except Exception:  # noqa: BLE001 - as above
        return ""
    pairs = zip(plain.trail.seen, far.seen, strict=True)
    if all(_error(y, x) <= NOISE for (_, _, one), (_, _, other) in pairs for x, y in zip(one, other, strict=True)):
        return ""
    return (
        f"{plain.trail.counted[0]} counts the tokens that it is given (torch.arange), not by position_ids, and in a part of a row "
        "the count begins anew"
    )


def _tried(model: nn.Module, shared: Shared, sample: Mapping[str, Any], plain: Found) -> tuple[str, Trail]:
    """Run the model on parts of a batch; gives what is wrong, "" if nothing is, and the trail of the pass."""
    undo = [shared.whole.install(model), share_attention(model, shared)]
    forward = share_forward(model, model.forward, shared)
    trail = Trail(shared.whole)
    try:
        problem = _tried_alone(model, shared, forward, sample, trail)
        if agreed(shared, problem):
            return problem, trail
        trail = Trail(shared.whole)
        parts = _run(model, forward, sample, trail)
    except Exception as error:  # noqa: BLE001 - the model's own code on parts may raise anything
        return raised(_innermost(trail), error), trail
    else:
        return _compare(plain, parts, shared), trail
    finally:
        for restore in undo:
            restore()


def _tried_alone(
    model: nn.Module, shared: Shared, forward: Callable[..., Any], sample: Mapping[str, Any], trail: Trail
) -> str:
    """The error of a forward that sends no messages, "" if none: if one rank alone raised in one that does, the others would wait."""
    shared.is_alone = True
    try:
        with _trained(model), watched(model, trail, _length(sample)):
            forward(**sample)
    except Exception as error:  # noqa: BLE001 - as above
        return raised(_innermost(trail), error)
    else:
        return ""
    finally:
        shared.is_alone = False


def _cured(model: nn.Module, shared: Shared, plain: Found, trail: Trail, is_mean: Callable[[nn.Module], bool]) -> bool:
    """Whether there was a cure that had not been tried; collective."""
    found: list[dict[str, Place]] = [{}] * shared.group.size
    dist.all_gather_object(found, _counting(model, plain.trail, trail, shared.group), group=shared.group.bare)
    places = {name: place for mine in found for name, place in mine.items() if name not in shared.whole.places}
    shared.whole.places.update(places)
    before = shared.is_mean
    shared.is_mean = before or is_mean(model)
    return bool(places) or shared.is_mean != before


def _counting(model: nn.Module, plain: Trail, parts: Trail, group: SequenceGroup) -> dict[str, Place]:
    """Modules that are given no hidden states, and whose output is not this rank's part of that of the plain model."""
    found = {}
    for name in may_see_whole_rows(model):
        wholes, locals_ = plain.outputs(name), parts.outputs(name)
        if not wholes or len(wholes) != len(locals_) or name in plain.fed:
            continue
        dim = _shared_dim(locals_[0], wholes[0])
        pairs = zip(locals_, wholes, strict=True)
        if dim is not None and any(not _is_part_along(dim, local, whole, group.rank) for local, whole in pairs):
            found[name] = Place(calls=len(wholes), dim=dim)
    return found


def _tables(model: nn.Module, plain: Trail) -> Iterator[str]:
    """Modules without weights that give numbers to each token, as rotary embeddings do."""
    for name in may_see_whole_rows(model):
        if plain.tables.get(name) and next(model.get_submodule(name).parameters(), None) is None:
            yield name


def _shared_dim(local: Tensor, whole: Tensor) -> int | None:
    """Along which dim `local` is a part of `whole`, but for dims of 1 that stand for all rows."""
    if local.ndim != whole.ndim:
        return None
    dims = [dim for dim in range(whole.ndim) if local.shape[dim] not in (1, whole.shape[dim])]
    return dims[0] if len(dims) == 1 else None


def _is_part_along(dim: int, local: Tensor, whole: Tensor, rank: int) -> bool:
    """Whether the tokens of `local` that are no filling are this rank's part of `whole`."""
    start = min(rank * local.shape[dim], whole.shape[dim])
    size = min(local.shape[dim], whole.shape[dim] - start)
    wanted = whole.narrow(dim, start, size)
    return _error(local.narrow(dim, 0, size).expand_as(wanted), wanted) <= TOLERANCE


def agreed(shared: Shared, problem: str) -> str:
    """Share the problem of the first rank that has one, "" if none has; collective over the ranks of the sequence."""
    problems: list[str] = [""] * shared.group.size
    dist.all_gather_object(problems, problem, group=shared.group.bare)
    return next(filter(None, problems), "")


def refuse(model: nn.Module, shared: Shared, problem: str) -> None:
    """Raise on all ranks of the sequence what any of them has found; collective.

    Raises:
        PlanError: There is a problem.
    """
    found = agreed(shared, problem)
    if found:
        raise refusal(model, shared.group.size, found, is_ring=shared.ring is not None)


def refusal(model: nn.Module, size: int, problem: str, *, is_ring: bool) -> PlanError:
    """The error that says what is wrong with a model on parts of the sequence of `size` ranks, and what to set instead."""
    method, fix = (" as a ring", FIX_OF_RING) if is_ring else ("", FIX)
    advice = "" if problem.endswith(".") else f". {fix}."  # our own refusals have one
    return PlanError(f"{type(model).__name__} with sp_size={size}{method}: {problem}{advice}")


def raised(module: str, error: Exception) -> str:
    """The problem of a forward that raised inside of a module, "" for the model itself."""
    said = (
        str(error) if isinstance(error, ParallelError) else f"{type(error).__name__}: {str(error)[:300]}".rstrip(".")
    )
    return f"{module or 'the model'} does not run on a part of the sequence: {said}"


def _innermost(trail: Trail) -> str:
    return trail.open[-1] if trail.open else ""


def _length(sample: Mapping[str, Any]) -> int:
    """Tokens of its rows."""
    return tokens_of(sample).shape[1]


def _run(
    model: nn.Module, forward: Callable[..., Any], sample: Mapping[str, Any], trail: Trail, *, spread: int = 1
) -> Found:
    """One training forward and backward pass without dropout; gradients of parameters are left alone.

    With `spread`, what blocks count their tokens with is multiplied by it.
    """
    length = _length(sample)
    with _trained(model) as held:
        with watched(model, trail, length), Counts(trail, blocks_of(model), length, spread):
            output = forward(**sample)
            loss = _loss_of(output)
            gradients = _gradients(loss, list(held.values()))
        with torch.no_grad():
            logits = forward(**{n: v for n, v in sample.items() if n != "labels"})["logits"]
    return Found(loss.detach(), logits, dict(zip(held, gradients, strict=True)), trail)


def _loss_of(output: Any) -> Tensor:
    """The loss in a model's output.

    Raises:
        PlanError: The output has no names, or no loss.
    """
    has_logits = isinstance(output, LabelledOutput) or (isinstance(output, Mapping) and "logits" in output)
    if has_logits and isinstance(output.get("loss"), Tensor):
        return output["loss"]  # type: ignore[no-any-return]
    raise PlanError(
        f"sp_size above 1 with a forward that returns {kind_of_output(output)} for a batch with labels: parts of a row are joined by name, "
        "and only loss and logits are known (models with a value head return a tuple, and values of each token). Return a "
        "ModelOutput with both, or set sp_size to 1: tp_size and zero.stage train such a model."
    )


@contextmanager
def _trained(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Inside, all parameters of a model, by name, are trained, without dropout, and whoever draws (NEFTune) draws alike."""
    held = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    required = [(p, p.requires_grad) for p in held.values()]
    states = [(generator, generator.get_state()) for generator in generators_of(model)]
    try:
        for generator, _ in states:
            generator.manual_seed(0)
        for parameter in held.values():
            parameter.requires_grad_(True)
        with in_mode(model, trains=True), torch.enable_grad(), NoDropout():
            yield held
    finally:
        for parameter, value in required:
            parameter.requires_grad_(value)
        for generator, state in states:
            generator.set_state(state)


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Gradients of a backward pass, which reentrant checkpoints need; earlier gradients, and hooks, are left alone."""
    hooks = [accumulation_hooks(p) for p in parameters]
    before = [(p.grad, dict(mine)) for p, mine in zip(parameters, hooks, strict=True)]
    try:
        for parameter, mine in zip(parameters, hooks, strict=True):
            parameter.grad = None
            mine.clear()
        loss.backward()
        return [p.grad for p in parameters]
    finally:
        for parameter, mine, (gradient, had) in zip(parameters, hooks, before, strict=True):
            parameter.grad = gradient
            mine.update(had)


def _compare(plain: Found, parts: Found, shared: Shared) -> str:
    """Compare two passes; gives what is wrong, "" if nothing is; collective."""
    group = shared.group
    if endless := _not_finite(plain):
        return (
            f"{endless} of the whole model is not finite on a batch of the check, so nothing can be compared with it. Load "
            "weights with which it is."
        )
    wrong = []
    if (error := _error(parts.loss, plain.loss)) > TOLERANCE:
        wrong.append(f"the loss (relative error {error:.1e})")
    if (error := _error(parts.logits, plain.logits)) > TOLERANCE:
        wrong.append(f"the logits (relative error {error:.1e})")
    sizes = [float(g.norm()) / g.numel() ** 0.5 for g in plain.gradients.values() if g is not None and g.numel()]
    floor = 1e-3 * max(sizes, default=0.0)
    for name, gradient in plain.gradients.items():
        mine = parts.gradients[name]
        present = torch.tensor([mine is not None], dtype=torch.float32, device=plain.loss.device)
        if bool(group.total(present)) != (gradient is not None):
            wrong.append(f"the gradient of {name}, which only one of them has")
        if gradient is None:
            continue
        total = group.total(torch.zeros_like(gradient) if mine is None else mine) / group.size
        if (error := _error(total, gradient, floor)) > TOLERANCE:
            wrong.append(f"the gradient of {name} (relative error {error:.1e})")
    if not wrong:
        return ""
    return f"{_first_difference(plain.trail, parts.trail, group.rank)} ({', '.join(wrong[:3])})"


def _not_finite(plain: Found) -> str:
    """The loss or the gradient of the plain model that is no number; "" if there is none. Logits of padding may be."""
    named = {f"the gradient of {name}": value for name, value in plain.gradients.items()}
    odd = (
        what
        for what, value in {"the loss": plain.loss, **named}.items()
        if value is not None and not _is_finite(value)
    )
    return next(odd, "")


def _is_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


def _first_difference(plain: Trail, parts: Trail, rank: int) -> str:
    """The module where the two forward passes part."""
    for (name, how, whole), (other, _, local) in zip(plain.seen, parts.seen, strict=False):
        if name != other:
            return f"{name} runs in the plain model where {other} runs on a part of the sequence"
        if len(whole) != len(local):
            continue
        if any(not _is_part(mine, all_, rank) for mine, all_ in zip(local, whole, strict=True)):
            home = name if how == "leaves" else name.rpartition(".")[0] or "the model"
            return f"{home} mixes tokens outside of the attention that is exchanged"
    return "the model differs from the plain one"


def _is_part(local: Tensor, whole: Tensor, rank: int) -> bool:
    """Whether `local` is this rank's part of `whole`; True where that cannot be told."""
    if local.shape == whole.shape:
        return _error(local, whole) <= TOLERANCE
    if local.ndim != whole.ndim:
        return True
    odd = [dim for dim in range(local.ndim) if local.shape[dim] != whole.shape[dim]]
    if len(odd) != 1 or (odd[0] == 0 and local.ndim < 3):  # tokens of all rows, one after the other
        return True
    dim, size = odd[0], local.shape[odd[0]]
    if rank * size + size > whole.shape[dim]:
        return True
    return _error(local, whole.narrow(dim, rank * size, size)) <= TOLERANCE


def _error(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over that of the reference; inf for tensors that cannot be compared."""
    if value.shape != reference.shape:
        return float("inf")
    least = max(floor * max(reference.numel(), 1) ** 0.5, torch.finfo(reference.dtype).tiny)
    both = value.double(), reference.double()
    if torch.equal(both[0].isnan(), both[1].isnan()):  # a model of its own may give some for padding
        both = both[0].nan_to_num(), both[1].nan_to_num()
    if torch.equal(*both):
        return 0.0
    error = float((both[0] - both[1]).norm()) / max(float(both[1].norm()), least)
    return error if error == error else float("inf")
