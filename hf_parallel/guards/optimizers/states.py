"""The state of an optimizer whose parameters are flat parts: nobody finds the state of a model's parameter there.

`optimizer.state[p]` would make an empty entry, and `optimizer.state.pop(p, None)` (a reset of moments) would do nothing, both
without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from copy import deepcopy
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from hf_parallel.compat.torch_tools import draws, pytree
from hf_parallel.data_parallel.loss_numbers import NUMBERS
from hf_parallel.errors import UnsupportedError


# Functions whose result for a part says nothing about the whole; `torch.linalg.vector_norm` has its name with a prefix.
ACROSS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "linalg_", "_foreach_")
    for name in (
        *("all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "argsort", "bincount", "cosine_similarity"),
        *("count_nonzero", "cumsum", "dist", "dot", "histc", "kthvalue", "logsumexp", "max", "mean", "median", "min"),
        *(
            "matrix_norm",
            "nanmean",
            "nanmedian",
            "nanquantile",
            "nansum",
            "nonzero",
            "norm",
            "prod",
            "quantile",
            "renorm",
        ),
        *("softmax", "sort", "std", "std_mean", "sum", "topk", "unique", "var", "var_mean", "vdot", "vector_norm"),
        *("__array__", "numpy", "tolist"),
    )
)


# Arithmetic in place; other functions in place have a name that ends with `_`.
IN_PLACE = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"})


class StateOfPart(Tensor):
    """The state of a part of a tensor as user code sees it: elements may be read and changed, but not compared."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ACROSS:
            raise UnsupportedError(
                f"{func.__name__}() of an optimizer's state with tp_size or zero.stage above 0: this rank has a part of it, whose norms, "
                "means and thresholds are not those of a parameter. Change the elements of optimizer.state.values() alike (moments to "
                "zero, times a factor), or set tp_size to 1 and zero.stage to 0."
            )
        if draws(func):
            refuse_others(name)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]  # this object is a view of the state
            return args[0].copy_(args[1])
        written = _written(name, args, kwargs or {})
        given = [one for one in (*args, *(kwargs or {}).values()) if one is not written]
        if written is not None:
            refuse_of_its_shape(name, pytree.tree_leaves(written), pytree.tree_leaves(given))
            plain = (one.as_subclass(Tensor) if isinstance(one, StateOfPart) else one for one in given)
            NUMBERS.note_change(name, plain)  # of this rank's part
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        leaves = pytree.tree_leaves(given)
        others = [one for one in leaves if isinstance(one, Tensor) and not isinstance(one, StateOfPart)]
        if others and written is None and are_others((one for one in leaves if isinstance(one, StateOfPart)), others):
            return pytree.tree_map_only(StateOfPart, lambda one: one.as_subclass(MixedState), made)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.as_subclass(Tensor).detach().clone())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class MixedState(StateOfPart):
    """Numbers made of the state of a part and of others of its shape; they may be read, and not be put into a state."""


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Argument that a function changes in place, None of a function that makes a new tensor."""
    if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return args[0]
    return kwargs.get("out")


def refuse_of_its_shape(name: str, states: Iterable[Any], given: Iterable[Any]) -> None:
    """Refuse to change parts of states by tensors that have their shapes and are made of something else, unless all elements are alike.

    A rank that holds another part makes another one: a mask of random numbers is not the part of a mask for the whole.

    Raises:
        UnsupportedError: Such a tensor is among those that are given.
    """
    if are_others(states, given):
        refuse_others(name)


def are_others(states: Iterable[Any], given: Iterable[Any]) -> bool:
    """Whether there is a tensor in the shape of states that is made of something else, and whose elements are not all alike."""
    shapes = {one.shape for one in states if isinstance(one, Tensor) and one.ndim > 0}
    for one in given:
        if isinstance(one, Tensor) and type(one) is not StateOfPart and one.shape in shapes and one.numel() > 1:
            plain = one.as_subclass(Tensor) if isinstance(one, StateOfPart) else one
            if bool((plain != plain.flatten()[0]).any()):
                return True
    return False


def refuse_others(name: str) -> NoReturn:
    """Refuse what gives a part of a state other elements than the whole would have there.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"{name if name.endswith('...') else f'{name}()'} of an optimizer's state by random numbers, or by a tensor of its shape that was not made of it, with tp_size or "
        "zero.stage above 0: this rank has a part of it, and in one process the part would be given other numbers. Change its elements "
        "alike (to zero, times a factor) or by what is made of them (state > 0), or set tp_size to 1 and zero.stage to 0."
    )


class Shown(MutableMapping[Any, Any]):
    """A dict whose values user code sees in another form; what it changes is changed there.

    Args:
        real: The dict.
        form: Makes what is shown of a key and its value.
        taken: Makes what is kept of a key, the value before and a new one.
    """

    def __init__(
        self,
        real: MutableMapping[Any, Any],
        form: Callable[[Any, Any], Any],
        taken: Callable[[Any, Any, Any], Any] = lambda key, before, value: value,
    ) -> None:
        self.real, self.form, self.taken = real, form, taken

    def __getitem__(self, key: Any) -> Any:
        return self.form(key, self.real[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.real[key] = self.taken(key, self.real.get(key), value)

    def __delitem__(self, key: Any) -> None:
        del self.real[key]

    def __contains__(self, key: object) -> bool:
        return key in self.real

    def __iter__(self) -> Iterator[Any]:
        return iter(self.real)

    def __len__(self) -> int:
        return len(self.real)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self.real else default

    def pop(self, key: Any, *default: Any) -> Any:
        return self.real.pop(key, *default)

    def clear(self) -> None:
        self.real.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(dict(self.items()), memo)

    def __repr__(self) -> str:
        return repr(dict(self.real))


def shown_states(
    states: MutableMapping[Any, Any], is_part: Callable[[Any], bool], is_known: Callable[[Tensor], bool]
) -> MutableMapping[Any, Any]:
    """The states of an optimizer as user code sees them.

    Args:
        states: By parameter.
        is_part: Whether this rank has a part of a parameter only.
        is_known: Whether a tensor was made of this rank's part of a parameter element by element.
    """

    def of_key(key: Any, value: Any) -> Any:
        wrapped = isinstance(value, Tensor) and type(value) is Tensor and value.ndim > 0
        return value.as_subclass(StateOfPart) if wrapped else value

    def of_parameter(parameter: Any, state: Any) -> Any:
        return Shown(state, of_key, take) if isinstance(state, dict) and is_part(parameter) else state

    def taken(parameter: Any, before: Any, state: Any) -> Any:
        return take(parameter, before, state) if is_part(parameter) else state

    def take(key: Any, before: Any, value: Any) -> Any:
        if isinstance(value, Shown):
            value = value.real
        if isinstance(value, dict):
            old = before if isinstance(before, dict) else {}
            return {name: take(name, old.get(name), one) for name, one in value.items()}
        if isinstance(value, Tensor) and isinstance(before, Tensor) and not is_known(value):
            refuse_of_its_shape(f"{key} = ...", [before], [value])
        return value.as_subclass(Tensor) if isinstance(value, StateOfPart) else value

    return Shown(states, of_parameter, taken)


class PartStates(defaultdict[Any, Any]):
    """States of parts, which refuses to be asked for those of parameters.

    Args:
        states: By part.
        names: Id of a model's parameter -> its name.
    """

    def __init__(self, states: dict[Any, Any], names: dict[int, str]) -> None:
        super().__init__(dict, states)
        self.names = names

    def _check(self, key: Any) -> None:
        if isinstance(key, Tensor) and id(key) in self.names:
            raise UnsupportedError(
                f"optimizer.state of parameter {self.names[id(key)]} with zero.stage above 0: the optimizer has flat parts of all "
                "parameters, and one state a part. Change the states of optimizer.state.values() alike (moments to zero), or set "
                "zero.stage to 0."
            )

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def guard_states(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> None:
    """Let an optimizer of parts refuse to be asked for the states of parameters; again after states were loaded."""
    if type(optimizer.state) is not PartStates:
        optimizer.state = PartStates(optimizer.state, {id(parameter): name for name, parameter in named})
