"""Hooks that users put inside a model after it was cut into pipeline stages.

They see microbatches, and gradients before the loss takes the factor of its loop. What was there before was judged with the
model (`pipeline_parallel/plan/`); what comes later is tested on the first tensors that it changes.

Extents: B/m rows of a microbatch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.utils.generic import ModelOutput

from hf_parallel.compat.private_torch import module_hooks
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.users_code import OURS, module_of, name_of
from hf_parallel.model.tensors import ROWS_AGREE, map_tensors, tensors_in


OTHER: Final = 0.25  # what rows beside those of a microbatch are to them
LARGE: Final = 2.0**10
EARLIER: Final = "before trainer.train() or accelerator.prepare(), so that it can be judged"

Hook: TypeAlias = Callable[..., Any]
Given: TypeAlias = tuple[Any, ...]


class LateHooks:
    """Finds and tests them.

    Args:
        modules: Of this rank's stages.
        pp_size: Stages.
    """

    def __init__(self, modules: Sequence[nn.Module], pp_size: int) -> None:
        self._pp_size = pp_size
        tests = (self._test_forward, self._test_forward, self._test_backward, self._test_backward)
        tables = [pair for module in modules for pair in zip(module_hooks(module), tests, strict=True)]
        self._tables = [(table, set(table), test) for table, test in tables]  # what was there before needs no test
        self._count = self._counted()
        self._limits = ""  # a hook that goes by the size of gradients

    def _counted(self) -> int:
        return sum(map(len, map(itemgetter(0), self._tables)))  # before every forward: no loop in Python

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the model is called in training, with all hooks that it has now."""
        before, self._count = self._count, self._counted()
        if self._count > before and self._wrap():
            with _Watch(self._test_backward):
                yield
        else:
            yield

    def _wrap(self) -> bool:
        """Let new hooks be tested; whether there are any of users."""
        found = False
        for table, known, test in self._tables:
            for key in [key for key in table if key not in known]:
                known.add(key)
                if not module_of(table[key]).startswith(OURS):
                    table[key], found = _tested(table[key], test), True
        return found

    def _test_forward(self, hook: Hook, given: Given, result: Any) -> None:
        """Call a hook on what a module is given or returns with more rows.

        Raises:
            UnsupportedError: It gives rows something else beside other rows.
        """
        if not _agree(_call(hook, _with_others(given, _rows(result))), result, 1.0):
            raise UnsupportedError(
                f"hook {name_of(hook)} on a module, with pp_size={self._pp_size}: it gives a row of a batch something else than the row "
                f"alone, and sees microbatches. Register it {EARLIER}, or set pp_size to 1."
            )

    def _test_backward(self, hook: Hook, given: Given, result: Any) -> None:
        """Call a hook on gradients with more rows, and with larger gradients, where a limit is met that none has met yet.

        Raises:
            UnsupportedError: It gives rows other gradients beside other rows.
        """
        larger = map_tensors(lambda _, gradient: gradient * LARGE, given)
        of_larger, rows = _call(hook, larger), _rows(given)
        both = ((given, result), (larger, of_larger))
        if not all(_agree(_call(hook, _with_others(each, rows)), alone, 1.0) for each, alone in both):
            raise UnsupportedError(
                f"hook {name_of(hook)} on gradients inside the model, with pp_size={self._pp_size}: it gives a row of a batch another "
                f"gradient than the row alone, and sees microbatches. Register it, or the forward hook that does, {EARLIER}, or set "
                "pp_size to 1."
            )
        if not _agree(of_larger, result, LARGE):
            self._limits = name_of(hook)

    def check_factor(self, factor: Tensor) -> None:
        """The loss is backpropagated; its gradients were made before, and take `factor` (0-d) now.

        Raises:
            UnsupportedError: A hook saw them at another scale, and goes by it.
        """
        if self._limits and abs(float(factor) - 1.0) > 1e-6:
            raise UnsupportedError(
                f"the loss was multiplied with {float(factor):.6g} after the model computed it, with pp_size={self._pp_size}: hook "
                f"{self._limits} on gradients inside the model saw them before that, and what it returns is not in proportion to "
                f"them. Register it, or the forward hook that does, {EARLIER}, or compute the loss from outputs.logits."
            )


def _tested(hook: Hook, test: Callable[[Hook, Given, Any], None]) -> Hook:
    """`hook`, which is tested when it first returns something: code that draws numbers or counts its calls cannot be."""
    is_known = False

    @functools.wraps(hook)
    def tested(*given: Any) -> Any:
        nonlocal is_known
        result = hook(*given)
        if result is not None and not is_known:
            is_known = True
            with torch.no_grad(), contextlib.suppress(_CannotTellError):
                if _agree(_call(hook, given), result, 1.0):
                    test(hook, given, result)
        return result

    return tested


class _CannotTellError(Exception):
    """A hook does not run with other tensors than its own."""


def _call(hook: Hook, given: Given) -> Any:
    """What a hook returns for copies of tensors: it may write to what it is given."""
    if any(isinstance(one, ModelOutput) for one in given):
        raise _CannotTellError
    try:
        return hook(*map_tensors(lambda _, tensor: tensor.clone(), given))
    except Exception as error:  # code of the user's, on tensors that they did not make
        raise _CannotTellError from error


class _Watch(TorchFunctionMode):
    """Inside, hooks that are put on gradients of tensors are tested, once for each piece of code."""

    def __init__(self, test: Callable[[Hook, Given, Any], None]) -> None:
        super().__init__()
        self._test, self._known = test, set[Any]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and len(args) > 1 and not module_of(args[1]).startswith(OURS):
            code = getattr(args[1], "__code__", type(args[1]))
            if code not in self._known:
                self._known.add(code)
                args = (args[0], _tested(args[1], self._test))
        return func(*args, **(kwargs or {}))


def _rows(given: Any) -> int:
    """Rows of the first tensor of some."""
    return next((len(one) for one in _tensors(given) if one.ndim), 0)


def _with_others(given: Given, rows: int) -> Given:
    """`given`, whose tensors of so many rows have as many others behind them."""

    def more(tensor: Tensor) -> Tensor:
        if not tensor.ndim or len(tensor) != rows:
            return tensor
        return torch.cat([tensor, OTHER * tensor if tensor.is_floating_point() else tensor])

    changed: Given = map_tensors(lambda _, tensor: more(tensor), given)
    return changed


def _tensors(given: Any) -> list[Tensor]:
    return [one for one in tensors_in(given) if one.is_floating_point()]


def _agree(value: Any, reference: Any, scale: float) -> bool:
    """Whether the first rows of `value` are `reference` x `scale`."""
    pairs = list(zip(_tensors(value), _tensors(reference), strict=False))
    if len(pairs) != len(_tensors(reference)):
        return False
    for one, other in pairs:
        here = one[: len(other)] if other.ndim else one
        wanted = other.double() * scale
        error = (here.double() - wanted).norm() if here.shape == wanted.shape else torch.inf
        if not error <= ROWS_AGREE.get(other.dtype, 1e-4) * wanted.norm():
            return False
    return True
