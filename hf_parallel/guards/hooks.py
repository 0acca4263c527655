"""Gradient hooks that user code puts on parameters (`register_hook`: row masks, scaling) see the gradient they are meant for.

Where ranks hold shards, a hook would be given a shard: it is gathered for the hook, and this rank keeps its part of what
the hook returns. Hooks may be registered and removed at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import accumulation_hooks, gradient_hooks
from hf_parallel.errors import UnsupportedError
from hf_parallel.ledger import Ledger
from hf_parallel.mesh import Mesh


logger = logging.getLogger(__name__)


class HookGuard:
    """Looks for hooks before every training forward pass.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        assemble: Parameter name and shard -> the whole tensor; collective over tensor-parallel ranks.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        assemble: Callable[[str, Tensor], Tensor],
    ) -> None:
        self._ledger, self._mesh, self._assemble = ledger, mesh, assemble
        self._parameters = [(n, p, ledger.entries[n].spec is not None) for n, p in parameters.items()]
        self._warned = False

    def check(self) -> None:
        """A training forward pass begins.

        Raises:
            UnsupportedError: A hook on the accumulated gradient of a parameter of which this rank holds a shard.
        """
        if self._mesh.mp_group is None:
            return
        for name, parameter, is_sharded in self._parameters:
            hooks = gradient_hooks(parameter)
            if hooks:
                self._adapt(name, hooks)
            if is_sharded and accumulation_hooks(parameter):
                self._refuse_accumulation(name, parameter)

    def _adapt(self, name: str, hooks: dict[int, Any]) -> None:
        if self._ledger.entries[name].spec is not None and self._mesh.tp_group is not None:
            for key, hook in hooks.items():
                if not isinstance(hook, _OnWhole):
                    hooks[key] = _OnWhole(name, hook, self)
        if self._mesh.shape.pp_size > 1 and not self._warned:
            self._warned = True
            logger.warning(
                "hf_parallel: the gradient hook of %s runs once a microbatch under pp_size=%d, on the gradient of that "
                "microbatch: masks and factors do the same as in one process, a limit on values does not. Set limits on the sum "
                "in on_pre_optimizer_step, or set num_microbatches to 1.",
                name,
                self._mesh.shape.pp_size,
            )

    def _refuse_accumulation(self, name: str, parameter: nn.Parameter) -> None:
        foreign = [hook for hook in accumulation_hooks(parameter).values() if not _is_ours(hook)]
        if foreign and self._mesh.tp_group is not None:
            raise UnsupportedError(
                f"parameter {name} has a hook on its accumulated gradient (register_post_accumulate_grad_hook) with "
                f"tp_size={self._mesh.shape.tp_size}: this rank accumulates {tuple(parameter.shape)} of "
                f"{self._ledger.entries[name].shape}, which the hook cannot know. Use parameter.register_hook, which is given the "
                "whole gradient, or tp_size 1."
            )

    def on_whole(self, name: str, hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor:
        """This rank's part of what `hook` makes of the whole gradient; collective."""
        spec = self._ledger.entries[name].spec
        if spec is None:
            raise RuntimeError(f"{name} is not sharded")
        whole = self._assemble(name, gradient)
        result = hook(whole)
        result = whole if result is None else result  # changed in place, or left alone
        if result.shape != whole.shape:
            raise UnsupportedError(
                f"the gradient hook of parameter {name} returned shape {tuple(result.shape)} for a gradient of shape "
                f"{tuple(whole.shape)}. Return a tensor of the gradient's shape."
            )
        return spec.shard(result, self._mesh.shape.tp_size, self._mesh.tp_rank).to(gradient.dtype)


class _OnWhole:
    """A hook that is given a shard, around one that wants the whole."""

    def __init__(self, name: str, hook: Callable[[Tensor], Tensor | None], guard: HookGuard) -> None:
        self.name, self.hook, self.guard = name, hook, guard

    def __call__(self, gradient: Tensor) -> Tensor:
        with torch.no_grad():
            return self.guard.on_whole(self.name, self.hook, gradient)


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("hf_parallel.")
