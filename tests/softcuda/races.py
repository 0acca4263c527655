"""Finds accesses to one tensor from two streams, or from a stream and the host, that nothing orders.

torch.cuda._sanitizer keeps the books: soft devices report streams, events and memory to it as a CUDA build does. Three things are
added to what its own mode sees:
* The host is a stream too. What it does with pinned memory must come after the copies that it waited for, and kernels come after
  what it did before they were launched.
* A tensor is its whole storage, so that a slice of a buffer is the buffer.
* Memory that is freed goes to the next tensor of the stream on which it was allocated: work of another stream on it must be over
  from the view of that stream, unless `record_stream` said so.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.cuda._gpu_trace as gpu_trace
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, ArgumentHandler, EventHandler
from torch.utils._python_dispatch import TorchDispatchMode

from softcuda.devices import LIBRARY


HOST = -1  # the host among the streams


class _Arguments(ArgumentHandler):
    """The storages that an operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.has_device = False
        self.has_pinned = False

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type not in ("cuda", "cpu"):
            return  # tensors without memory, and those made of others, which show up themselves
        base = value.untyped_storage().data_ptr()
        self.has_device |= value.is_cuda
        if not base or not (value.is_cuda or _is_pinned(base)):
            return
        self.has_pinned |= not value.is_cuda
        if is_write:
            self.dataptrs_written.add(base)
        elif not metadata_only:
            self.dataptrs_read.add(base)
        self.tensor_aliases.setdefault(base, [])
        if name is not None:
            self.tensor_aliases[base].append(name)
        if is_output:
            self.outputs.add(base)


def _is_pinned(base: int) -> bool:
    return bool(LIBRARY.softcuda_is_pinned(base))


class Races(TorchDispatchMode):
    """Reports in `found`, one text a race; of a step on one device, with all its threads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.handler = EventHandler()
        self.handler.syncs.create_stream(HOST)
        self._waited: set[int] = set()  # streams that the host waited for while an operator ran

    def listen(self) -> None:
        """Hear of streams, events and memory from now on, for the life of this process: torch has no way back."""
        torch._C._activate_gpu_trace()
        handler = self.handler
        gpu_trace.register_callback_for_event_creation(handler._handle_event_creation)
        gpu_trace.register_callback_for_event_deletion(handler._handle_event_deletion)
        gpu_trace.register_callback_for_event_record(handler._handle_event_record)
        gpu_trace.register_callback_for_event_wait(handler._handle_event_wait)
        gpu_trace.register_callback_for_memory_allocation(handler._handle_memory_allocation)
        gpu_trace.register_callback_for_memory_deallocation(self._freed)
        gpu_trace.register_callback_for_stream_creation(handler._handle_stream_creation)
        gpu_trace.register_callback_for_device_synchronization(handler._handle_device_synchronization)
        gpu_trace.register_callback_for_stream_synchronization(self._host_waits)
        gpu_trace.register_callback_for_event_synchronization(handler._handle_event_synchronization)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.record_stream.default:
            return func(*args, **kwargs)
        is_factory = bool(FACTORY_FUNCTION_REGEX.match(func._schema.name))
        arguments = _Arguments()
        arguments.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
        self._waited.clear()
        result = func(*args, **kwargs)
        arguments.parse_outputs(func._schema, result, is_factory=is_factory)
        if arguments.has_device or arguments.has_pinned:
            stream = torch.cuda.current_stream().cuda_stream if arguments.has_device else HOST
            self._launched(stream, arguments, func._schema)
            for waited in self._waited:  # the wait is at the operator's end
                self.handler._handle_stream_synchronization(waited)
        return result

    def _launched(self, stream: int, arguments: _Arguments, schema: Any) -> None:
        syncs = self.handler.syncs
        if stream != HOST:
            syncs._ensure_stream_exists(stream)
            syncs.current_sync_states[stream][HOST] = syncs.current_sync_states[HOST].get(HOST, 0)
        errors = self.handler._handle_kernel_launch(
            stream,
            arguments.dataptrs_read - arguments.dataptrs_written,
            arguments.dataptrs_written,
            arguments.outputs,
            schema,
            arguments.tensor_aliases,
        )
        self.found += [str(error) for error in errors]

    def _host_waits(self, stream: int) -> None:
        self._waited.add(stream)
        self.handler._handle_stream_synchronization(stream)

    def _freed(self, base: int) -> None:
        """The next owner works on the stream of the allocation: what others still do must be known there."""
        handler, owner = self.handler, int(LIBRARY.softcuda_stream_of(base))
        info = handler.tensors_accessed.accesses.get(base)
        for access in [*info.reads, *([info.write] if info.write is not None else [])] if info is not None else []:
            if access.stream in (owner, HOST) or LIBRARY.softcuda_is_recorded(base, access.stream):
                continue
            if not handler.syncs.is_ordered_after(owner, access.seq_num, access.stream):
                self.found.append(
                    f"memory of stream {owner} is freed while stream {access.stream} may still be {access.type} it in "
                    f"{access.operator}\n"
                    + "".join(traceback.format_list(access.stack_trace))
                    + "record_stream() is missing"
                )
                break
        handler._handle_memory_deallocation(base)


@contextmanager
def watching() -> Iterator[list[str]]:
    """Inside, races are found; once a process, because torch never stops to report."""
    races = Races()
    races.listen()
    with races:
        yield races.found
