"""Judge whether an optimizer may update a part of a tensor: whether it treats every element by itself.

Others (Adafactor, LAMB, Muon, ...) use norms or factors of the whole tensor and would train silently wrong on a part of
it. What counts is the class that computes, not its name.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import optim

from hf_parallel.compat.private_optimizers import own_step


ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.RMSprop,
    optim.Adadelta,
    optim.Rprop,
    optim.ASGD,
)
# Classes of packages that are not imported here, by module and name, whose source was read: fused forms of Adam, and signs (Lion).
ELEMENTWISE_ELSEWHERE = frozenset(
    {
        ("apex.optimizers.fused_adam", "FusedAdam"),
        ("lion_pytorch.lion_pytorch", "Lion"),
        ("deepspeed.ops.adam.fused_adam", "FusedAdam"),
        ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam"),
    }
)
# The same, of classes whose `train()` and `eval()` move weights between steps, each element by itself (Schedule-Free).
MOVING = frozenset(
    (f"schedulefree.{name.lower()}_schedulefree", f"{name}ScheduleFree") for name in ("AdamW", "SGD", "RAdam")
)
# What a subclass may say of its own without changing how a step is computed.
HARMLESS = frozenset(
    {
        "__init__",
        "__repr__",
        "__module__",
        "__doc__",
        "__annotations__",
        "__firstlineno__",
        "__static_attributes__",
        "__qualname__",
        "__parameters__",
        "__orig_bases__",
        "zero_grad",
        "state_dict",
        "load_state_dict",
    }
)


def treats_elements_alone(optimizer: optim.Optimizer) -> bool:
    """Whether a step gives the same values on a part of a tensor as on the whole of it.

    A subclass of a known class counts as that class as long as it overrides nothing that a step calls.
    """
    return own_step(optimizer) is None and _is_known(type(optimizer))


def moves_between_steps(optimizer: optim.Optimizer) -> bool:
    """Whether `train()` and `eval()` of an optimizer that treats elements alone move weights."""
    return any(_name_of(one) in MOVING for one in type(optimizer).__mro__)


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _is_known(kind: type) -> bool:
    added: dict[str, Any] = {}
    for one in kind.__mro__:
        if one in ELEMENTWISE or _name_of(one) in ELEMENTWISE_ELSEWHERE | MOVING:
            return all(_is_of(one, name, value) for name, value in added.items() if hasattr(one, name))
        added |= {name: value for name, value in vars(one).items() if name not in HARMLESS}
    return False


def _is_of(kind: type, name: str, value: Any) -> bool:
    """Whether torch itself put `value` there: the first object of a class gets a step that is profiled."""
    own = inspect.unwrap(getattr(kind, name)) if callable(getattr(kind, name)) else None
    while callable(value) and hasattr(value, "__wrapped__"):
        if getattr(value, "__globals__", {}).get("__name__") not in (optim.Optimizer.__module__, kind.__module__):
            return False
        value = value.__wrapped__
    return own is not None and value is own


def known_names() -> str:
    """The classes to choose from, for a message."""
    return ", ".join(sorted(f"torch.optim.{kind.__name__}" for kind in ELEMENTWISE))
