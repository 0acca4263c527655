"""Hooks of user code on the parameters of a pipeline run once per batch, as in one process, and not once per microbatch.

Inside a schedule they are held. When the caller's backward pass ends they get what the whole pass gave the parameter,
summed over the stages that share it: hooks on gradients (`register_hook`) first, then those on the accumulated gradient
(`register_post_accumulate_grad_hook`), which may step an optimizer of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.compat.private_collectives import rows_of_ranks
from hf_parallel.compat.private_torch import with_hooks
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.gradients.hooks import Hook, HookGuard
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh


ABSENT = -(2**30)  # less than any number of hooks


class BatchHooks:
    """Keeps the gradients of parameters with hooks until a backward pass of the caller's ends.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter, in the order of the ledger.
        mesh: This rank's mesh.
        guard: Finds and wraps the hooks.
        holders: Pipeline ranks that share parameters -> their group, of those that this rank is in.
        group: The stages, for messages over host memory.
        take_reduced: Name -> the gradient of earlier passes of this step that is reduced already, if there is one.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        *,
        guard: HookGuard,
        holders: Mapping[tuple[int, ...], dist.ProcessGroup | None],
        group: dist.ProcessGroup | None,
        take_reduced: Callable[[str], Tensor | None],
    ) -> None:
        self._ledger, self._parameters, self._mesh = ledger, dict(parameters), mesh
        self._guard, self._holders, self._group, self._take_reduced = guard, holders, group, take_reduced
        self._everywhere = [entry.name for entry in ledger if entry.kind == "param" and len(entry.holders) > 1]
        self._agreed: dict[str, bool] = {}  # shared parameter with hooks -> whether any is on the accumulated gradient
        self._found: dict[int, Tensor] = {}

    def ask(self) -> bool:
        """A training forward begins: whether a parameter of any stage has hooks; collective over the pipeline.

        Raises:
            UnsupportedError: The holders of a shared parameter have not put the same number of hooks on it.
        """
        if self._group is None:
            return False
        counts = [self._count(name) for name in self._everywhere]
        words = [int(len(self.hooked) > 0)]
        for one in (0, 1):
            words += [count[one] if count is not None else ABSENT for count in counts]
            words += [-count[one] if count is not None else ABSENT for count in counts]
        said = torch.tensor(words, dtype=torch.int32)
        anywhere, *rest = rows_of_ranks(said, self._group).amax(0).tolist()
        size, self._agreed = len(counts), {}
        for index, name in enumerate(self._everywhere):
            most, negated, most_after, negated_after = rest[index::size]
            if most != -negated or most_after != -negated_after:
                self._refuse_some_holders(name)
            if name in self._parameters and most + most_after:
                self._agreed[name] = most_after > 0
        return bool(anywhere)

    def _count(self, name: str) -> tuple[int, int] | None:
        if name not in self._parameters:
            return None
        before, after = self._guard.hooks_of(name)
        return len(before), len(after)

    def _refuse_some_holders(self, name: str) -> None:
        entry = self._ledger.entries[name]
        raise UnsupportedError(
            f"parameter {name} has gradient hooks on some of its stages only, or not as many on each: with pp_size="
            f"{self._mesh.shape.pp_size} the pipeline ranks {list(entry.holders)} share it, under the names "
            f"{', '.join(entry.aliases)}. Register the same hooks on every rank that has it under any of them, or before the "
            "model is prepared."
        )

    @property
    def hooked(self) -> list[nn.Parameter]:
        """This rank's parameters that have hooks."""
        found = with_hooks(self._parameters.items())
        return [self._parameters[name] for name in found if any(self._guard.hooks_of(name))]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a schedule runs its backward passes, which are of single microbatches."""
        with self._guard.held():
            yield

    @torch.no_grad()
    def keep(
        self, gradients: Sequence[tuple[nn.Parameter, Tensor]], factor: Tensor | None = None
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Keep gradients of one schedule for parameters with hooks until the end of the pass.

        Args:
            gradients: Gradients with their parameters; consumed where they are kept.
            factor: Factor to multiply them with (0-d).

        Returns:
            The other gradients, unchanged.
        """
        hooked = {id(parameter) for parameter in self.hooked}
        for parameter, gradient in gradients:
            if id(parameter) not in hooked:
                continue
            if factor is not None:
                gradient.mul_(factor.to(gradient.device))
            kept = self._found.get(id(parameter))
            self._found[id(parameter)] = gradient if kept is None else kept.add_(gradient)
        return [pair for pair in gradients if id(pair[0]) not in hooked]

    @torch.no_grad()
    def run(self, frozen: set[int]) -> None:
        """Run hooks on what was kept, and add it to `p.grad`, as the caller's backward pass ends; collective over holders.

        Args:
            frozen: Ids of parameters whose gradients do not count.

        Raises:
            UnsupportedError: A hook does something that cannot be done on this mesh.
        """
        found, self._found = self._found, {}
        if not found and not self._agreed:
            return
        for name, parameter in self._parameters.items():
            gradient = found.pop(id(parameter), None) if id(parameter) not in frozen else None
            shared = name in self._agreed
            if not shared and gradient is None:
                continue
            before, after = self._guard.hooks_of(name)
            if not shared and len(self._ledger.entries[name].holders) > 1:
                self._refuse_some_holders(name)  # registered since the forward
            whole = self._summed(name, gradient) if shared else gradient
            if whole is None:
                continue
            for hook in before:
                whole = self._guard.changed_by(name, hook, whole)
            self._add(name, whole, after)

    def _add(self, name: str, gradient: Tensor, after: Sequence[Hook]) -> None:
        """Add a gradient, which is the sum over the holders, and run the hooks on the sum of the step so far."""
        parameter, shared = self._parameters[name], name in self._agreed
        counts = not shared or self._ledger.entries[name].holders[0] == self._mesh.pp_rank
        if not (after or (shared and self._agreed[name])):
            if counts:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            return
        earlier = self._summed(name, parameter.grad) if shared else parameter.grad
        reduced = self._take_reduced(name)
        for other in (earlier, reduced):
            gradient = gradient if other is None else other.add_(gradient)
        parameter.grad = gradient
        for hook in after:
            self._guard.run_after(name, hook)
        if not counts and parameter.grad is not None:  # the sum over the holders is to be what the hooks left
            parameter.grad = torch.zeros_like(parameter.grad)

    def _summed(self, name: str, part: Tensor | None) -> Tensor | None:
        """The sum over the stages that share a parameter; None if none of them has a part."""
        parameter, group = self._parameters[name], self._holders[self._ledger.entries[name].holders]
        present = torch.tensor(int(part is not None), device=parameter.device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
        if not int(present):
            return None
        whole = torch.zeros_like(parameter) if part is None else part
        total = (whole.float() if whole.dtype.itemsize < 4 else whole).contiguous()
        dist.all_reduce(total, group=group)
        return total.to(whole.dtype)
