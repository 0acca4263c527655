"""Hooks and forwards that users put inside a model after it was cut into pipeline stages.

They see microbatches, and gradients before the loss takes the factor of its loop. What was there before was judged with the
model (`pipeline_parallel/plan/`); what comes later is tested on the first tensors that it changes.

Extents: B/m rows of a microbatch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_parallel.compat.private_torch import module_hooks
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.late_forwards import LateForward, LateForwards
from hf_parallel.guards.calls.row_tests import (
    LARGE,
    CannotTellError,
    Code,
    Given,
    agree,
    call,
    ignores_others,
    rows_of,
)
from hf_parallel.guards.users_code import OURS, module_of, name_of
from hf_parallel.model.tensors import map_tensors


EARLIER: Final = "before trainer.train() or accelerator.prepare(), so that it can be judged"

Hook: TypeAlias = Code


class LateHooks:
    """Finds and tests hooks that were registered after the model was cut.

    Args:
        modules: Modules of this rank's stages.
        around: Modules among them that have the blocks in them, also those of other stages: they cannot be called by
            themselves.
        pp_size: Stages.
    """

    def __init__(self, modules: Sequence[nn.Module], around: Collection[nn.Module], pp_size: int) -> None:
        self._pp_size = pp_size
        tests = (self._test_forward, self._test_forward, self._test_backward, self._test_backward)
        tables = [pair for module in modules for pair in zip(module_hooks(module), tests, strict=True)]
        self._tables = [(table, set(table), test) for table, test in tables]  # what was there before needs no test
        self._count = self._counted()
        self._forwards = LateForwards([one for one in modules if one not in around], self._test_replaced)
        self._limits = ""  # what goes by the size of gradients

    def _counted(self) -> int:
        return sum(map(len, map(itemgetter(0), self._tables)))  # before every forward: no loop in Python

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the model is called in training, with all hooks that it has now."""
        self._forwards.watch()
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
        if not ignores_others(hook, given, result, rows_of(result)):
            self._refuse_mixing(f"hook {name_of(hook)} on a module", "something else")

    def _test_backward(self, hook: Hook, given: Given, result: Any) -> None:
        """Call a hook on gradients with more rows, and with larger gradients, where a limit is met that none has met yet.

        Raises:
            UnsupportedError: It gives rows other gradients beside other rows.
        """
        larger = map_tensors(lambda _, gradient: gradient * LARGE, given)
        self._judge(f"hook {name_of(hook)} on gradients inside the model", hook, (given, larger), result)

    def _test_replaced(self, name: str, late: LateForward) -> None:
        """Call a forward with more rows, and its backward pass as `_test_backward`.

        Raises:
            UnsupportedError: It gives rows something else, or other gradients, beside other rows.
        """
        what = f"forward {name} of a module"
        if not ignores_others(late.run, late.given, late.result, rows_of(late.given)):
            self._refuse_mixing(what, "something else")
        given = (*late.given, late.cotangents())
        alone = call(late.gradients, given)
        for factor in (LARGE, 1 / LARGE):
            other = (*late.given, [gradient * factor for gradient in given[-1]])
            self._judge(what, late.gradients, (given, other), alone, factor)

    def _judge(self, what: str, code: Code, sizes: tuple[Given, Given], result: Any, factor: float = LARGE) -> None:
        given, other = sizes
        of_other, rows = call(code, other), rows_of(given)
        if not all(ignores_others(code, *pair, rows) for pair in ((given, result), (other, of_other))):
            self._refuse_mixing(what, "another gradient")
        if not agree(of_other, result, factor):
            self._limits = what

    def _refuse_mixing(self, what: str, gives: str) -> NoReturn:
        raise UnsupportedError(
            f"{what}, with pp_size={self._pp_size}: it gives a row of a batch {gives} than the row alone, and sees microbatches. "
            f"Put it, or what registers it, there {EARLIER}, or set pp_size to 1."
        )

    def check_factor(self, factor: Tensor) -> None:
        """Refuse `factor` (0-d) of a loss whose gradients were made before, if a hook has seen them without it.

        Raises:
            UnsupportedError: A hook saw them at another scale, and goes by it.
        """
        if self._limits and abs(float(factor) - 1.0) > 1e-6:
            raise UnsupportedError(
                f"the loss was multiplied with {float(factor):.6g} after the model computed it, with pp_size={self._pp_size}: "
                f"{self._limits} saw them before that, and what it returns is not in proportion to "
                f"them. Put it, or what registers it, there {EARLIER}, or compute the loss from outputs.logits."
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
            with torch.no_grad(), contextlib.suppress(CannotTellError):
                if agree(call(hook, given), result, 1.0):
                    test(hook, given, result)
        return result

    return tested


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
