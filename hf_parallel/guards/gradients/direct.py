"""Gradients that reach parameters through the user's loss itself, past the stages of a pipeline.

Each rank of a pipeline holds the parameters of its own stages. What a loss reads of them by itself is the same on all
ranks only where all ranks hold it: there each has the whole gradient, of which the sum over the holders must count one.
Anything else (a penalty over `model.parameters()`) is another loss on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_parallel.compat.private_torch import Onlooker
from hf_parallel.errors import UnsupportedError


USED = "backward through the graph a second time"  # torch's words


class DirectGradients:
    """Watches the backward passes that user code runs.

    Args:
        parameters: Name -> this rank's parameter.
        everywhere: Names of parameters that all ranks of the pipeline hold.
        num_ranks: Ranks of the pipeline.
        noticed: Called inside the backward pass in which a direct gradient arrives.
        summands: In a callback: on how many ranks a parameter has gradients now that are added up later.
        compared: Called with the name and the gradient of a parameter that all ranks hold: it must be the same on all of them.

    Attributes:
        found: Names of parameters that not all ranks hold and that got a direct gradient.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        everywhere: frozenset[str],
        num_ranks: int,
        noticed: Callable[[], None],
        summands: Callable[[str], int],
        compared: Callable[[str, Tensor], None],
    ) -> None:
        self._parameters, self._everywhere, self._num_ranks = parameters, everywhere, num_ranks
        self._noticed, self._summands, self._compared = noticed, summands, compared
        self._handles: list[RemovableHandle] = []
        self._resting = self._in_callback = False
        self.found: list[str] = []

    def watch(self) -> None:
        """Begin to watch parameters: the next backward passes are the user's."""
        self.stop()
        self._handles = [
            parameter.register_hook(_Hook(self, name))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def stop(self) -> None:
        """Stop to watch parameters: the next backward passes are those of a schedule."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._in_callback = [], False

    @contextmanager
    def in_callback(self) -> Iterator[None]:
        """Inside, until the model runs, gradients are what a callback adds to `p.grad`: whole on each rank that holds a parameter."""
        self._in_callback = True
        try:
            yield
        finally:
            self._in_callback = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside a backward pass of the user a schedule runs its own."""
        self._resting = True
        try:
            yield
        finally:
            self._resting = False

    def arrives(self, name: str, gradient: Tensor) -> Tensor | None:
        """A gradient arrives at a parameter in a backward pass of the user's; what is left of it."""
        if self._resting:
            return None
        if self._in_callback:
            count = self._summands(name)
            return None if count == 1 else gradient / count
        self._noticed()
        if name in self._everywhere:
            self._compared(name, gradient)
            return gradient / self._num_ranks
        if name not in self.found:
            self.found.append(name)
        return None


@contextmanager
def through_stages(pp_size: int) -> Iterator[None]:
    """Around a backward pass of the user's: says why it cannot go back into a stage.

    Raises:
        UnsupportedError: It met a graph that the schedule has used.
    """
    try:
        yield
    except RuntimeError as error:
        if pp_size == 1 or USED not in str(error):
            raise
        raise UnsupportedError(
            f"the loss depends on a graph that was used and let go, with pp_size={pp_size}: a call with labels has run the backward "
            "pass of its stages already, so none can go through activations that a forward hook kept. Let the model's forward "
            "add such a term to its loss, detach the activations, or set pp_size to 1. If one loss was backpropagated twice, "
            "pass retain_graph=True the first time."
        ) from error


class _Hook(Onlooker):
    """Tells which parameter it is on. In the backward passes of a schedule it is at rest."""

    def __init__(self, owner: DirectGradients, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, gradient: Tensor) -> Tensor | None:
        return self._owner.arrives(self._name, gradient)
