"""Hooks that users put on gradients inside a model after it was cut into pipeline stages.

They see microbatches, and gradients before the loss takes the factor of its loop. What was there before was judged with the
model (`pipeline_parallel/plan/backward_kind.py`); what comes later is tested on the first gradient that it changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_parallel.compat.private_torch import module_hooks
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.users_code import OURS, module_of, name_of


OTHER: Final = 0.25  # what rows beside those of a microbatch are to them
LARGE: Final = 2.0**10
TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
EARLIER: Final = "before trainer.train() or accelerator.prepare(), so that it can be judged"

Gradients = tuple[Tensor | None, ...]


class BackwardCode:
    """Finds and tests them.

    Args:
        modules: Of this rank's stages.
        pp_size: Stages.
    """

    def __init__(self, modules: Sequence[nn.Module], pp_size: int) -> None:
        self._pp_size = pp_size
        tables = [module_hooks(module) for module in modules]
        self._forward = [table for *forward, _, _ in tables for table in forward]
        self._backward = [table for _, _, *backward in tables for table in backward]
        self._known = [set(table) for table in self._backward]
        self._counts = self._counted()
        self._limits = ""  # a hook that goes by the size of gradients

    def _counted(self) -> tuple[int, int]:
        return sum(map(len, self._forward)), sum(map(len, self._backward))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the model is called in training, with all hooks that it has now."""
        before, self._counts = self._counts, self._counted()
        if self._counts[1] > before[1]:
            self._wrap()
        if self._counts[0] > before[0]:
            with _Watch(self.tests):
                yield
        else:
            yield

    def _wrap(self) -> None:
        for table, known in zip(self._backward, self._known, strict=True):
            for key in [key for key in table if key not in known]:
                known.add(key)
                if not module_of(table[key]).startswith(OURS):
                    table[key] = self.tests(table[key])

    def tests(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """`hook`, which is tested when it first changes gradients.

        Args:
            hook: Takes gradients f[B/m ...] or tuples of them, after modules; returns some of these, or None.
        """
        is_tested = False

        @functools.wraps(hook)
        def tested(*given: Any) -> Any:
            nonlocal is_tested
            result = hook(*given)
            if result is not None and not is_tested:
                is_tested = True
                self._test(hook, given, result)
            return result

        return tested

    def _test(self, hook: Callable[..., Any], given: tuple[Any, ...], result: Any) -> None:
        """Call a hook with more rows, and with larger gradients, where a limit is reached that none has reached yet.

        Raises:
            UnsupportedError: It gives rows other gradients beside other rows.
        """
        rows = next((len(one) for one in _tensors(given) if one.ndim), 0)

        def with_others(gradient: Tensor) -> Tensor:
            has_rows = gradient.ndim and len(gradient) == rows
            return torch.cat([gradient, OTHER * gradient]) if has_rows else gradient

        larger = _mapped(lambda gradient: gradient * LARGE, given)
        results = {1.0: (given, result), LARGE: (larger, hook(*larger))}
        if not all(_agree(hook(*_mapped(with_others, each)), alone, 1.0) for each, alone in results.values()):
            raise UnsupportedError(
                f"hook {name_of(hook)} on gradients inside the model, with pp_size={self._pp_size}: it gives a row of a batch another "
                f"gradient than the row alone, and sees microbatches. Register it, or the forward hook that does, {EARLIER}, or set "
                "pp_size to 1."
            )
        if not _agree(results[LARGE][1], result, LARGE):
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


class _Watch(TorchFunctionMode):
    """Inside, hooks that are put on gradients of tensors are tested, once for each piece of code."""

    def __init__(self, tests: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__()
        self._tests, self._known = tests, set[Any]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook and len(args) > 1 and not module_of(args[1]).startswith(OURS):
            code = getattr(args[1], "__code__", type(args[1]))
            if code not in self._known:
                self._known.add(code)
                args = (args[0], self._tests(args[1]))
        return func(*args, **(kwargs or {}))


def _mapped(change: Callable[[Tensor], Tensor], given: Any) -> Any:
    if isinstance(given, tuple):
        return tuple(_mapped(change, one) for one in given)
    return change(given) if isinstance(given, Tensor) else given


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, (tuple, list)):
        return [tensor for one in given for tensor in _tensors(one)]
    return [given] if isinstance(given, Tensor) else []


def _agree(value: Any, reference: Any, scale: float) -> bool:
    """Whether the first rows of `value` are `reference` x `scale`."""
    pairs = list(zip(_tensors(value), _tensors(reference), strict=False))
    if len(pairs) != len(_tensors(reference)):
        return False
    for one, other in pairs:
        here = one[: len(other)] if other.ndim else one
        wanted = other.double() * scale
        error = (here.double() - wanted).norm() if here.shape == wanted.shape else torch.inf
        if not error <= TOLERANCE.get(other.dtype, 1e-4) * wanted.norm():
            return False
    return True
