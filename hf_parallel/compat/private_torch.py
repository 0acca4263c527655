"""Private names of torch: of tensors, modules, operators and autograd.

Each function checks what it relies on and says which package moved when the check fails.
"""

from __future__ import annotations

import contextlib
import functools
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from hf_parallel.compat.versions import wanted
from hf_parallel.errors import UnsupportedError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor, nn


WRITERS = ("torch.", "safetensors.", "accelerate.", "pickle.", "contextlib.")


def version_of(tensor: Tensor) -> int:
    """Number of writes to a tensor through any view of its memory; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def is_referred_to(tensor: Tensor) -> bool:
    """Whether anything beside this object refers to its memory: a view, another tensor of it, an array; True if torch cannot say."""
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return True
    alone = torch.empty(0)
    return bool(count(tensor.untyped_storage()._cdata) > count(alone.untyped_storage()._cdata))


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that a view was made of, as autograd sees it; None for what is no view."""
    return tensor._base


def has_pre_hooks(module: nn.Module) -> bool:
    """Whether somebody else than hf_parallel, whose hooks change nothing, looks at or changes what a module is called with."""
    return not _all_ours(module._forward_pre_hooks)


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """Hooks of `register_forward_hook` by the ids of their handles, in the order in which they run."""
    return module._forward_hooks


def module_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """All that runs around a module's forward and backward, by the ids of the handles; changing it changes what runs."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called: calls then go past what is put around a module later."""
    return getattr(module, "_compiled_call_impl", None) is not None


def changes_backward(module: nn.Module) -> bool:
    """Whether somebody else than hf_parallel looks at or changes the gradients that pass a module."""
    return not (_all_ours(module._backward_pre_hooks) and _all_ours(module._backward_hooks))


def _all_ours(hooks: dict[int, Any]) -> bool:
    return all(str(getattr(hook, "__module__", "")).startswith("hf_parallel.") for hook in hooks.values())


def runs_around_all_modules() -> bool:
    """Whether code of somebody runs around every module, or every function of torch: global hooks, modes that are entered."""
    import torch
    from torch.nn.modules import module

    named = (f"_global_{when}_hooks" for when in ("forward", "forward_pre", "backward", "backward_pre"))
    return any(vars(module)[name] for name in named) or torch._C._len_torch_function_stack() > 0


def around_call(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what `module(...)` does, hooks of forward and backward included, by `wrapper` of it."""
    object.__setattr__(module, "_call_impl", wrapper(module._call_impl))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module itself has, by attribute; None where it was told that it has none."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Like `own_parameters`, for buffers."""
    return module._buffers


def own_tensor(module: nn.Module, key: str) -> Tensor | None:
    """A parameter or buffer that a module itself has."""
    parameter = module._parameters.get(key)
    return module._buffers.get(key) if parameter is None else parameter


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Like `own_parameters`, for children."""
    return module._modules


def is_persistent(module: nn.Module, key: str) -> bool:
    """Whether `state_dict` has a buffer of the module."""
    return key not in module._non_persistent_buffers_set


def unregister(module: nn.Module, key: str) -> Tensor:
    """Take a parameter or a buffer from a module; `state_dict` does not name it any more."""
    table: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    tensor: Tensor = table.pop(key)
    module._non_persistent_buffers_set.discard(key)
    return tensor


def name_of_op(op: Any) -> str:
    """The name of an op without its overload, e.g. "aten::mm"."""
    return str(op._schema.name)


def packet_of_op(op: Any) -> Any:
    """The op without its overload, as `flop_registry` has it; None for what is none."""
    return getattr(op, "_overloadpacket", None)


@functools.cache
def arguments_written(op: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an op changes in place, by its schema."""
    schema = getattr(op, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def gives_new_memory(op: Any) -> bool:
    """Whether an op, by its schema, changes no argument and returns no memory of one."""
    schema = getattr(op, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return all(value.alias_info is None for value in [*schema.arguments, *schema.returns])


def id_of_storage(storage: Any) -> int:
    """A number of a storage while it is alive; `data_ptr()` is 0 for every empty or meta tensor."""
    return int(storage._cdata)


def writes_arguments(op: Any) -> bool:
    """Whether an op changes one of its arguments in place."""
    return bool(op._schema.is_mutable)


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward pass now running has finished (as DDP and FSDP do)."""
    from torch.autograd import Variable

    engine = getattr(Variable, "_execution_engine", None)
    if engine is None:
        raise UnsupportedError(f"this torch has no autograd engine callbacks: install {wanted('torch')}.")
    engine.queue_callback(callback)


def gives_gradients_away(parameters: Iterable[Tensor]) -> bool:
    """Whether the backward pass now running is `torch.autograd.grad` for some of `parameters`: none gets a `grad` of it.

    Stops at the first parameter that does.
    """
    from torch import _C
    from torch.autograd.graph import get_gradient_edge

    for parameter in parameters:
        try:
            if _C._will_engine_execute_node(get_gradient_edge(parameter).node):
                return False
        except RuntimeError:  # torch does not answer for a leaf whose gradient goes to the caller
            return True
    return False


def gradient_hooks(parameter: Tensor) -> dict[int, Any]:
    """Hooks of `parameter.register_hook` by the ids of their handles; changing the dict changes what runs."""
    found: dict[int, Any] | None = parameter._backward_hooks
    return found if found is not None else {}


class Onlooker:
    """A hook on a parameter that wants nothing of the backward passes of a schedule; a layer may put its gradient off."""


def accumulation_hooks(parameter: Tensor) -> dict[int, Any]:
    """Like `gradient_hooks`, for `register_post_accumulate_grad_hook`."""
    found: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return found if found is not None else {}


def with_hooks(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of those of which `gradient_hooks` or `accumulation_hooks` has any; asked of every parameter before every forward."""
    given: Iterable[tuple[str, Any]] = named
    return [name for name, parameter in given if parameter._backward_hooks or parameter._post_accumulate_grad_hooks]


def not_overridden() -> Any:
    """`__torch_function__` of a tensor class whose functions are taken over in `__torch_dispatch__` alone."""
    import torch

    return torch._C._disabled_torch_function_impl


def without_memory(kind: type, shape: Any, dtype: Any, device: Any) -> Any:
    """A tensor of class `kind` that has no memory, as `DTensor` is made."""
    import torch

    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def in_backward_pass() -> bool:
    """Whether autograd is running a backward pass in this thread: a forward in it is a recomputation."""
    import torch

    current = getattr(torch._C, "_current_graph_task_id", None)
    if current is None:
        raise UnsupportedError(
            f"this torch does not tell whether a backward pass is running: install {wanted('torch')}."
        )
    return bool(current() != -1)


def no_torch_function() -> contextlib.AbstractContextManager[None]:
    """Inside, tensor subclasses are treated as plain tensors by functions of torch (its documented way to do so)."""
    import torch

    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def no_torch_function_modes() -> contextlib.AbstractContextManager[None]:
    """Like `no_torch_function`; modes that were entered see nothing either."""
    import torch

    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


@contextlib.contextmanager
def set_aside(*modes: Any) -> Iterator[None]:
    """Inside, functions of torch do not go through modes that are the innermost ones: each would cost some microseconds.

    Args:
        modes: Each a `TorchFunctionMode` or `TorchDispatchMode`, the innermost first.
    """
    if not modes:
        yield
        return
    from torch.overrides import TorchFunctionMode, _get_current_function_mode
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

    left: list[tuple[Any, Any]] = []
    for mode in modes:
        if mode in (_get_current_function_mode(), _get_current_dispatch_mode()):
            kind: Any = TorchFunctionMode if isinstance(mode, TorchFunctionMode) else TorchDispatchMode
            kind.__exit__(mode, None, None, None)  # as torch does, whatever the class adds
            left.append((kind, mode))
    try:
        yield
    finally:
        for kind, mode in reversed(left):
            kind.__enter__(mode)


def is_cross_entropy(function: Any) -> bool:
    """Whether `function` is `torch.nn.functional.cross_entropy` as torch ships it."""
    from torch.nn import functional

    return is_shipped(function, "cross_entropy", functional.__file__)


def is_shipped(function: Any, name: str, source: str) -> bool:
    """Whether a plain function is the one of that name in a source file: a wrapper or a replacement is not."""
    code = getattr(function, "__code__", None) if isinstance(function, FunctionType) else None
    return code is not None and code.co_name == name and code.co_filename == source


def brings_into_file(function: Any, frame: FrameType | None, libraries: tuple[str, ...]) -> bool:
    """Whether `function` of a tensor runs because somebody writes tensors to a file, and none of `libraries` does so.

    Args:
        function: What runs. Of an ordinary tensor, pickling asks torch for its storage alone, past `__reduce_ex__`.
        frame: Frame that called it.
        libraries: Beginnings of names of modules, each with its dot.
    """
    if getattr(function, "__name__", "") not in ("untyped_storage", "data_ptr"):
        return False
    writes = False
    while frame is not None and (module := f"{frame.f_globals.get('__name__', '')}.").startswith(WRITERS):
        writes = writes or frame.f_code.co_name == "_reduce_ex_internal" or module.startswith("safetensors.")
        frame = frame.f_back
    return writes and frame is not None and not module.startswith(libraries)
