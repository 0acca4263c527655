"""Hooks and forwards that user code puts on modules that see parts of tensors, after the model was planned.

Between sharded layers these are this rank's channels, with sequence parallelism and shared rows its part of the sequence. What was there when
the model was planned is part of the recorded forward, and nothing is sharded where it would compute something else. What comes
later nobody has looked at: a norm over the channels would be that of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from hf_parallel.compat.private_torch import module_hooks
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.forwards import Forwards
from hf_parallel.guards.calls.kept_parts import KeptParts
from hf_parallel.guards.users_code import OURS, module_of, name_of


class PartHooks:
    """Notices hooks and forwards that would see parts of tensors.

    Built when the model is sharded, with all of our hooks.

    Args:
        model: The sharded model.
        modules: Modules that see parts, by name, and parts of what; of all stages, so that all ranks refuse alike.
        whole_inputs: Modules among them that are given whole tensors: forward pre-hooks may come later.
        whole_outputs: Modules among them that return whole tensors: forward hooks may come later.
        axis: The setting that leaves parts.
        is_part: Whether what a module of them returns is a part of the sequence; None: it never is.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, str],
        whole_inputs: Collection[str] = (),
        whole_outputs: Collection[str] = (),
        axis: str = "tp_size",
        is_part: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._axis = axis
        self._tables: list[tuple[str, str, dict[int, Any], set[int]]] = []
        for name, parts in modules.items():
            module = model.get_submodule(name)
            if is_part is not None and name not in whole_outputs:
                _watch_kept(module, name, axis, is_part)
            before, after, *backward = module_hooks(module)
            tables = [
                *([] if name in whole_inputs else [before]),
                *([] if name in whole_outputs else [after]),
                *backward,
            ]
            self._tables += [(name, parts, hooks, set(hooks)) for hooks in tables]
        # Looked at before every forward: most of a model's modules never have hooks, nor a forward of their own.
        self._empty = [table[2] for table in self._tables if not table[2]]
        self._others = [table for table in self._tables if table[2]]
        self._parts = modules
        self._forwards = Forwards({name: model.get_submodule(name) for name in modules})

    def check(self) -> None:
        """Refuse, before a forward, hooks and forwards that were put on modules which see parts.

        Raises:
            UnsupportedError: Names the module and what was put on it.
        """
        for name, parts, hooks, known in self._tables if any(self._empty) else self._others:
            if hooks and not known.issuperset(hooks):
                for key in [key for key in hooks if key not in known]:
                    if not module_of(hooks[key]).startswith(OURS):
                        _refuse(f"hook {name_of(hooks[key])} was put on {name}", parts, self._axis)
                    known.add(key)
        for name in self._forwards.replaced():
            _refuse(f"forward of {name} was replaced", self._parts[name], self._axis)


def _watch_kept(module: nn.Module, name: str, axis: str, is_part: Callable[[Tensor], bool]) -> None:
    hooks = list(module_hooks(module)[1].values())
    # transformers' own hooks only keep outputs, and the outputs are gathered later.
    if hooks and not any(module_of(hook).startswith(OURS) for hook in hooks):
        module.register_forward_hook(KeptParts(name, [name_of(hook) for hook in hooks], axis, is_part))


def _refuse(what: str, parts: str, axis: str) -> None:
    whole = (
        "the attention or MLP around sharded layers, without sequence_parallel"
        if axis == "tp_size"
        else "the model itself"
    )
    raise UnsupportedError(
        f"{what} after the model was prepared, with {axis} above 1: it would see this rank's {parts} only, and a norm or mean over "
        "them would be that of a part. Put it there before trainer.train() or accelerator.prepare() (the model is then planned "
        f"with it, and checked), or on a module whose inputs and outputs are whole: {whole}."
    )
