"""Fake memory for models that were built without values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from hf_parallel.compat.private_torch import own_buffers, own_parameters
from hf_parallel.compat.private_transformers import attention_of, own_attention_names
from hf_parallel.compat.torch_tools import FakeTensorMode


MASKLESS: Final = "hf_parallel_sdpa_without_mask"


def give_memory(
    model: nn.Module,
    device: torch.device,
    fake: FakeTensorMode,
    follow: Callable[[Tensor, str, str], None] | None = None,
) -> None:
    """Give fake memory to every tensor of a model that has none; tensors that are one stay one.

    Args:
        model: With parameters and buffers on `meta`.
        device: Device of the new tensors.
        fake: Mode that makes the fake tensors.
        follow: Called with each tensor that takes memory, what it is, and its name.
    """
    made: dict[int, Tensor] = {}
    for name, table, key, tensor in _tensors_of(model):
        if id(tensor) not in made:
            with fake:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            vars(made[id(tensor)]).update(
                {k: v for k, v in vars(tensor).items() if k not in vars(made[id(tensor)]) and not k.startswith("_")}
            )
            if follow is not None:
                follow(made[id(tensor)], "weights", name)
        table[key] = made[id(tensor)]
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.is_meta:
                with fake:  # stands for a weight that another stage has
                    one = torch.zeros((), dtype=value.dtype, device=device)
                    object.__setattr__(module, key, one.expand(value.shape))


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Name, table, key and tensor of everything registered that is not on its device yet."""
    for prefix, module in model.named_modules():
        for table in (own_parameters(module), own_buffers(module)):
            for key, tensor in list(table.items()):
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, table, key, tensor


@contextlib.contextmanager
def maskless_attention(model: Any) -> Iterator[None]:
    """SDPA without a mask: under fake tensors transformers makes one, and repeats keys for it, as on no device."""
    from transformers import AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = attention_of(model.config)
    if name == "sdpa":
        ALL_ATTENTION_FUNCTIONS[MASKLESS] = sdpa_attention_forward  # and no function that makes masks for it
        try:
            model.set_attn_implementation(MASKLESS)
            yield
        finally:
            model.set_attn_implementation("sdpa")
            del ALL_ATTENTION_FUNCTIONS[MASKLESS]
    elif name.endswith("_sdpa"):  # of ranks that share rows: a name of its own, with masks of the same name
        with own_attention_names():
            AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
            yield
    else:
        yield
