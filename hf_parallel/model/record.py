"""Recording one tiny forward, op by op, into addresses and small integers.

Every op is logged with the storages it reads and writes and with the epoch it ran in: 0 before the first block, 2j+1
inside block j, 2j+2 between blocks j and j+1, 2L after the last block. Storages rather than tensors, because a view is
another python object on the same memory. What is returned holds no tensor: storages appear as numbers, return values
as templates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from hf_parallel.compat.private_torch import (
    arguments_written,
    forward_hooks,
    id_of_storage,
    own_parameters,
    packet_of_op,
)
from hf_parallel.compat.private_transformers import CACHES
from hf_parallel.compat.torch_tools import TorchDispatchMode
from hf_parallel.model import shapes_of_ops
from hf_parallel.model.stack import blocks_of
from hf_parallel.model.structure import Path, Template, get_at, leaf_paths, leaves, nodes, template_of
from hf_parallel.model.tensors import tensors_in
from hf_parallel.model.unchanged import refuse_written


@dataclasses.dataclass(frozen=True)
class Op:
    """One recorded op; storages are numbers, `is_view` ops only rename memory."""

    epoch: int
    reads: frozenset[int]
    writes: frozenset[int]
    name: str
    is_view: bool
    scalars: str = ""  # numbers, flags and names that it was given


@dataclasses.dataclass(frozen=True)
class HookedCall:
    """One call, inside a block, of a submodule on which somebody else's forward hook listens."""

    module: str  # name below the block
    occurrence: int  # n-th recorded call of that module in that block
    output: Template
    tensors: tuple[tuple[Path, int], ...]


@dataclasses.dataclass
class BlockTrace:
    """Values that one block returned, wrote into its arguments, and showed to hooks; tensors as storage numbers."""

    returned: Template
    return_tensors: tuple[tuple[Path, int], ...]
    written: tuple[tuple[Path, int], ...]  # argument leaves that were not there, or were others, before the call
    arguments: tuple[tuple[Path, int], ...]
    hooked: list[HookedCall]


@dataclasses.dataclass
class Record:
    """One forward of a model, seen from one candidate stack."""

    stack: str
    ops: list[Op]
    calls: dict[str, list[int]]  # candidate stack -> order in which its blocks ran
    blocks: dict[int, BlockTrace]
    outputs: frozenset[int]  # storages of the tensors the model returned
    parameters: dict[str, int]  # every parameter and buffer name (aliases too) -> storage number
    zero_outputs: dict[str, str]  # module -> "rows" | "features": its output is a table look-up / a 2-D projection
    flops: dict[int, float]  # matmul FLOPs by epoch, forward
    traffic: dict[int, float]  # bytes of activations that ops without FLOPs read and write, by epoch, forward
    saved: dict[int, int]  # bytes that autograd keeps for the backward, parameters and buffers left out, by epoch
    early: frozenset[str]  # modules of `zero_outputs` that are called before the first block only
    has_scalars: bool = False


class _OpLog(TorchDispatchMode):
    """Logs every op below autograd."""

    def __init__(self, with_scalars: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.with_scalars = with_scalars
        self.ops: list[Op] = []
        self.flops: dict[int, float] = {}
        self.traffic: dict[int, float] = {}
        self.saved: dict[int, int] = {}
        self.weights: frozenset[int] = frozenset()  # storages of parameters and buffers
        self.epoch = 0
        self._kept: set[int] = set()
        self._silent = False
        self._numbers: dict[int, int] = {}
        self._storages: list[Any] = []  # kept alive, else a freed address would be taken for an old tensor

    def number(self, tensor: Tensor) -> int:
        """A small integer for the tensor's memory; views of one memory share it."""
        try:
            storage = tensor.untyped_storage()
            address = id_of_storage(storage)
        except NotImplementedError:  # a wrapper subclass without storage: the object stands for itself
            storage, address = tensor, id(tensor)  # type: ignore[assignment]
        if address not in self._numbers:
            self._numbers[address] = len(self._numbers)
            self._storages.append(storage)
        return self._numbers[address]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = shapes_of_ops.call(func, args, kwargs)
        if self._silent:
            return out
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(out)
        mutated = _mutated(func, args, kwargs)
        reads = frozenset(map(self.number, inputs))
        writes = frozenset(map(self.number, outputs + mutated))
        is_view = not mutated and bool(writes) and writes <= reads
        scalars = _scalars(args, kwargs) if self.with_scalars else ""
        self.ops.append(Op(self.epoch, reads, writes, _name(func), is_view, scalars))
        flops = _flops(func, args, kwargs, out)
        self.flops[self.epoch] = self.flops.get(self.epoch, 0.0) + flops
        if not flops and not is_view:
            self.traffic[self.epoch] = self.traffic.get(self.epoch, 0.0) + self._bytes([*inputs, *outputs])
        return out

    def _bytes(self, tensors: list[Tensor]) -> int:
        """Bytes of activations; of an expanded tensor those that exist."""
        moved = [t for t in tensors if self.number(t) not in self.weights]
        return sum(min(t.nbytes, _memory(t)) for t in moved if t.layout == torch.strided)

    def keep(self, tensor: Tensor) -> Tensor:
        """Count what autograd saves; a storage that is saved several times counts once, where it was saved first."""
        number = self.number(tensor)
        if number not in self.weights and number not in self._kept and tensor.layout == torch.strided:
            self._kept.add(number)
            self.saved[self.epoch] = self.saved.get(self.epoch, 0) + _memory(tensor)
        self._silent = True  # the model does not run this op
        try:
            return tensor.detach()  # an output that its own node keeps would never be freed
        finally:
            self._silent = False


@functools.cache
def _name(op: Any) -> str:
    return str(op)  # which torch composes each time


def _scalars(args: Any, kwargs: Mapping[str, Any]) -> str:
    plain = [value for value in args if not isinstance(value, Tensor)]
    named = [(name, value) for name, value in kwargs.items() if not isinstance(value, Tensor)]
    if not plain and not named:
        return ""
    return repr((*map(_scalar, plain), *((name, _scalar(value)) for name, value in named))).replace("torch.", "")


def _scalar(value: Any) -> Any:
    """A value without its tensors, which would be printed."""
    if isinstance(value, (list, tuple)):
        return [_scalar(item) for item in value]
    return "" if isinstance(value, Tensor) else value


def _memory(tensor: Tensor) -> int:
    """Bytes of the storage behind a strided tensor."""
    try:
        return tensor.untyped_storage().nbytes()
    except NotImplementedError:  # a wrapper subclass without storage
        return tensor.nbytes


def _mutated(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that an op writes in place, by its schema."""
    found: list[Tensor] = []
    for position, name in arguments_written(func):
        found += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return found


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> float:
    """Forward FLOPs of a matmul-like op, 0 for any other."""
    formula = flop_registry.get(packet_of_op(func))
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    if "grouped_mm" in _name(func) and len(args) > 1 and args[0].ndim == 2 and args[1].ndim == 3:
        # torch has no formula for it: each row meets one expert
        return 2.0 * float(args[0].numel()) * float(args[1].shape[-1])
    return 0.0


class _Watcher:
    """Hooks that move the epoch and note what blocks take, return, write and show to other hooks."""

    def __init__(self, model: nn.Module, stack: str, candidates: list[str], log: _OpLog) -> None:
        self.log = log
        self.calls: dict[str, list[int]] = {name: [] for name in candidates}
        self.blocks: dict[int, BlockTrace] = {}
        self.zero_outputs: dict[str, str] = {}
        self._varied: set[str] = set()
        self.called: dict[str, set[int]] = {}  # a table or projection -> epochs
        self._before: dict[Path, int] = {}
        self._hooked: list[HookedCall] = []
        self._handles: list[RemovableHandle] = []
        self._names: dict[int, str] = {}
        for name in candidates:
            for j, block in enumerate(blocks_of(model, name)):
                self._handles.append(block.register_forward_pre_hook(self._count(name, j)))
        blocks = blocks_of(model, stack)
        for j, block in enumerate(blocks):
            self._handles.append(
                block.register_forward_pre_hook(self._enter(j, block), with_kwargs=True, prepend=True)
            )
            self._handles.append(block.register_forward_hook(self._leave(j), with_kwargs=True))
        for inner in {id(m): m for block in blocks for n, m in block.named_modules() if n}.values():
            self._watch_inner(inner)
        for name, module in model.named_modules():
            if not name.startswith(stack + ".") and _is_table(module):
                self._handles.append(module.register_forward_hook(self._shape(name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, name: str, j: int) -> Callable[..., None]:
        return lambda module, args: self.calls[name].append(j)

    def _enter(self, j: int, block: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.log.epoch = 2 * j + 1
            self._before = {path: self.log.number(t) for path, t in leaves((args, kwargs))}
            self._hooked = []
            self._names = {id(m): n for n, m in block.named_modules() if n}

        return hook

    def _leave(self, j: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            number = self.log.number
            found = tuple((path, number(t)) for path, t in leaves((args, kwargs)))
            handed = {id(value): path for path, value in nodes((args, kwargs)) if path}
            returned = template_of(out, handed)
            self.blocks[j] = BlockTrace(
                returned=returned,
                return_tensors=tuple((path, number(get_at(out, path))) for path in leaf_paths(returned)),
                written=tuple((path, n) for path, n in found if self._before.get(path) != n),
                arguments=found,
                hooked=self._hooked,
            )
            self.log.epoch = 2 * j + 2
            self._names = {}

        return hook

    def _watch_inner(self, inner: nn.Module) -> None:
        own: list[int] = []

        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            name = self._names.get(id(module))
            if name is None or not any(key not in own for key in forward_hooks(module)):
                return
            occurrence = sum(call.module == name for call in self._hooked)
            output = template_of(out, {})
            tensors = tuple((path, self.log.number(get_at(out, path))) for path in leaf_paths(output))
            self._hooked.append(HookedCall(name, occurrence, output, tensors))

        handle = inner.register_forward_hook(hook, with_kwargs=True)
        own.append(handle.id)
        self._handles.append(handle)

    def _shape(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self.called.setdefault(name, set()).add(self.log.epoch)
            kind = _zero_kind(module, args, out)
            if kind is None or self.zero_outputs.get(name, kind) != kind or name in self._varied:
                self.zero_outputs.pop(name, None)
                self._varied.add(name)
            else:
                self.zero_outputs[name] = kind

        return hook


def _is_table(module: nn.Module) -> bool:
    """A module without children whose own weight is a matrix: an embedding or a projection."""
    weight = own_parameters(module).get("weight")
    return weight is not None and weight.ndim == 2 and next(module.children(), None) is None


def _zero_kind(module: nn.Module, args: Any, out: Any) -> str | None:
    """Relation of the output's shape to the input's: "rows" (look-up), "features" (projection), or None if unknown."""
    if len(args) < 1 or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
        return None
    given, weight = args[0], own_parameters(module)["weight"]
    if weight is None or out.ndim < 1 or out.shape[-1] not in weight.shape:
        return None
    if not given.is_floating_point():
        width = weight.shape[1]
        return "rows" if out.shape == (*given.shape, width) and out.dtype == weight.dtype else None
    outer = given.ndim > 0 and out.shape[:-1] == given.shape[:-1]
    pair = outer and sorted((given.shape[-1], out.shape[-1])) == sorted(weight.shape)
    return "features" if pair else None


def record_forward(
    model: nn.Module,
    stack: str,
    candidates: list[str],
    forward: Callable[..., Any],
    sample: Mapping[str, Any],
    *,
    with_scalars: bool = False,
) -> Record:
    """Run one forward and log it from the point of view of `stack`.

    Args:
        model: the model; call inside `unchanged`.
        stack: the candidate whose blocks set the epochs.
        candidates: all candidates; the order of their calls is noted.
        forward: what to call with the sample.
        sample: keyword arguments of a tiny batch.
        with_scalars: whether to note the numbers that ops were given, which takes longer.

    Raises:
        UnsupportedError: The forward writes to a parameter.
    """
    log = _OpLog(with_scalars)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    parameters = {name: log.number(t) for name, t in tensors}
    log.weights = frozenset(parameters.values())
    watcher = _Watcher(model, stack, candidates, log)
    try:
        with torch.enable_grad(), log, saved_tensors_hooks(log.keep, lambda tensor: tensor):
            out = forward(**sample)
    finally:
        watcher.remove()
    written = {number for op in log.ops if not op.is_view for number in op.writes}
    refuse_written(model, [name for name, _ in model.named_parameters() if parameters.get(name) in written])
    ignored = set(getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", None) or CACHES)
    outputs = frozenset(log.number(t) for path, t in leaves(out) if not path or path[0][1] not in ignored)
    return Record(
        stack=stack,
        ops=log.ops,
        calls=watcher.calls,
        blocks=watcher.blocks,
        outputs=outputs,
        parameters=parameters,
        zero_outputs=watcher.zero_outputs,
        flops=log.flops,
        traffic=log.traffic,
        saved=log.saved,
        early=frozenset(name for name, epochs in watcher.called.items() if epochs == {0}),
        has_scalars=with_scalars,
    )
