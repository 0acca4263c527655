"""Foresees the number of blocks on each stage of a pipeline, from sizes of the model alone.

The cut of a run weighs what its forward does (`pipeline_parallel.plan.costs`); this foresees it where there is no model yet.
"""

from __future__ import annotations

import math
from typing import Final

from hf_parallel.memory.terms import Layout, ModelShape


LENGTH: Final = 512  # tokens of the row that the cut is made for
FLOPS_PER_BYTE: Final = 100.0  # of a GPU, as the cut has it
# Bytes that ops without products read and write for a token, for each element of width in a block: counted in forwards of Llama
# in several sizes (39), GPT-2 (57) and GPT-NeoX (18).
BLOCK_BYTES: Final = 39.0
LOGIT_BYTES: Final = 12.0  # the same for each entry of the vocabulary: logits and their loss


def blocks_of_stages(shape: ModelShape, layout: Layout) -> list[int]:
    """Blocks of each stage: as listed in `pipeline.split`, evenly, or balanced against the head and the loss.

    Args:
        shape: Shape of the model; its blocks are taken to be alike.
        layout: Division among the ranks.
    """
    if layout.pp_size == 1:
        return [shape.layers]
    split = layout.pipeline.split
    if not isinstance(split, str):
        return list(split)
    stages = len(layout.schedule.placement)
    if split == "even" or shape.layers < stages - 1:
        return _even(shape.layers, stages)
    tail = _tail_in_blocks(shape, layout)
    # Smallest largest stage, then the most even cut.
    last = min(
        range(shape.layers - stages + 2),
        key=lambda own: (max(math.ceil((shape.layers - own) / (stages - 1)), own + tail), -own),
    )
    return [*_even(shape.layers - last, stages - 1), last]


def _even(blocks: int, stages: int) -> list[int]:
    return [blocks // stages + (index < blocks % stages) for index in range(stages)]


def _tail_in_blocks(shape: ModelShape, layout: Layout) -> float:
    """Cost of head and loss in a training step, as a number of blocks."""
    attention = 4.0 * shape.heads * shape.head_dim * LENGTH
    wide = shape.heads * shape.head_dim + shape.kv_heads * shape.head_dim + 2 * shape.hidden + shape.intermediate
    block = 2.0 * shape.block + attention + FLOPS_PER_BYTE * BLOCK_BYTES * wide
    tail = 2.0 * shape.vocab * shape.hidden + FLOPS_PER_BYTE * LOGIT_BYTES * shape.vocab
    again = 4 / 3 if layout.recompute.every is not None else 1.0  # forward, backward of two, and the forward once more
    return tail / (again * block)
