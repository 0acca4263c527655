"""Forwards that users put on modules, or on their classes, after the model was cut into pipeline stages: to be tested as late hooks are.

A test runs a copy of the module, which has no hooks: hooks may count their calls, and those of transformers collect what
modules return.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import module_hooks
from hf_parallel.guards.calls.forwards import Forwards
from hf_parallel.guards.calls.row_tests import CannotTellError, Code, Given, agree, call, floats_in, rows_of
from hf_parallel.guards.users_code import OURS, module_of, name_of
from hf_parallel.model.copies import deep_copy, rebind_forwards
from hf_parallel.model.dropout import NoDropout
from hf_parallel.model.tensors import map_tensors


class LateForwards:
    """Finds and tests forwards that were replaced after the model was cut.

    Args:
        modules: Modules of this rank's stages.
        test: Given the name of a forward, what runs it or its backward pass, and what that is given and returns.
    """

    def __init__(self, modules: Sequence[nn.Module], test: Callable[[str, LateForward], None]) -> None:
        self._modules, self._test = {str(place): module for place, module in enumerate(modules)}, test
        self._forwards = Forwards(self._modules)

    def watch(self) -> None:
        """Look, before a training forward pass, for new forwards of modules; each is tested when it is called."""
        for place in self._forwards.replaced():
            module = self._modules[place]
            if not module_of(module.forward).startswith(OURS):
                self._test_once(module)

    def _test_once(self, module: nn.Module) -> None:
        forward, attributes = module.forward, vars(module)
        own = {key: value for key, value in attributes.items() if key == "forward"}

        def tested(*args: Any, **kwargs: Any) -> Any:
            if attributes.get("forward") is tested:
                del attributes["forward"]
                attributes.update(own)
            result = forward(*args, **kwargs)
            with contextlib.suppress(CannotTellError), torch.no_grad(), _own_numbers(result), NoDropout():
                self._test(name_of(forward), LateForward(module, args, kwargs))
            return result

        attributes["forward"] = tested


class LateForward:
    """A call of a replaced forward, to be repeated with other tensors, without dropout.

    Args:
        module: Module whose forward it is.
        args: Arguments that the forward was given.
        kwargs: Keyword arguments that the forward was given.

    Attributes:
        run: The forward of a copy, of `given`.
        given: Arguments.
        result: Its result.
        gradients: Function of `given` and gradients of what is returned: those of the arguments that have rows.

    Raises:
        CannotTellError: The module cannot be copied, or returns something else each time.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        copied = _without_hooks(module)
        self.run: Code = lambda args, kwargs: copied.forward(*args, **kwargs)
        self.given: Given = (args, dict(kwargs))
        self.result = call(self.run, self.given)
        self.gradients: Code = functools.partial(_gradients, self.run)
        if not agree(call(self.run, self.given), self.result, 1.0):
            raise CannotTellError

    def cotangents(self) -> list[Tensor]:
        """Random gradients of size 1 for its results."""
        generator = torch.Generator().manual_seed(0)
        drawn = ((one, torch.randn(one.shape, generator=generator)) for one in floats_in(self.result))
        return [numbers.to(one.device, one.dtype) for one, numbers in drawn]


def _own_numbers(result: Any) -> AbstractContextManager[None]:
    """Inside, random numbers are drawn that change none of those outside."""
    devices = {tensor.device for tensor in floats_in(result) if tensor.device.type == "cuda"}
    return torch.random.fork_rng(devices=list(devices))


def _without_hooks(module: nn.Module) -> nn.Module:
    hooks = (table for one in module.modules() for table in module_hooks(one))
    try:
        copied = deep_copy(module, {id(table): type(table)() for table in hooks})
        rebind_forwards(copied, module)
    except Exception as error:  # of whatever users have hung on it
        raise CannotTellError from error
    return copied


def _gradients(run: Code, args: Any, kwargs: Any, cotangents: Sequence[Tensor]) -> list[Tensor]:
    rows, leaves = rows_of((args, kwargs)), list[Tensor]()

    def leaf(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() and tensor.ndim and len(tensor) == rows):
            return tensor
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    with torch.enable_grad():
        args, kwargs = map_tensors(lambda _, tensor: leaf(tensor), (args, kwargs))
        outputs = [output for output in floats_in(run(args, kwargs)) if output.requires_grad]
        found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]
