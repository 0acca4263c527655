"""The width of a block's feed-forward part, and the numbers by which a plan may keep heads of attention together."""

from __future__ import annotations

from typing import Any, Final

from hf_parallel.tensor_parallel.units import numbers_of


NAMES: Final = ("intermediate_size", "ffn_dim", "n_inner")


def width_of(config: Any, hidden: int) -> int:
    """Width that a token passes: of a dense part, or of all experts that it is routed to."""
    experts = _largest(getattr(config, "num_experts_per_tok", None))
    width = _largest(getattr(config, "moe_intermediate_size", None)) if experts else None
    width = width or next((v for key in NAMES if isinstance(v := getattr(config, key, None), int)), 4 * hidden)
    return int(width) * int(experts or 1)


def is_of_width(shape: tuple[int, ...], width: int, hidden: int) -> bool:
    """Whether a tensor has a dim of the width of the feed-forward part, or of a gate and the way up together.

    Args:
        shape: Shape of the tensor.
        width: Width of that part.
        hidden: Width of the residual stream, from which it cannot be told where they are one.
    """
    wide = {width, 2 * width} - {hidden}
    return len(shape) in (2, 3) and width != hidden and not wide.isdisjoint(shape)


def numbers_beside(model: Any, width: int) -> frozenset[int]:
    """Numbers that the first module with attention's products and its config hold.

    Args:
        model: A model, or one of its blocks.
        width: Width of the feed-forward part, whose products are not meant.
    """
    for module in model.modules():
        products = [
            tuple(weight.shape)
            for child in module.children()
            if (weight := getattr(child, "weight", None)) is not None and weight.ndim == len("oi")
        ]
        if len(products) > 1 and all({width, 2 * width}.isdisjoint(shape) for shape in products):
            return numbers_of([module, *([config] if (config := vars(module).get("config")) is not None else [])])
    return frozenset()


def _largest(value: Any) -> Any:
    """Largest value over the layers, where a config has one for each; else the value itself."""
    return max(value) if isinstance(value, (list, tuple)) and value else value
