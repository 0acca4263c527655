"""Counts what a training step does to a device: memory, collectives, and where the host waits.

Works on fake tensors, which have shapes and no values, and on real ones, with which it is checked. What is small and lives on
the host stays real where a fake device is metered: the values of counts and flags decide what runs next.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_parallel.compat.fake_cuda import replaced
from hf_parallel.compat.fake_ranks import group_named, ranks_of_group
from hf_parallel.compat.private_torch import id_of_storage, name_of_op
from hf_parallel.compat.torch_tools import FakeTensor, FakeTensorMode, TorchDispatchMode, pytree
from hf_parallel.memory.allocations import Allocations, Block
from hf_parallel.model.tensors import tensors_in


SMALL: Final = 1 << 16  # elements of host tensors that are real
TOLD_BYTES: Final = 1 << 18  # blocks from this size on say where they come from
READS: Final = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select"}
COPIES: Final = {"aten::_to_copy", "aten::copy_"}
DEVICE_OF: Final = torch.ops.prim.device.default
MESSAGES: Final = ("c10d::", "_c10d_functional::")


class Meter(TorchDispatchMode):
    """Meters one device while it is entered.

    Args:
        device_type: "cuda" or "cpu".
        axis_of: Name of what a group of world ranks is along.
        fake: The mode of the fake tensors; None: all are real.
        told_bytes: Blocks from this size on say where they come from.
        memory: Where blocks are noted; None makes one.

    Attributes:
        memory: Every block of the device.
        messages: (operation, axis, dtype) -> number of calls.
        message_bytes: The same -> bytes of the largest tensor of each call.
        waits: Cause and place of a wait of the host -> number of such waits.
        phase: Kind of blocks that are taken now, if nothing else is known of them.
    """

    def __init__(
        self,
        device_type: str,
        axis_of: Callable[[list[int]], str],
        fake: FakeTensorMode | None = None,
        *,
        told_bytes: int = TOLD_BYTES,
        memory: Allocations | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type, self.fake = device_type, fake
        self.memory = memory or Allocations()
        self._told_bytes = told_bytes
        self.messages: Counter[tuple[str, str, str]] = Counter()
        self.message_bytes: Counter[tuple[str, str, str]] = Counter()
        self.waits: Counter[str] = Counter()
        self.phase = "activations"
        self._axis_of = axis_of
        self._axes: dict[str, str] = {}
        self._blocks: dict[int, Block] = {}
        self._places: dict[int, tuple[int, int]] = {}  # of real storages: addresses
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        """Count anew; what is in memory stays."""
        self.memory.begin()
        for counter in (self.messages, self.message_bytes, self.waits):
            counter.clear()

    def counts(self) -> tuple[Counter[Any], ...]:
        """Operations and messages counted since `begin`, without memory."""
        return self.messages.copy(), self.message_bytes.copy(), self.waits.copy()

    def repeat(self, without: tuple[Counter[Any], ...], times: int) -> None:
        """Count what came on top of `without` some times more."""
        counters: tuple[Counter[Any], ...] = (self.messages, self.message_bytes, self.waits)
        for counter, before in zip(counters, without, strict=True):
            for key in counter:
                counter[key] += times * max(0, counter[key] - before[key])

    def name(self, model: nn.Module) -> None:
        """Tell the names of a model's modules."""
        self._names.update({module: of_any_block(name) for name, module in model.named_modules()})

    def follow(self, tensor: Tensor, kind: str, where: str = "") -> None:
        """Count the memory of a tensor that was made before."""
        self._track(tensor, "aten::empty")
        self.mark(tensor, kind, of_any_block(where))

    def mark(self, tensor: Tensor | None, kind: str, where: str = "") -> None:
        """Say what the memory of a tensor is."""
        if tensor is None:
            return
        block = self._blocks.get(id_of_storage(_local(tensor).untyped_storage()))
        if block is not None:
            block.kind, block.where = kind, where or block.where

    def waited(self, what: str) -> None:
        """Note that the host waits for the device."""
        self.waits[f"{what} {self._caller()[1]}"] += 1

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Inside, storages that are resized in place are followed (`fully_shard` gives gathered parameters up so)."""
        stock, meter = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            found = stock(storage, size)
            key = id_of_storage(storage)
            block = meter._blocks.get(key)
            if block is not None:
                block.kind = "gathered parameters"
                meter.memory.resize(block, size)
            if meter._places.pop(key, None) is not None and size:
                meter._places[key] = storage.data_ptr(), storage.data_ptr() + size
            return found

        with replaced(torch.UntypedStorage, resize_=resize_):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:  # two of three calls
            return func(*args)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own ops on the local part are counted
        kwargs = kwargs or {}
        name = name_of_op(func)
        given = tensors_in((args, kwargs))
        if name.startswith(MESSAGES):
            self._message(name, args, kwargs, given)
        if name in COPIES:
            self._copy(name, args, kwargs)
        if self.fake is None:
            found = func(*args, **kwargs)
            if name in READS:
                self._read(name, given)
        else:
            found = self._run(self.fake, func, name, args, kwargs, given)
        for tensor in tensors_in(found):
            self._track(tensor, name)
        return found

    # -- running ops ---------------------------------------------------------------------------------------------

    def _run(
        self, fake: FakeTensorMode, func: Any, name: str, args: Any, kwargs: dict[str, Any], given: list[Tensor]
    ) -> Any:
        fakes = [one for one in given if isinstance(one, FakeTensor)]
        if name in READS and fakes:
            self._read(name, given)
            return _made_up(name, fakes[0])
        if name == "aten::copy_" and fakes and not isinstance(args[0], FakeTensor):
            return args[0].zero_()  # what a device said to the host: nothing differs, nothing happened
        if name in ("c10d::allreduce_", "c10d::_allgather_base_") and not fakes:
            for tensor in given:
                tensor.zero_()  # what ranks compare in parts of their own would differ
        if name == "aten::record_stream":
            return None
        if name == "aten::_pin_memory":
            return args[0]
        if name == "aten::_fused_sdp_choice":
            return _attention_kernel(args, kwargs)
        kwargs.pop("pin_memory", None)
        if not fakes and _stays_real(args, kwargs, given):
            return func(*args, **kwargs)
        if len(fakes) < len(given) or any(one.constant is not None for one in fakes):
            args, kwargs = pytree.tree_map_only(Tensor, functools.partial(_without_values, fake), (args, kwargs))
        with fake:
            return func(*args, **kwargs)

    def _read(self, name: str, given: list[Tensor]) -> None:
        if self.device_type != "cpu" and any(one.device.type == self.device_type for one in given):
            self.waited(name.removeprefix("aten::"))

    def _copy(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Copies between host and device that the host waits for."""
        if self.device_type == "cpu":
            return
        if name == "aten::_to_copy":
            source, target = args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
            returns_at_once = kwargs.get("non_blocking", False)
        else:
            source, target = args[1].device.type, args[0].device.type
            returns_at_once = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if {source, target} == {"cpu", self.device_type} and not returns_at_once:
            self.waited("copy to the host" if target == "cpu" else "copy to the device")

    def _message(self, name: str, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> None:
        short = name.split("::")[1].strip("_").removesuffix("_base")
        if "wait" in short:
            return
        leaves = pytree.tree_leaves((args, kwargs))
        largest = max(given, key=lambda one: one.nbytes, default=None)
        dtype = "" if largest is None else str(largest.dtype).removeprefix("torch.")
        key = (short, self._axis(leaves, functional="functional" in name), dtype)
        self.messages[key] += 1
        self.message_bytes[key] += 0 if largest is None else largest.nbytes

    def _axis(self, leaves: list[Any], *, functional: bool) -> str:
        kind: Any = str if functional else torch.ScriptObject
        for leaf in leaves:
            if not isinstance(leaf, kind):
                continue
            try:
                name, ranks = ranks_of_group(group_named(leaf) if functional else leaf)
            except (RuntimeError, ValueError, LookupError, TypeError):
                continue  # an operation of a reduction, or its name
            if name not in self._axes:
                self._axes[name] = self._axis_of(ranks)
            return self._axes[name]
        return "?"

    # -- memory --------------------------------------------------------------------------------------------------

    def _track(self, tensor: Tensor, op: str) -> None:
        local = _local(tensor)
        if local.device.type != self.device_type or (self.fake is not None and not isinstance(local, FakeTensor)):
            return
        storage = local.untyped_storage()
        key = id_of_storage(storage)
        if key in self._blocks or (self.fake is None and self._is_inside(storage)):
            return
        block = self._blocks[key] = Block(self.phase)
        if storage.nbytes() >= self._told_bytes:
            module, line = self._caller()
            block.shape, block.dtype = tuple(local.shape), str(local.dtype).removeprefix("torch.")
            block.op, block.where = op.split("::")[1], f"{module} {line}".strip()
        self.memory.resize(block, storage.nbytes())
        weakref.finalize(storage, self._free, key, block).atexit = False

    def _is_inside(self, storage: torch.UntypedStorage) -> bool:
        """Whether a real storage is a part of another one."""
        start = storage.data_ptr() if storage.nbytes() else 0
        if any(begin <= start < end for begin, end in list(self._places.values())):  # some are freed meanwhile
            return True
        if start:
            self._places[id_of_storage(storage)] = start, start + storage.nbytes()
        return False

    def _free(self, key: int, block: Block) -> None:
        if self._blocks.get(key) is block:
            del self._blocks[key]
            self._places.pop(key, None)
        self.memory.resize(block, 0)

    def _caller(self) -> tuple[str, str]:
        """Module whose forward runs, and the line that called torch."""
        module, line, frame = "", "", sys._getframe(2)
        above: Any = frame
        while above is not None and not module:
            code = above.f_code
            if not line and not any(part in code.co_filename for part in SKIPPED):
                line = f"{_shortened(code.co_filename)}:{above.f_lineno}"
            if code.co_name == "forward":
                owner = above.f_locals.get("self")
                module = self._names.get(owner, "") if isinstance(owner, nn.Module) else ""
            above = above.f_back
        return module, line


SKIPPED: Final = ("/torch/", "memory/meter", "compat/fake_", "<", "contextlib.py", "weakref.py", "functools.py")


def of_any_block(name: str) -> str:
    """The name of a module or parameter without the numbers of its block and expert: what all of them have in common."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _shortened(path: str) -> str:
    for package in ("hf_parallel/", "transformers/", "accelerate/"):
        if package in path:
            return package + path.rpartition(package)[2]
    return path.rpartition("/")[2]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _without_values(fake: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor as a fake one that no value is known of: torch would compute with those it knows."""
    made = tensor if isinstance(tensor, FakeTensor) else fake.from_tensor(tensor)
    if isinstance(made, FakeTensor):
        made.constant = None
    return made


def _made_up(name: str, read: Tensor) -> Any:
    """Values for the host where it reads from a fake device: nothing differs, nothing happened."""
    if name in ("aten::nonzero", "aten::masked_select"):
        shape = (0, read.ndim) if name == "aten::nonzero" else (0,)
        return read.new_empty(shape, dtype=torch.int64 if name == "aten::nonzero" else read.dtype)
    if name == "aten::equal":
        return True
    if name == "aten::is_nonzero" or read.dtype == torch.bool:
        return False
    return 0.0 if read.is_floating_point() else 0


def _attention_kernel(args: Any, kwargs: dict[str, Any]) -> int:
    """The number of the kernel that a GPU would choose: flash attention (1) in half precision without a mask, else efficient (2)."""
    query, mask = args[0], args[3] if len(args) > 3 else kwargs.get("attn_mask")
    return 1 if query.device.type == "cpu" or (mask is None and query.dtype.itemsize == 2) else 2


def _stays_real(args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> bool:
    """Whether an op without fake inputs is of the host, and small."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        return False
    if given:
        return True
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return math.prod(size for size in sizes if isinstance(size, int)) <= SMALL
