"""Whether an optimizer's update of one parameter depends on others: on their gradients, or on how many come before it.

With pipeline stages every rank steps on its own parameters. An optimizer that clips by a norm over all of them, or adapts
one number from all (Prodigy, D-Adaptation), would use another norm on every rank, without a word; one that pairs parameters
with a list of tensors of its own (Lookahead) would pair others. What counts is what it does: a copy of it takes a few steps
on tiny parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from hf_parallel.compat.private_optimizers import is_hook_table, own_step
from hf_parallel.compat.torch_tools import TorchDispatchMode


MOST = 64  # parameters of a group that take part
TOLERANCE = 1e-5
SIZE = 4  # of a dimension
RATE = 1e-2  # where nothing says another one
OTHERS = 7.0  # what the gradients of others are multiplied with
# Of gradients. With OTHERS a norm over all grows fivefold, so that a limit anywhere between is met by one of two runs and not the other.
SIZES = (1.0, 5.0**-4, 5.0**-3, 5.0**-2, 5.0**-1, 5.0, 5.0**2, 5.0**3)
STEPS = 4  # some begin to limit when they have seen a few


class SendsMessages(Exception):
    """A step of a copy was about to send a message to other ranks."""


class CannotTry(Exception):
    """A copy of an optimizer does not step on tiny parameters, or moves none of them; its cause says why."""


def crosses_parameters(optimizer: optim.Optimizer) -> bool:
    """Whether half of the parameters, or numbers of groups, change when the gradients of the other half are different.

    Neither the optimizer nor its parameters are changed; random states are put back.

    Args:
        optimizer: Optimizer of any class, before its first step.

    Raises:
        CannotTry: The trial cannot decide it.
    """
    any_moved = False
    with _trying(optimizer):
        for size in SIZES:
            (mine, one), (theirs, other) = (_steps(optimizer, size, factor) for factor in (1.0, OTHERS))
            if _differ(mine[::2], theirs[::2]) or _numbers(one) != _numbers(other):
                return True
            any_moved = any_moved or any(bool(moved.any()) for moved in mine)
    if not (any_moved or _is_empty(type(optimizer).step)):
        raise CannotTry("its steps moved none of the parameters")
    return False


def _is_empty(step: Callable[..., Any]) -> bool:
    """Whether a function reads nothing but its arguments: that of an optimizer which stands in where hooks step in the backward pass."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is not None and not (code.co_names or code.co_freevars)


def goes_by_place(optimizer: optim.Optimizer) -> bool:
    """Whether its parameters move differently when the first of them is taken out, or were counted when it was built.

    As `crosses_parameters`. False for one that draws random numbers, which are others then, or whose copy does not step.
    """
    if _has_counted(optimizer.state.values()):
        return True
    try:
        with _own_numbers(optimizer) as device:
            whole = _moves(optimizer)
            return _has_fresh_numbers(device) and _differ(_moves(optimizer, without=1), whole[1:])
    except Exception:  # noqa: BLE001  as above
        return False


def draws_numbers(optimizer: optim.Optimizer) -> bool:
    """Whether a step draws from torch's own generator: a rank that steps on other parameters draws other numbers for each.

    As `crosses_parameters`. False for one whose copy does not step.
    """
    try:
        with _own_numbers(optimizer) as device:
            _moves(optimizer)
            return not _has_fresh_numbers(device)
    except Exception:  # noqa: BLE001  as above
        return False


def stepped_copy(optimizer: optim.Optimizer) -> optim.Optimizer:
    """A copy on tiny parameters after a few steps, whose state has what that of `optimizer` will have, but for the sizes.

    As `crosses_parameters`.

    Raises:
        CannotTry: It does not step.
    """
    with _trying(optimizer):
        return _steps(optimizer)[1]


@contextmanager
def _trying(optimizer: optim.Optimizer) -> Iterator[None]:
    """Do what `_own_numbers` does; whatever the user's code raises on a copy becomes `CannotTry`."""
    try:
        with _own_numbers(optimizer):
            yield
    except CannotTry:
        raise
    except Exception as error:
        raise CannotTry(f"{type(error).__name__}: {error}") from error


@contextmanager
def _own_numbers(optimizer: optim.Optimizer) -> Iterator[torch.device]:
    """Inside, random numbers are drawn that change none of those outside, and no message is sent; gives the device of the parameters."""
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _NoMessages():  # type: ignore[no-untyped-call]
        yield device


class _NoMessages(TorchDispatchMode):
    """Refuses collectives: other ranks, which try other parameters, may send other ones, or none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise SendsMessages(f"its step calls {func.namespace}.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _has_fresh_numbers(device: torch.device) -> bool:
    """Whether nothing was drawn since the last step of `_moves` began."""
    now = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    torch.manual_seed(0)
    fresh = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return all(torch.equal(one, other) for one, other in zip(now, fresh, strict=True))


def keeps_by_place(optimizer: optim.Optimizer) -> bool:
    """Whether it has a list of tensors that go with its parameters, one by one, beside its states."""
    groups = [[parameter.shape for parameter in group["params"]] for group in optimizer.param_groups]
    shapes = [[shape for group in groups for shape in group], *groups]
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "defaults")]
    own += [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    lists = [list(_tensors(value)) for value in own if isinstance(value, (list, tuple))]
    return any(
        [tensor.shape for tensor in tensors] in shapes
        for tensors in lists
        if tensors and not {id(tensor) for tensor in tensors} <= known
    )


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for one in tree if isinstance(tree, (list, tuple)) else ():
        yield from _tensors(one)


def _differ(moved: list[Tensor], others: list[Tensor]) -> bool:
    return any(not torch.allclose(a, b, rtol=TOLERANCE, atol=1e-9) for a, b in zip(moved, others, strict=True))


def _moves(optimizer: optim.Optimizer, without: int = 0) -> list[Tensor]:
    """Run a few steps of a copy; gives how far each parameter moved. `without` parameters are taken out first."""
    return _steps(optimizer, without=without)[0]


def _steps(
    optimizer: optim.Optimizer, size: float = 1.0, others: float = 1.0, without: int = 0
) -> tuple[list[Tensor], optim.Optimizer]:
    """Run a few steps of a copy; gives how far each parameter moved, and the copy.

    Args:
        optimizer: Optimizer, which is copied.
        size: Size of the elements of gradients.
        others: Factor for the gradients of every second parameter in every second step.
        without: Number of parameters that are taken out first.
    """
    stepper, parameters = _tiny(optimizer)
    for parameter in parameters[:without]:
        for group in stepper.param_groups:
            group["params"] = [member for member in group["params"] if member is not parameter]
    before = [parameter.detach().double().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        factor = (
            others if step % 2 else 1.0
        )  # or a limit that goes by earlier gradients would see the same ones, larger
        drawn = [torch.randn(parameter.shape, generator=generator) * size for parameter in parameters]
        for index in range(1, len(drawn), 2):
            drawn[index] *= factor

        begun = [parameter.detach().clone() for parameter in parameters]

        def gives_gradients(drawn: list[Tensor] = drawn, begun: list[Tensor] = begun) -> Tensor:
            # Where a step asks again it has moved the parameters, and may put them back (SAM): others give other gradients.
            for parameter, gradient, start in zip(parameters, drawn, begun, strict=True):
                parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)
                parameter.grad += size * (parameter.detach() - start)
            return torch.ones(())  # some multiply with it (Polyak's step)

        gives_gradients()
        torch.manual_seed(0)
        _step(stepper, gives_gradients)
    moved = [p.detach().double() - b for p, b in zip(parameters, before, strict=True)]
    return moved[without:], stepper


def _numbers(stepper: optim.Optimizer) -> list[dict[str, float]]:
    """The numbers of an optimizer's groups; some are computed from gradients (Prodigy's factors grow after many steps)."""
    return [
        {
            name: float(value)
            for name, value in group.items()
            if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        for group in stepper.param_groups
    ]


def _step(optimizer: optim.Optimizer, closure: Callable[[], Any]) -> None:
    """Step as a Trainer does, or where that raises (LBFGS, SAM) with a closure."""
    try:
        optimizer.step()
    except Exception:  # noqa: BLE001  as above
        torch.manual_seed(0)
        optimizer.step(closure)


def _tiny(optimizer: optim.Optimizer) -> tuple[optim.Optimizer, list[nn.Parameter]]:
    """A copy of `optimizer` whose parameters are tiny, and two of them at least; it learns, whatever a warm-up begins with.

    Raises:
        CannotTry: A step was put on the optimizer itself, which a copy would call on it.
    """
    if own_step(optimizer) is not None:
        raise CannotTry("a step of its own was put on it")
    generator = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    groups: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups:
        made = []
        for parameter in group["params"]:
            drawn = torch.randn([min(SIZE, size) for size in parameter.shape], generator=generator)
            small = nn.Parameter(drawn.to(parameter.device, parameter.dtype), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = small
            made.append(small)
        groups.append([small for small in made if small.requires_grad][:MOST])
    stepper = _copy_of(optimizer, memo)
    for group, members in zip(stepper.param_groups, groups, strict=True):
        group["params"] = members
        if "lr" in group and not group["lr"]:
            group["lr"] = group.get("initial_lr") or getattr(optimizer, "defaults", {}).get("lr") or RATE
    parameters = [small for members in groups for small in members]
    if len(parameters) == 1:
        parameters.append(nn.Parameter(parameters[0].detach().clone()))
        next(group for group in stepper.param_groups if group["params"])["params"].append(parameters[1])
    if callable(getattr(stepper, "train", None)):  # schedule-free optimizers step in no other mode
        stepper.train()  # type: ignore[attr-defined]
    return stepper, parameters


def _copy_of(optimizer: optim.Optimizer, memo: dict[int, Any]) -> optim.Optimizer:
    # `copy.copy` asks `__getstate__`, which may leave out what a step reads.
    stepper: optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":  # a scheduler's, of the real one
            continue
        if is_hook_table(name):  # hooks mean the real one
            vars(stepper)[name] = type(value)()
        elif name == "state":
            vars(stepper)[name] = type(value)(value.default_factory)
            vars(stepper)[name].update(_before_steps(value, memo))
        elif _is_singleton(value):  # of bitsandbytes, which knows the model
            vars(stepper)[name] = value
        else:
            vars(stepper)[name] = copy.deepcopy(value, memo)
    return stepper


def _before_steps(state: Any, memo: dict[int, Any]) -> dict[nn.Parameter, dict[str, Any]]:
    """Copy, for tiny parameters, the states that an optimizer made when it was built; nothing once it has stepped."""
    made = {memo[id(parameter)]: dict(own) for parameter, own in state.items() if id(parameter) in memo}
    has_stepped = any(isinstance(value, Tensor) for own in made.values() for value in own.values())
    # By parameter: a copy of the whole would have copies of the tiny parameters, of which no step finds a state.
    return {} if has_stepped else {tiny: copy.deepcopy(own, memo) for tiny, own in made.items()}


def _has_counted(states: Iterable[dict[str, Any]]) -> bool:
    """Whether each parameter was given a number of its own before the first step (to draw its projection from, say)."""
    made = list(states)
    if any(isinstance(value, Tensor) for own in made for value in own.values()):
        return False
    given: dict[str, list[int]] = {}
    for own in made:
        for key, value in own.items():
            given.setdefault(key, []).extend([value] if type(value) is int else [])
    return any(len(numbers) > 1 and len(set(numbers)) == len(numbers) for numbers in given.values())


def _is_singleton(value: object) -> bool:
    """Whether there is one object of a class in a process."""
    instance = getattr(type(value), "get_instance", None)
    return callable(instance) and instance() is value
