"""Notes what a function reads beside its arguments, as far as the names in its code tell, and whether that has changed since.

A loss function that was believed on made-up logits computes something else when a callback sets an attribute that it reads, a
global, a field of the arguments; or when it looks at `trainer.state`, which changes by itself.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy
from torch import Tensor

from hf_parallel.compat.private_torch import version_of
from hf_parallel.model.identity import names_in


LIBRARIES: Final = frozenset({"torch", "transformers", "accelerate", "peft", "trl", "numpy", "hf_parallel"})
SCALARS: Final = (bool, int, float, complex, str, bytes, type(None))
OF_MODES: Final = frozenset({"training"})  # of a model; a step sets it
DEPTH: Final = 5
MOST_ITEMS: Final = 256
_MISSING: Final = object()


class Reads:
    """Notes what a function reads beside its arguments when this is made, and says later whether any of it has changed.

    Args:
        function: The function; one of a library reads what that needs, and nothing of the user's.
        without: Names that do not count.
    """

    def __init__(self, function: Any, without: frozenset[str] = frozenset()) -> None:
        self._names: set[str] = set()
        self._without = OF_MODES | without
        known = -1
        while known < len(self._names):  # a function found late may name what an object has that came before it
            known = len(self._names)
            self._found: list[tuple[Callable[[], Any], Any]] = []
            self._seen: set[int] = set()
            try:
                self._walk(function, 0)
            except Exception:  # noqa: BLE001  objects of users may raise anything when they are looked at
                return  # with what was found before

    def changed(self) -> bool:
        """Whether anything is not as it was, or cannot be looked at any more."""
        try:
            return not all(_same(get(), before) for get, before in self._found)
        except Exception:  # noqa: BLE001  as above
            return True

    def _note(self, get: Callable[[], Any], depth: int) -> None:
        value = get()
        self._found.append((get, value))
        self._walk(value, depth + 1)

    def _walk(self, value: Any, depth: int) -> None:
        if depth > DEPTH or id(value) in self._seen or isinstance(value, SCALARS) or value is _MISSING:
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType):
            self._walk(value.__self__, depth)
            self._walk(value.__func__, depth)
        elif isinstance(value, FunctionType):
            self._of_function(value, depth)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self._walk(part, depth)
        elif isinstance(value, Tensor):
            self._found.append((lambda: version_of(value), version_of(value)))
        elif isinstance(value, numpy.ndarray):
            if value.size <= MOST_ITEMS:
                self._found.append((value.tobytes, value.tobytes()))
        elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            self._of_container(value, depth)
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__):
                self._of_names(vars(value), depth)
        else:
            self._of_object(value, depth)

    def _of_function(self, function: FunctionType, depth: int) -> None:
        if _is_library(function.__module__):
            return
        names = set(names_in(function.__code__))
        self._names |= names - self._without
        for cell in function.__closure__ or ():
            self._note(partial(_content, cell), depth)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._walk(default, depth + 1)
        self._of_names(vars(function), depth)
        for name in names & function.__globals__.keys():
            self._note(partial(function.__globals__.get, name, _MISSING), depth)

    def _of_container(self, value: Any, depth: int) -> None:
        def items() -> tuple[Any, ...]:
            return (len(value), *islice(value.items() if isinstance(value, dict) else value, MOST_ITEMS))

        before = items()
        self._found.append((lambda: all(map(_same, items(), before)), True))
        for item in before[1:]:
            self._walk(item[1] if isinstance(value, dict) else item, depth + 1)

    def _of_object(self, value: Any, depth: int) -> None:
        self._of_names(getattr(value, "__dict__", {}), depth)
        for kind in value.__mro__ if isinstance(value, type) else type(value).__mro__:
            if not _is_library(kind.__module__):
                self._of_class(kind, depth)

    def _of_class(self, kind: type, depth: int) -> None:
        for name in (self._names | {"__call__"}) & vars(kind).keys():
            found = vars(kind)[name]
            code = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if isinstance(code, FunctionType):
                self._walk(code, depth + 1)
            else:
                self._note(partial(vars(kind).get, name, _MISSING), depth)

    def _of_names(self, there: Any, depth: int) -> None:
        """Note the attributes of an object that code reads by name; also those that it lacks and may get."""
        for name in tuple(self._names):  # what is found may name more, and is walked once more then
            self._note(partial(there.get, name, _MISSING), depth)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return _MISSING


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and isinstance(before, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    if isinstance(now, SCALARS):
        return type(now) is type(before) and (now == before or now != now)
    return now is before


def _is_library(module: str | None) -> bool:
    first = (module or "").partition(".")[0]
    return first in LIBRARIES or (first in sys.stdlib_module_names and first != "__main__")
