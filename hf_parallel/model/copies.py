"""Copies of models that somebody has hung functions and results on.

A copy of a function still calls what it was made around: TRL, accelerate and users write `original = model.forward; model.forward = types.MethodType(wrapper, model)`, and `wrapper`
calls `original`, which is bound to the model. In a deep copy it is bound to the model still, so that the copy runs that.
And torch copies no tensor that was computed from parameters, wherever a hook has kept one.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


DEPTH: Final = 8  # of functions around functions


def deep_copy(module: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy; results that the module or its hooks have kept (DoRA, a `partial` with a list) are copied as constants.

    Args:
        module: Module to copy.
        memo: Ids of objects that are not copied, with what takes their place.
    """
    with _ResultsAsConstants():
        return copy.deepcopy(module, dict(memo or {}))


class _ResultsAsConstants(TorchFunctionMode):
    """Inside, `copy.deepcopy` takes tensors that have a graph, which it refuses otherwise: without their graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())  # one copy for all who hold it
        return func(*args, **(kwargs or {}))


def rebind_forwards(copied: nn.Module, model: nn.Module) -> None:
    """Let functions that were put over forwards of a deep copy call its modules where they call those of the model.

    Args:
        copied: The copy; functions in it are replaced by others, and stay those of the model.
        model: Model of which it is a copy.
    """
    twins: dict[int, Any] = dict(zip(map(id, model.modules()), copied.modules(), strict=True))
    for module in copied.modules():
        if "forward" in vars(module):
            vars(module)["forward"] = _rebound(vars(module)["forward"], twins, 0)


def _rebound(value: Any, twins: Mapping[int, Any], depth: int) -> Any:
    """`value`, or one like it that has the copies of the modules that it has."""
    if id(value) in twins or depth > DEPTH:
        return twins.get(id(value), value)
    if isinstance(value, MethodType):
        function, owner = (_rebound(part, twins, depth + 1) for part in (value.__func__, value.__self__))
        return value if function is value.__func__ and owner is value.__self__ else MethodType(function, owner)
    if isinstance(value, partial):
        given = [_rebound(part, twins, depth + 1) for part in value.args]
        named = {name: _rebound(part, twins, depth + 1) for name, part in value.keywords.items()}
        return partial(_rebound(value.func, twins, depth + 1), *given, **named)
    if isinstance(value, FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
        return _function(value, twins, depth)
    return value


def _function(function: FunctionType, twins: Mapping[int, Any], depth: int) -> FunctionType:
    cells, is_other = [], False
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # nothing is in it yet
            cells.append(cell)
            continue
        new = _rebound(content, twins, depth + 1)
        is_other |= new is not content
        cells.append(CellType(new) if new is not content else cell)
    # The idiom of a loop: `lambda x, inner=layer.forward: ...`.
    defaults = tuple(_rebound(value, twins, depth + 1) for value in function.__defaults__ or ())
    named = {name: _rebound(value, twins, depth + 1) for name, value in (function.__kwdefaults__ or {}).items()}
    is_other |= any(map(operator.is_not, defaults, function.__defaults__ or ()))
    is_other |= any(map(operator.is_not, named.values(), (function.__kwdefaults__ or {}).values()))
    if not is_other:
        return function
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults or None, tuple(cells) or None
    )
    made.__kwdefaults__, made.__qualname__, made.__doc__ = named or None, function.__qualname__, function.__doc__
    made.__dict__.update({name: _rebound(held, twins, depth + 1) for name, held in vars(function).items()})
    return made
