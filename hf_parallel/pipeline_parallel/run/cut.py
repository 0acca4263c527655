"""Taking out of a model, in place, what one pipeline stage does not need.

A parameter (or block buffer) that nothing here reads is replaced by a placeholder: one element expanded to the full
shape, because model code asks dropped weights for `.device`, `.dtype` and `.shape`. A weight that is read although its
result goes nowhere (an embedding on a later stage) is dropped together with the computation, by a stub that returns
zeros of the same shape; where that is not possible it stays, frozen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_parallel.compat.private_peft import merge_elsewhere, tuner_layers
from hf_parallel.compat.private_quantised import forget_scales
from hf_parallel.compat.private_torch import no_torch_function, own_buffers, own_parameters, unregister
from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan, Span


# In-place methods of tensors that draw random numbers.
DRAWS = frozenset(
    ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
)


HOOKING = frozenset(("register_hook", "register_post_accumulate_grad_hook"))


class Uncopyable:
    """Base of the callables installed on a cut model: a copy of the model would still call into the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise PlanError(
            "a model that is cut into a pipeline stage cannot be copied or pickled: the copy would run the original's "
            "hooks. Copy the model before it is cut, or use its state_dict."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__({})


class Running:
    """Whether code of stages or engine runs: it may look at weights that are not here, and knows what they are.

    Attributes:
        depth: Calls under way; 1 and more also until somebody hands the model to user code.
        asked: Name of a weight that is not here -> whether it is to be trained, as user code has set on this rank.
    """

    def __init__(self) -> None:
        self.depth = 1
        self.asked: dict[str, bool] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Code of a stage runs."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def require(self, name: str) -> None:
        """Refuse values that nobody has here.

        Raises:
            UnsupportedError: Neither a stage nor the engine runs.
        """
        if not self.depth:
            raise UnsupportedError(
                f"{name} was read outside of the model's forward, but another pipeline rank holds it (pp_size above 1: each "
                "rank has the weights of its own stages). Call the whole model and no part of it (model.model(...), a head or a block "
                "by itself); compute a loss from logits (call the model without labels); give "
                "the model input_ids instead of inputs_embeds; read weights in a saved model; or set pp_size to 1."
            )


class ZeroOutput(Uncopyable):
    """Forward of a module whose output nobody here needs: zeros of the shape it would have had."""

    def __init__(self, weight: Tensor, kind: str, name: str, running: Running) -> None:
        self.kind, self.name, self.running = kind, name, running
        self.shape = tuple(weight.shape)
        self.dtype = weight.dtype

    def __call__(self, given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.running.require(f"{self.name}.weight")
        if self.kind == "rows":
            return torch.zeros(
                *given.shape, self.shape[1], dtype=self.dtype, device=given.device
            )  # i[B S] -> f[B S H]
        width = self.shape[0] if given.shape[-1] == self.shape[1] else self.shape[1]
        return given.new_zeros(*given.shape[:-1], width)  # f[B S in] -> f[B S out]


class _Placeholder(Uncopyable, Tensor):
    """Stands for a dropped weight. Writing in place changes nothing: RWKV rescales all its blocks before an evaluation.

    Model code that a stage runs may ask for shape, dtype and device. Whoever computes with it outside of a stage (a loss
    of the user) would compute with zeros, and is refused.
    """

    _full_name: str
    _running: Running

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        written = args[0] if args else (kwargs or {}).get("tensor")  # so torch.nn.init.kaiming_uniform_ names it
        if name.endswith("_") and not name.endswith("__") and isinstance(written, cls):
            if name in DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
                written._draw(func, args, kwargs or {})
            if name == "requires_grad_":
                written._freeze((*args[1:], *(kwargs or {}).values(), True)[0])
            return written
        if name in HOOKING and isinstance(written, cls):
            return RemovableHandle(OrderedDict())  # the stage that has the weight runs the hook
        if name == "__set__" and func == Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
            args[0]._freeze(args[1])
        with no_torch_function():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            for given in (*args, *(kwargs or {}).values()):
                for item in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(item, cls):
                        item._running.require(item._full_name)
        return result

    def _freeze(self, trained: bool) -> None:
        """Note that user code froze or unfroze a stub: the rank that has the weight must be told the same."""
        if not self._running.depth:
            self._running.asked[self._full_name] = bool(trained)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """Make the draws of the rank that has the weight, so that later ones, for a weight of this rank, follow them."""
        with no_torch_function():
            scratch = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        named = {key: scratch if value is self else value for key, value in kwargs.items()}
        func(*(scratch if value is self else value for value in args), **named)


def drop(module: nn.Module, key: str, name: str, running: Running) -> None:
    """Replace one parameter or buffer of a module by a placeholder of its shape, dtype and device."""
    tensor = unregister(module, key)
    forget_scales(module)
    # One element of memory, whatever the shape: stride 0 in every dim. Plain, whatever kind of tensor (quantised) it stands for.
    element = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    placeholder = element.expand(tensor.shape).as_subclass(_Placeholder)
    placeholder._full_name, placeholder._running = name, running
    object.__setattr__(module, key, placeholder)  # nn.Module.__setattr__ would refuse or register it


@contextmanager
def with_dropped_names(model: nn.Module) -> Iterator[None]:
    """Inside, state dicts of the model and its modules name what was taken out too, as tensors without values."""
    shown = []
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, _Placeholder):
                own = own_parameters(module)
                own[key] = nn.Parameter(
                    torch.empty(value.shape, dtype=value.dtype, device="meta"), requires_grad=False
                )
                shown.append((own, key))
    try:
        yield
    finally:
        for own, key in shown:
            own.pop(key, None)


def settle_placeholders(model: nn.Module, device: torch.device) -> None:
    """Put placeholders that were made on the `meta` device where the model is."""
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, _Placeholder) and value.is_meta:
                settled = torch.zeros((), dtype=value.dtype, device=device).expand(value.shape)
                placeholder = settled.as_subclass(_Placeholder)
                placeholder._full_name, placeholder._running = value._full_name, value._running
                object.__setattr__(module, key, placeholder)


def cut_parameters(model: nn.Module, plan: PipelinePlan, spans: Sequence[Span], running: Running) -> frozenset[str]:
    """Keep in `model` what any of the stages `spans` needs; returns the names of the parameters it holds.

    Parameters that stay are the same objects under the same names.
    """
    held: set[str] = set()
    for prefix, module in list(model.named_modules(remove_duplicate=False)):
        dot = f"{prefix}." if prefix else ""
        parameters = own_parameters(module)
        kept = {key for key in parameters if _is_kept(plan, spans, dot + key)}
        held |= {dot + key for key in kept if parameters[key] is not None}
        loose = {key: p for key, p in parameters.items() if p is not None and key not in kept}
        touched = [key for key in loose if _is_touched(plan, spans, dot + key)]
        if touched and not kept and prefix in plan.zero_outputs:
            weight = parameters["weight"]
            if weight is not None:
                module.forward = ZeroOutput(weight, plan.zero_outputs[prefix], prefix, running)
                touched = []
        for key, parameter in loose.items():
            if key in touched:
                parameter.requires_grad_(False)
            else:
                drop(module, key, dot + key, running)
        _cut_buffers(module, dot, plan, spans, running)
    for layer in tuner_layers(model).values():
        if any(isinstance(value, _Placeholder) for module in layer.modules() for value in vars(module).values()):
            merge_elsewhere(layer)
    return frozenset(held)


def _is_kept(plan: PipelinePlan, spans: Sequence[Span], name: str) -> bool:
    """Held here, or read by nobody at all and outside the blocks: those stay on the first stage."""
    if any(plan.holds(span, name) for span in spans):
        return True
    first = any(span.lo == 0 for span in spans)
    return first and plan.block_of(name) is None and not plan.is_read(name)


def _is_touched(plan: PipelinePlan, spans: Sequence[Span], name: str) -> bool:
    return any(plan.touches(span, name) for span in spans)


def _cut_buffers(module: nn.Module, dot: str, plan: PipelinePlan, spans: Sequence[Span], running: Running) -> None:
    """Drop the buffers of blocks that live elsewhere; buffers outside the stack are small and stay."""
    for key, buffer in list(own_buffers(module).items()):
        name = dot + key
        inside = plan.block_of(name) is not None
        needed = any(plan.holds(span, name) for span in spans) or _is_touched(plan, spans, name)
        if buffer is not None and inside and not needed:
            drop(module, key, name, running)
