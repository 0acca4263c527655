"""Undo what a trial of a model leaves behind: a module may begin from the first batch that it is trained on, and count its calls."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from transformers import PretrainedConfig

from hf_parallel.compat.private_torch import own_buffers, version_of
from hf_parallel.compat.private_transformers import FLAGS_OF_HOOKS
from hf_parallel.errors import UnsupportedError


DEPTH: Final = 4  # of containers and objects in each other
MOST: Final = 2**20  # elements of a tensor beside parameters and buffers whose values are kept
SAMPLES: Final = 64  # elements of a parameter that are compared
OF_TORCH: Final = frozenset(vars(nn.Module()))
CONTAINERS: Final = (dict, OrderedDict, defaultdict, Counter, list, set, deque, tuple)
LIBRARIES: Final = ("torch.", "transformers.", "accelerate.", "hf_parallel.")


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what a forward leaves behind: random state, buffers, what modules have as plain attributes, in containers and in objects of
    user code, and what it wrote to configs (the loss of a classifier writes down what labels it has met).

    Gradients are not touched, and no hooks: transformers installs its output hooks on the first forward that needs them, and the
    crossings found rely on them.

    Raises:
        UnsupportedError: The forward has written to a parameter, of which there is no copy.
    """
    devices = {t.device for t in [*model.parameters(), *model.buffers()]}
    accelerators = [d for d in devices if d.type not in ("cpu", "meta")]
    kind = accelerators[0].type if accelerators else "cuda"
    buffers = [
        (own, dict(own), {name: buffer.clone() for name, buffer in own.items() if buffer is not None})
        for own in map(own_buffers, model.modules())
    ]
    attributes = [(vars(module), _plain(module)) for module in model.modules()]
    kept = _Kept()
    for _, plain in attributes:
        kept.walk(list(plain.values()), 0)
    configs = [(vars(config), dict(vars(config))) for config in _configs(model)]
    weights = _sampled(model)
    with torch.random.fork_rng(devices=[d.index or 0 for d in accelerators], device_type=kind):
        try:
            yield
        finally:
            with torch.no_grad():
                for own, originals, values in buffers:
                    own.clear()
                    own.update(originals)
                    for name, value in values.items():
                        own[name].copy_(value)  # type: ignore[union-attr]
                kept.put_back()
            for held, plain in attributes:
                for name in [name for name in held if _is_plain(name) and name not in plain]:
                    del held[name]
                held.update(plain)
            for settings, first in configs:
                for name in settings.keys() - first.keys():
                    del settings[name]
                settings.update(first)
    _refuse_written(weights, _sampled(model))


def _sampled(model: nn.Module) -> dict[str, Tensor]:
    """Some elements of each parameter, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        if type(parameter.data) is Tensor and not (parameter.is_meta or is_lazy(parameter)):
            flat = parameter.detach().flatten()
            found[name] = flat[:: max(1, len(flat) // SAMPLES)].clone()
    return found


def _refuse_written(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    for name in before.keys() & now.keys():
        if not torch.allclose(before[name], now[name], rtol=0.0, atol=0.0, equal_nan=True):
            raise written_to(name)


def written_to(name: str) -> UnsupportedError:
    """That a forward pass writes to a parameter."""
    return UnsupportedError(
        f"the forward pass writes to parameter {name} in training (an initialisation from the first batch? a norm that is kept in "
        "place?). It was tried on made-up text, and ranks that have parts of a batch or of the weights would write other values. "
        "Call the model in training mode on a batch of yours before trainer.train() or accelerator.prepare() if it then has done "
        "so, or keep what it writes in a buffer."
    )


def _configs(model: nn.Module) -> list[Any]:
    """Configs of its modules, each once."""
    found = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in found if isinstance(config, PretrainedConfig)}.values())


def _is_plain(name: str) -> bool:
    return name not in OF_TORCH and name not in FLAGS_OF_HOOKS


def _plain(module: nn.Module) -> dict[str, Any]:
    """What a module has beside what torch keeps there."""
    return {name: value for name, value in vars(module).items() if _is_plain(name)}


class _Kept:
    """What containers, objects of user code and tensors hold."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []

    def put_back(self) -> None:
        """Let all of them hold the same again."""
        for tensor, version, values in self._tensors:
            if version_of(tensor) != version:
                tensor.detach().copy_(values)
        for container, content in self._containers:
            if not _holds(container, content):
                _fill(container, content)

    def walk(self, value: Any, depth: int) -> None:
        """Note what `value` holds, and what that holds."""
        if depth > DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if not (value.is_meta or isinstance(value, nn.Parameter)) and value.numel() <= MOST:
                self._tensors.append((value, version_of(value), value.detach().clone()))
            return
        container = vars(value) if _is_of_user(value) else value
        if type(container) not in CONTAINERS:  # a subclass may refuse to be filled, as outputs of transformers do
            return
        if not isinstance(container, tuple):
            self._containers.append((container, copy.copy(container)))
        for item in container.values() if isinstance(container, dict) else container:
            self.walk(item, depth + 1)


def _is_of_user(value: Any) -> bool:
    """Whether it is an object with attributes, of a class of none of the libraries whose objects a forward leaves as they are."""
    if isinstance(value, (nn.Module, type, ModuleType)) or inspect.isroutine(value) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith(LIBRARIES)


def _holds(container: Any, content: Any) -> bool:
    """Whether it holds the same objects."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(map(operator.is_, container.values(), content.values())) and list(container) == list(content)
    return container == content if isinstance(container, set) else all(map(operator.is_, container, content))


def _fill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
