"""Private names of torch's DTensor, and what its methods do silently wrong.

All of these change DTensors of the whole process: the calls are the user's, on parameters and gradients, from anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils import _pytree as pytree

from hf_parallel.compat.versions import wanted
from hf_parallel.errors import UnsupportedError


DRAWS = (
    *("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_", "bernoulli", "native_dropout"),
    *("exponential_", "cauchy_", "log_normal_", "geometric_", "random_"),
)

# Changed in place by an element of another tensor at the same place.
ELEMENTWISE = ("add_", "sub_", "mul_", "div_", "copy_", "lerp_", "addcmul_", "addcdiv_", "masked_fill_")
MIXED = (
    "add",
    "sub",
    "mul",
    "div",
    "mm",
    "bmm",
    "addmm",
    "embedding",
    "where",
)  # with plain tensors torch refuses them
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")  # their third argument is the reduction
INDEXED = ("index_put_", "index_fill_", "index_copy_", "index_add_", "masked_scatter_", "scatter_", "index")
PRODUCTS = ("addmm_", "addmv_", "addr_", "baddbmm_", "addbmm_")


def whole_numbers_of_parts() -> None:
    """Let `float(p.grad.sum())` of a DTensor give the sum over all ranks: torch 2.13 gives that of this rank's part.

    For all DTensors of this process, since the call is the user's, anywhere: a number that was right stays what it was.
    """
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if not isinstance(handlers, dict):
        raise UnsupportedError(
            "numbers taken of partitioned tensors cannot be made whole: this torch keeps the functions of DTensor elsewhere. Use "
            "zero.stage 1 or 2 of the native engine, or torch 2.13."
        )

    def item(func: Any, args: Any, kwargs: Any) -> Any:
        value = args[0]
        return func(value.full_tensor() if is_partial(value) else value.to_local())

    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, item)

    def norm(func: Any, args: Any, kwargs: Any) -> Any:
        """Norms of columns, say: torch 2.13 adds up those of the parts of each column when their sum is taken."""
        found = stock_result(handlers, func, args, kwargs)
        partial = found.ndim > 0 and is_partial(found)
        whole = [Replicate() if placement.is_partial() else placement for placement in found.placements]
        return found.redistribute(placements=whole) if partial else found

    for func in overloads_of(("linalg_vector_norm", "norm")):
        handlers.setdefault(func, norm)

    def loss(func: Any, args: Any, kwargs: Any) -> Any:
        """Refuse a mean over parts: torch 2.13 divides its gradient by the elements of a part."""
        reduction = kwargs.get("reduction", args[2] if len(args) > 2 else 1)
        if reduction:
            _refuse(func.overloadpacket.__name__, "a parameter or gradient", args[:1], None)
        return stock_result(handlers, func, args, kwargs)

    for func in overloads_of(LOSSES):
        handlers.setdefault(func, loss)


def mark_rows_of_parts(kind: type) -> None:
    """Let views of a DTensor that are copies (rows of what is sharded by rows) be of class `kind`, a DTensor too."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them
    aten = torch.ops.aten

    def memory(tensor: Any) -> int:
        return int(tensor._local_tensor.untyped_storage().data_ptr())

    def view(func: Any, args: Any, kwargs: Any) -> Any:
        found = stock_result(handlers, func, args, kwargs)
        for one in found if isinstance(found, list | tuple) else [found]:
            if isinstance(args[0], kind) or memory(one) != memory(args[0]):
                one.__class__ = kind
        return found

    for func in (
        *(aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
        *(aten.view.default, aten._unsafe_view.default, aten.diagonal.default),
    ):
        handlers.setdefault(func, view)


def whole_draws_of_parts() -> None:
    """Let random numbers for a DTensor (`randn_like(p)`, `p.grad.normal_()`) be this rank's part of those drawn for the whole.

    torch 2.13 draws them for each part by itself on the CPU, which gives all ranks of one seed the same numbers.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them

    def draw(func: Any, args: Any, kwargs: Any) -> Any:
        first = args[0]
        whole = [arg.full_tensor() if isinstance(arg, DTensor) and arg is not first else arg for arg in args]
        reads = not func._schema.name.endswith(("_like", "_"))  # probabilities, say
        device = first.to_local().device
        whole[0] = first.full_tensor() if reads else torch.empty(first.shape, dtype=first.dtype, device=device)
        drawn = func(*whole, **kwargs)
        if func._schema.is_mutable:
            first._local_tensor.copy_(part_of(drawn, first)._local_tensor)
            return first
        many = drawn if isinstance(drawn, tuple) else (drawn,)
        parts = tuple(part_of(one, first) if one.shape == first.shape else one for one in many)
        return parts if isinstance(drawn, tuple) else parts[0]

    for name in DRAWS:
        packet = getattr(torch.ops.aten, name)
        for func in (getattr(packet, overload) for overload in packet.overloads()):
            if torch.Tag.nondeterministic_seeded in func.tags:
                handlers.setdefault(func, draw)


def whole_indices_of_parts() -> None:
    """Let `p[mask] = 0`, `p[rows] = new`, `p[rows]` and `p.grad.addmm_(a, b)` be those of the whole where torch refuses them.

    Collective then, and so is what changes a plain tensor by parts (`statistics.addmm_(p.grad, p.grad.T)`).
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # `whole_numbers_of_parts` has looked for them

    def index(func: Any, args: Any, kwargs: Any) -> Any:
        handlers.pop(func, None)  # while the stock one runs
        try:
            return func(*args, **kwargs)
        except (RuntimeError, UnsupportedError):
            first = args[0]
            if not isinstance(first, DTensor) and not func._schema.is_mutable:
                raise
        finally:
            handlers[func] = index
        whole = pytree.tree_map_only(DTensor, lambda part: part.full_tensor(), (args, kwargs))
        found = func(*whole[0], **whole[1])
        if not func._schema.is_mutable or not isinstance(first, DTensor):
            return found
        first._local_tensor.copy_(part_of(found, first)._local_tensor)
        return first

    for func in overloads_of((*INDEXED, *PRODUCTS)):
        handlers.setdefault(func, index)


def explain_refusals_of_parts(name_of: Callable[[Tensor], str | None]) -> None:
    """Let plain tensors change parts element by element (`p.mul_(mask)`), and say what to do about what torch refuses.

    Args:
        name_of: The parameter that a part, or its gradient, belongs to.
    """
    dispatcher: Any = DTensor._op_dispatcher
    steps = ("unwrap_to_op_info", "_propagate_op_sharding_dispatch_slow_path")
    if "unwrap_to_op_info" in vars(dispatcher):
        return
    if not all(hasattr(dispatcher, step) for step in steps):
        raise UnsupportedError(f"this torch does not tell how it shares out tensors: install {wanted('torch')}.")

    def explained(stock: Any) -> Any:
        @functools.wraps(stock)
        def run(op: Any, args: Any, *others: Any, **kwargs: Any) -> Any:
            try:
                return stock(op, args, *others, **kwargs)
            except RuntimeError as error:
                parts = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, DTensor)]
                _refuse(str(op), _named(parts, name_of), parts, error)

        return run

    for step in steps:
        setattr(dispatcher, step, explained(getattr(dispatcher, step)))
    handlers: Any = dispatcher._custom_op_handlers
    for func in overloads_of((*ELEMENTWISE, *MIXED)):
        handlers.setdefault(func, explained(_with_plain(handlers)))

    def leaving(name: str) -> Any:
        return lambda part, *args, **kwargs: _refuse(f"{name}()", _named([part], name_of), [part], None)

    for name in ("numpy", "tolist"):
        setattr(DTensor, name, leaving(name))


def explained_calls(call: Callable[..., Any], name_of: Callable[[Tensor], str | None]) -> Callable[..., Any]:
    """`call`, which calls code of users: what torch refuses for parts by itself (plain tensors beside parts) is explained, too.

    Args:
        call: A function.
        name_of: Names a parameter, as in `explain_refusals_of_parts`.
    """

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            text, parts = str(error), _parts_in(error.__traceback__)
            if "DTensor" not in text and "invalid python storage" not in text:
                raise
            what = text.split(" ", 1)[0] if text.startswith("aten.") else "a function of torch"
            _refuse(what, _named(parts, name_of), parts, error)

    return called


def _parts_in(trace: TracebackType | None) -> list[Tensor]:
    """Parts that the innermost function which has any held in a variable of its own."""
    found: list[Tensor] = []
    while trace is not None:
        found = [value for value in trace.tb_frame.f_locals.values() if isinstance(value, DTensor)] or found
        trace = trace.tb_next
    return found


def _named(parts: Sequence[Tensor], name_of: Callable[[Tensor], str | None]) -> str:
    name = next((name for part in parts if (name := name_of(part))), None)
    return "a parameter or gradient" if name is None else f"parameter {name}"


def _with_plain(handlers: dict[Any, Any]) -> Callable[..., Any]:
    """A function of torch on parts where plain tensors beside them are wholes, of which each rank takes its part."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        first, changes = args[0], func._schema.is_mutable and isinstance(args[0], DTensor)
        if changes and any(map(_is_plain, args[1:])):
            args = [first, *(part_of(arg.expand(first.shape), first) if _is_plain(arg) else arg for arg in args[1:])]
        return stock_result(handlers, func, args, kwargs)

    return run


def stock_result(handlers: dict[Any, Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` as torch itself would, without our handler."""
    handler = handlers.pop(func, None)  # None in another thread's call
    try:
        return func(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[func] = handler


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1


def is_partial(part: Any) -> bool:
    """Whether ranks have summands of a DTensor, or others that are to be combined."""
    return any(placement.is_partial() for placement in part.placements)


def overloads_of(names: Sequence[str]) -> Iterator[Any]:
    for name in names:
        packet = getattr(torch.ops.aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads() if not overload.endswith("out"))


def _refuse(what: str, where: str, parts: Sequence[Tensor], error: Exception | None) -> NoReturn:
    shape = f" of shape {tuple(parts[0].shape)}" if parts else ""
    reason = f" torch says: {str(error).splitlines()[0][:200]}" if error is not None else ""
    raise UnsupportedError(
        f"{what} on {where}{shape} with zero.stage: 3 or engine: fsdp2: ranks share out its rows, and torch does not compute this from "
        "parts. On every rank take the whole (new = p.full_tensor()), compute with it, and write it back under torch.no_grad() "
        f"(p.copy_(new)); change modules before training; or set zero.stage to 1 or 2 of the native engine.{reason}"
    ) from error


def part_of(whole: Tensor, like: Any) -> Any:
    """This rank's part of a tensor that every rank has."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def exchangeable_data_of_parts() -> None:
    """Let `p.grad.data = new` of a DTensor have its effect: torch 2.13 drops the new values and keeps the part as it was.

    For all DTensors of this process; what is assigned stays shared with its owner, as with plain tensors.
    """
    if "data" in vars(DTensor):
        return
    if "_local_tensor" not in DTensor.__slots__ or "_spec" not in DTensor.__slots__:
        raise UnsupportedError(f"this torch keeps the parts of a DTensor elsewhere: install {wanted('torch')}.")
    stock: Any = Tensor.data

    def exchange(part: Any, new: Any) -> None:
        if not isinstance(new, DTensor) or new.shape != part.shape:
            kind = "a DTensor" if isinstance(new, DTensor) else "a plain tensor"
            raise UnsupportedError(
                f"tensor.data = {kind} of shape {tuple(new.shape)}, on a tensor of shape {tuple(part.shape)} that is shared out "
                "over replicas (zero.stage: 3 or engine: fsdp2). Assign what is computed from the tensor itself "
                "(torch.zeros_like(p.grad), p.grad * 2), or set zero.stage to 1 or 2 of the native engine."
            )
        alike: Any = new.redistribute(part.device_mesh, part.placements).detach()
        stock.__set__(part, alike)
        part._local_tensor, part._spec = alike._local_tensor, alike._spec

    DTensor.data = property(lambda part: stock.__get__(part), exchange)  # type: ignore[assignment]
