"""Gives this process soft CUDA devices when it is imported; torch must not be imported before.

`CUDA_VISIBLE_DEVICES` says how many there are: one if it is not set.
"""

from __future__ import annotations

import ctypes
import sys
import time
import types
from typing import Any

from softcuda.build import library, torch_folder


if "torch" in sys.modules:
    raise ImportError("softcuda.devices must be imported before torch: torch asks once whether there are CUDA devices")
for name in ("libc10.so", "libtorch_cpu.so"):
    ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
LIBRARY = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
for name in ("softcuda_allocated", "softcuda_most_allocated", "softcuda_stream_of"):
    getattr(LIBRARY, name).restype = ctypes.c_int64
LIBRARY.softcuda_stream_of.argtypes = [ctypes.c_void_p]
LIBRARY.softcuda_is_recorded.restype = LIBRARY.softcuda_is_pinned.restype = ctypes.c_bool
LIBRARY.softcuda_is_pinned.argtypes = [ctypes.c_void_p]
LIBRARY.softcuda_is_recorded.argtypes = [ctypes.c_void_p, ctypes.c_int64]
LIBRARY.softcuda_install()

# What torch.cuda is made of looks at torch._C when it is imported; these two look for CUDA themselves, and are to find none.
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch._inductor.runtime.hints  # noqa: E402
import torch.cuda.random  # noqa: E402


CUDA = 1  # the number of the device type
MOST_DEVICES = 8  # as in soft.h
MEMORY_BYTES = 80 * 2**30
PROPERTIES = types.SimpleNamespace(
    name="soft CUDA", total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132, warp_size=32, uuid="0"
)


class Stream(torch.Stream):
    """`torch.cuda.Stream` as a CUDA build has it."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)  # type: ignore[call-arg]
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """`torch.cuda.Event` as a CUDA build has it."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)
        self._moment = time.perf_counter()  # work of a stream is done when it is given

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]
        """Milliseconds; that of `torch.Event` takes no subclass."""
        return 1e3 * (end_event._moment - self._moment)

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


def _current_stream(device: int) -> tuple[int, int, int]:
    stream = torch.accelerator.current_stream(torch.device("cuda", device) if device >= 0 else None)
    return stream.stream_id, stream.device_index, stream.device_type


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    stream = torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    torch.accelerator.set_stream(stream)


def _exchange(device: int) -> int:
    before = torch.accelerator.current_device_index()
    if device >= 0:
        torch.accelerator.set_device_index(device)
    return before


def _device(device: int) -> int:
    return device if device >= 0 else torch.accelerator.current_device_index()


def _statistics() -> dict[str, Any]:
    return {
        "allocated_bytes.all.current": LIBRARY.softcuda_allocated(),
        "allocated_bytes.all.peak": LIBRARY.softcuda_most_allocated(),
        "reserved_bytes.all.current": LIBRARY.softcuda_allocated(),
        "reserved_bytes.all.peak": LIBRARY.softcuda_most_allocated(),
    }


_stock_to = torch.storage._to
_stock_clone = torch.UntypedStorage.clone
_stock_resize = torch.UntypedStorage.resize_


def _storage_to(storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """`storage.to(device)`: the constructor of a storage knows the devices that torch was built for."""
    if torch.device(device).type != "cuda" or storage.is_cuda:
        return _stock_to(storage, device, non_blocking)
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    return made.copy_(storage, non_blocking)


def _storage_clone(storage: Any) -> Any:
    """`storage.clone()`, as `_storage_to`."""
    if not storage.is_cuda:
        return _stock_clone(storage)
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
    return made.copy_(storage)


def _storage_resize(storage: Any, size: int) -> Any:
    """`storage.resize_(size)`, as `_storage_to`."""
    if not storage.is_cuda:
        return _stock_resize(storage, size)
    holder = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch.ops.softcuda.resize_storage(holder, size)
    return storage


def _install() -> None:
    """What torch.cuda finds in torch._C of a CUDA build, and what it copied from there when it was imported."""
    for name, function in {
        "getDeviceCount": LIBRARY.softcuda_device_count,
        "getDevice": torch.accelerator.current_device_index,
        "setDevice": _exchange,
        "getCurrentStream": _current_stream,
        "getCurrentRawStream": lambda device: _current_stream(device)[0],
        "getDefaultStream": lambda device: (0, _device(device), CUDA),
        "setStream": _set_stream,
        "synchronize": torch.accelerator.synchronize,
        "canDeviceAccessPeer": lambda device, peer: True,
        "emptyCache": lambda: None,
        "resetPeakMemoryStats": lambda device: LIBRARY.softcuda_reset_most_allocated(),
        "getArchFlags": lambda: "sm_90",
        "ipc_collect": lambda: None,
        "isCurrentStreamCapturing": lambda: False,
    }.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch.storage._to = _storage_to  # type: ignore[assignment]
    torch.UntypedStorage.resize_ = _storage_resize  # type: ignore[method-assign]
    torch.UntypedStorage.clone = _storage_clone  # type: ignore[method-assign]
    cuda = torch.cuda
    cuda._initialized = True
    cuda.Stream = cuda.streams.Stream = Stream  # type: ignore[misc, assignment]
    cuda.Event = cuda.streams.Event = Event  # type: ignore[misc, assignment]
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange
    cuda.default_generators = tuple(map(torch.ops.softcuda.default_generator, range(MOST_DEVICES)))
    cuda.get_device_properties = lambda device=None: PROPERTIES  # type: ignore[assignment]
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.memory.memory_stats = cuda.memory_stats = lambda device=None: _statistics()
    cuda.memory.mem_get_info = cuda.mem_get_info = lambda device=None: (MEMORY_BYTES, MEMORY_BYTES)


_install()
