"""Matrices train one model many times in a process: what planning finds out about it is found out once.

Plans, the verdict on its loss and the self-check take most of such a case, and are pure functions with tests of their
own (tests/unit/test_stage_*.py, test_tp_*.py, test_self_check.py): the first case of each model and kind of settings
calls them. What they are given is told apart by `_description`: tensors, modules, hooks, patched functions, settings.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.loss import loss_utils

from hf_parallel.compat.private_torch import forward_hooks


def share_plans() -> None:
    """From here on, in this process, equal models get copies of one plan; call it on every rank."""
    from hf_parallel.engine.plan import plans, self_check
    from hf_parallel.engine.plan import shards as plan_shards
    from hf_parallel.engine.plan import stages as plan_stages

    if hasattr(plans.discover_stages, "__wrapped__"):
        return
    plans.discover_stages = _once(plans.discover_stages)
    plan_stages.judge_loss = _once(plan_stages.judge_loss)
    plan_shards.plan_model = _once(plan_shards.plan_model)
    self_check.check_split = _once(self_check.check_split)
    self_check.verify_model = _once(self_check.verify_model)


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(model, ...)`, called once for models and arguments of one description; an error is not kept."""
    found: dict[Any, Any] = {}

    @functools.wraps(function)
    def shared(model: nn.Module, *args: Any, **options: Any) -> Any:
        key = repr((_description(model), _told(args), _told(options)))
        if key in found:
            return _copied(found[key][0])
        hooks = _num_hooks(model)
        result = function(model, *args, **options)
        if _num_hooks(model) == hooks:  # transformers installs some in the first forward, which a copy would not make
            found[key] = (_copied(result), _functions_of(model))  # as long as they live, nothing else has their ids
        return result

    return shared


def _copied(result: Any) -> Any:
    """With containers of its own, which a run fills; what is in them is not changed."""
    copied = copy.copy(result)
    if hasattr(result, "__dict__"):
        for name, value in vars(result).items():
            object.__setattr__(copied, name, copy.copy(value))
    return copied


def _description(model: nn.Module) -> Any:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    places: dict[int, int] = {}
    kinds = [
        (name, t.shape, t.dtype, t.device, t.requires_grad, places.setdefault(id(t), len(places)))
        for name, t in tensors
    ]
    modules = [(name, module.training) for name, module in model.named_modules()]
    names = {id(module): name for name, module in model.named_modules()}
    config = getattr(model, "config", None)
    names[id(config)] = "its config"
    return (
        None if config is None else config.to_json_string(use_diff=False),
        getattr(model, "is_activation_checkpointing", None),
        kinds,
        modules,
        [_identity(function, names) for function in _functions_of(model)],
        _num_hooks(model),
    )


def _functions_of(model: nn.Module) -> list[Any]:
    """Forwards, functions that were put on modules, and those of the files they are from: users patch all of them."""
    found: list[Any] = []
    for module in model.modules():
        own = [value for value in vars(module).values() if callable(value) and not isinstance(value, nn.Module)]
        found += [type(module), type(module).forward, *own]
    files = {functional, loss_utils, *(sys.modules[type(module).__module__] for module in model.modules())}
    for file in sorted(files, key=lambda file: file.__name__):
        found += [value for value in vars(file).values() if callable(value)]
    return found


def _identity(value: Any, names: dict[int, str], depth: int = 4) -> Any:
    """What tells functions apart: those that a library makes anew for each model, of the same code and values, are the same."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if id(value) in names:
        return ("of the model", names[id(value)])
    if isinstance(value, tuple):
        return [_identity(each, names, depth) for each in value]
    if depth and isinstance(value, functools.partial):
        given = [value.func, *value.args, *value.keywords.values()]
        return ("partial", list(value.keywords), [_identity(each, names, depth - 1) for each in given])
    if depth and isinstance(value, MethodType):
        return ("method", [_identity(each, names, depth - 1) for each in (value.__func__, value.__self__)])
    if depth and isinstance(value, FunctionType) and value.__closure__:
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        given += [getattr(cell, "cell_contents", None) for cell in value.__closure__]
        return ("function", id(value.__code__), [_identity(each, names, depth - 1) for each in given])
    return ("object", id(value))


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _told(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(inner) for inner in value]
    if isinstance(value, Tensor):
        return (value.dtype, value.tolist())
    if hasattr(value, "fingerprint"):
        return value.fingerprint()
    if callable(value) and hasattr(value, "__code__"):
        return value.__code__
    return value


def _num_hooks(model: nn.Module) -> int:
    return sum(len(forward_hooks(module)) for module in model.modules())
