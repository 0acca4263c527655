"""Gradient hooks that user code puts on parameters (`register_hook`: row masks, scaling) see the gradient they are meant for.

Where ranks hold shards, a hook would be given a shard: it is gathered for the hook, and this rank keeps its part of what
the hook returns. The backward passes of a pipeline are of single microbatches: hooks are held there, and run on the
gradient of the batch (`batch_hooks`). Hooks may be registered and removed at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import Onlooker, accumulation_hooks, gradient_hooks, version_of, with_hooks
from hf_parallel.errors import UnsupportedError
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh


Hook: TypeAlias = Callable[[Tensor], Tensor | None]


class HookGuard:
    """Looks for hooks before every training forward pass.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        assemble: Parameter name and shard -> the whole tensor; collective over the ranks with its shards.

    Attributes:
        gathered: Names of the parameters whose gradients the hooks found last need whole, of which this rank has a shard.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        assemble: Callable[[str, Tensor], Tensor],
    ) -> None:
        self._ledger, self._mesh, self._assemble = ledger, mesh, assemble
        self._parameters = dict(parameters)
        self._holds = False
        self.gathered: list[str] = []

    def check(self) -> None:
        """Adapt the hooks on parameters before a training forward pass: they see whole gradients.

        Raises:
            UnsupportedError: A hook on the accumulated gradient of a parameter of which this rank holds a shard.
        """
        if self._mesh.model_group is None and self._mesh.sp_group is None:
            return
        self.gathered = []
        for name in with_hooks(self._parameters.items()):
            self._adapt(name)
            if any(isinstance(hook, _OnWhole) for hook in gradient_hooks(self._parameters[name]).values()):
                self.gathered.append(name)

    def refuse_accumulated(self) -> None:
        """Refuse hooks on accumulated gradients in a step of which earlier passes are reduced.

        Raises:
            UnsupportedError: Names a parameter that has one.
        """
        for name in with_hooks(self._parameters.items()):
            if not all(map(_is_ours, accumulation_hooks(self._parameters[name]).values())):
                raise of_one_pass(name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, backward passes are of single microbatches, and hooks do not run."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    def hooks_of(self, name: str) -> tuple[list[Hook], list[Hook]]:
        """Hooks of user code on a parameter's gradient and on its accumulated one, as they run on the batch's."""
        self._adapt(name)
        parameter = self._parameters[name]
        found = [
            [hook.hook if isinstance(hook, _Held) else hook for hook in table.values() if not _is_ours(hook)]
            for table in (gradient_hooks(parameter), accumulation_hooks(parameter))
        ]
        return found[0], found[1]

    def changed_by(self, name: str, hook: Hook, gradient: Tensor) -> Tensor:
        """The gradient as a hook changes it."""
        result = hook(gradient)
        result = gradient if result is None else result  # changed in place, or left alone
        if result.shape != gradient.shape:
            raise UnsupportedError(
                f"the gradient hook of parameter {name} returned shape {tuple(result.shape)} for a gradient of shape "
                f"{tuple(gradient.shape)}. Return a tensor of the gradient's shape."
            )
        return result

    def run_after(self, name: str, hook: Hook) -> None:
        """Run a hook on the accumulated gradient of a parameter.

        Raises:
            UnsupportedError: It updates the parameter from the gradient of this replica alone.
        """
        parameter = self._parameters[name]
        present, version = parameter.grad is not None, version_of(parameter)
        hook(parameter)
        steps = version_of(parameter) != version or (present and parameter.grad is None)
        if steps and self._mesh.shape.num_copies > 1:
            raise UnsupportedError(
                f"the hook on the accumulated gradient of {name} (register_post_accumulate_grad_hook) updates the parameter or "
                f"drops its gradient before the {self._mesh.shape.dp_size} replicas have averaged it: each would train another "
                "model. Step the optimizer after the backward pass, or use one replica (pp_size x tp_size = number of "
                "processes)."
            )

    def _adapt(self, name: str) -> None:
        parameter = self._parameters[name]
        hooks, after = gradient_hooks(parameter), accumulation_hooks(parameter)
        if not hooks and not after:
            return
        if self._mesh.sp_group is not None and not all(map(_is_ours, (*hooks.values(), *after.values()))):
            raise of_own_tokens(name, self._mesh.shape.sp_size)
        is_sharded = self._ledger.entries[name].spec is not None
        if is_sharded and after:
            self._refuse_accumulation(name, parameter)
        if is_sharded and self._mesh.parts.group is not None:
            for key, hook in hooks.items():
                if not isinstance(hook, _OnWhole | _Held) and not _is_ours(hook):
                    hooks[key] = _OnWhole(name, hook, self)
        if self._mesh.shape.pp_size == 1:
            return
        for table in (hooks, after):
            for key, hook in table.items():
                if not isinstance(hook, _Held) and not _is_ours(hook):
                    table[key] = _Held(name, hook, self)

    def refuse_direct(self, name: str) -> None:
        """Refuse a gradient that arrives at a parameter with hooks, unless a schedule has made it.

        Raises:
            UnsupportedError: It comes from the caller's own loss, and not from a schedule.
        """
        if not self._holds:
            raise UnsupportedError(
                f"parameter {name} has gradient hooks and the loss reads it directly, past the stages of pp_size="
                f"{self._mesh.shape.pp_size}: the hooks would see a part of its gradient. Remove the hooks or the term of the "
                "loss, or set pp_size to 1."
            )

    def _refuse_accumulation(self, name: str, parameter: nn.Parameter) -> None:
        foreign = [hook for hook in accumulation_hooks(parameter).values() if not _is_ours(hook)]
        if foreign and self._mesh.parts.group is not None:
            raise UnsupportedError(
                f"parameter {name} has a hook on its accumulated gradient (register_post_accumulate_grad_hook) with "
                f"{self._mesh.shape.sharded_by}={self._mesh.parts.size}: this rank accumulates {tuple(parameter.shape)} of "
                f"{self._ledger.entries[name].shape}, which the hook cannot know. Use parameter.register_hook, which is given the "
                f"whole gradient, or {self._mesh.shape.sharded_by} 1."
            )

    def on_whole(self, name: str, hook: Hook, gradient: Tensor) -> Tensor:
        """This rank's part of what `hook` makes of the whole gradient; collective."""
        spec = self._ledger.entries[name].spec
        if spec is None:
            raise RuntimeError(f"{name} is not sharded")
        # Tokens of all replicas that share experts have reached them: the gradient is the sum of what their losses gave.
        losses = self._mesh.shape.ep_size
        whole = self._assemble(name, gradient) / losses
        result = self.changed_by(name, hook, whole) * losses
        return spec.shard(result, self._mesh.parts.size, self._mesh.parts.rank).to(gradient.dtype)


def refuse_hooks(parameters: Iterable[tuple[str, Tensor]], sp_size: int) -> None:
    """Refuse hooks on parameters of a model whose rows ranks are to share, before anything is compared.

    Raises:
        UnsupportedError: Names a parameter that has one.
    """
    for name in with_hooks(parameters):
        raise of_own_tokens(name, sp_size)


def of_own_tokens(name: str, sp_size: int) -> UnsupportedError:
    """The error about a hook that would see what a part of each row gives."""
    return UnsupportedError(
        f"parameter {name} has gradient hooks with sp_size={sp_size}: they would see the gradient of this "
        "rank's tokens alone. Remove the hooks and change p.grad in on_pre_optimizer_step, or set sp_size to 1."
    )


def of_one_pass(name: str) -> UnsupportedError:
    """The error about a hook that would see a part of what a step accumulates."""
    return UnsupportedError(
        f"the hook on the accumulated gradient of {name} (register_post_accumulate_grad_hook) would see the gradient of "
        "this backward pass only: that of earlier passes of the same step is averaged over the replicas already. Use "
        "parameter.register_hook, or accumulate with accelerator.accumulate(model) and zero.stage below 2."
    )


class _OnWhole:
    """A hook that is given a shard, around one that wants the whole."""

    def __init__(self, name: str, hook: Hook, guard: HookGuard) -> None:
        self.name, self.hook, self.guard = name, hook, guard

    def __call__(self, gradient: Tensor) -> Tensor:
        with torch.no_grad():
            return self.guard.on_whole(self.name, self.hook, gradient)


class _Held(Onlooker):
    """A hook that does not run in the backward passes of a schedule, around one that runs on the gradient of the batch."""

    def __init__(self, name: str, hook: Hook, guard: HookGuard) -> None:
        self.name, self.hook, self.guard = name, hook, guard

    def __call__(self, tensor: Tensor) -> None:
        self.guard.refuse_direct(self.name)


def _is_ours(hook: Any) -> bool:
    ours = str(getattr(hook, "__module__", "")).startswith("hf_parallel.")
    return ours and not isinstance(hook, _OnWhole | _Held)
