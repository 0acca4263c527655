"""Private names of torch's `fully_shard`: its classes, and its parameters while they are gathered."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hf_parallel.compat.private_torch import accumulation_hooks, gradient_hooks
from hf_parallel.compat.versions import wanted
from hf_parallel.errors import UnsupportedError


if TYPE_CHECKING:
    from torch import Tensor, nn


def keep_class_name(module: nn.Module) -> None:
    """Give the class that `fully_shard` made the name of the module's own: saving and label smoothing look at it.

    Its `forward` becomes the own one as well: checkpointed layers look whether theirs is still the class's.
    """
    kind: Any = type(module)
    plain, renamed = _named_as_before(kind)
    type.__setattr__(renamed, "forward", plain.forward)  # of now: a class may have been patched since it was renamed
    module.__class__ = renamed


@functools.cache
def _named_as_before(kind: Any) -> tuple[Any, type]:
    """The class of before, and one for all its modules: `torch.compile` compiles each class by itself."""
    from torch.distributed.fsdp import FSDPModule

    place = FSDPModule._orig_cls_mro_index
    plain: Any = kind.__mro__[place]
    body = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_orig_cls_mro_index": place + 1}
    return plain, type(plain.__name__, (kind,), body)


class HookCarrier:
    """Lets hooks on the parameters that `fully_shard` made run where autograd computes: on the gathered ones.

    Args:
        parts: Modules that `fully_shard` was called on.

    Raises:
        UnsupportedError: This torch keeps its parameters elsewhere.
    """

    def __init__(self, parts: Any) -> None:
        self._pairs: list[tuple[Any, Any, Any]] = []
        self._accumulation: dict[int, dict[int, Any]] = {}
        for part in parts:
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            held = [one for group in groups for one in getattr(group, "fsdp_params", ())]
            self._pairs += [(part, one, one.sharded_param) for one in held]
        self._held = {id(sharded): held for _, held, sharded in self._pairs}
        if not self._pairs:
            raise UnsupportedError(
                f"this torch does not tell the parameters of fully_shard: install {wanted('torch')}."
            )

    def adopt(self, new: Tensor, old: Tensor) -> None:
        """Take over the hooks of a parameter that `fully_shard` has replaced; their handles go on removing them."""
        if gradient_hooks(old):
            new._backward_hooks = old._backward_hooks
        if accumulation_hooks(old):
            self._accumulation[id(new)] = accumulation_hooks(old)

    def accumulating(self) -> list[Any]:
        """Parts whose hooks on accumulated gradients see the gradient of one backward pass: that of the gathered parameter."""
        return [sharded for _, _, sharded in self._pairs if self._accumulation.get(id(sharded))]

    def follow(self) -> None:
        """Bring hooks to gathered parameters before a training forward; collective if there were some before the first."""
        for part, held, sharded in self._pairs:
            own, accumulated = sharded._backward_hooks, self._accumulation.get(id(sharded))
            if not own and not accumulated:
                continue
            if not hasattr(held, "_unsharded_param"):
                part.unshard()
            gathered = held._unsharded_param
            if own and gathered._backward_hooks is not own:
                gathered._backward_hooks = own
            if accumulated and gathered._post_accumulate_grad_hooks is not accumulated:
                gathered._post_accumulate_grad_hooks = accumulated

    def gathered_of(self, part: Tensor) -> Any:
        """The parameter that a module has while this part of it is gathered; None before it was gathered for the first time."""
        return getattr(self._held.get(id(part)), "_unsharded_param", None)

    def gathered(self) -> list[tuple[Any, Any]]:
        """The parameters that are gathered now, each with the part that this rank keeps of it."""
        return [
            (held._unsharded_param, part) for _, held, part in self._pairs if held.sharded_state.name == "UNSHARDED"
        ]
