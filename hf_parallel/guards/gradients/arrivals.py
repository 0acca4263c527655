"""Track, parameter by parameter, the gradients that have arrived since the last reduction.

A loop may run several backward passes in a step, step several optimizers, or forget to clear gradients. What is reduced
already must not be reduced again (a sum over the stages that hold a parameter would count it twice), and what was never
reduced must not be stepped on.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import version_of


class Arrivals:
    """The gradients of one rank's parameters, by what has happened to them.

    Args:
        parameters: Parameters of the model, in any order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._ready: set[int] = set()  # ids of parameters whose gradients may be stepped on
        self._reduced: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._aside: list[tuple[nn.Parameter, Tensor]] = []
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._assigned: set[int] = (
            set()
        )  # ids of parameters of which replicas may have had unlike gradients before their passes

    def set_aside(self, *, everything: bool = False) -> None:
        """Take away the reduced gradients before backward passes begin, so that new ones can be told from them.

        One that was changed since (a loss beside the model's adds to it) counts as arrived.

        Args:
            everything: Whether to set aside all gradients: they were left over or assigned before this step, and are
                not reduced again.
        """
        self._hidden = []  # of a pass that nobody wanted
        reduced, self._reduced = self._reduced, {}
        for parameter in self._parameters if reduced or everything else ():
            gradient = parameter.grad
            reference, version = reduced.get(id(parameter), (None, 0))
            if gradient is None or (reference is None and not everything):
                continue
            self._ready.discard(id(parameter))
            unchanged = reference is not None and reference() is gradient and version_of(gradient) == version
            if everything or unchanged:
                self._aside.append((parameter, gradient))
                if not unchanged:
                    self._assigned.add(id(parameter))
                parameter.grad = None

    def hide(self) -> None:
        """Put back the gradients from before backward passes that ran ahead of the caller's `backward()`."""
        self._hidden = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None
        aside, self._aside = self._aside, []
        for parameter, gradient in aside:
            parameter.grad = gradient
            self.note(parameter)

    def show(self) -> None:
        """Let what was hidden arrive: the caller's `backward()` runs."""
        hidden = self._hidden
        if hidden:
            self.set_aside()
            for parameter, gradient in hidden:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def put_back(self) -> None:
        """Add what was set aside to what has arrived and is reduced by now."""
        aside, self._aside = self._aside, []
        for parameter, gradient in aside:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
            self.note(parameter)

    @property
    def has_assigned(self) -> bool:
        """Whether user code had given a parameter a gradient before the passes of this step, which is set aside."""
        return len(self._assigned) > 0 and any(id(parameter) in self._assigned for parameter, _ in self._aside)

    def join(self, holders: Mapping[int, int], factor: float = 1.0) -> None:
        """Join what was set aside with what has arrived, to be reduced together: user code may change the one sum that it sees.

        Args:
            holders: Id of a parameter -> how many stages hold it: they add up what each has.
            factor: Factor of the reduction for all gradients, which those aside have already; not 0.
        """
        aside, self._aside = self._aside, []
        for parameter, gradient in aside:
            shared = holders[id(parameter)] * factor
            own = gradient if shared == 1 else gradient.div_(shared)
            parameter.grad = own if parameter.grad is None else own.add_(parameter.grad)

    def take_aside(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that was set aside of one parameter: from here on it is the caller's."""
        found = next((gradient for other, gradient in self._aside if other is parameter), None)
        self._aside = [pair for pair in self._aside if pair[0] is not parameter]
        return found

    def settle(self, others: Iterable[Tensor] = ()) -> None:
        """Note that all gradients are reduced now.

        Args:
            others: Tensors that the optimizer updates in place of parameters.
        """
        with torch.no_grad():
            self.put_back()
        self._assigned.clear()
        for parameter in self._parameters:
            if parameter.grad is not None:
                self.note(parameter)
        self._ready.update(id(other) for other in others)

    def note_all(self) -> None:
        """Note all reduced gradients again after a change of our own."""
        for parameter in self._parameters:
            if id(parameter) in self._reduced:
                self.note(parameter)

    def note(self, parameter: nn.Parameter) -> None:
        """Note that the gradient of a parameter is reduced as it is now."""
        gradient = parameter.grad
        if gradient is not None:
            self._ready.add(id(parameter))
            self._reduced[id(parameter)] = (weakref.ref(gradient), version_of(gradient))

    def use(self, updated: Iterable[Tensor]) -> bool:
        """An optimizer steps on the gradients of `updated`: whether all of them were reduced."""
        mine = [parameter for parameter in updated if parameter.grad is not None]
        if any(id(parameter) not in self._ready for parameter in mine):
            return False
        self._ready.difference_update(id(parameter) for parameter in mine)
        return True
