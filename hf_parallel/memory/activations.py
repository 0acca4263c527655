"""Memory of blocks, embedding and loss on each rank of a pipeline: recorded, traced or counted, under recomputation."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hf_parallel.head.rows import is_tiled, rows_of_tile
from hf_parallel.memory.cut import blocks_of_stages
from hf_parallel.memory.experts import stay_whole
from hf_parallel.memory.moments import Batch, Part, Parts, Recorded, StageParts, summed
from hf_parallel.memory.terms import Layout, ModelShape, Work
from hf_parallel.pipeline_parallel.schedule.actions import Schedule, placement_of
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.pipeline_parallel.schedule.simulate import peak_held
from hf_parallel.settings.sequence_rules import method_of


LOSS_CHUNK: Final = 2**22  # elements: of `tensor_parallel.run.vocab_loss`
# Of a block that runs again, inputs of column-sharded products that are gathered from the ranks that share the sequence at once.
GATHERED_INPUTS: Final = 2
SUM_BYTES: Final = 4.0  # of an element of the gradient of the head's weight, summed over tiles
COLUMNS: Final = 2**14  # of the vocabulary, in one product for the gradient of its weight: of `head.tiles`
NORMED: Final = (
    8.0  # bytes of each hidden state that the last norm keeps, and of what it gives, where it is not recorded
)
ON_HOST: Final = "inputs of checkpointed blocks"


def saved_by_block(shape: ModelShape, layout: Layout, work: Work) -> float:
    """Bytes that autograd keeps of one block for each token, as traced or else as counted.

    Counted op by op for Hugging Face's Llama block (RMSNorm, rotary attention through SDPA, gated feed-forward part) and
    equal to what `saved_tensors_hooks` sees there; for h = heads * head_dim = kv_heads * head_dim in 16 bit it is
    h (24 + 8 intermediate / h) and some bytes of statistics. Without a gate: LayerNorm and a fused activation, a lower
    bound. Tensor parallelism leaves the norms whole, unless the sequence is shared.
    """
    traced, whole = shape.saved, 1 if layout.sequence_parallel else layout.tp_size
    if traced is not None:
        return (traced.shared * whole + traced.split + traced.square * work.length) / layout.tp_size
    full = layout.precision == "fp32"
    size, tp = (4 if full else 2), layout.tp_size
    norm = {"fp32": 12, "half": 8, "autocast": 13}[layout.precision] if shape.gated else 2 * size
    norms = 2 * (norm * shape.hidden + 4)
    heads = 2 * size * shape.head_dim * (shape.heads + shape.kv_heads) + 4 * shape.heads
    wide = size * shape.intermediate * (4 if shape.gated else 2)
    scores = (2 * size + 2) * shape.heads * work.length if work.eager_attention else 0
    return norms / (tp if layout.sequence_parallel else 1) + (heads + wide + scores) / tp


def activations(shape: ModelShape, layout: Layout, work: Work) -> list[dict[str, float]]:
    """Bytes that each rank of a pipeline keeps for the backward when it holds most, by term.

    With checkpointing every k blocks in mode block: the input of every k-th block, and k whole blocks while one group is
    computed again; in mode alternate every k-th block keeps its input only, in mode selective each block its input and
    some results. Without: every block whole. Inputs that wait in host memory are there for the block that runs again and
    the one after it.
    """
    rows, schedule = schedule_of(layout, work)
    tokens, every = rows * work.length / layout.sp_size, layout.recompute.every
    whole = tokens * saved_by_block(shape, layout, work)
    entry = tokens * shape.hidden * (2.0 if layout.precision == "half" else 4.0)
    entry /= layout.tp_size if layout.sequence_parallel else 1
    counts = blocks_of_stages(shape, layout)
    together = blocks_at_once(shape, layout) if every is not None else 0
    alone = [alone_of(count, layout) for count in counts]
    results = tokens * kept_results(shape, layout)
    kept = [single * whole + (count - single) * results for single, count in zip(alone, counts, strict=True)]
    inputs = [entry * entries for entries in _entries(counts, layout)]
    moved, again = layout.recompute.offload, together * whole
    if moved:
        again += 2 * entry
    else:
        kept = [one + other for one, other in zip(kept, inputs, strict=True)]
    waiting = peak_held(schedule, inputs) if moved else [0.0] * layout.pp_size
    logits, last = loss_bytes(shape, layout, tokens), placement_of(schedule)[-1]
    return [
        {"activations": held, "recomputed blocks": again, "logits and loss": logits * (rank == last), ON_HOST: apart}
        for rank, (held, apart) in enumerate(zip(peak_held(schedule, kept), waiting, strict=True))
    ]


@dataclass(frozen=True)
class Stages:
    """The stages of a run.

    Attributes:
        tokens: Tokens of a microbatch.
        length: Tokens of a row.
        placement: The rank of each stage.
        counts: Number of blocks of each stage.
        sizes: Memory that the blocks of each stage keep, in blocks as recorded.
    """

    tokens: float
    length: int
    placement: Sequence[int]
    counts: Sequence[int]
    sizes: Sequence[float]

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage, place in enumerate(self.placement) if place == rank]


def stages_of(shape: ModelShape, layout: Layout, work: Work) -> Stages:
    """The stages of a layout, and what they run on."""
    rows, schedule = schedule_of(layout, work)
    counts = blocks_of_stages(shape, layout)
    return Stages(rows * work.length / layout.sp_size, work.length, placement_of(schedule), counts, counts)


def stage_parts(
    shape: ModelShape, recorded: Recorded, layout: Layout, stages: Stages, rank: int, gradients: float
) -> list[StageParts]:
    """Bytes that the stages of a rank take, part by part.

    Args:
        shape: Shape of the model.
        recorded: Recorded step of the model.
        layout: Division among the ranks.
        stages: Stages of the whole run.
        rank: Pipeline rank.
        gradients: Bytes of all that the rank holds.
    """
    counts, tokens = stages.counts, stages.tokens
    parts = _parts_of_step(shape, recorded, layout, stages)
    forward = parts.forward
    whole = tokens * shape.hidden * (recorded.element or (2.0 if layout.precision == "half" else 4.0))
    shares = layout.sequence_parallel and layout.tp_size > 1
    entry, gathered = whole / layout.tp_size if shares else whole, GATHERED_INPUTS * whole * shares
    recorded_again = recorded.runs_again
    block = forward.kept + (0.0 if recorded_again else forward.casts)
    passing = forward.most - forward.kept - forward.casts
    moved, again = layout.recompute.offload, functools.partial(_again_beside, shape, layout)
    own, last = stages.of_rank(rank), len(counts) - 1
    weights = _weights_of(shape, counts, own)
    entries, results = _entries(counts, layout), tokens * kept_results(shape, layout)
    found = []
    for stage in own:
        single = counts[stage] if recorded_again else alone_of(counts[stage], layout)
        rest = counts[stage] - single
        size = single * stages.sizes[stage] / max(1, counts[stage])
        kept = size * block + rest * results
        # Of what blocks that run again give: all, or what the last one gives if the host has the others.
        if not recorded_again:
            kept += entry * ((rest > 0) if moved else entries[stage])
        kept += (whole if stage else 0.0) - entry * (stage < last)  # what it received; what it sends is gone then
        # Whole beside the parts: what the embedding gives, and what enters the last norm.
        kept += (whole - entry) * ((stage == 0) + (stage == last))
        share = gradients * weights[stage] / max(1.0, sum(weights.values()))
        found.append(
            StageParts(
                kept=kept + parts.embedding.kept * (stage == 0),
                entering=parts.embedding.kept * (stage == 0),
                # Autocast keeps the casts of weights that are trained; blocks that run again keep none else.
                casts=0.0 if shape.adapters else (counts[stage] if recorded_again else rest) * forward.casts,
                block=passing,
                again=gathered if recorded_again else again(counts[stage]) * block + 2 * entry * moved,
                # The forward of the last block that runs again has what it gives back, too.
                backward=max(parts.backward.most, 0.0 if recorded_again else passing * (rest > 0)),
                gradients=share,
                late=share * (shape.block + shape.embedding * (stage == 0)) / max(1.0, weights[stage]),
                table=share * shape.head / max(1.0, weights[stage]) if stage == last else 0.0,
                loss=parts.loss if stage == last else None,
                head=parts.head if stage == last else None,
                # The others find theirs in their backward, when that one is done.
                once=_once(shape, layout, stages, recorded, parts.loss) if stage == last else 0.0,
                message=whole * (last > 0),
                sent=whole * (stage < last),
            )
        )
    return found


def _weights_of(shape: ModelShape, counts: Sequence[int], own: Sequence[int]) -> dict[int, float]:
    """Parameters of each stage of a rank."""
    weights = {stage: float(counts[stage]) * shape.block + shape.embedding * (stage == 0) for stage in own}
    last = len(counts) - 1
    if last in own:
        weights[last] += 0 if shape.tied and 0 in own else shape.head
    return weights


def _parts_of_step(shape: ModelShape, recorded: Recorded, layout: Layout, stages: Stages) -> Parts:
    """Bytes that a microbatch takes in each part of the model, with the head and the loss of the layout."""
    # What is gathered is in the precision that computes, and gradients are sent at once.
    gathers = layout.engine == "fsdp2" and layout.stage > 0
    batch = Batch(
        *(stages.tokens, stages.length, layout.tp_size, layout.sequence_parallel),
        with_fixed=not gathers,
        with_gradients=not shape.adapters,
        whole_experts=stay_whole(shape.expert_width, layout.tp_size),
        numbers=shape.numbers,
        ep_size=layout.ep_size,
        exchanging=_exchanging(shape, layout),
    )
    parts = recorded.parts(batch)
    if layout.tp_size > 1 and layout.recompute.products is not None:
        parts = _without_what_is_sent(parts, summed([one for one in recorded.forward if one.is_sent], batch).kept)
    parts = _with_inputs_of_keys(parts, _inputs_of_keys(shape, recorded, layout, stages.tokens), recorded.runs_again)
    loss, head = parts.loss, parts.head
    if _is_without_logits(shape, layout, stages.tokens):
        normed = _normed_for_tiles(shape, layout, recorded, stages)
        loss, head = _parts_without_logits(shape, layout, stages.tokens, normed, recorded.steps)
    elif layout.tp_size > 1:
        normed = _normed(recorded, stages)
        loss, head = _parts_of_split_vocabulary(shape, layout, stages.tokens, normed, recorded.steps)
    return replace(parts, loss=loss, head=head)


def _without_what_is_sent(parts: Parts, sent: float) -> Parts:
    """The parts of a selectively recomputed block on one of several ranks: what products give to messages is not kept, and made again."""
    forward = replace(parts.forward, kept=parts.forward.kept - sent)
    return replace(parts, forward=forward, backward=replace(parts.backward, most=parts.backward.most + sent))


def _inputs_of_keys(shape: ModelShape, recorded: Recorded, layout: Layout, tokens: float) -> float:
    """Bytes of whole inputs that products of keys and values keep on ranks that share the sequence and have all of these products.

    Where there are fewer heads of these than ranks. Products that tensor parallelism cuts keep parts of what is gathered. A norm that
    widens its result has it cast by each of both.
    """
    shares = layout.sequence_parallel and layout.tp_size > 1
    are_own = any(one.heads[0] == shape.kv_heads for one in recorded.forward)  # not of one product with the queries
    if not (shares and 0 < shape.kv_heads < min(layout.tp_size, shape.heads) and are_own):
        return 0.0
    size, casts = (4.0 if layout.precision == "fp32" else 2.0), any(one.readers for one in recorded.forward)
    return size * tokens * shape.hidden * (2 if casts else 1)


def _with_inputs_of_keys(parts: Parts, size: float, runs_again: bool) -> Parts:
    """The parts of a block that has so many bytes more from its forward to its backward, or in this if it runs again."""
    forward, backward = parts.forward, parts.backward
    if runs_again:
        return replace(parts, backward=replace(backward, most=backward.most + size))
    return replace(parts, forward=replace(forward, most=forward.most + size, kept=forward.kept + size))


def _exchanging(shape: ModelShape, layout: Layout) -> int:
    """Number of ranks that exchange parts of a row for heads; 1 where keys go round them."""
    heads = max(1, shape.heads // layout.tp_size) if shape.heads else None
    return layout.sp_size if method_of(layout.sp_attention, heads, layout.sp_size) == "ulysses" else 1


def _normed(recorded: Recorded, stages: Stages) -> float:
    """Bytes of the width of the residual stream that the last norm and the head keep."""
    return summed([one for one in recorded.loss if one.whole], Batch(stages.tokens, stages.length)).kept


def _normed_for_tiles(shape: ModelShape, layout: Layout, recorded: Recorded, stages: Stages) -> float:
    """The same of a loss without logits, which keeps hidden states as they are and casts those of a tile."""
    uncast = (4.0 - 2.0) * stages.tokens * shape.hidden if layout.precision == "autocast" else 0.0
    return _normed(recorded, stages) + uncast


def loss_bytes(shape: ModelShape, layout: Layout, tokens: float) -> float:
    """Bytes of logits and loss of a microbatch: 12 a logit (16 bit, fp32, fp32 gradient and its 16-bit copy).

    A loss without logits has those of one tile, the head's weight as it is cast, the sum of its gradient in fp32 and the gradient of
    the hidden states.
    """
    if not _is_without_logits(shape, layout, tokens):
        return 12.0 * tokens * shape.vocab / layout.tp_size
    return _parts_without_logits(shape, layout, tokens, NORMED * tokens * shape.hidden)[0].most


def _is_without_logits(shape: ModelShape, layout: Layout, tokens: float) -> bool:
    return layout.chunked_loss and is_tiled(int(tokens), shape.hidden, int(shape.vocab / layout.tp_size))


def _once(shape: ModelShape, layout: Layout, stages: Stages, recorded: Recorded, loss: Part) -> float:
    """Bytes of gradients that one of several losses without logits keeps."""
    if not _is_without_logits(shape, layout, stages.tokens):
        return 0.0
    return loss.kept - _normed_for_tiles(shape, layout, recorded, stages)


def _parts_without_logits(
    shape: ModelShape, layout: Layout, tokens: float, normed: float, steps: tuple[int, int] = (0, 0)
) -> tuple[Part, Part]:
    """The loss that computes its gradients in tiles as it goes, and its backward, which hands them on.

    `normed` are the bytes that the last norm keeps, `steps` those of `Recorded`.
    """
    vocab, size = shape.vocab / layout.tp_size, 4.0 if layout.precision == "fp32" else 2.0
    rows = rows_of_tile(int(tokens), shape.hidden, int(vocab))
    to_weight = 0.0 if shape.adapters else SUM_BYTES * vocab * shape.hidden
    to_hidden = size * tokens * shape.hidden
    cast = 2.0 * vocab * shape.hidden if layout.precision == "autocast" else 0.0  # of the head's weight
    each = vocab * of_logit_in_tile(size, *steps)
    added = vocab * rows * size + (size * min(COLUMNS, vocab) * shape.hidden if size < 4 and to_weight else 0.0)
    # The gradient of the weight begins when the first tile is gone.
    at_once = max(each * rows, to_weight + max(each * min(rows, tokens - rows), added))
    kept = to_weight + to_hidden + normed
    return Part(at_once + cast + to_hidden + normed, kept, 0.0), Part(0.0, -kept, 0.0)


def of_logit_in_tile(size: float, steps: int, kept: int) -> float:
    """Bytes of a logit of a tile when it takes most; see `Recorded.steps`.

    In fp32 all of a tile has the memory of its logits, unless steps have made these: then product, logits, exponentials and gradients
    are apart. Logits in 16 bit are widened, and exponentials have memory of their own; the gradient in 16 bit is left of these, and
    makes what is added to that of the weight.
    """
    if size == SUM_BYTES:
        return size * (4 + kept + (steps > 1) if steps else 1)
    return size + 4.0 + 4.0 + size + size * (kept + (steps > 0))


def _parts_of_split_vocabulary(
    shape: ModelShape, layout: Layout, tokens: float, normed: float, steps: tuple[int, int]
) -> tuple[Part, Part]:
    """The loss over logits that tp ranks share, and its backward: it keeps logits alone and computes by chunks in fp32.

    `normed` are the bytes that the last norm keeps, `steps` those of `Recorded`: the backward has what they kept and two of their
    gradients. Then the gradient of the head's weight has come, under autocast as it is computed and as it is added, beside the sum of those
    before it.
    """
    size = 4 if layout.precision == "fp32" else 2
    each = 0.0 if shape.adapters else size + 4.0 * (layout.precision == "autocast")
    to_weight = each * shape.vocab / layout.tp_size * shape.hidden
    elements = tokens * shape.vocab / layout.tp_size
    logits = size * elements
    between = logits * steps[1]
    chunk, is_half = 4.0 * min(LOSS_CHUNK, elements), size == 2  # in fp32 the backward writes into the gradient itself
    kept = normed + logits + between
    forward = Part(kept + chunk * (1 + is_half), kept, 0.0)
    at_once = is_half * (2 if elements > LOSS_CHUNK else 1)  # the one before lives until there is another
    return forward, Part(max(logits + max(chunk * at_once, logits * (steps[0] > 1)), to_weight), -kept, 0.0)


def _again_beside(shape: ModelShape, layout: Layout, count: int) -> int:
    """Blocks that run again in a stage of so many beside all that it keeps: where others come after them, these are gone by then."""
    every = layout.recompute.every
    if every is None or (layout.recompute.mode == "alternate" and (count - 1) % every):
        return 0
    return blocks_at_once(shape, layout)


def blocks_at_once(shape: ModelShape, layout: Layout) -> int:
    """Blocks that `fully_shard` gathers together: those of a checkpoint."""
    recompute = layout.recompute
    return min(recompute.every or 1, shape.layers) if recompute.mode == "block" else 1


def _entries(counts: Sequence[int], layout: Layout) -> list[int]:
    """Inputs that each stage keeps, one for each of its checkpoints: the first begins with the stage."""
    every, mode = layout.recompute.every, layout.recompute.mode
    if every is None:
        return [0] * len(counts)
    if mode == "selective":
        return list(counts)
    return [math.ceil(count / every) for count in counts]


def alone_of(count: int, layout: Layout) -> int:
    """Number of blocks of a stage that autograd keeps whole."""
    every = layout.recompute.every
    if every is None:
        return count
    return count - math.ceil(count / every) if layout.recompute.mode == "alternate" else 0


def kept_results(shape: ModelShape, layout: Layout) -> float:
    """Bytes for each token that a selectively recomputed block keeps beside its input.

    Counted for Llama's block: the results of q, k, v, o, gate, up and down in this order, one in `every`, and that of
    attention with 4 bytes a head. What o and down give on a tensor-parallel rank is a summand of the whole width.
    """
    every = layout.recompute.products
    if every is None:
        return 0.0
    size, tp = (4 if layout.precision == "fp32" else 2), layout.tp_size
    wide, narrow = shape.heads * shape.head_dim / tp, shape.kv_heads * shape.head_dim / tp
    products = [wide, narrow, narrow, shape.hidden, *[shape.intermediate / tp] * (1 + shape.gated), shape.hidden]
    return size * (sum(products[::every]) + wide) + 4 * shape.heads / tp


def schedule_of(layout: Layout, work: Work) -> tuple[int, Schedule]:
    """Rows of the largest microbatch, and the actions of an optimizer step."""
    if layout.pp_size == 1:
        return work.rows, build_schedule("gpipe", 1, 1)
    count = min(work.rows, layout.schedule.num_microbatches)
    return math.ceil(work.rows / count), layout.schedule.training(count * work.accumulation)
