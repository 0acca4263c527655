"""Undo what a trial of a model leaves behind: a module may begin from the first batch that it is trained on, and count its calls."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from transformers import PretrainedConfig

from hf_parallel.compat.private_torch import own_buffers, version_of
from hf_parallel.compat.private_transformers import FLAGS_OF_HOOKS
from hf_parallel.errors import UnsupportedError
from hf_parallel.model.libraries import LIBRARIES, package_of
from hf_parallel.model.structure import leaves


DEPTH: Final = 4  # of containers and objects in each other
MOST: Final = 2**20  # elements of a tensor beside parameters and buffers whose values are kept
MOST_ITEMS: Final = 1024  # of a container that are looked into
SAMPLES: Final = 64  # elements of a parameter that are compared
OF_TORCH: Final = frozenset(vars(nn.Module()))
CONTAINERS: Final = (dict, OrderedDict, defaultdict, Counter, list, set, deque, tuple)


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter of a model is trained, nor gets a gradient from what else runs it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def in_mode(model: nn.Module, *, trains: bool) -> Iterator[None]:
    """Inside, a model and all of its modules are in training or in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(trains)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo what a forward leaves behind: random state, buffers, what modules have as plain attributes, in containers and in objects of
    user code, and what it wrote to configs (the loss of a classifier writes down what labels it has met).

    Gradients are not touched, and no hooks: transformers installs its output hooks on the first forward that needs them, and the
    crossings found rely on them. Where a library has changed weights (RWKV scales them, bitsandbytes packs them), what says so stays.

    Raises:
        UnsupportedError: User code has written to a parameter, of which there is no copy.
    """
    devices = {t.device for t in [*model.parameters(), *model.buffers()]}
    accelerators = [d for d in devices if d.type not in ("cpu", "meta")]
    kind = accelerators[0].type if accelerators else "cuda"
    buffers = [
        (own, dict(own), {name: buffer.clone() for name, buffer in own.items() if buffer is not None})
        for own in map(own_buffers, model.modules())
    ]
    seen: set[int] = set()
    modules = [_Before(module, seen) for module in model.modules()]
    configs = [(vars(config), dict(vars(config))) for config in _configs(model)]
    weights = {name: (parameter, _facts(parameter)) for name, parameter in model.named_parameters()}
    written: list[str] = []
    with torch.random.fork_rng(devices=[d.index or 0 for d in accelerators], device_type=kind):
        try:
            yield
        finally:
            written = [name for name, (parameter, facts) in weights.items() if not _equal(_facts(parameter), facts)]
            others = {id(weights[name][0]) for name in written}
            with torch.no_grad():
                for own, originals, values in buffers:
                    own.clear()
                    own.update(originals)
                    for name, value in values.items():
                        own[name].copy_(value)  # type: ignore[union-attr]
                for module in modules:
                    module.put_back(says=not others or not any(id(p) in others for p in module.module.parameters()))
            for settings, first in configs:
                for name in settings.keys() - first.keys():
                    del settings[name]
                settings.update(first)
    refuse_written(model, written)


def _facts(parameter: nn.Parameter) -> list[Any]:
    """Facts about a parameter that show changes: some elements, where they are, and what hangs on it."""
    hung = [*map(id, vars(parameter).values())]
    if type(parameter.data) is not Tensor or parameter.is_meta or is_lazy(parameter):
        return hung
    flat = parameter.detach().flatten()
    return [flat[:: max(1, len(flat) // SAMPLES)].clone(), parameter.data_ptr(), *hung]


def _equal(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(_same, now, before))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return type(one) is type(other) and bool(one == other)


def refuse_written(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a forward pass of user code that writes to parameters; libraries keep some within limits (Gemma 3n).

    Args:
        model: The model.
        names: Names of parameters that were written to.

    Raises:
        UnsupportedError: Names one.
    """
    for name in names:
        parameter = model.get_parameter(name)
        packed = not parameter.requires_grad and type(parameter) is not nn.Parameter  # by one that quantises
        if not packed and _is_in_users_module(model, name):
            raise UnsupportedError(
                f"the forward pass writes to parameter {name} (an initialisation from the first batch? a norm that is kept in place?). "
                "It was tried on made-up text, and ranks that have parts of a batch or of the weights would write other values. "
                "Call the model in training mode on a batch of yours before trainer.train() or accelerator.prepare() if it then "
                "has done so, or keep what it writes in a buffer."
            )


def _is_in_users_module(model: nn.Module, name: str) -> bool:
    path = name.split(".")[:-1]
    around = (model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1))
    return not all(package_of(type(module).__module__) in LIBRARIES for module in around)


def _configs(model: nn.Module) -> list[Any]:
    """Configs of its modules, each once."""
    found = (vars(module).get("config") for module in model.modules())
    return list({id(config): config for config in found if isinstance(config, PretrainedConfig)}.values())


def _is_plain(name: str) -> bool:
    return name not in OF_TORCH and name not in FLAGS_OF_HOOKS


class _Before:
    """Attributes that a module had beside those that torch keeps there.

    Args:
        module: The module.
        seen: Ids of objects that another one has noted.
    """

    def __init__(self, module: nn.Module, seen: set[int]) -> None:
        self.module = module
        self._plain = {name: value for name, value in vars(module).items() if _is_plain(name)}
        self._kept = _Kept(seen)
        for value in self._plain.values():
            self._kept.walk(value, 0)

    def put_back(self, *, says: bool) -> None:
        """Let it have the same again.

        Args:
            says: Also what may say that something was done; else tensors and numbers only.
        """
        held = vars(self.module)
        for name in [name for name in held if _is_plain(name)]:
            number = isinstance(held[name], (int, float)) and not isinstance(held[name], bool)
            if says or number or next(leaves(held[name]), None) is not None:
                if name in self._plain:
                    held[name] = self._plain[name]
                else:
                    del held[name]
        if says:
            held.update(self._plain)
            self._kept.put_back()


class _Kept:
    """Copies of the content of containers, objects of user code and tensors."""

    def __init__(self, seen: set[int]) -> None:
        self._seen = seen
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
        if len(container) > MOST_ITEMS:  # a data set
            return
        for item in container.values() if isinstance(container, dict) else container:
            self.walk(item, depth + 1)


def _is_of_user(value: Any) -> bool:
    """Whether it is an object with attributes, of a class that is of none of these libraries, nor Python's (threads, queues)."""
    if isinstance(value, (nn.Module, type, ModuleType)) or inspect.isroutine(value) or not hasattr(value, "__dict__"):
        return False
    package = package_of(type(value).__module__)
    return package == "types" or package not in {*sys.stdlib_module_names, *LIBRARIES}


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
