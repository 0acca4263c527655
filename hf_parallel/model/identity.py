"""Digests all that decides how a model runs into one number: its code as it is loaded, its settings, its tensors' shapes.

For remembering what was found out about a model from one start to the next. Where anything is met that is not known to be
plain data or code of torch and transformers, there is no number, and nothing is remembered.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from hf_parallel.compat.private_torch import (
    module_hooks,
    own_buffers,
    own_modules,
    own_parameters,
    runs_around_all_modules,
)
from hf_parallel.compat.private_transformers import loss_functions
from hf_parallel.model.fewer import is_stock


PLAIN: Final = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
PACKAGES: Final = [
    "torch",
    "transformers",
    "accelerate",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "packaging",
    "flash_attn",
]
SHIPPED: Final = frozenset({*PACKAGES, *sys.stdlib_module_names})
MODELS: Final = (
    "transformers.models."  # the attributes that code of theirs names are looked for on the classes of a model
)
# Modules whose code a forward runs: what stands behind a name in them is theirs, or somebody has put it there.
FORWARDS: Final = (
    *(MODELS, "transformers.masking_utils", "transformers.modeling_layers", "transformers.modeling_rope_utils"),
    *(
        "transformers.activations",
        "transformers.cache_utils",
        "transformers.pytorch_utils",
        "transformers.loss.loss_utils",
    ),
    *(
        "transformers.modeling_flash_attention_utils",
        "transformers.integrations.sdpa_",
        "transformers.integrations.flash_",
    ),
    *("transformers.integrations.flex_", "transformers.integrations.eager_"),
)
WALKED: Final = (
    "transformers"  # its code is looked at, because people patch and edit it; that of others goes by version
)
TABLES: Final = ("_parameters", "_buffers", "_modules")
HANDLES: Final = ("_require_grads_hook", "_require_grads_hooks")  # to remove hooks that are looked at themselves
# Of libraries, but not what a user may have put in their place.
FUNCTIONS: Final = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
CODE: Final = (*FUNCTIONS, functools.partial, type)


class UnknownError(Exception):
    """A model depends on something that cannot be told from one start to the next."""


def identity_of(model: nn.Module) -> str:
    """A digest that is another one whenever the model may run in another way.

    It covers what its modules are and have been set to, the loaded code of transformers that their forward can reach, shapes,
    dtypes, ties and what is frozen, and which parameters start as constants; not the values.

    Raises:
        UnknownError: There is code or data of which this cannot be said.
    """
    if runs_around_all_modules() or not is_stock(model):
        raise UnknownError("a module with hooks, or code that is not from torch or transformers")
    code = _Code()
    lines = [line for name, module in model.named_modules() for line in _of_module(name, module, code)]
    lines += _of_tensors(model)
    lines += [code.named(function) for function in loss_functions(model) if not isinstance(function, nn.Module)]
    lines += code.reached()
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of_batch(batch: Mapping[str, Any]) -> str:
    """A digest of a batch of the host's or a device's tensors, values included.

    Raises:
        UnknownError: It holds something else.
    """
    code, made = _Code(), hashlib.sha256()
    for name, value in sorted(batch.items()):
        if isinstance(value, Tensor):
            made.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            made.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            made.update(f"{name} {code.of(value)}".encode())
    return made.hexdigest()


def _of_module(name: str, module: nn.Module, code: _Code) -> Iterator[str]:
    code.classes(type(module))
    kinds = type(module).__mro__
    yield f"{name}: {[*map(_home, kinds)]} {[*own_modules(module)]}"
    for kind in kinds:
        yield f"{name}: {sorted((key, value) for key, value in vars(kind).items() if type(value) in (int, float, bool, str))}"
    hooks = {id(table) for table in module_hooks(module)}
    for key, value in sorted(vars(module).items()):
        if id(value) in hooks:  # of libraries; by the number of the handle
            yield f"{name}.{key}={code.of(list(value.values()))}"
        elif key not in TABLES and key not in HANDLES:
            yield f"{name}.{key}={code.of(value)}"


def _of_tensors(model: nn.Module) -> Iterator[str]:
    """Shapes and such; a tensor of one value may hide what one of many shows, so which is which counts."""
    first: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for table in (own_parameters(module), own_buffers(module)):
            for key, tensor in table.items():
                name = f"{prefix}.{key}"
                if tensor is None:
                    yield f"{name} none"
                    continue
                same = first.setdefault(id(tensor), name)
                head = tensor.detach().flatten()[:64]
                varies = not tensor.is_meta and bool((head != head[:1]).any())
                yield (
                    f"{name} {same} {type(tensor).__qualname__} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} "
                    f"{tensor.device.type} {tensor.requires_grad} {varies}"
                )


def _home(value: Any) -> str:
    """Module and name of code; a decorated function may carry the name of another."""
    inner = getattr(value, "__func__", value)
    own = inner.__globals__.get("__name__") if isinstance(inner, types.FunctionType) else None
    module = own or getattr(inner, "__module__", None) or "builtins"
    return f"{module}:{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def _package(home: str) -> str:
    return home.partition(":")[0].partition(".")[0]


class _Code:
    """The code that functions of transformers can reach by the names in it, and plain data as text."""

    def __init__(self) -> None:
        self._functions: dict[int, types.FunctionType] = {}
        self._classes: dict[int, type] = {}
        self._names: set[str] = {"forward", "__call__", "__init__"}
        self._lines: dict[str, None] = {}
        self._texts: dict[int, tuple[Any, str]] = {}  # objects are kept, so that ids stay theirs

    def classes(self, kind: type) -> None:
        """Describe a class and its bases, which may be asked for any attribute that is named somewhere."""
        for one in kind.__mro__:
            self._shipped(one)
            if _package(_home(one)) == WALKED:
                self._classes.setdefault(id(one), one)

    def named(self, function: Any) -> str:
        """A function by where it is from; its code is looked at where people change it."""
        if isinstance(function, functools.partial):
            return f"partial {self.of([function.func, list(function.args), dict(function.keywords)])}"
        home = self._shipped(function)
        inner = getattr(function, "__func__", function)
        if isinstance(inner, types.FunctionType) and _package(home) == WALKED:
            self._functions.setdefault(id(inner), inner)
        return home

    def of(self, value: Any, depth: int = 0) -> str:
        """Data as text.

        Raises:
            UnknownError: It is neither plain nor code that is shipped.
        """
        if depth > 8:
            raise UnknownError(f"data nested too deeply: {type(value).__qualname__}")
        if type(value) in PLAIN:
            return repr(value)
        if isinstance(value, Enum):
            return f"{self._shipped(type(value))} {value.name}"
        if isinstance(value, type):
            self.classes(value)
            return _home(value)
        if isinstance(value, (*FUNCTIONS, functools.partial)):
            return self.named(value)
        if isinstance(value, Tensor):
            return f"tensor {tuple(value.shape)} {value.dtype} {value.device.type}"
        if isinstance(value, GenerationConfig):  # no forward reads it, and it holds a hash of this process
            return self._shipped(type(value))
        if isinstance(value, PretrainedConfig):
            inside = {key: one for key, one in vars(value).items() if key != "_commit_hash"}
            return f"{self._shipped(type(value))} {self.of(inside, depth + 1)}"
        if isinstance(value, nn.Module):
            return f"module {_home(type(value))}"
        return f"{self._shipped(type(value))} {self._inside(value, depth + 1)}"

    def _inside(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return sorted((self.of(key, depth), self.of(one, depth)) for key, one in value.items())
        if isinstance(value, (set, frozenset)):
            return sorted(self.of(one, depth) for one in value)
        if isinstance(value, (list, tuple)):
            return [self.of(one, depth) for one in value]
        if is_dataclass(value):
            return self.of({each.name: getattr(value, each.name) for each in fields(value)}, depth)
        raise UnknownError(f"a value of {_home(type(value))}")

    def reached(self) -> list[str]:
        """The code of all functions that can be reached; new names may lead to new ones."""
        done: set[tuple[int, str]] = set()
        visited: set[int] = set()
        while True:
            for function in [f for key, f in self._functions.items() if key not in visited]:
                visited.add(id(function))
                self._look_into(function)
            found = [
                (one, name)
                for one in list(self._classes.values())
                for name in self._names & vars(one).keys()
                if (id(one), name) not in done
            ]
            for one, name in found:
                done.add((id(one), name))
                self._attribute(one, name, vars(one)[name])
            if not found and visited == self._functions.keys():
                return sorted(self._lines)

    def _attribute(self, owner: type, name: str, value: Any) -> None:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, functools.cached_property):
            value = value.func
        for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
            self._lines[f"{_home(owner)}.{name} {self._global(one)}"] = None

    def _look_into(self, function: types.FunctionType) -> None:
        home = _home(function)
        strict = home.startswith(FORWARDS)
        named = set(names_in(function.__code__))
        if home.startswith(MODELS):
            self._names |= named
        self._lines[f"{home} {_text_of(function.__code__)}"] = None
        self._lines[f"{home} {self._global(function.__defaults__)} {self._global(function.__kwdefaults__)}"] = None
        for cell in function.__closure__ or ():
            try:
                self._lines[f"{home} cell {self._global(cell.cell_contents, strict=strict)}"] = None
            except ValueError:  # not filled yet
                continue
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._lines[f"{home} wraps {self._global(wrapped, strict=strict)}"] = None
        holders: list[Any] = [Tensor, torch, nn.functional]
        for name in sorted(named):
            if name in function.__globals__:
                value = function.__globals__[name]
                self._lines[f"{function.__module__}.{name} {self._global(value, strict=strict)}"] = None
                if isinstance(value, types.ModuleType):
                    holders.append(value)
        for holder in holders:
            for name in sorted(named):
                value = vars(holder).get(name)
                if isinstance(value, (*FUNCTIONS, type)):
                    self._lines[f"{holder.__name__}.{name} {self._global(value, strict=strict)}"] = None

    def _global(self, value: Any, *, strict: bool = True) -> str:
        """Describe the object that a name in code stands for.

        Raises:
            UnknownError: With `strict`, code that is not shipped. Other parts of transformers load all kinds of packages.
        """
        if strict and isinstance(value, CODE):
            return self.of(value)
        if id(value) not in self._texts:
            self._texts[id(value)] = value, self._described(value)
        return self._texts[id(value)][1]

    def _described(self, value: Any) -> str:
        """Describe a value; an object of a library by its class and the functions in its tables."""
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        before = len(self._functions), len(self._classes)
        try:
            return self.of(value)
        except UnknownError:
            self._leave_out(*before)
            if isinstance(value, CODE):
                return f"not of transformers: {_home(value)}"
            home = self._shipped(type(value))
            if isinstance(value, logging.Logger) or _package(home) != WALKED:
                return home
        self.classes(type(value))
        inside = [*vars(type(value)).values(), *getattr(value, "__dict__", {}).values()]
        tables = [one for table in inside if isinstance(table, Mapping) for one in table.values()]
        return f"{home} {sorted(self.named(one) for one in tables if isinstance(one, FUNCTIONS))}"

    def _leave_out(self, functions: int, classes: int) -> None:
        """Reach only so many again: how far a set was read before something was unknown depends on addresses of this process."""
        for table, count in ((self._functions, functions), (self._classes, classes)):
            for key in list(table)[count:]:
                del table[key]

    def _shipped(self, value: Any) -> str:
        home = _home(value)
        self._require(home)
        return home

    def _require(self, home: str) -> None:
        if _package(home) not in SHIPPED:
            raise UnknownError(f"code of {home}")


def names_in(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes that code reads, in nested functions too, and what `getattr` may be given."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # getattr(self, "name")
            yield constant


def _text_of(code: types.CodeType) -> str:
    """Instructions, names and constants; sets in an order that does not depend on the process."""

    def text(constant: Any) -> str:
        if isinstance(constant, types.CodeType):
            return _text_of(constant)
        if isinstance(constant, frozenset):
            return f"set {sorted(map(repr, constant))}"
        return f"({', '.join(map(text, constant))})" if isinstance(constant, tuple) else repr(constant)

    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {text(code.co_consts)}"
