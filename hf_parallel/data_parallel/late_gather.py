"""Gather updated parameters while the next forward pass already runs.

Every module waits for its own parameters when it is called. Code that reads a parameter of a module it does not call
would see old values, or a mixture. So the first forward pass records such reads, and later forward passes wait for these
parameters before they begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_parallel.compat.private_collectives import Pending
from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.compat.torch_tools import pytree
from hf_parallel.monitor.recorder import Recorder


class LateGather:
    """Running all-gathers of updated parameters, and the modules that wait for them.

    Args:
        model: The model.
        shard_of: Id of a parameter -> index of the flat buffer that it is a view of.
        waiting: Context for waits on other ranks.
        recorder: Keeps when they were.

    Attributes:
        at_once: Wait for every gather when it is started: user code may read parameters between two passes.
    """

    def __init__(
        self,
        model: nn.Module,
        shard_of: Mapping[int, int],
        waiting: Callable[[str], AbstractContextManager[None]],
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self.at_once = False
        self._works: dict[int, Pending] = {}
        self._waiting = waiting
        self._running: Counter[int] = Counter()  # ids of parameters whose module is being called
        self._foreign: set[int] = set()
        self._watched = False
        self._shard_of = dict(shard_of)
        for module in model.modules():
            own = [param for param in own_parameters(module).values() if param is not None and id(param) in shard_of]
            if own:
                self._hook(module, [id(param) for param in own])

    def _hook(self, module: nn.Module, ids: Sequence[int]) -> None:
        indices = sorted({self._shard_of[key] for key in ids})

        def entered(module: nn.Module, args: Any) -> None:
            for index in indices:
                self.wait(index)
            self._running.update(ids)

        def left(module: nn.Module, args: Any, output: Any) -> None:
            self._running.subtract(ids)

        module.register_forward_pre_hook(entered)
        module.register_forward_hook(left, always_call=True)

    @property
    def arriving(self) -> bool:
        """Whether some flat buffers may not be complete yet."""
        return bool(self._works)

    def put(self, works: Sequence[Pending | None]) -> None:
        """Note that the gathers of all flat buffers, in order, have begun."""
        self._works = {index: work for index, work in enumerate(works) if work is not None}
        if self.at_once:
            self.wait_for_all()

    def wait(self, index: int) -> None:
        """Wait until the all-gather of a flat buffer has ended."""
        work = self._works.pop(index, None)
        if work is not None:
            with (
                self._recorder.span("gather", index),
                self._waiting("waits for the updated parameters of the other replicas"),
            ):
                work.wait()

    def wait_for_all(self) -> None:
        """Wait until the all-gathers of all flat buffers have ended."""
        for index in list(self._works):
            self.wait(index)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass of the whole model, or of this rank's stages."""
        if self._watched:
            for index in self._foreign:
                self.wait(index)
            yield
            return
        self.wait_for_all()
        with _Reads(self._note):
            yield
        self._watched = True

    def _note(self, param: Tensor) -> None:
        index = self._shard_of.get(id(param))
        if index is not None and self._running[id(param)] <= 0:
            self._foreign.add(index)


class _Reads(TorchFunctionMode):
    """Reports the parameters that functions compute with; those that give no tensor read its shape or dtype only."""

    def __init__(self, report: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            for leaf in pytree.tree_leaves((args, kwargs or {})):
                if isinstance(leaf, nn.Parameter):
                    self._report(leaf)
        return result
