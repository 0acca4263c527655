"""Rules for which optimizers a rank may step by itself, given the parts of the parameters that it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.compat.private_optimizers import own_step
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.reads import Reads
from hf_parallel.guards.optimizers.crossing import crosses_parameters, draws_numbers, goes_by_place
from hf_parallel.guards.optimizers.elementwise import known_names, moves_between_steps, treats_elements_alone
from hf_parallel.guards.optimizers.trial import CannotTry, SendsMessages
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh


logger = logging.getLogger(__name__)

# Of a group of parameters, what changes from step to step and concerns each of them alone.
OF_STEPS: Final = frozenset({"params", "lr", "initial_lr", "betas", "momentum", "weight_decay"})
MOST_ASKED: Final = 16


@torch.no_grad()
def cut_states(
    optimizer: torch.optim.Optimizer, name_of: Callable[[torch.Tensor], str | None], ledger: Ledger, mesh: Mesh
) -> None:
    """Keep this rank's parts of states that an optimizer has of whole tensors: it has stepped, or made them, before they were cut.

    Args:
        optimizer: With the parameters from before or from now.
        name_of: Name of a parameter of this rank.
        ledger: Says which are shards.
        mesh: This rank's mesh.
    """
    for parameter, state in optimizer.state.items():
        name = name_of(parameter)
        entry = ledger.entries[name] if name is not None else None
        if entry is None or entry.spec is None:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == entry.shape:
                state[key] = entry.spec.shard(value, mesh.parts.size, mesh.parts.rank)


def drop_others(optimizer: torch.optim.Optimizer, live: Iterable[nn.Parameter]) -> bool:
    """Keep an optimizer's parameters and states of this rank alone; whether it had parameters of others."""
    known, had_others = {id(parameter) for parameter in live}, False
    for group in optimizer.param_groups:
        kept = [parameter for parameter in group["params"] if id(parameter) in known]
        had_others |= len(kept) < len(group["params"])
        group["params"] = kept
    for parameter in [one for one in optimizer.state if isinstance(one, nn.Parameter) and id(one) not in known]:
        del optimizer.state[parameter]
    return had_others


def refuse_updates_in_backward(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """LOMO writes to weights in hooks on gradients.

    Raises:
        UnsupportedError: The gradients are those of one of several ranks.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.partition(".")[0] == "lomo_optim"]
    if kinds and mesh.shape.world_size > 1:
        raise UnsupportedError(
            f"optimizer {_named(optimizer)} on {mesh.shape.world_size} ranks: it updates weights while the backward pass runs, by this "
            f"rank's gradients, which are not summed yet. Use one of {known_names()}, or train in one process."
        )


def refuse_whole_tensor_updates(
    optimizer: torch.optim.Optimizer,
    ledger: Ledger,
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    *,
    partitions: bool,
    gathers: bool,
) -> None:
    """Refuse updates that depend on whole tensors where shards and parts of tensors are updated by themselves.

    Args:
        optimizer: Optimizer with the parameters of this rank.
        ledger: Says which are shards.
        parameters: Parameters of this rank, by name.
        mesh: This rank's mesh.
        partitions: Whether the optimizer updates flat parts of parameters.
        gathers: Whether ranks get, when it has stepped, what others have updated.

    Raises:
        UnsupportedError: It may use norms or factors of whole tensors.
    """
    if treats_elements_alone(optimizer):
        if gathers and moves_between_steps(optimizer):
            raise UnsupportedError(
                f"optimizer {_named(optimizer)} with zero.stage 1 or 2: its train() and eval() move weights between steps, and other "
                "ranks would not get those of this one. Set zero.stage to 0 or 3."
            )
        return
    kind = type(optimizer).__name__
    if hasattr(torch.optim, kind) and type(optimizer) is not getattr(torch.optim, kind):
        kind += f" of {type(optimizer).__module__}"
    sharded = [name for name in parameters if ledger.entries[name].spec is not None]
    by = mesh.shape.sharded_by
    if sharded:
        raise UnsupportedError(
            f"optimizer {kind} with {by}={mesh.parts.size}: its update may use norms or factors of "
            f"whole tensors, but {len(sharded)} parameters are shards (first: {sharded[0]}). Use one of "
            f"{known_names()}, or {by} 1."
        )
    if partitions:
        raise UnsupportedError(
            f"optimizer {kind} with zero.stage above 0: its update may use norms or factors of "
            f"whole tensors, but each rank updates a part of them. Use one of "
            f"{known_names()}, or zero.stage 0."
        )


def _named(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _refuse_crossing(optimizer: torch.optim.Optimizer, mesh: Mesh) -> NoReturn:
    kind = _named(optimizer)
    raise UnsupportedError(
        f"optimizer {kind} with pp_size={mesh.shape.pp_size}: its update of one parameter depends on the gradients "
        "of others (a norm over all of them?), but each stage steps on its own parameters only. Clip with max_grad_norm, "
        f"accelerator.clip_grad_norm_ or in on_pre_optimizer_step, use one of {known_names()}, or set pp_size to 1."
    )


def _untried(optimizer: torch.optim.Optimizer, mesh: Mesh, error: CannotTry | None) -> None:
    """Refuse an optimizer, or warn where its own step calls the hooks of its class: that sees gradients as callbacks do."""
    if own_step(optimizer) is not None:
        logger.warning(
            "hf_parallel: a step was put on optimizer %s (optimizer.step = ...), which cannot be tried on a copy. With pp_size=%d "
            "each stage steps on its own parameters: if it uses anything of several but a norm of their gradients, set pp_size to 1.",
            _named(optimizer),
            mesh.shape.pp_size,
        )
        return
    raise UnsupportedError(
        f"optimizer {_named(optimizer)} with pp_size={mesh.shape.pp_size}: its update could not be tried on a copy "
        f"({error or 'on another stage'}). Each stage steps on its own parameters only, which is wrong if the update of one "
        "parameter depends on the gradients of others. Let a deep copy of it step on parameters of other shapes, use one of "
        f"{known_names()}, or set pp_size to 1."
    ) from error


def refuse_crossing_now(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Like `refuse_crossing_updates`, by this rank alone, for an optimizer that has changed since it was asked about."""
    if mesh.shape.pp_size == 1 or treats_elements_alone(optimizer):
        return
    if any(group["params"] for group in optimizer.param_groups):
        try:
            if crosses_parameters(optimizer):
                _refuse_crossing(optimizer, mesh)
        except CannotTry as error:
            _untried(optimizer, mesh, error)


def watch_later_steps(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Ask again whether an update crosses parameters when something that it reads has changed: it may begin to clip later.

    Of one that counts its steps each of the first is asked about, and then every second, fourth and so on.

    Args:
        optimizer: Optimizer that `refuse_crossing_updates` has accepted.
        mesh: This rank's mesh.
    """
    if mesh.shape.pp_size == 1 or treats_elements_alone(optimizer):
        return
    changes = 0

    def options() -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k not in OF_STEPS} for group in optimizer.param_groups]

    def facts() -> tuple[Reads, list[dict[str, Any]]]:
        return Reads(MethodType(type(optimizer).step, optimizer), frozenset({"param_groups", "state"})), options()

    reads, before = facts()

    def before_step(*args: object) -> None:
        nonlocal reads, before, changes
        if options() == before and not reads.changed():
            return
        changes += 1
        if changes > MOST_ASKED and changes & (changes - 1):
            return  # what it reads is looked up again when it is asked about again
        reads, before = facts()
        refuse_crossing_now(optimizer, mesh)

    optimizer.register_step_pre_hook(before_step)


def refuse_crossing_updates(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], mesh: Mesh, *, pairs: bool
) -> None:
    """Refuse updates that depend on parameters of other stages: each stage steps on its own. Collective.

    Args:
        optimizer: Optimizer with the parameters of this stage only.
        parameters: Parameters of this stage, by name.
        mesh: This rank's mesh.
        pairs: Whether it has tensors that go with those that it had before.

    Raises:
        UnsupportedError: Its update crosses parameters, goes by their places, or cannot be tried.
    """
    if mesh.shape.pp_size == 1 or treats_elements_alone(optimizer):
        return
    has_any = any(group["params"] for group in optimizer.param_groups)
    crosses, untried = False, None
    try:
        crosses = has_any and crosses_parameters(optimizer)
    except CannotTry as error:
        untried = error
    by_place = pairs or (has_any and not (crosses or untried) and goes_by_place(optimizer))
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    draws = has_any and draws_numbers(optimizer)
    sends = untried is not None and isinstance(untried.__cause__, SendsMessages)
    found = torch.tensor([crosses, untried is not None, by_place, draws, sends], device=device).int()
    if mesh.mp_group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.mp_group)
    kind, (anywhere, unknown, placed, drawn, sent) = _named(optimizer), found.tolist()
    if sent:
        raise UnsupportedError(
            f"optimizer {kind} with pp_size={mesh.shape.pp_size}: its step sends messages to other ranks (torch.distributed), which "
            "it takes for replicas that have the same parameters, but each stage has its own: their weights would be mixed. Let it "
            f"step without messages, as in one process, use one of {known_names()}, or set pp_size to 1."
        )
    if anywhere:
        _refuse_crossing(optimizer, mesh)
    if placed:
        raise UnsupportedError(
            f"optimizer {kind} with pp_size={mesh.shape.pp_size}: its update of a parameter depends on the place of that "
            "parameter among others (a list of tensors beside them, as of Lookahead, or their numbers), but each stage has its "
            "own parameters only, counted from its first. Keep such tensors in optimizer.state[parameter]; if it is a list beside "
            "them, make it when the model was prepared (in create_optimizer of a Trainer); use one of "
            f"{known_names()}, or set pp_size to 1."
        )
    if unknown:
        _untried(optimizer, mesh, untried)
    if drawn:
        logger.warning(
            "hf_parallel: optimizer %s draws random numbers in its steps. With pp_size=%d each stage draws for its own parameters, so they "
            "are not those of one process. Draw them from a generator that is seeded for each parameter (by its name and the step).",
            kind,
            mesh.shape.pp_size,
        )
