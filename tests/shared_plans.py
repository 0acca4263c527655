"""Matrices train one model many times in a process: what `discover_stages` finds out about it is found out once.

It takes half of such a case, and is a pure function, tested in tests/unit/test_stage_*.py: the first case of each model and
kind of settings calls it.
"""

from __future__ import annotations

import copy
from typing import Any

from hf_parallel.compat.private_torch import forward_hooks
from hf_parallel.engine import plans


def share_plans() -> None:
    """From here on, in this process, equal models get copies of one plan; call it on every rank."""
    stock, found = plans.discover_stages, dict[str, Any]()

    def shared(model: Any, samples: Any, **options: Any) -> Any:
        key = repr((_description(model), _description_of_samples(samples), options))
        if key in found:
            return _copied(found[key])
        hooks = _num_hooks(model)
        plan = stock(model, samples, **options)
        if _num_hooks(model) == hooks:  # transformers installs some in the first forward, which a copy would not make
            found[key] = _copied(plan)
        return plan

    plans.discover_stages = shared


def _copied(plan: Any) -> Any:
    """With containers of its own, which a run fills; what is in them is not changed."""
    copied = copy.copy(plan)
    vars(copied).update({name: copy.copy(value) for name, value in vars(plan).items()})
    return copied


def _description(model: Any) -> Any:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    kinds = [(name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors]
    modules = [(name, type(module), module.training) for name, module in model.named_modules()]
    return (
        model.config.to_json_string(use_diff=False),
        model.is_gradient_checkpointing,
        kinds,
        modules,
        _num_hooks(model),
    )


def _description_of_samples(samples: Any) -> Any:
    given = [samples] if isinstance(samples, dict) else samples
    return [
        {name: getattr(value, "tolist", lambda value=value: value)() for name, value in one.items()} for one in given
    ]


def _num_hooks(model: Any) -> int:
    return sum(len(forward_hooks(module)) for module in model.modules())
