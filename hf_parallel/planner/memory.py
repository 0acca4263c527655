"""Bytes of the fullest rank, term by term: recorded where this package runs the layout, else by formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hf_parallel.head.rows import is_tiled, rows_of_tile
from hf_parallel.memory.activations import Stages
from hf_parallel.memory.estimate import CONTEXT_BYTES, GATHERED_BLOCKS, part_of_tables
from hf_parallel.memory.moments import Recorded
from hf_parallel.memory.optimizers import kept_bytes, more_of_embedding
from hf_parallel.memory.terms import Buffers
from hf_parallel.pipeline_parallel.schedule.simulate import peak_held
from hf_parallel.planner.adapters import is_beside, may_be_beside, stored_bytes
from hf_parallel.planner.cost import whole_experts
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.own import in_room_of, peaks_of_ranks, recorded_of, traced_of
from hf_parallel.planner.pipeline import placement, schedule_of
from hf_parallel.planner.profile import BlockProfile, ModelProfile


FRAGMENTATION: Final = 0.1  # of what comes and goes; states are allocated once
# The same where a GPU is full: torch gives cached blocks back and tries again before it is out of memory. The largest batches
# of MosaicML's table that ran on 40 GB leave 0.08.
TIGHTEST: Final = 0.08
# Of a GPU, what processes of Megatron and of systems like it hold besides, where there is room for it: buffers of their groups and
# cached memory. From what a monitor showed of 143 published runs, 9 GB of 80 in the mean.
OTHERS_HOLD: Final = 0.105
PASSING: Final = ("activations", "logits", "buffers")
BUCKET: Final = 25e6 * 4  # elements of a message of gradients, two of them in fp32
# Bytes of a logit while the loss is computed: 16-bit, fp32 copy, fp32 gradient and its 16-bit copy.
LOGIT_BYTES: Final = {"eager": 12.0, "compiled": 10.0, "norms": 12.0, "fused": 8.0}
ADAPTER_BYTES: Final = (4.0, 4.0)  # PEFT's adapters and their gradients are in fp32 beside whatever the model is in
DEEPSPEED: Final = Buffers()
MIDDLE: Final = 1  # the block that is recorded, of three
# Of each logit of the whole vocabulary: log-softmax and the gradients before and after it, in fp32. In 16 bit the logits, and the
# parts that they were gathered from, whose memory the allocator keeps in pieces that are too small for the others.
GATHERED_LOSS: Final = 12.0
FUSED_LOSS: Final = 4.0  # one kernel reads the 16-bit logits and another writes their gradient


def memory_bytes(
    profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int], seq_len: int, limit: float = math.inf
) -> dict[str, float]:
    """Bytes of the rank that needs most.

    Args:
        profile: The model.
        spec: The layout.
        counts: Blocks of each stage.
        seq_len: Tokens of a row.
        limit: Bytes of a GPU, which decides how much of it may lie idle in the allocator's cache.
    """
    # Of the ways to read what is trained the one that needs more counts.
    readings = {is_beside(profile, spec), may_be_beside(profile, spec)}
    found = [_terms(profile, spec, counts, seq_len, beside=beside) for beside in readings]
    terms = max(found, key=lambda one: sum(one.values()))
    return terms | {"overhead": _overhead(terms, spec, limit)}


def _terms(
    profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int], seq_len: int, *, beside: bool
) -> dict[str, float]:
    """Terms of `memory_bytes` but overhead; `beside` tells adapters from layers of the model's own."""
    recorded = recorded_of(profile, spec, beside=beside)
    if recorded is None:
        return _bytes_by_formula(profile, spec, counts, seq_len, beside=beside)
    return _own_bytes(profile, recorded, spec, counts, seq_len, beside=beside)


def _overhead(terms: Mapping[str, float], spec: LayoutSpec, limit: float) -> float:
    """The context, and what the allocator and its groups hold without use."""
    passing, left = sum(terms[term] for term in PASSING), limit - CONTEXT_BYTES - sum(terms.values())
    fragments = min(FRAGMENTATION * passing, max(TIGHTEST * passing, left))
    is_others = spec.engine == "native" and not spec.places_replicas and spec.num_ranks > 1 and math.isfinite(limit)
    more = min(OTHERS_HOLD * limit, max(0.0, left - fragments)) if is_others else 0.0
    return CONTEXT_BYTES + fragments + more


def _bytes_by_formula(
    profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int], seq_len: int, *, beside: bool
) -> dict[str, float]:
    """Terms of `memory_bytes` but overhead, of layouts that other packages run."""
    ranks = placement(spec)
    held, experts = parameters_of_ranks(profile, spec, counts), experts_of_ranks(profile, spec, counts)
    blocks = blocks_of_ranks(profile, spec, counts)
    trained = trained_of_ranks(held, blocks, spec, beside=beside)
    kept, working = kept_activations(profile, spec, counts, seq_len)
    tokens = spec.micro_batch * seq_len / spec.sp
    logits = _loss(profile, spec, tokens)
    logits += spec.element * tokens * profile.hidden * _keeps_gathered(spec)
    tables, found = tables_of_ranks(profile, spec), []
    for rank in range(spec.pp):
        terms = _states(held[rank], experts[rank], blocks[rank], trained[rank], tables[rank], spec, beside=beside)
        terms["activations"] = kept[rank] + working
        terms["logits"] = logits if rank == ranks[-1] else 0.0
        terms["buffers"] = _buffers(profile, held[rank], spec) + _unpacked(profile, spec)
        if spec.num_ranks * spec.num_microbatches == 1:  # gradients come as what the forward kept goes
            terms |= in_room_of(terms["gradients"], {name: terms[name] for name in PASSING})
        found.append(terms)
    return max(found, key=lambda terms: sum(terms.values()))


def _own_bytes(
    profile: ModelProfile, recorded: Recorded, spec: LayoutSpec, counts: Sequence[int], seq_len: int, *, beside: bool
) -> dict[str, float]:
    """Terms of `memory_bytes` but overhead, of layouts that this package runs."""
    held, experts = parameters_of_ranks(profile, spec, counts), experts_of_ranks(profile, spec, counts)
    blocks = blocks_of_ranks(profile, spec, counts)
    trained = trained_of_ranks(held, blocks, spec, beside=beside)
    each = zip(held, experts, blocks, trained, tables_of_ranks(profile, spec), strict=True)
    states = [_states(*one, spec, beside=beside) for one in each]
    sizes = _sizes(profile, spec, counts, seq_len)
    stages = Stages(spec.micro_batch * seq_len / spec.sp, seq_len, placement(spec), counts, sizes)
    if spec.pp == 1:
        stages = replace(stages, placement=(0,), counts=[sum(counts)], sizes=[sum(sizes)])
    peaks = peaks_of_ranks(profile.shape, recorded, spec, stages, held, states)
    found = [lasting | peak for lasting, peak in zip(states, peaks, strict=True)]
    return max(found, key=lambda terms: sum(terms.values()))


def _sizes(profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int], seq_len: int) -> list[float]:
    """Number of recorded blocks that the blocks of each stage are as large as; kinds differ as the formula says."""
    if len(profile.kinds) == 1:
        return [float(count) for count in counts]
    kept = [saved_by_block(profile, kind, spec, seq_len) for kind in profile.kinds]
    usual = kept[profile.layers[min(MIDDLE, len(profile.layers) - 1)]]
    found, layer = [], 0
    for count in counts:
        found.append(sum(kept[kind] for kind in profile.layers[layer : layer + count]) / usual)
        layer += count
    return found


def _loss(profile: ModelProfile, spec: LayoutSpec, tokens: float) -> float:
    """Logits and loss; without logits those of one tile, the head's gradient in fp32 and that of the hidden states."""
    vocab, each = profile.vocab / (1 if spec.loss == "gathered" else spec.tp), _logit_bytes(spec)
    if not spec.chunked_loss or not is_tiled(int(tokens), profile.hidden, int(vocab)):
        return each * tokens * vocab
    tile = rows_of_tile(int(tokens), profile.hidden, int(vocab))
    to_weight = 0.0 if spec.adapters else 4.0 * vocab * profile.hidden
    return each * tile * vocab + to_weight + spec.element * tokens * profile.hidden


def _logit_bytes(spec: LayoutSpec) -> float:
    """Bytes of each logit, when the loss takes most."""
    if spec.loss == "fused":
        return FUSED_LOSS * spec.element / 2
    if spec.loss == "gathered":
        return GATHERED_LOSS + 2.0 * spec.element
    stored = LOGIT_BYTES["eager" if spec.loss == "logits" else spec.kernels]
    return stored * (2 if spec.dtype == "fp32" else 1)


def parameters_of_ranks(profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int]) -> list[float]:
    """Parameters of each rank of a pipeline.

    Args:
        profile: The model.
        spec: The layout.
        counts: Blocks of each stage.
    """
    ranks = placement(spec)
    held = blocks_of_ranks(profile, spec, counts)
    held[ranks[0]] += part_of_tables(profile.embedding, profile.positions, spec.tp)
    held[ranks[-1]] += 0 if profile.tied and ranks[0] == ranks[-1] else profile.head / spec.tp
    return held


def blocks_of_ranks(profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int]) -> list[float]:
    """Parameters of each rank's blocks; see `parameters_of_ranks`."""

    def size(kind: BlockProfile) -> float:
        beyond = kind.beyond_even(spec.tp) * spec.tp if spec.places_replicas else 0.0  # others share heads evenly
        return kind.held(spec.sharing_replicas, whole_experts(kind, spec)) + beyond

    return _of_blocks(profile, spec, counts, size)


def experts_of_ranks(profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int]) -> list[float]:
    """Like `parameters_of_ranks`, counting the experts alone."""
    return _of_blocks(
        profile, spec, counts, lambda kind: kind.experts * whole_experts(kind, spec) / spec.sharing_replicas
    )


def tables_of_ranks(profile: ModelProfile, spec: LayoutSpec) -> list[float]:
    """Parameters of each rank before the first block, as far as they are trained."""
    first, own = placement(spec)[0], part_of_tables(profile.embedding, profile.positions, spec.tp)
    return [own * (rank == first and not spec.adapters) for rank in range(spec.pp)]


def _of_blocks(
    profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int], size: Callable[[BlockProfile], float]
) -> list[float]:
    """Parameters of the blocks of each rank."""
    ranks, kinds = placement(spec), iter(profile.layers)
    found = [0.0] * spec.pp
    for stage, count in enumerate(counts):
        found[ranks[stage]] += sum(size(profile.kinds[kind]) for kind in itertools.islice(kinds, count)) / spec.tp
    return found


def trained_of_ranks(held: Sequence[float], blocks: Sequence[float], spec: LayoutSpec, *, beside: bool) -> list[float]:
    """Parameters of each rank that get gradients: adapters lie beside the products of its blocks, of which ranks have different numbers.

    Args:
        held: Parameters of each rank.
        blocks: Parameters of them that are in blocks.
        spec: The layout.
        beside: Whether what is trained are adapters.
    """
    whole = sum(blocks)
    if not (spec.adapters and beside and whole > 0):
        return [spec.trained(one) for one in held]
    return [spec.adapters / spec.tp * one / whole for one in blocks]


def _states(
    parameters: float, experts: float, blocks: float, trained: float, table: float, spec: LayoutSpec, *, beside: bool
) -> dict[str, float]:
    """Bytes of a rank's states: `parameters`, of which `blocks` are in blocks, of these `experts` in experts, and `table` in the embedding."""
    weights, gradients, optimizer = spec.states
    if spec.adapters:  # the model itself has neither gradients nor optimizer, and no fp32 copy
        share = trained / max(parameters, 1.0)
        if spec.state_bytes is None:
            weights = 4.0 if spec.param_dtype == "fp32" and not spec.block_bits else spec.element
        if spec.block_bits:
            weights -= (weights - spec.block_bits / 8) * blocks / max(parameters, 1.0)
        is_in_fp32 = beside and spec.state_bytes is None and spec.engine == "native" and spec.kernels == "eager"
        usual = *ADAPTER_BYTES, kept_bytes(spec.optim, 4.0)
        own, gradients, optimizer = (share * each for each in (usual if is_in_fp32 else spec.states))
        weights += own * beside
    # Experts are in parts already, of which fewer ranks have copies.
    shard = (parameters + experts * (spec.sharing_replicas - 1)) / (spec.dp * spec.sp)
    whole = spec.engine == "fsdp2" and spec.zero > 0  # the shard is all that lasts
    found = {
        "weights": weights * (shard if spec.zero == 3 or whole else parameters),
        "gradients": gradients * (shard if spec.zero >= 2 or whole else parameters),
        "optimizer": optimizer * (shard if spec.zero >= 1 else parameters),
    }
    found["optimizer"] += more_of_embedding(spec.optim) * table / (spec.dp * spec.sp if spec.zero else 1)
    if spec.offload_optimizer != "none":
        found["optimizer"] = 0.0
        if spec.zero == 3:
            found["gradients"] = 0.0
    if spec.offload_param != "none":
        found["weights"] = 0.0
    return found


def _buffers(profile: ModelProfile, parameters: float, spec: LayoutSpec) -> float:
    """Bytes that are gathered, cast or on their way for a while."""
    element = float(spec.element)
    block = max(kind.held(spec.sharing_replicas, whole_experts(kind, spec)) for kind in profile.kinds) / spec.tp
    rest = max(profile.embedding, profile.head) / spec.tp
    passing = GATHERED_BLOCKS * block * stored_bytes(1.0, 1.0, spec) + element * rest
    if spec.dp * spec.sp == 1:  # alone, what is offloaded passes block by block
        return min(element * parameters, passing) if spec.offload_param != "none" else 0.0
    reduced = spec.states[1] * spec.trained(parameters) / max(parameters, 1.0)
    if spec.zero == 3 and spec.pp > 1:  # whole from the first pass of a step to the last
        return (element + reduced) * parameters
    if spec.zero == 3:
        at_once = max(block, rest)
        if spec.engine == "deepspeed":  # a parameter at a time, up to its limits
            largest = profile.shape.largest / spec.tp
            passing = min(passing, element * max(DEEPSPEED.live + DEEPSPEED.prefetch, largest))
            at_once = min(at_once, max(DEEPSPEED.reduce_bucket, largest))
        return min(element * parameters, passing) + reduced * min(parameters, at_once)
    if spec.engine == "fsdp2" and spec.zero > 0:
        return element * parameters + reduced * min(parameters, max(block, rest))
    return min(reduced * parameters, 2 * BUCKET)


def _unpacked(profile: ModelProfile, spec: LayoutSpec) -> float:
    """The largest matrix of a quantised block, which a product unpacks."""
    if not spec.block_bits:
        return 0.0
    return spec.element * max(float(p.inputs * p.outputs) for kind in profile.kinds for p in kind.products) / spec.tp


def saved_by_block(profile: ModelProfile, block: BlockProfile, spec: LayoutSpec, seq_len: int) -> float:
    """Bytes that the backward of a block needs for each token of a rank, with nothing computed again.

    Source: arXiv:2205.05198, section 4, of which the terms are those of any block: norms and inputs of products, heads,
    the feed-forward part and, where attention stores them, its scores. Megatron and this package gather the inputs of sharded
    products again in the backward; autograd alone keeps what was gathered.
    """
    traced = traced_of(profile, spec)
    if traced is not None:
        whole = 1 if spec.sequence_parallel else spec.tp
        return (traced.shared * whole + traced.split + traced.square * seq_len) / spec.tp
    size = spec.element
    norm = 8.0 if spec.kernels == "eager" and block.has_rms else 4.0
    norm -= 2.0 * (norm > 4.0 and is_beside(profile, spec))  # what it has made is kept for its weight's gradient
    norms = 2 * norm * profile.hidden * (size / 2) + 2.0 * profile.has_dropout * profile.hidden
    heads = size * block.heads * (block.head_dim + block.value_dim) + size * block.kv_heads * (
        block.head_dim + block.value_dim
    )
    wide = size * block.width * ((4 if spec.kernels in ("eager", "norms") else 3) if block.is_gated else 2)
    routed = 2.0 * size * block.routed * profile.hidden
    split = heads + wide + routed + 4.0 * block.heads + _scores(block, spec, seq_len, profile.has_dropout)
    gathered = 2.0 * size * profile.hidden * _keeps_gathered(spec)
    return norms / (spec.tp if spec.sequence_parallel else 1) + gathered + split / spec.tp


def _keeps_gathered(spec: LayoutSpec) -> bool:
    """Whether inputs of sharded products stay whole until the backward."""
    return spec.sequence_parallel and spec.tp > 1 and spec.kernels != "fused" and not spec.is_own


def _scores(block: BlockProfile, spec: LayoutSpec, seq_len: int, dropout: bool) -> float:
    """Bytes of a token's row of attention scores."""
    if spec.attention != "eager":
        return 0.0
    each = spec.element * (2 if dropout else 1) + dropout + (4 if spec.kernels in ("eager", "norms") else 0)
    return float(each * block.heads * seq_len)


def _kept(profile: ModelProfile, block: BlockProfile, spec: LayoutSpec, seq_len: int) -> float:
    """Bytes for each token that a block keeps until its backward, under the layout's recomputation."""
    whole = saved_by_block(profile, block, spec, seq_len)
    entry = spec.element * profile.hidden / (spec.tp if spec.sequence_parallel else 1)
    if spec.recompute == "full":
        return spec.repeated * entry + (1 - spec.repeated) * whole
    if spec.recompute == "none":
        return whole
    if spec.repeats_attention_alone:
        return whole - _scores(block, spec, seq_len, profile.has_dropout) / spec.tp
    products = sum(p.outputs * p.times / (spec.tp if p.cut == "column" else 1) for p in block.products)
    attention = block.heads * block.value_dim / spec.tp
    return entry + spec.element * (products / 2 + attention)


def kept_activations(
    profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int], seq_len: int
) -> tuple[list[float], float]:
    """Bytes that each rank keeps when it holds most, and those of the block that runs again."""
    tokens = spec.micro_batch * seq_len / spec.sp
    kept = [tokens * _kept(profile, block, spec, seq_len) for block in profile.kinds]
    stages, layer = [], 0
    for count in counts:
        stages.append(sum(kept[kind] for kind in profile.layers[layer : layer + count]))
        layer += count
    whole = 3.0 if _keeps_gathered(spec) else 2.0  # a product's input and its gradient; partial gradients of several
    working = whole * spec.element * tokens * profile.hidden
    if spec.recompute != "none":
        working += max(tokens * saved_by_block(profile, block, spec, seq_len) for block in profile.kinds)
    if spec.pp == 1:
        return [sum(stages)], working
    most = spec.num_microbatches
    if spec.schedule != "gpipe":
        most = min(most, 4 * spec.pp)
    return list(peak_held(schedule_of(spec.schedule, spec.pp, most, spec.stages_per_rank), stages)), working
