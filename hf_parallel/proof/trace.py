"""Reduces each tensor that passes through a module in a step to a few numbers a row, to find where two runs part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import in_backward_pass


NUMBERS = 8  # for each row
TRACE = "trace.pt"


@dataclass
class Passed:
    """A tensor that passed through a module in one call.

    Args:
        module: Name of the module.
        call: Number of the module's forward, from 0.
        kind: forward (its output), output_gradient or input_gradient.
        order: Position in the order of all that passed in this process.
        shape: Shape of one row, or of the part of it.
        numbers: f64[rows, NUMBERS], projections of each row.
        part: Index of the part of the rows' tokens, where a layout cuts rows; 0 for what is not cut.
        is_bare: Whether the module has no parameters, and so runs on every stage, on some on what stands in for its input.
    """

    module: str
    call: int
    kind: str
    order: int
    shape: list[int]
    numbers: Tensor
    part: int = 0
    is_bare: bool = False


@dataclass
class Tracer:
    """Watches every module of a model from before it is parallelized.

    Args:
        model: The model.
        parts: Into which tensors f[B S ...] are cut along their tokens: what ranks of a layout that share rows have.

    Attributes:
        is_on: Whether calls are noted: not those that plan and check a layout.
    """

    model: nn.Module
    parts: int = 1
    is_on: bool = False
    passed: list[Passed] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)
    _trained: set[nn.Module] = field(default_factory=set)
    _bare: set[str] = field(default_factory=set)
    _projections: dict[int, Tensor] = field(default_factory=dict)
    _notes: int = 0

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            if has_parameters(module):
                self._trained.add(module)
            else:
                self._bare.add(name)
            if name:
                module.register_forward_pre_hook(self._before(name), with_kwargs=True)
                module.register_forward_hook(self._after(name))

    def write(self, folder: Path, place: dict[str, Any]) -> None:
        """Write what was seen."""
        torch.save({"place": place, "passed": [vars(each) for each in self.passed]}, folder / TRACE)

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._counts(module):
                return
            call = self._calls[name] = self._calls.get(name, -1) + 1
            given = next(_floats((args, kwargs.get("hidden_states"))), None)
            if given is not None and given.requires_grad:
                given.register_hook(lambda gradient: self._note(name, call, "input_gradient", gradient))

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            made = next(_floats(output), None)
            if made is None or not self._counts(module) or name not in self._calls:
                return
            call = self._calls[name]
            self._note(name, call, "forward", made)
            if made.requires_grad:
                made.register_hook(lambda gradient: self._note(name, call, "output_gradient", gradient))

        return hook

    def _counts(self, module: nn.Module) -> bool:
        """Whether a call is a training forward, no recomputation of one, and of a module that this rank has."""
        if module in self._trained and not has_parameters(module):  # of another stage
            return False
        return self.is_on and module.training and torch.is_grad_enabled() and not in_backward_pass()

    def _note(self, name: str, call: int, kind: str, tensor: Tensor | None) -> None:
        if tensor is None:  # autograd calls hooks of tensors that got no gradient, too
            return
        if tensor.ndim < 2:
            return
        size = -(-tensor.shape[1] // self.parts) if tensor.ndim > 2 else tensor.shape[1]
        for index, part in enumerate(tensor.detach().split(max(1, size), dim=1)):
            shape, numbers = list(part.shape[1:]), self._projected(part)
            self.passed.append(Passed(name, call, kind, self._notes, shape, numbers, index, name in self._bare))
        self._notes += 1

    def _projected(self, tensor: Tensor) -> Tensor:
        rows = tensor.to("cpu", torch.float64).reshape(tensor.shape[0], -1)
        width = rows.shape[1]
        if width not in self._projections:
            generator = torch.Generator().manual_seed(width)
            self._projections[width] = torch.randn(width, NUMBERS, generator=generator, dtype=torch.float64)
        projected: Tensor = rows @ self._projections[width] / width**0.5
        return projected


def has_parameters(module: nn.Module) -> bool:
    """Whether a module, or one inside of it, has parameters."""
    return next(module.parameters(), None) is not None


def _floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors of a value, in order."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        yield from _floats(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _floats(each)
