"""Which models cannot be cut or sharded, and why."""

from __future__ import annotations

from torch import nn

from hf_parallel.compat.private_transformers import other_task
from hf_parallel.errors import UnsupportedError


def refuse_model(model: nn.Module, mp_size: int, *, shares_parameters: bool = False) -> None:
    """Refuse models that would train wrong or crash late.

    Args:
        model: The whole model.
        mp_size: Ranks that hold one copy of it.
        shares_parameters: Whether replicas shard its parameters (ZeRO 3).

    Raises:
        UnsupportedError: The model is dispatched, or quantised or wrapped in a way that cannot be cut or sharded.
    """
    name = type(model).__name__
    device_map = getattr(model, "hf_device_map", None)
    if device_map is not None and len(set(device_map.values())) > 1:
        raise UnsupportedError(
            f"{name} was loaded with device_map={sorted(set(map(str, device_map.values())))}: accelerate already "
            "spread it over devices. Load it without device_map; hf_parallel places the stages."
        )
    task = other_task(model) if mp_size > 1 else None
    if task is not None:
        raise UnsupportedError(
            f"{name} is made for {task} with {mp_size} ranks a copy (pp_size x tp_size): pipeline stages and shards are "
            "planned for causal language models only. Set pp_size and tp_size to 1 (replicas, ZeRO), or load it with "
            "AutoModelForCausalLM."
        )
    method = getattr(model, "quantization_method", None)
    quantised = method is not None or bool(getattr(model, "is_quantized", False))
    named = getattr(method, "value", method) or "unknown method"
    if quantised and mp_size > 1:
        raise UnsupportedError(
            f"{name} has quantised weights ({named}) with {mp_size} ranks a copy (pp_size x tp_size): they cannot be cut and "
            "sharded. Set pp_size and tp_size to 1 and train adapters on it, or load it without quantization_config."
        )
    if quantised and shares_parameters:
        raise UnsupportedError(
            f"{name} has quantised weights ({named}) with zero.stage=3, which shards parameters of one floating-point "
            "dtype. Set zero.stage to 2 or less, or load it without quantization_config."
        )
