"""Timing the parts of a whole model on its device: every block, what comes before them, and the tail with the loss.

Hooks time each block in a forward and a backward of the whole model, so nothing has to be called out of its place: kernels,
masks, hooks and a user's patches are those of training. In the backward pass a block is timed from the gradient of its output
to the gradient of its input.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_parallel.model.stack import blocks_of
from hf_parallel.model.structure import leaves
from hf_parallel.model.unchanged import in_mode, unchanged
from hf_parallel.pipeline_parallel.plan.costs import StageCosts, backward_ratios
from hf_parallel.pipeline_parallel.plan.verify_stages import loss_of
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


def measure_costs(
    model: nn.Module, plan: PipelinePlan, sample: Mapping[str, Any], *, repetitions: int = 5
) -> StageCosts:
    """Median milliseconds of each part on one batch, forward and backward, in training mode.

    The model keeps its weights, gradients, buffers, mode and the random state; a gradient is dropped as soon as it is
    made. Needed memory: the activations of the batch, and the gradient of the largest parameter.

    Args:
        model: the whole model, on its device.
        plan: from `discover_stages`.
        sample: keyword arguments with labels, one microbatch, on the model's device.
        repetitions: timed runs, >= 1, after one that warms up.

    Raises:
        PlanError: The model returns no loss.
    """
    runs = []
    with unchanged(model), in_mode(model, trains=True), _without_gradients(model):
        for _ in range(repetitions + 1):
            with _Clock(model, plan) as clock:
                runs.append(clock.run(model, sample))
    forward, backward = ([_median(part) for part in zip(*times, strict=True)] for times in zip(*runs[1:], strict=True))
    found = _costs(forward)
    trained = found.of_trained(backward_ratios(model, plan))
    weights = [
        min(own, most) for own, most in zip([trained.first, *trained.blocks, trained.last], backward, strict=True)
    ]
    return replace(found, backward=_costs(backward), weights=_costs(weights))


def _median(seconds: Sequence[float]) -> float:
    return 1e3 * max(0.0, statistics.median(seconds))


def _costs(parts: Sequence[float]) -> StageCosts:
    return StageCosts(tuple(parts[1:-1]), parts[0], parts[-1], unit="ms")


class _Clock:
    """Times of one forward and backward: when each block began and ended, and when the gradients of its output were there.

    Results are lists over the prologue, every block, and the tail.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan) -> None:
        self._device = next(model.parameters()).device
        self._count = plan.num_blocks
        self._forward: dict[int, tuple[float, float]] = {}  # block -> entered, left
        self._entered = 0.0
        self._gradient_at: dict[int, float] = {}  # block -> when the gradient of its output was complete
        self._input_gradient = 0.0  # when that of the first block's input was
        self._in_forward = True
        self._handles: list[RemovableHandle] = []
        for j, block in enumerate(blocks_of(model, plan.stack)):
            self._handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._leave(j)))

    def __enter__(self) -> _Clock:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def now(self) -> float:
        """Seconds, once everything that was started has finished."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def run(self, model: nn.Module, sample: Mapping[str, Any]) -> tuple[list[float], list[float]]:
        """Seconds of the forward and of the backward of each part."""
        with torch.enable_grad():
            start = self.now()
            loss = loss_of(model(**sample))
            made = self.now()
            self._in_forward = False
            begun = self.now()
            loss.backward()
            ended = self.now()
        forward = self._forward_parts(start, made)
        return forward, self._backward_parts(begun, ended, forward)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._in_forward:  # run again by activation checkpointing
            return
        if not self._forward:

            def arrived(grad: Tensor) -> None:
                self._input_gradient = self.now()

            _on_gradients((args, kwargs), arrived)
        self._entered = self.now()

    def _leave(self, j: int) -> Callable[..., None]:
        def arrived(grad: Tensor) -> None:
            self._gradient_at[j] = self.now()

        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if self._in_forward:
                self._forward[j] = (self._entered, self.now())
                _on_gradients(out, arrived)

        return hook

    def _forward_parts(self, start: float, end: float) -> list[float]:
        """A part begins where the one before it ended, so code between blocks counts for the block after it."""
        parts = [0.0] * (self._count + 2)
        at = start
        for j, (entered, left) in sorted(self._forward.items()):
            if at == start:
                parts[0], at = entered - start, entered
            parts[j + 1], at = left - at, left
        parts[-1] = end - at
        return parts

    def _backward_parts(self, start: float, end: float, forward: Sequence[float]) -> list[float]:
        ran = sorted(self._forward)
        first = next((at for at, j in enumerate(ran) if j in self._gradient_at), len(ran))
        if any(j not in self._gradient_at for j in ran[first:]) or first == len(ran):  # the blocks hide their graph
            scale = (end - start) / sum(forward)
            return [scale * part for part in forward]
        # Nothing is trained in the blocks before the first gradient, nor before them.
        stamps = [self._input_gradient or end, *(self._gradient_at.get(j, end) for j in ran)]
        parts = [0.0] * (self._count + 2)
        parts[0], parts[-1] = end - stamps[0], stamps[-1] - start
        for at, j in enumerate(ran):
            parts[j + 1] = stamps[at] - stamps[at + 1]
        return parts


def _on_gradients(value: Any, arrived: Callable[[Tensor], None]) -> None:
    for _, tensor in leaves(value):
        if tensor.requires_grad and tensor.is_floating_point():
            tensor.register_hook(arrived)


@contextlib.contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, a gradient is dropped when it is complete; afterwards the old ones are back."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    handles = []

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter, _ in kept:
        parameter.grad = None
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(drop))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, grad in kept:
            parameter.grad = grad
