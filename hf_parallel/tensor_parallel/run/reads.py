"""Reads of a sharded parameter by code outside of the module that owns it.

A module's own sharded forward works on this rank's part. Any other code that reads `module.weight` (a patched forward, a loss,
a regulariser) expects the whole tensor and gets a stand-in of its shape (`whole_tensors`). In a forward that all ranks run, its
values are gathered when they are first used, and each rank keeps its part of the gradient. Anywhere else a collective could
wait forever, so using the values is an error that names the parameter. Shape, dtype and device can be read everywhere.

Optimizers, checkpoints and callbacks get the parts themselves from `parameters()` and `named_parameters()`. Inside a loss
of the user's these give the stand-ins: a penalty over all parameters refers to whole ones.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn

from hf_parallel.compat.private_torch import own_buffers, own_parameters, own_tensor, set_aside
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.run.forwards import put_over
from hf_parallel.tensor_parallel.run.functions import SharedCopy
from hf_parallel.tensor_parallel.run.whole_tensors import Owned, Reads, Scope, stand_in


FULLY_SHARD = "torch.distributed.fsdp."  # it replaces parameters of modules, and needs the parts themselves


def install_reads(
    model: nn.Module,
    specs: Mapping[str, ShardSpec],
    scopes: Mapping[str, Scope],
    shared: SharedCopy,
    tp_rank: int,
    *,
    reports: bool,
    sums: bool = False,
) -> None:
    """Notice reads of sharded tensors from outside of their modules. In place; call when everything is sharded.

    Args:
        model: The model.
        specs: Layout of each tensor that was sharded here, by name.
        scopes: Name -> scope in which its part is meant; nowhere for names that are not in it.
        shared: For the group.
        tp_rank: This rank in the group.
        reports: Whether this rank says who reads what.
        sums: Whether the ranks read rows of their own.
    """
    reads = vars(model)["tp_reads"] = Reads(shared, tp_rank, reports=reports, sums=sums)
    found: dict[int, tuple[str, ShardSpec]] = {}
    for name, spec in specs.items():
        path, _, key = name.rpartition(".")
        tensor = own_tensor(model.get_submodule(path), key)
        if tensor is not None:
            found.setdefault(id(tensor), (name, spec))
    kinds: dict[type, type] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        owned: dict[str, Owned] = vars(module).get("tp_owned", {})
        for key, tensor in {**own_parameters(module), **own_buffers(module)}.items():
            scope = scopes.get(f"{path}.{key}" if path else key)
            if id(tensor) in found and (key not in owned or scope is not None):
                owned[key] = Owned(*found[id(tensor)], reads, scope or Scope())
        if owned and "tp_owned" not in vars(module):
            vars(module)["tp_owned"] = owned
            plain = type(module)
            module.__class__ = kinds.setdefault(plain, _noticing(plain))
    for module in model.modules():
        vars(module)["tp_reads_here"], vars(module)["named_parameters"] = reads, MethodType(_named_parameters, module)


def _named_parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Named parameters as the class gives them; inside a user's loss, stand-ins take the place of the sharded ones."""
    reads: Reads = self.__dict__["tp_reads_here"]
    prefix = args[0] if args else kwargs.get("prefix", "")
    for name, parameter in type(self).named_parameters(self, *args, **kwargs):
        path, _, key = (name[len(prefix) + 1 :] if prefix else name).rpartition(".")
        owned = self.get_submodule(path).__dict__.get("tp_owned", {}).get(key) if reads.in_loss else None
        yield name, parameter if owned is None else stand_in(owned, parameter)


def open_in(module: nn.Module, scope: Scope) -> None:
    """Let `module`'s forward work on parts. In place."""
    put_over(module, "tp_scope", scope, _scoped_forward)


def own(module: nn.Module, key: str) -> Any:
    """This rank's part of a parameter, for the module's own forward: what stands in its place now, or the parameter."""
    kept = vars(module)
    return kept[key] if key in kept else own_parameters(module).get(key)


@contextlib.contextmanager
def in_lockstep(model: nn.Module, *, is_loss: bool = False) -> Iterator[None]:
    """Inside, all tensor-parallel ranks run the same code, so that whole tensors can be gathered.

    Args:
        model: The model.
        is_loss: Whether that code is a loss of the user's, and not the model's forward.
    """
    reads: Reads | None = vars(model).get("tp_reads")
    if reads is None:
        yield
        return
    before, reads.in_loss = reads.in_loss, is_loss
    reads.depth += 1
    try:
        with set_aside(*(() if reads.watching is None else (reads.watching,))):
            yield
    finally:
        reads.depth -= 1
        reads.in_loss = before
        if not reads.depth:
            reads.inside.clear()


def _noticing(plain: type) -> type:
    """A class like `plain` whose instances notice who reads their sharded tensors; of the same name."""

    def read(self: Any, name: str) -> Any:
        owned: Owned | None = self.__dict__.get("tp_owned", {}).get(name)
        tensor = None if owned is None else own_tensor(self, name)
        if owned is None or tensor is None or owned.scope.depth:
            return plain.__getattr__(self, name)  # type: ignore[attr-defined]  # nn.Module's
        if owned.reads.watching is not None and not owned.reads.depth:  # which knows the part
            return tensor
        if sys._getframe(1).f_globals.get("__name__", "").startswith(FULLY_SHARD):
            return tensor
        return stand_in(owned, tensor)

    body = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__getattr__": read}
    return type(plain.__name__, (plain,), body)


def _scoped_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    scope: Scope = self.tp_scope
    scope.depth += 1
    try:
        return self.tp_scope_inner(*args, **kwargs)
    finally:
        scope.depth -= 1
