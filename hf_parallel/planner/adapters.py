"""Seconds of LoRA's pairs of thin products beside the products of a frozen model and of adding up both results, and what unpacking
a quantised model moves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.memory.variant import USUAL_RANK
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.profile import BlockProfile, ModelProfile, Product, profile_of


# Of a model's parameters, what adapters have at most: more that are trained are some of its own.
MOST_BESIDE: Final = 0.1
# Up to this part they may be either: large ranks, or some of a model's own layers.
MOST_UNSURE: Final = 0.25
LEAST_RANK: Final = USUAL_RANK  # adapters of fewer on every product are rare
# How often inputs and outputs of an adapted product are moved, forward and backward. PEFT's forward reads the input, writes
# the result, scales it (read, written) and adds it (two read, one written). Its backward scales the gradient (read, written),
# reads it for both thin products, reads the input and adds what it gets (written, two read, one written).
# A compiler scales where it adds. Systems with kernels of their own do all of it inside of products.
MOVED: Final = {
    "eager": ((1, 6), (5, 4)),
    "compiled": ((1, 4), (5, 3)),
    "norms": ((1, 6), (5, 4)),
    "fused": ((0, 0), (0, 0)),
}


def adapters_of(text: str, model: Any) -> int:
    """Number of parameters of adapters, from that number or from their rank.

    Args:
        text: A number of 0 or more, or a rank such as r16: that of LoRA on every linear layer of the blocks. Stacks of experts
            are no linear layers.
        model: A transformers config, or a path to one.

    Raises:
        ConfigError: The text is neither, or a rank without a model.
    """
    if text.isdecimal():
        return int(text)
    rank = re.fullmatch(r"r([1-9][0-9]*)", text)
    if rank is None:
        raise ConfigError(
            f"adapters={text}: expected an integer of 0 or more, the parameters that are trained, or a rank such as r16."
        )
    if model is None:
        raise ConfigError(
            f"adapters={text!r}: a rank counts the linear layers of a model. Give the model, or a number of parameters."
        )
    profile = profile_of(model)
    blocks = (profile.kinds[kind].products for kind in profile.layers)
    return int(rank[1]) * sum(_widths([one for one in products if one.stored == 1]) for products in blocks)


def is_beside(profile: ModelProfile, spec: LayoutSpec) -> bool:
    """Whether what is trained are parameters beside the model's, and not some of its own layers."""
    return _are_beside(profile, spec, MOST_BESIDE)


def may_be_beside(profile: ModelProfile, spec: LayoutSpec) -> bool:
    """Whether what is trained, as far as its number tells, may be parameters beside the model's."""
    return _are_beside(profile, spec, MOST_UNSURE)


def _are_beside(profile: ModelProfile, spec: LayoutSpec, most: float) -> bool:
    """Whether adapters are beside the model: as the layout says, else if they are up to this part of it, or cannot be its own."""
    if not spec.adapters or spec.adapters_are != "auto":
        return spec.adapters > 0 and spec.adapters_are == "beside"
    return spec.adapters <= most * profile.parameters or spec.adapters > profile.parameters or spec.block_bits > 0


def rank_of_all(profile: ModelProfile, spec: LayoutSpec) -> tuple[int, bool]:
    """Rank of adapters on the products of a usual block, no less than is usual, and whether its experts have them, too."""
    block, each = profile.kinds[profile.layers[len(profile.layers) // 2]], spec.adapters / len(profile.layers)
    on_experts = block.num_experts > 1 and each >= LEAST_RANK * _widths(block.products)
    adapted = block.products if on_experts else [one for one in block.products if one.stored == 1]
    return max(LEAST_RANK, round(each / max(1, _widths(adapted)))), on_experts


def trained_share(profile: ModelProfile, spec: LayoutSpec) -> float:
    """Part of the model's own weights that get gradients."""
    if not spec.adapters:
        return 1.0
    return 0.0 if is_beside(profile, spec) else min(1.0, spec.adapters / profile.parameters)


def adapted(profile: ModelProfile, block: BlockProfile, adapters: float) -> tuple[float, Sequence[Product]]:
    """The rank of the adapters, and the products that have one: all of a block, or those of attention if the rank were too low.

    Args:
        profile: The model.
        block: A kind of block of the model.
        adapters: Parameters of all adapters.
    """
    choices = block.products, tuple(one for one in block.products if one.is_attention)
    ranks = [adapters / len(profile.layers) / max(1, _widths(products)) for products in choices]
    few = ranks[0] < LEAST_RANK and choices[1]
    return ranks[bool(few)], choices[bool(few)]


def _widths(products: Sequence[Product]) -> int:
    return sum(one.stored * (one.inputs + one.outputs) for one in products)


def adapter_pass(
    profile: ModelProfile, block: BlockProfile, spec: LayoutSpec, tokens: float, rate: float, moved: float
) -> tuple[float, float]:
    """Seconds of one micro-batch in a block, forward and backward.

    Args:
        profile: The model.
        block: The block.
        spec: The layout.
        tokens: Tokens of a rank and micro-batch.
        rate: FLOP/s of large products.
        moved: Bytes per second of other kernels.
    """
    rank, products = adapted(profile, block, spec.adapters)
    inputs = sum(one.times * one.inputs for one in products)
    outputs = sum(one.times * one.outputs for one in products)
    arithmetic = 2 * tokens * rank * (inputs + outputs) / rate / spec.tp
    there, back = (
        spec.element * tokens * (reads * inputs + writes * outputs) / moved / spec.tp
        for reads, writes in MOVED[spec.kernels]
    )
    return arithmetic + there, 2 * arithmetic + back


def stored_bytes(block: float, parameters: float, spec: LayoutSpec) -> float:
    """Mean bytes of a parameter as it is gathered or waits in other memory: those of quantised blocks are as few as they are.

    Args:
        block: Parameters in blocks, as a number or a share.
        parameters: All of them, in the same unit.
        spec: The layout.
    """
    if not spec.block_bits:
        return float(spec.element)
    return spec.element - (spec.element - spec.block_bits / 8) * block / max(parameters, 1e-9)


def moved_by_unpacking(block: BlockProfile, spec: LayoutSpec) -> float:
    """Bytes that a pass, forward or backward, moves to unpack the quantised matrices of a block, each for its product."""
    if not spec.block_bits:
        return 0.0
    weights = sum(float(one.stored * one.inputs * one.outputs) for one in block.products)
    return (spec.block_bits / 8 + spec.element) * weights / spec.tp
