"""A process that believes in CUDA devices, for dry runs on fake tensors: nothing is computed and no memory is taken.

A build of torch without CUDA has no device guard for CUDA tensors, and its autograd asks for an accelerator that is not there.
Both are given to it in this process: a guard that torch makes for backends written in Python, and hooks that answer "yes"
where torch asks whether there is such a device. What is changed is put back at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from hf_parallel.compat.torch_tools import FakeTensor
from hf_parallel.errors import UnsupportedError


CUDA, PRIVATE_USE = 1, 20  # numbers of device types
NUM_TYPES = 22
# Table of C++ methods: two entries of type information, then destructors and `isBuilt`, `isAvailable`,
# `hasPrimaryContext`.
HEAD, ANSWERS, NUM_METHODS = 2, (2, 3, 4), 64
MEMORY_BYTES: Final = 80 * 10**9


@contextlib.contextmanager
def fake_cuda(on_sync: Callable[[str], None]) -> Iterator[None]:
    """Inside, there is a CUDA device, of whose tensors only fake ones may be made, and autograd runs in this thread.

    Args:
        on_sync: Called with the name of a function of torch.cuda by which the host waits for the device.

    Raises:
        UnsupportedError: This build of torch cannot be made to believe it.
    """
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(_device_guard())
            stack.enter_context(_accelerator_hooks())
        for owner, values in _stubs(on_sync):
            stack.enter_context(replaced(owner, **values))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes of a module or class are others."""
    missing = object()
    before = {name: vars(owner).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(owner, name) if value is missing else setattr(owner, name, value)


@contextlib.contextmanager
def fake_products() -> Iterator[None]:
    """Inside, products of experts have shapes on fake tensors of the CPU, too, as `fake_cuda` gives them on those of a GPU."""
    with replaced(functional, grouped_mm=_grouped(functional.grouped_mm)):
        yield


def _library(name: str) -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    found = next((folder / f"{name}{end}" for end in (".so", ".dylib") if (folder / f"{name}{end}").exists()), None)
    if found is None:
        raise _unlike("has no shared libraries that can be loaded by name")
    return ctypes.CDLL(str(found))


def _unlike(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"a dry run needs CUDA tensors without CUDA, and torch {torch.__version__} {what}. Run it on Linux or macOS with "
        "torch 2.11 to 2.13, or where there is a GPU."
    )


@functools.cache
def _guards() -> tuple[Any, int, object]:
    """Torch's table of device guards, by device type, and the address of one for CUDA that is written in Python.

    It is made once and kept, because torch keeps a pointer to it.
    """
    try:
        table = (ctypes.c_void_p * NUM_TYPES).in_dll(_library("libc10"), "_ZN3c104impl26device_guard_impl_registryE")

        class Guard(torch._C._acc.DeviceGuard):
            def type_(self) -> Any:
                return torch._C._autograd.DeviceType.CUDA

        before, guard = table[PRIVATE_USE], Guard()
        torch._C._acc.register_python_privateuseone_device_guard(guard)
    except (AttributeError, ValueError) as error:
        raise _unlike(f"has no place for a device guard ({error})") from error
    made, table[PRIVATE_USE] = table[PRIVATE_USE], before
    return table, made or 0, guard


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Inside, CUDA devices have a guard."""
    table, made, _ = _guards()
    before, table[CUDA] = table[CUDA], made
    try:
        yield
    finally:
        table[CUDA] = before


@contextlib.contextmanager
def _accelerator_hooks() -> Iterator[None]:
    """Let torch find that CUDA is its accelerator."""
    try:
        get = _library("libtorch_cpu")._ZN2at6detail12getCUDAHooksEv
    except AttributeError as error:
        raise _unlike(f"has no hooks of CUDA ({error})") from error
    get.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(get())
    stock = table.value or 0
    size = ctypes.sizeof(ctypes.c_void_p)
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda hooks: True)
    kind = ctypes.c_void_p * (HEAD + NUM_METHODS)
    methods = kind(*kind.from_address(stock - HEAD * size))
    for place in ANSWERS:
        methods[HEAD + place] = ctypes.cast(answer, ctypes.c_void_p).value
    table.value = ctypes.addressof(methods) + HEAD * size
    try:
        if str(torch.accelerator.current_accelerator()) != "cuda":
            raise _unlike("does not ask its hooks for an accelerator")
        yield
    finally:
        table.value = stock


class _Stream:
    """A stream that runs nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.stream_id = self.cuda_stream = id(self)
        self.device_index, self.device_type, self.priority = 0, CUDA, 0

    def wait_stream(self, other: Any) -> None:
        """Do nothing: work has always ended."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: work has always ended."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cuda.Event() if event is None else event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        return None


class _Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take any arguments of torch.cuda.Event."""

    def record(self, stream: Any = None) -> None:
        """Do nothing: no stream runs."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the event has happened."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _stubs(on_sync: Callable[[str], None]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (module or class, name -> stub) of what is replaced."""
    cuda = torch.cuda

    def waits(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: on_sync(name)

    stream_type = type("Stream", (_Stream,), {"synchronize": waits("Stream.synchronize")})
    event_type = type("Event", (_Event,), {"synchronize": waits("Event.synchronize")})
    stream, generator = stream_type(), torch.Generator()
    nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
    inside: Callable[..., Any] = lambda *args, **kwargs: contextlib.nullcontext()  # noqa: E731
    about = types.SimpleNamespace(
        name="dry run", total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132, warp_size=32
    )
    yield (
        cuda,
        {
            "Stream": stream_type,
            "Event": event_type,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda *args, **kwargs: True,
            "device_count": lambda: 8,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: "dry run",
            "get_device_properties": lambda device=None: about,
            "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
            "synchronize": waits("torch.cuda.synchronize"),
            "default_generators": (generator,) * 8,
            "is_current_stream_capturing": lambda: False,
            "get_rng_state": lambda device=None: generator.get_state(),
            "set_rng_state": lambda state, device=None: generator.set_state(state),
            **dict.fromkeys(("device", "stream"), inside),
            **dict.fromkeys(("_lazy_init", "init", "set_device", "set_stream", "empty_cache", "manual_seed"), nothing),
        },
    )
    yield (
        torch.accelerator,
        {
            "current_stream": lambda device=None: stream,
            "current_device_index": lambda: 0,
            "synchronize": waits("torch.accelerator.synchronize"),
        },
    )
    yield torch, {"tensor": _tensor(torch.tensor)}
    yield Tensor, {"__getitem__": _indexed(Tensor.__getitem__), "record_stream": lambda self, stream: None}
    yield (
        functional,
        {
            "scaled_dot_product_attention": _attention(functional.scaled_dot_product_attention),
            "grouped_mm": _grouped(functional.grouped_mm),
        },
    )


def _attention(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`scaled_dot_product_attention` with the kernel that a GPU would choose, for which torch asks the device."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.device.type != "cuda":
            return stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (one.to(dtype) for one in (query, key, value))
        broadcasts = not enable_gqa and key.shape[1] != query.shape[1]
        alike = query.shape[-1] == value.shape[-1]  # flash attention takes no values of another width
        if attn_mask is None and query.dtype.itemsize == 2 and alike and not broadcasts:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if enable_gqa or broadcasts:  # which the kernels below do not know
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        if broadcasts:  # nor does any that stores no scores
            stores = torch.ops.aten._scaled_dot_product_attention_math
            return stores(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)  # what is added to the scores
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    return attend


def _grouped(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`grouped_mm`, which devices compute in fp32, too; torch's rule for its shape knows bf16 alone, and transformers has one of all."""

    def multiply(input: Tensor, weight: Tensor, *, offs: Tensor | None = None, **more: Any) -> Any:
        if not isinstance(weight, FakeTensor) or weight.dtype == torch.bfloat16 or offs is None or more:
            return stock(input, weight, offs=offs, **more)
        return torch.ops.transformers.grouped_mm_fallback(input, weight, offs=offs)

    return multiply


def _indexed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Indexing with lists, of which torch makes tensors on the device below every dispatch mode."""

    def getitem(self: Tensor, index: Any) -> Any:
        if self.device.type == "cuda":
            parts = index if isinstance(index, tuple) else (index,)
            index = tuple(torch.tensor(one) if isinstance(one, list) else one for one in parts)
        return stock(self, index)

    return getitem


def _tensor(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.tensor`, which copies to the device below every dispatch mode."""

    def tensor(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        made = stock(data, *args, **kwargs)
        if device is not None and torch.device(device).type != "cpu":
            made = made.to(device)
        return made.requires_grad_() if requires_grad else made

    return tensor
