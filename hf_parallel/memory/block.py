"""Counts what autograd keeps of one block of a model, on fake tensors: no weights, no memory, a second or two.

A model of 2 blocks and one of up to 6 run at three lengths; they differ by blocks only, and how that grows with the length
tells stored attention matrices from the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_parallel.compat.private_torch import id_of_storage
from hf_parallel.compat.torch_tools import FakeTensorMode
from hf_parallel.memory.fakes import maskless_attention
from hf_parallel.memory.layers import number_of_blocks, with_layers
from hf_parallel.memory.terms import Precision, SavedBytes


LENGTHS: Final = (72, 144, 216)  # of no usual width, so that shapes tell what is what
FEW: Final = 2
MANY: Final = 6
# What transformers' models raise when fake tensors, or so few blocks, are not enough for them.
REFUSALS: Final = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    NotImplementedError,
    ImportError,
    ArithmeticError,
)


def trace_block(config: Any, precision: Precision) -> SavedBytes | None:
    """Bytes that autograd keeps of one block for each token; None if the model cannot be traced.

    Dropout is off, so its masks are not counted. Attention is what transformers chooses on a CPU without dropout, which
    for SDPA keeps what flash attention keeps; the mask that it makes there for each block is left out.

    Args:
        config: A transformers config; it is not changed.
        precision: See `Layout`.
    """
    try:
        wide, other = zip(*(_of_blocks(config, length, precision) for length in LENGTHS), strict=True)
    except REFUSALS:
        return None
    (shared, _), (split, square) = _polynomial(wide), _polynomial(other)
    return SavedBytes(shared, split, square) if shared + split > 0 else None


def _polynomial(sizes: Sequence[float]) -> tuple[float, float]:
    """Linear and quadratic coefficient of the parabola through the bytes at `LENGTHS`, which are evenly spaced.

    What does not depend on the length (copies of a block's parameters) is left out.
    """
    step = LENGTHS[1] - LENGTHS[0]
    square = (sizes[2] - 2 * sizes[1] + sizes[0]) / (2 * step**2)
    if square <= 0:  # rows of experts that are padded
        return (sizes[2] - sizes[0]) / (2 * step), 0.0
    return (sizes[1] - sizes[0]) / step - square * (LENGTHS[0] + LENGTHS[1]), square


def _of_blocks(config: Any, length: int, precision: Precision) -> tuple[float, float]:
    """Bytes of the mean of some blocks: of the width of the residual stream, and of all else."""
    blocks = number_of_blocks(config)
    if blocks is None:
        raise LookupError("no number of blocks")
    most = min(MANY, blocks)
    least = min(FEW, most - 1)
    few, many = (_saved(with_layers(config, layers), length, precision) for layers in (least, most))
    return (many[0] - few[0]) / (most - least), (many[1] - few[1]) / (most - least)


def _saved(config: Any, length: int, precision: Precision) -> tuple[int, int]:
    from transformers import AutoModelForCausalLM

    own: set[int] = set()
    kept: dict[int, tuple[bool, torch.UntypedStorage]] = {}
    hidden = config.get_text_config().hidden_size

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_mask = tensor.dim() == 4 and tensor.numel() == length**2 and tensor.shape[-1] == length
        if id_of_storage(storage) not in own and not is_mask:
            wide = tensor.dim() in (2, 3) and tensor.shape[-1] in (hidden, 1)
            kept.setdefault(id_of_storage(storage), (wide, storage))
        return tensor

    dtype = torch.bfloat16 if precision == "half" else torch.float32
    cast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        own |= {id_of_storage(tensor.untyped_storage()) for tensor in [*model.parameters(), *model.buffers()]}
        with saved_tensors_hooks(keep, lambda tensor: tensor), cast, maskless_attention(model):
            model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
    casts = 2 * sum(p.numel() for p in model.parameters() if p.dim() > 1) if precision == "autocast" else 0
    wide, other = (
        sum(storage.nbytes() for is_wide, storage in kept.values() if is_wide == kind) for kind in (True, False)
    )
    return wide, other - casts
