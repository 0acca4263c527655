"""The only module that touches private names of torch, transformers and accelerate.

Each function checks what it relies on and says which package moved when the check fails.
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
import threading
from collections import OrderedDict
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from hf_parallel.errors import UnsupportedError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.distributed_c10d import Store
    from torch.optim import Optimizer


def private_store() -> Store | None:
    """A connection of its own to the default process group's key-value store; None when this torch gives none.

    Its own, because a call that blocks on one connection blocks every other thread that uses it.
    """
    from torch.distributed import distributed_c10d

    getter = getattr(distributed_c10d, "_get_default_store", None)
    clone = getattr(getter(), "clone", None) if getter is not None else None
    return clone() if clone is not None else None


def blocked_collective() -> tuple[tuple[int, int] | None, str | None]:
    """The call of a torch.distributed collective that another thread of this process is in, and its name.

    The call is equal as long as the thread stays in it. NCCL's collectives return at once, so they are not seen.
    """
    from torch.distributed import distributed_c10d

    own = threading.get_ident()
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost if thread != own else None
        for _ in range(4):  # the wait itself may be a helper's
            if frame is None:
                break
            if frame.f_globals is vars(distributed_c10d):
                return (id(frame), frame.f_lasti), frame.f_code.co_name
            frame = frame.f_back
    return None, None


class Pending(Protocol):
    """A collective on its way."""

    def wait(self) -> object:
        """Return when its result is there."""
        ...


def all_gather_flat(whole: Tensor, mine: Tensor, group: ProcessGroup) -> Work | None:
    """Begin to gather the ranks' `mine`, f[n], into `whole`, f[N n]; torch 2.13 gave the function another name."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work | None = gather(whole, mine, group=group, async_op=True)
    return work


def reduce_scatter_flat(mine: Tensor, whole: Tensor, group: ProcessGroup) -> Pending | None:
    """Begin to sum the ranks' `whole`, f[N n], of which each rank gets its part, f[n], in `mine`.

    On gloo, whose own sends the bytes of an all-reduce (torch 2.13), ranks exchange parts and whoever waits sums them.
    """
    import torch.distributed as dist

    if "gloo" in dist.get_backend(group):
        parts = whole.new_empty(group.size(), mine.numel())
        return _PartsToSum(dist.all_to_all_single(parts.view(-1), whole, group=group, async_op=True), parts, mine)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work | None = scatter(mine, whole, group=group, async_op=True)
    return work


class _PartsToSum:
    """The ranks' parts on their way here, f[N, n]; `wait` sums them into `mine`, f[n]."""

    def __init__(self, work: Pending | None, parts: Tensor, mine: Tensor) -> None:
        self._work, self._parts, self._mine = work, parts, mine

    def wait(self) -> None:
        import torch

        if self._work is not None:
            self._work.wait()
        torch.sum(self._parts, 0, out=self._mine)


def loss_scale(scaler: Any) -> Tensor:
    """What an fp16 loss scaler multiplies losses with now, without waiting for the device.

    Raises:
        UnsupportedError: This torch keeps it elsewhere.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    if scale is None:
        raise UnsupportedError(
            f"the scale of {type(scaler).__name__} cannot be read, so what gradient compression feeds back would be in "
            "the wrong units. Train in bf16, or set gradient_compression.method to int8."
        )
    return scale


# Where in gloo's own source a failed transfer was noticed stands at the head of its messages.
_OF_GLOO = re.compile(r"\[[^\]\s]*\bgloo/[^\]\s]*\.(cc|h):\d+\] ")


def is_connection_loss(error: BaseException, *, in_collective: bool = False) -> bool:
    """Whether a collective failed because another rank is gone.

    NCCL's and the network's errors have classes of their own. gloo raises plain RuntimeErrors (torch 2.13): they begin
    with the place in its source, and no Python code has raised them.

    Args:
        error: What was raised.
        in_collective: Whether only a collective can have raised it, so that who did need not be found out.
    """
    from torch.distributed import DistBackendError, DistNetworkError

    if isinstance(error, (DistBackendError, DistNetworkError)):
        return True
    if type(error) is not RuntimeError or _OF_GLOO.match(str(error)) is None:
        return False
    return in_collective or not _raised_by_python(error)


def _raised_by_python(error: BaseException) -> bool:
    """Whether a `raise` statement made this error, and no compiled function that was called."""
    trace = error.__traceback__
    if trace is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code
    return code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, through any view of its memory; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def has_pre_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what a module is called with."""
    return bool(module._forward_pre_hooks)


def forward_hooks(module: nn.Module) -> dict[int, Any]:
    """What `register_forward_hook` was given, by the ids of their handles, in the order in which they run."""
    return module._forward_hooks


def module_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """All that runs around a module's forward and backward, by the ids of the handles; changing it changes what runs."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def around_call(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what `module(...)` does, hooks of forward and backward included, by `wrapper` of it."""
    object.__setattr__(module, "_call_impl", wrapper(module._call_impl))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module itself has, by attribute; None where it was told that it has none."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """As `own_parameters`, buffers."""
    return module._buffers


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


def arguments_written(op: Any) -> list[tuple[int, str]]:
    """Position and name of each argument that an op changes in place, by its schema."""
    schema = getattr(op, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return [
        (position, argument.name)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def id_of_storage(storage: Any) -> int:
    """A number of a storage while it is alive; `data_ptr()` is 0 for every empty or meta tensor."""
    return int(storage._cdata)


def keep_class_name(module: nn.Module) -> None:
    """Give the class that `fully_shard` made the name of the module's own: saving and label smoothing look at it.

    Its `forward` becomes the own one as well: checkpointed layers look whether theirs is still the class's.
    """
    from torch.distributed.fsdp import FSDPModule

    kind, place = type(module), FSDPModule._orig_cls_mro_index
    plain: Any = kind.__mro__[place]
    body = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "_orig_cls_mro_index": place + 1}
    renamed = type(plain.__name__, (kind,), body)
    type.__setattr__(renamed, "forward", plain.forward)
    module.__class__ = renamed


def writes_arguments(op: Any) -> bool:
    """Whether an op changes one of its arguments in place."""
    return bool(op._schema.is_mutable)


def steps_counted(scheduler: Any) -> int:
    """How often a learning rate scheduler was stepped, the step of its constructor included."""
    return int(scheduler._step_count)


def count_step(scheduler: Any) -> None:
    """Count a step that is not taken, as accelerate does between two updates."""
    scheduler._step_count += 1


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` once, when the backward pass now running has finished (as DDP and FSDP do)."""
    from torch.autograd import Variable

    engine = getattr(Variable, "_execution_engine", None)
    if engine is None:
        raise UnsupportedError("this torch has no autograd engine callbacks: install torch >= 2.11")
    engine.queue_callback(callback)


def scaler_of_group(stock: torch.amp.GradScaler, device: str, group: ProcessGroup | None) -> torch.amp.GradScaler:
    """A loss scaler with the settings of `stock` that skips a step on all ranks of a group or on none.

    Args:
        stock: Makes the decision from its own rank's gradients.
        device: Type of the device that the scale is on.
        group: The ranks that decide together.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class GroupGradScaler(ShardedGradScaler):
        def unscale_(self, optimizer: Optimizer) -> None:
            super().unscale_(optimizer)
            # Its flags have shape (1,); fused optimizers subtract them from step counts of shape ().
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.squeeze_()

    if isinstance(stock, ShardedGradScaler):
        return stock
    return GroupGradScaler(
        device=device,
        init_scale=stock.get_scale(),
        growth_factor=stock.get_growth_factor(),
        backoff_factor=stock.get_backoff_factor(),
        growth_interval=stock.get_growth_interval(),
        enabled=stock.is_enabled(),
        process_group=group,
    )


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
    """What `parameter.register_hook` was given, by the ids of their handles; changing it changes what runs."""
    found: dict[int, Any] | None = parameter._backward_hooks
    return found if found is not None else {}


class Onlooker:
    """A hook on a parameter that wants nothing of the backward passes of a schedule; a layer may put its gradient off."""


def accumulation_hooks(parameter: Tensor) -> dict[int, Any]:
    """As `gradient_hooks`, of `register_post_accumulate_grad_hook`."""
    found: dict[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return found if found is not None else {}


def whole_numbers_of_parts() -> None:
    """Let `float(p.grad.sum())` of a DTensor give the sum over all ranks: torch 2.13 gives that of this rank's part.

    For all DTensors of this process: a number that was right stays what it was.
    """
    import torch
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if not isinstance(handlers, dict):
        raise UnsupportedError(
            "numbers taken of partitioned tensors cannot be made whole: this torch keeps the functions of DTensor elsewhere. Use "
            "zero.stage 1 or 2 of the native engine, or torch 2.13."
        )

    def item(func: Any, args: Any, kwargs: Any) -> Any:
        value = args[0]
        partial = any(placement.is_partial() for placement in value.placements)
        return func(value.full_tensor() if partial else value.to_local())

    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, item)


def mark_rows_of_parts(kind: type) -> None:
    """Let views of a DTensor that are copies (rows of what is sharded by rows) be of class `kind`, a DTensor too."""
    import torch
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them
    aten = torch.ops.aten

    def memory(tensor: Any) -> int:
        return int(tensor._local_tensor.untyped_storage().data_ptr())

    def view(func: Any, args: Any, kwargs: Any) -> Any:
        del handlers[func]
        try:
            found = func(*args, **kwargs)
        finally:
            handlers[func] = view
        for one in found if isinstance(found, list | tuple) else [found]:
            if isinstance(args[0], kind) or memory(one) != memory(args[0]):
                one.__class__ = kind
        return found

    for func in (
        *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
        *(aten.view.default, aten._unsafe_view.default, aten.diagonal.default),
    ):
        handlers.setdefault(func, view)


def exchangeable_data_of_parts() -> None:
    """Let `p.grad.data = new` of a DTensor have its effect: torch 2.13 drops the new values and keeps the part as it was.

    For all DTensors of this process; what is assigned stays shared with its owner, as with plain tensors.
    """
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    if "data" in vars(DTensor):
        return
    if "_local_tensor" not in DTensor.__slots__ or "_spec" not in DTensor.__slots__:
        raise UnsupportedError("this torch keeps the parts of a DTensor elsewhere: install torch >= 2.11,<2.14")
    stock: Any = Tensor.data

    def exchange(part: Any, new: Any) -> None:
        if not isinstance(new, DTensor) or new.shape != part.shape:
            kind = "a DTensor" if isinstance(new, DTensor) else "a plain tensor"
            raise UnsupportedError(
                f"tensor.data = {kind} of shape {tuple(new.shape)}, on a tensor of shape {tuple(part.shape)} that is shared out "
                "over replicas (zero.stage: 3 or engine: fsdp2). Assign what is computed from the tensor itself "
                "(torch.zeros_like(p.grad), p.grad * 2), or set zero.stage to 1 or 2 of the native engine."
            )
        alike: Any = new.detach().redistribute(part.device_mesh, part.placements)
        stock.__set__(part, alike)
        part._local_tensor, part._spec = alike._local_tensor, alike._spec

    DTensor.data = property(lambda part: stock.__get__(part), exchange)  # type: ignore[assignment]


def is_hook_table(name: str) -> bool:
    """Whether an attribute of an optimizer holds hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def step_hooks(optimizer: Optimizer) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """The hooks before and after a step, by the ids of their handles, in the order in which they run."""
    tables = (
        getattr(optimizer, "_optimizer_step_pre_hooks", None),
        getattr(optimizer, "_optimizer_step_post_hooks", None),
    )
    if not all(isinstance(table, OrderedDict) for table in tables):
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} does not keep hooks of its steps as torch.optim.Optimizer does. Derive it "
            "from that class, and call its __init__."
        )
    return tables  # type: ignore[return-value]


def not_overridden() -> Any:
    """`__torch_function__` of a tensor class whose functions are taken over in `__torch_dispatch__` alone."""
    import torch

    return torch._C._disabled_torch_function_impl


def without_memory(kind: type, shape: Any, dtype: Any, device: Any) -> Any:
    """A tensor of class `kind` that has no memory, as `DTensor` is made."""
    import torch

    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


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
        if not self._pairs:
            raise UnsupportedError(
                "this torch does not tell the parameters of fully_shard: install torch >= 2.11,<2.14"
            )

    def adopt(self, new: Tensor, old: Tensor) -> None:
        """Hooks of a parameter that `fully_shard` has replaced; their handles go on removing them."""
        if gradient_hooks(old):
            new._backward_hooks = old._backward_hooks
        if accumulation_hooks(old):
            self._accumulation[id(new)] = accumulation_hooks(old)

    def follow(self) -> None:
        """A training forward pass begins; collective where hooks were registered before the first."""
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


def in_backward_pass() -> bool:
    """Whether autograd is running a backward pass in this thread: a forward in it is a recomputation."""
    import torch

    current = getattr(torch._C, "_current_graph_task_id", None)
    if current is None:
        raise UnsupportedError("this torch does not tell whether a backward pass is running: install torch >= 2.11")
    return bool(current() != -1)


def no_torch_function() -> contextlib.AbstractContextManager[None]:
    """Inside, tensor subclasses are treated as plain tensors by functions of torch (its documented way to do so)."""
    import torch

    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def is_cross_entropy(function: Any) -> bool:
    """Whether `function` is `torch.nn.functional.cross_entropy` as torch ships it."""
    from torch.nn import functional

    return is_shipped(function, "cross_entropy", functional.__file__)


def is_shipped(function: Any, name: str, source: str) -> bool:
    """Whether a plain function is the one of that name in a source file: a wrapper or a replacement is not."""
    code = getattr(function, "__code__", None) if isinstance(function, FunctionType) else None
    return code is not None and code.co_name == name and code.co_filename == source
