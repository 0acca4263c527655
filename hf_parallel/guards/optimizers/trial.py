"""Steps of a copy of an optimizer on small parameters, to see what the optimizer does without doing it.

A few elements a parameter are enough for most. A step that views a tensor as blocks of so many elements (the heads of Adam-mini) raises
on them: one parameter of each such kind is as large as it must be, and there are two of it.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from hf_parallel.compat.private_optimizers import is_hook_table, own_step
from hf_parallel.compat.torch_tools import TorchDispatchMode


MOST = 64  # parameters of a group that take part
SIZE = 4  # of a dimension
MOST_ELEMENTS = 2**24  # of a parameter on whose few elements no step runs
RATE = 1e-2  # where nothing says another one
STEPS = 4  # some begin to limit when they have seen a few
MORE_STEPS = 12  # some move nothing before: RAdam until its sixth step, AdaShift until its eleventh


class Sizes(NamedTuple):
    """Sizes of the parameters of a copy.

    Attributes:
        of: Id of a parameter that takes part -> its size.
        keeps_states: Whether the copy has the states of the optimizer, in which a step looks for what was there when it was built.
        steps: Number of steps of a trial.
    """

    of: Mapping[int, Sequence[int]]
    keeps_states: bool = False
    steps: int = STEPS


class SendsMessages(Exception):
    """A step of a copy was about to send a message to other ranks."""


class CannotTry(Exception):
    """A copy of an optimizer does not step on tiny parameters, or moves none of them; its cause says why."""


@contextmanager
def trying(optimizer: optim.Optimizer) -> Iterator[None]:
    """Do what `own_numbers` does; whatever the user's code raises on a copy becomes `CannotTry`."""
    try:
        with own_numbers(optimizer):
            yield
    except CannotTry:
        raise
    except Exception as error:
        raise CannotTry(f"{type(error).__name__}: {error}") from error


@contextmanager
def own_numbers(optimizer: optim.Optimizer) -> Iterator[torch.device]:
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


def stepped_copy(optimizer: optim.Optimizer) -> optim.Optimizer:
    """A copy on small parameters after a few steps, whose state has what that of `optimizer` will have, but for the sizes.

    Neither the optimizer nor its parameters are changed; random states are put back.

    Raises:
        CannotTry: It does not step.
    """
    with trying(optimizer):
        return steps(optimizer, small_sizes(optimizer))[1]


def moves(optimizer: optim.Optimizer, sizes: Sizes, without: int = 0) -> list[Tensor]:
    """Run a few steps of a copy; gives how far each parameter moved. `without` parameters are taken out first."""
    return steps(optimizer, sizes, without=without)[0]


def steps(
    optimizer: optim.Optimizer, sizes: Sizes, scale: float = 1.0, others: float = 1.0, without: int = 0
) -> tuple[list[Tensor], optim.Optimizer]:
    """Run a few steps of a copy; gives how far each parameter moved, and the copy.

    Args:
        optimizer: Optimizer, which is copied.
        sizes: What `small_sizes` gives of it.
        scale: Size of the elements of gradients.
        others: Factor for the gradients of every second parameter in every second step.
        without: Number of parameters that are taken out first.
    """
    stepper, parameters = _small(optimizer, sizes)
    for parameter in parameters[:without]:
        for group in stepper.param_groups:
            group["params"] = [member for member in group["params"] if member is not parameter]
    before = [parameter.detach().double().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    asks = False
    for step in range(sizes.steps):
        factor = (
            others if step % 2 else 1.0
        )  # or a limit that goes by earlier gradients would see the same ones, larger
        drawn = [torch.randn(parameter.shape, generator=generator) * scale for parameter in parameters]
        for index in range(1, len(drawn), 2):
            drawn[index] *= factor

        begun = [parameter.detach().clone() for parameter in parameters]

        def gives_gradients(drawn: list[Tensor] = drawn, begun: list[Tensor] = begun) -> Any:
            # Where a step asks again it has moved the parameters, and may put them back (SAM): others give other gradients.
            for parameter, gradient, start in zip(parameters, drawn, begun, strict=True):
                parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)
                parameter.grad += scale * (parameter.detach() - start)
            return torch.ones(())  # some multiply with it (Polyak's step)

        gives_gradients()
        torch.manual_seed(0)
        if not step:
            asks = _begin(stepper, gives_gradients)
        elif asks:  # a step that raises later is none that asks for a closure
            stepper.step(gives_gradients)
        else:
            stepper.step()
    moved = [p.detach().double() - b for p, b in zip(parameters, before, strict=True)]
    return moved[without:], stepper


def small_sizes(optimizer: optim.Optimizer) -> Sizes:
    """The sizes on which a step of a copy runs, and as many steps as it takes to move something.

    Raises:
        Exception: What a step raises on tiny parameters, if it does on larger ones too.
    """
    sizes = _sizes_that_run(optimizer)
    moved = any(bool(one.any()) for one in moves(optimizer, sizes))
    return sizes if moved else sizes._replace(steps=MORE_STEPS)


def _sizes_that_run(optimizer: optim.Optimizer) -> Sizes:
    """Tiny sizes, or those of the first parameter of a kind that needs more."""
    taking = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in [one for one in group["params"] if one.requires_grad][:MOST]
    ]
    tiny = {id(parameter): _tiny(parameter) for _, parameter in taking}
    error = _error(optimizer, Sizes(tiny))
    if error is None:
        return Sizes(tiny)
    if optimizer.state and _error(optimizer, Sizes(tiny, keeps_states=True)) is None:
        return Sizes(tiny, keeps_states=True)
    kinds: dict[tuple[torch.Size, str], Sequence[int]] = {}
    sizes: dict[int, Sequence[int]] = {}
    for group, parameter in taking:
        kind = parameter.shape, _without_numbers(group)
        if kind not in kinds:
            kinds[kind] = sizes[id(parameter)] = _smallest(optimizer, parameter, error)
        elif kinds[kind] == _tiny(parameter):
            sizes[id(parameter)] = kinds[kind]
    return Sizes(sizes)


def _without_numbers(group: Mapping[str, Any]) -> str:
    """The names in a group, in which parameters of several blocks differ by their number."""
    return re.sub(r"\d+", "#", repr([(key, value) for key, value in group.items() if isinstance(value, str)]))


def _smallest(optimizer: optim.Optimizer, parameter: nn.Parameter, error: Exception) -> Sequence[int]:
    """Tiny, or all columns and ever more rows until a step runs; raises `error` if none does."""
    size, rows = _tiny(parameter), SIZE
    while _error(optimizer, Sizes({id(parameter): size})) is not None:
        if size == list(parameter.shape):
            raise error
        size = [min(rows, parameter.shape[0]), *parameter.shape[1:]]
        if math.prod(size) > MOST_ELEMENTS:
            raise error
        rows *= 2
    return size


def _tiny(parameter: Tensor) -> Sequence[int]:
    return [min(SIZE, size) for size in parameter.shape]


def _error(optimizer: optim.Optimizer, sizes: Sizes) -> Exception | None:
    """The error that steps on parameters of these sizes raise, if they do."""
    try:
        steps(optimizer, sizes)
    except (CannotTry, SendsMessages):
        raise
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        return error
    return None


def _begin(stepper: optim.Optimizer, closure: Callable[[], Any]) -> bool:
    """Step as a Trainer does, or where that raises (LBFGS, SAM) with a closure; gives which of them it was."""
    try:
        stepper.step()
    except Exception:  # noqa: BLE001 - as above
        torch.manual_seed(0)
        stepper.step(closure)
        return True
    return False


def paired_tensors(optimizer: optim.Optimizer) -> list[tuple[Tensor, nn.Parameter]]:
    """Tensors in lists beside an optimizer's states that go with its parameters, one by one, and these (slow weights of Lookahead)."""
    groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
    own = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", "defaults")]
    own += [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    lists = [list(_tensors(value)) for value in own if isinstance(value, (list, tuple))]
    everything = [parameter for group in groups for parameter in group]
    known, found = {id(parameter) for parameter in everything}, []
    for parameters in [everything, *groups]:
        shapes = [parameter.shape for parameter in parameters]
        for tensors in lists:
            if (
                tensors
                and [tensor.shape for tensor in tensors] == shapes
                and not {id(one) for one in tensors} <= known
            ):
                found += list(zip(tensors, parameters, strict=True))
    return found


def _keyed_tensors(tree: Any, seen: set[int]) -> Iterator[tuple[Tensor, nn.Parameter]]:
    """Tensors that an optimizer, or one inside it, keeps under a parameter, and these: states, and slow weights of Lookahead."""
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, optim.Optimizer):
        yield from _keyed_tensors(vars(tree), seen)
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(key, nn.Parameter):
            inside = list(value.values()) if isinstance(value, Mapping) else value
            yield from ((tensor, key) for tensor in _tensors(inside))
        else:
            yield from _keyed_tensors(value, seen)
    for value in tree if isinstance(tree, (list, tuple)) else ():
        yield from _keyed_tensors(value, seen)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for one in tree if isinstance(tree, (list, tuple)) else ():
        yield from _tensors(one)


def _small(optimizer: optim.Optimizer, sizes: Sizes) -> tuple[optim.Optimizer, list[nn.Parameter]]:
    """A copy of `optimizer` whose parameters are small, and two of them at least; it learns, whatever a warm-up begins with.

    Raises:
        CannotTry: A step was put on the optimizer itself, which a copy would call on it.
    """
    if own_step(optimizer) is not None:
        raise CannotTry("a step of its own was put on it")
    generator = torch.Generator().manual_seed(1)
    memo: dict[int, Any] = {}
    groups: list[list[nn.Parameter]] = []
    large: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        made = []
        for parameter in group["params"]:
            drawn = torch.randn(sizes.of.get(id(parameter), _tiny(parameter)), generator=generator)
            small = nn.Parameter(drawn.to(parameter.device, parameter.dtype), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = small
            if id(parameter) in sizes.of:
                made.append(small)
                large += [small] if list(small.shape) != _tiny(parameter) else []
        groups.append(made)
    kept = [*paired_tensors(optimizer), *_keyed_tensors(optimizer, set())]
    for tensor, parameter in kept:
        if tensor.shape == parameter.shape and id(parameter) in memo:  # not negative: it may be a mean of squares
            drawn = memo[id(parameter)].detach()
            memo[id(tensor)] = drawn > 0 if tensor.dtype is torch.bool else drawn.to(tensor.dtype).abs()
    stepper = _copy_of(optimizer, memo, keeps_states=sizes.keeps_states)
    for group, members in zip(stepper.param_groups, groups, strict=True):
        group["params"] = members
        if "lr" in group and not group["lr"]:
            group["lr"] = group.get("initial_lr") or getattr(optimizer, "defaults", {}).get("lr") or RATE
    tiny = [small for members in groups for small in members if not any(small is one for one in large)]
    # Among those whose gradients change and those whose gradients stay is one of each large kind: a norm would be theirs alone.
    parameters = [one for small in large for one in (small, _twin(stepper, small))] + tiny
    if len(parameters) == 1:
        parameters.append(_twin(stepper, parameters[0]))
    if callable(getattr(stepper, "train", None)):  # schedule-free optimizers step in no other mode
        stepper.train()  # type: ignore[attr-defined]
    return stepper, parameters


def _twin(stepper: optim.Optimizer, parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter like one of a copy, in its group and with its state."""
    twin = nn.Parameter(parameter.detach().clone())
    group = next(group for group in stepper.param_groups if any(member is parameter for member in group["params"]))
    group["params"].append(twin)
    if parameter in stepper.state:
        stepper.state[twin] = copy.deepcopy(stepper.state[parameter])
    return twin


def _copy_of(optimizer: optim.Optimizer, memo: dict[int, Any], *, keeps_states: bool) -> optim.Optimizer:
    # `copy.copy` asks `__getstate__`, which may leave out what a step reads.
    stepper: optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":  # a scheduler's, of the real one
            continue
        if is_hook_table(name):  # hooks mean the real one
            vars(stepper)[name] = type(value)()
        elif name == "state":
            vars(stepper)[name] = type(value)(value.default_factory)
            vars(stepper)[name].update(copy.deepcopy(value, memo) if keeps_states else _before_steps(value, memo))
        elif _is_singleton(value) or _is_read(value):  # of bitsandbytes, which knows the model
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


def _is_singleton(value: object) -> bool:
    """Whether there is one object of a class in a process."""
    instance = getattr(type(value), "get_instance", None)
    return callable(instance) and instance() is value


def _is_read(value: object) -> bool:
    """Whether it is a generator that has given all it has (`model.named_parameters()` that an optimizer keeps): nothing reads it again."""
    return isinstance(value, GeneratorType) and value.gi_frame is None
