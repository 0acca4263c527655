"""Traces one forward pass of a model: which linear modules feed which, and who reads their weights.

Everything here leaves the model as it was. Linear modules are recognised by what they compute, not by their class, and
the data flow between them is read from the autograd graph of the model's own forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_modules, own_parameters, writes_arguments
from hf_parallel.compat.torch_tools import TorchDispatchMode
from hf_parallel.errors import PlanError
from hf_parallel.model.copies import deep_copy
from hf_parallel.model.samples import signature_of, taken
from hf_parallel.model.tensors import largest, map_tensors, tensors_in
from hf_parallel.model.unchanged import in_mode, unchanged
from hf_parallel.tensor_parallel.plan.autograd_graph import met_first


PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # matrix products, and the position of their left factor
NOISE_SEED = 20  # any fixed number: analysis must give the same plan every time


@dataclass(frozen=True)
class LinearInfo:
    """A module that computes `x @ W.T + b`, or `x @ W + b` when `transposed`."""

    transposed: bool
    out_features: int
    in_features: int
    has_bias: bool

    @property
    def out_dim(self) -> int:
        """Dim of the weight that indexes outputs."""
        return 1 if self.transposed else 0

    @property
    def in_dim(self) -> int:
        """Dim of the weight that indexes inputs."""
        return 1 - self.out_dim


@dataclass
class Trace:
    """The data flow between linear modules in one forward pass.

    Args:
        producers: Called linear, in call order -> for each call the linears whose outputs reach its input directly.
        escaping: Linears whose output reaches the model's output without passing another linear.
        foreign: Parameters that are read while the module that owns them is not running.
        called: Linears that run, with or without a gradient.
        flops: Module -> operations of its own matrix products, per token of the sample, forward.
    """

    producers: dict[str, list[frozenset[str]]]
    escaping: frozenset[str]
    foreign: frozenset[str]
    called: frozenset[str]
    flops: dict[str, float]


def perturb(module: nn.Module, *, only_constant: bool = False) -> None:
    """Add noise to float parameters, in place, so that zeros and equal values cannot hide a wrong layout.

    Args:
        module: Module to perturb.
        only_constant: Leave parameters whose values differ: a deep model of trained weights stays well conditioned.
    """
    generator = torch.Generator().manual_seed(NOISE_SEED)
    for parameter in module.parameters():
        varied = only_constant and _varies(parameter)
        if parameter.is_floating_point() and not varied:
            scale = 0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.data.add_(noise.to(parameter.device, parameter.dtype))


def _varies(parameter: Tensor) -> bool:
    """Whether its values differ; mostly the first ones do, which spares looking at all."""
    values = parameter.flatten()
    return any(bool((part != values[:1]).any()) for part in (values[:64], values))


def widen(module: nn.Module) -> nn.Module:
    """`module` with half-precision parameters and buffers cast to fp32, in place; fp32 and fp64 are kept."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors):
        module.float()
    return module


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run `model` inside: in eval mode, every float parameter asking for gradients; all state is restored after.

    Restored: training flags, `requires_grad`, and what `unchanged` restores.
    """
    parameters = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with unchanged(model), in_mode(model, trains=False):
        try:
            for parameter, _ in parameters:
                parameter.requires_grad_(parameter.is_floating_point())
            yield
        finally:
            for parameter, required in parameters:
                parameter.requires_grad_(required)


@contextlib.contextmanager
def replaced(module: nn.Module, key: str, value: Any) -> Iterator[None]:
    """Inside, a module itself has `value` as its attribute `key`, past registration: a forward, a loss function, a config."""
    before = vars(module).get(key)
    vars(module)[key] = value
    try:
        yield
    finally:
        del vars(module)[key]
        if before is not None:
            vars(module)[key] = before


def run(model: nn.Module, sample: Mapping[str, Any]) -> Any:
    """`model(**sample)` without a key-value cache: a cache hides data flow and grows with every call."""
    without = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    return model(**{**taken(signature_of(model), without), **sample})


def find_linears(model: nn.Module) -> dict[str, LinearInfo]:
    """Linear modules by name, recognised by comparing their forward with a matrix product.

    Raises:
        PlanError: If the model has no values to compute with (meta device).
    """
    known: dict[Any, LinearInfo | None] = {}
    found = {}
    for name, module in model.named_modules():
        weight = own_parameters(module).get("weight")
        if weight is None or weight.ndim != 2 or not weight.is_floating_point():
            continue
        if weight.is_meta:
            raise PlanError(
                f"parameter {name}.weight is on the meta device: a tensor-parallel plan is verified by numbers. "
                "Give the model weights before it is planned, or plan it by its config: plan_for(model.config, tp_size)."
            )
        scalars = sorted((k, v) for k, v in vars(module).items() if isinstance(v, (int, str)) and k != "training")
        patched = id(module) if "forward" in vars(module) else None
        parameters = tuple((k, p.shape) for k, p in own_parameters(module).items() if p is not None)
        key = (type(module), parameters, weight.dtype, str(scalars), patched)
        if key not in known:
            known[key] = _linear_info(module, weight)
        info = known[key]
        if info is not None:
            found[name] = info
    return found


def _linear_info(module: nn.Module, weight: Tensor) -> LinearInfo | None:
    if (
        own_modules(module)
        or not set(own_parameters(module)) <= {"weight", "bias"}
        or isinstance(module, nn.Embedding)
    ):
        return None
    has_bias = own_parameters(module).get("bias") is not None
    if type(module) is nn.Linear and "forward" not in vars(module):
        return LinearInfo(False, weight.shape[0], weight.shape[1], has_bias)  # known; spares a copy of a large head
    probe = widen(deep_copy(module)).eval()
    perturb(probe)
    matrix, bias = own_parameters(probe)["weight"], own_parameters(probe).get("bias")
    if matrix is None:
        return None
    generator = torch.Generator().manual_seed(NOISE_SEED)
    for transposed in (False, True):
        full = matrix if transposed else matrix.t()
        x = torch.randn(1, 3, full.shape[0], generator=generator).to(matrix.device, matrix.dtype)
        with torch.no_grad():
            try:
                result = probe(x)
            except Exception:  # noqa: BLE001  a module of unknown class may refuse this input in any way: not a linear
                continue
            expected = x @ full if bias is None else x @ full + bias
        if isinstance(result, Tensor) and result.shape == expected.shape and agree(result, expected):
            return LinearInfo(transposed, full.shape[1], full.shape[0], has_bias)
    return None


def agree(value: Tensor, reference: Tensor, floor: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding.

    A wrong layout changes results by their own magnitude; rounding in fp32 by about 1e-6 of it. Models may compute
    parts in fp32 even when they are fp64, which bounds the fp64 tolerance.

    Args:
        value: The tensor to judge.
        reference: The tensor to compare with.
        floor: Magnitude below which differences count relative to `floor` (for gradients that are rounding noise).
    """
    if value.shape != reference.shape:
        return False
    if value.numel() == 0:
        return True
    tolerance = 1e-6 if value.dtype == torch.float64 else 1e-4
    scale = max(largest(reference), floor, torch.finfo(reference.dtype).tiny)
    return largest(value - reference) <= tolerance * scale


def trace_linears(model: nn.Module, linears: Mapping[str, LinearInfo], sample: Mapping[str, Any]) -> Trace:
    """Run the model once and read the data flow between `linears` from its autograd graph.

    Call inside `undisturbed(model)`.
    """
    name_of_node: dict[Any, str] = {}
    calls: list[tuple[str, Tensor]] = []
    called: set[str] = set()

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs = tensors_in([args, kwargs])
            called.add(name)
            if inputs and isinstance(output, Tensor) and output.grad_fn is not None:
                calls.append((name, inputs[0]))
                name_of_node[output.grad_fn] = name

        return hook

    handles = [model.get_submodule(name).register_forward_hook(record(name), with_kwargs=True) for name in linears]
    try:
        with torch.enable_grad(), _reader_stack(model) as reads:
            output = run(model, sample)
        foreign = reads.foreign | _read_in_training(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    producers: dict[str, list[frozenset[str]]] = {}
    for name, x in calls:
        producers.setdefault(name, []).append(met_first([x], name_of_node))
    escaping = met_first(tensors_in(output), name_of_node)
    return Trace(producers, escaping, frozenset(foreign), frozenset(called), _per_token(model, reads.flops, sample))


def _read_in_training(model: nn.Module, sample: Mapping[str, Any]) -> set[str]:
    """Parameters read from outside their module in training mode only; the mode is left as it was."""
    with in_mode(model, trains=True):
        try:
            with torch.no_grad(), _reader_stack(model) as reads:
                run(model, sample)
        except Exception:  # noqa: BLE001  a model may insist on labels in training; what was read until then counts
            return reads.foreign
    return reads.foreign


def _per_token(model: nn.Module, flops: Mapping[nn.Module, int], sample: Mapping[str, Any]) -> dict[str, float]:
    tokens = max((tensor.numel() for tensor in tensors_in(sample) if not tensor.is_floating_point()), default=1)
    return {name: flops[module] / tokens for name, module in model.named_modules() if module in flops}


class _ReadRecorder(TorchDispatchMode):  # torch does not annotate it
    """Notes each parameter that an operation takes while its owner is not running; undoes changes of parameters.

    `hf_parallel.model.record` logs storages and blocks of a forward that it changes nothing in. Here the module that runs
    decides, aliases of a parameter count apart, and values are put back; of its log nothing could be used.
    """

    def __init__(
        self,
        owners: Mapping[int, tuple[str, list[nn.Module]]],
        running: list[nn.Module],
        parameters: list[nn.Parameter],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owners = owners
        self.running = running
        self.foreign: set[str] = set()
        self.storages = {p.untyped_storage().data_ptr(): p for p in parameters}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.flops: dict[nn.Module, int] = {}

    def keep(self, tensors: list[Tensor]) -> None:
        """Remember the values of parameters among `tensors`, which an operation is about to change."""
        for tensor in tensors:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer in self.storages and pointer not in self.before:
                parameter = self.storages[pointer]
                self.before[pointer] = parameter, parameter.detach().clone()

    def _with_weight(self, args: Any, kind: str) -> bool:
        """Whether a product is one with a weight; those of attention scores depend on the kernel and are not counted."""
        return "bmm" not in kind or any(t.untyped_storage().data_ptr() in self.storages for t in tensors_in(args))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in([args, kwargs or {}]):
            if id(tensor) in self.owners:
                name, modules = self.owners[id(tensor)]
                if not any(module in self.running for module in modules):
                    self.foreign.add(name)
        if writes_arguments(func):
            self.keep(tensors_in([args[:1], kwargs or {}]))
        result = func(*args, **(kwargs or {}))
        factors = PRODUCTS.get(func.overloadpacket.__name__)
        if factors is not None and self.running and self._with_weight(args, func.overloadpacket.__name__):
            module = self.running[-1]
            self.flops[module] = self.flops.get(module, 0) + 2 * result.numel() * args[factors].shape[-1]
        return result


@contextlib.contextmanager
def _reader_stack(model: nn.Module) -> Iterator[_ReadRecorder]:
    """Yields what is read and computed by whom, filled while the model runs."""
    owners: dict[int, tuple[str, list[nn.Module]]] = {}
    for prefix, module in model.named_modules():
        for key, parameter in own_parameters(module).items():
            if parameter is not None:
                name = f"{prefix}.{key}" if prefix else key
                owners.setdefault(id(parameter), (name, []))[1].append(module)
    running: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    recorder = _ReadRecorder(owners, running, list(model.parameters()))
    try:
        with recorder:
            yield recorder
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for changed, value in recorder.before.values():
                changed.data.copy_(value)


def capture_inputs(
    model: nn.Module, names: list[str], sample: Mapping[str, Any]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of the first call of each named module. Call inside `undisturbed(model)`.

    Tensors are detached copies that ask for gradients if the originals did; half precision is cast to fp32.
    """
    captured: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(_: tuple[str | int, ...], tensor: Tensor) -> Tensor:
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        clone = tensor.detach().to(torch.float32) if half else tensor.detach().clone()
        return clone.requires_grad_(tensor.requires_grad)

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in captured:
                captured[name] = (map_tensors(keep, args), map_tensors(keep, kwargs))

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(record(name), with_kwargs=True) for name in names]
    try:
        with torch.enable_grad():
            run(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    return captured
