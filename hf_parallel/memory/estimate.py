"""Estimates the memory of a run on a GPU and in a node's RAM, term by term, before anything is started.

Pure arithmetic: no torch, no model, only numbers of it. Nothing here is a measurement of a GPU: terms say what they
leave out, and `OVERHEAD` is from experience.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hf_parallel.memory.activations import (
    ON_HOST,
    activations,
    blocks_at_once,
    schedule_of,
    stage_parts,
    stages_of,
)
from hf_parallel.memory.cut import blocks_of_stages
from hf_parallel.memory.experts import stay_whole
from hf_parallel.memory.heads import beyond_even
from hf_parallel.memory.moments import (
    GATHERED,
    NAMES,
    SENT,
    TEMPORARY,
    Moment,
    Recorded,
    Sending,
    StageParts,
    fullest,
    moments_of,
)
from hf_parallel.memory.optimizers import kept_bytes, more_of_embedding, passing_bytes
from hf_parallel.memory.terms import Engine, Layout, Memory, ModelShape, Precision, Work
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.tensor_parallel.units import most_of


CONTEXT_BYTES: Final = 1.5e9  # CUDA context and NCCL: from experience, not measured
FRAGMENTATION: Final = 0.08  # of everything else: from experience, not measured
OVERHEAD: Final = "overhead (not measured)"
CASTS: Final = "weights cast to 16 bit"
GATHERED_BLOCKS: Final = 3  # whole at once under stage 3: one computes, one arrives, one leaves
# Bytes per parameter of weights, gradients and Adam's state, whole. Source: ZeRO (arXiv:1910.02054) section 3.1 for
# half precision with fp32 master weights.
WHOLE: Final[Mapping[tuple[Engine, Precision], tuple[float, float, float]]] = {
    ("native", "fp32"): (4, 4, 8),
    ("native", "autocast"): (4, 4, 8),
    ("native", "half"): (2, 2, 12),
    ("fsdp2", "fp32"): (4, 4, 8),
    ("fsdp2", "autocast"): (4, 4, 8),
    ("fsdp2", "half"): (4, 4, 8),  # the shard itself is the fp32 master; what computes is gathered in half precision
    ("deepspeed", "fp32"): (4, 4, 12),  # and an fp32 master copy all the same
    ("deepspeed", "autocast"): (4, 4, 12),
    ("deepspeed", "half"): (2, 2, 12),
}
SUMMED: Final = 4.0  # bytes of a gradient in a message of the native engine
ADAM: Final = 8.0  # part of AdamW's bytes above that are its two states, the rest being an fp32 copy
GRADIENT_PARTS: Final = 4.0
HOST_OPTIMIZER: Final = 16.0  # fp32 master, AdamW's two states and an fp32 gradient
HOST_PARAMETERS: Final = 4.0  # half-precision parameters and gradients


def optimizer_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes per parameter of an fp32 copy, and of what the optimizer keeps beside it."""
    if _updates_in_half(layout):
        return 0.0, kept_bytes(layout.optim, 2.0)
    return WHOLE[layout.engine, layout.precision][2] - ADAM, kept_bytes(layout.optim, 4.0)


def _updates_in_half(layout: Layout) -> bool:
    """Whether the optimizer has no fp32 copies, and so keeps its states in the parameters' own dtype."""
    return layout.engine == "native" and layout.precision == "half" and layout.stage == 0


def states(parameters: float, layout: Layout, experts: float = 0.0, embedding: float = 0.0) -> dict[str, float]:
    """Bytes on the GPU of weights, gradients and optimizer state of a rank that holds `parameters`.

    `experts` of them are in experts, `embedding` in the token embedding.

    Source: ZeRO (arXiv:1910.02054) figure 1; offload as measured with DeepSpeed 0.19.8: with the optimizer on the host
    the gradient's partition goes there as well (stage 3). The native engine sums gradients next to the parameters: stage 2
    holds a part of them while it brings them down.
    """
    weights, gradients, _ = WHOLE[layout.engine, layout.precision]
    optimizer = sum(optimizer_bytes(layout))
    if (layout.engine, layout.precision, layout.stage, layout.offload_optimizer) == ("native", "half", 2, "none"):
        gradients = GRADIENT_PARTS  # what is summed is the gradient of the fp32 copy
    parts, stage, sharded_weights = layout.num_shards, layout.stage, layout.stage == 3
    if layout.engine == "fsdp2" and stage > 0:  # the shard is all that lasts; what is whole is a buffer
        sharded_weights, stage = True, 3
    found = {
        "weights": weights * parameters / (parts if sharded_weights else 1),
        "gradients": gradients * parameters / (parts if stage >= 2 else 1),
        # Experts are in parts already, of which fewer replicas have copies.
        "optimizer state": optimizer * (parameters + experts * (layout.ep_size - 1)) / parts
        if stage >= 1
        else optimizer * parameters,
    }
    found["optimizer state"] += more_of_embedding(layout.optim) * embedding / (parts if stage >= 1 else 1)
    if layout.offload_optimizer != "none":
        found["optimizer state"] = 0.0
        if stage == 3:
            found["gradients"] = 0.0
    if layout.offload_param != "none":
        found["weights"] = 0.0
    return found


def host_states(parameters: float, layout: Layout) -> dict[str, float]:
    """Bytes of a node for what its ranks offload: 16 per parameter for the optimizer, 4 more for the parameters.

    Source: measured with DeepSpeed 0.19.8, every live storage counted (5.05 bytes a rank at 20 / 4); FSDP2 offloads
    fp32 parameters, gradients and states together, which is 16; so does the native engine with copies of the parameters.
    """
    share = parameters / layout.num_shards * min(layout.ranks_per_node, layout.num_processes)
    found = {}
    if layout.offload_optimizer == "cpu":
        whole = layout.engine == "fsdp2"
        name = "parameters, gradients, optimizer state" if whole else "optimizer state and fp32 gradients"
        found[name] = (HOST_OPTIMIZER - ADAM + kept_bytes(layout.optim, 4.0)) * share
    if layout.offload_param == "cpu" and layout.engine != "fsdp2":
        found["parameters and gradients"] = HOST_PARAMETERS * share
    return found


def buffers(parameters: float, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """Bytes on the GPU of what a partition needs for a while; from the meaning of the settings, peaks not measured.

    Gradients travel of what is trained alone, adapters' in fp32; gathered is the whole model.
    """
    trained = _trained(parameters, shape)
    if layout.engine == "native":
        casts = layout.precision == "autocast" and not shape.block_bits
        return ({CASTS: 2 * parameters} if casts else {}) | _native_messages(trained, shape, layout)
    if layout.stage == 0:
        return {}
    element = 4 if layout.precision == "fp32" else 2
    block = _block_of_rank(shape, layout)
    if layout.engine == "fsdp2":
        block *= blocks_at_once(shape, layout)
        whole = min(parameters, GATHERED_BLOCKS * block) if layout.stage == 3 else parameters
        found = {GATHERED: element * whole, SENT: 4 * min(trained, block * trained / max(parameters, 1.0))}
        if layout.stage == 3:  # what is outside of the blocks stays gathered, in fp32 unless it is half itself
            rest = max(0.0, parameters - shape.layers * _block_of_rank(shape, layout))
            found["gathered embedding and head"] = (2 if layout.precision == "half" else 4) * rest
        if layout.stage == 1:
            found["whole gradients between backward passes"] = 4 * trained
        return found
    return _deepspeed_buffers(parameters, shape, layout, element)


def _trained(parameters: float, shape: ModelShape) -> float:
    """Parameters that get gradients of the `parameters` of a rank."""
    return shape.adapters * parameters / shape.parameters if shape.adapters else parameters


def _native_messages(trained: float, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """Gradients that move into a bucket, which then has them."""
    sent = sending_of(trained, shape, layout)
    return {SENT: sent.last} if sent.last else {}


def sending_of(
    trained: float, shape: ModelShape, layout: Layout, *, passes: int = 1, is_first: bool = False
) -> Sending:
    """Gradients of the native engine on their way to the other replicas.

    A message takes memory of its own, in fp32, beside the gradients that it is of; then it has these. It is closed when it has
    reached its size, so a large table makes a message of its own.

    Args:
        trained: Parameters of the rank that get gradients.
        shape: Shape of the model.
        layout: Division among the ranks.
        passes: Backward passes of a step that are reduced one by one; counts with stage 2.
        is_first: Whether it is the first step, which finds out what is complete when, and so sends at its end.
    """
    if layout.num_processes == layout.tp_size * layout.pp_size:
        return Sending()
    element = 2.0 if layout.precision == "half" and not shape.adapters else 4.0
    usual = layout.bucket_cap_mb * 2**20 / SUMMED
    among, last = min(trained, usual), min(trained, max(usual, shape.largest / layout.tp_size))
    if layout.stage == 0:  # all of the sums stay, in fp32
        return Sending(element * among, element * last, SUMMED / element, element * usual)
    if is_first:
        return Sending(0.0, (SUMMED + element) * last)
    each = SUMMED * (1 - 1 / layout.num_shards) + element  # its sum comes when the gradients are gone
    if layout.stage == 1:
        return Sending(each * among, each * last, SUMMED / layout.num_shards / element, element * usual)
    return Sending(each * among, each * last, 2.0 if passes > 1 else 1.0)  # parts of earlier passes are there already


def steps_of(
    states: dict[str, float], trained: float, shape: ModelShape, layout: Layout, passes: int, sent: float = 0.0
) -> list[tuple[dict[str, float], Sending]]:
    """States of a rank and its messages in a step in the middle of a run, and in the first one where that may need more.

    With stages 1 and 2 the first step has all gradients whole, and no state of Adam yet.

    Args:
        states: Bytes of what lasts, by term, in the middle of a run.
        trained: See `sending_of`.
        shape: Shape of the model.
        layout: Division among the ranks.
        passes: See `sending_of`.
        sent: Bytes of gradients on their way, where another engine than the native one sends them.
    """
    if layout.engine != "native":
        return [(states, Sending(sent, sent))]
    is_half = layout.precision == "half" and not shape.adapters
    whole = states | {"gradients": (2.0 if is_half else 4.0) * trained}
    if layout.stage == 2 and layout.pp_size > 1:
        # A pipeline reduces at the end of its window, so gradients are as in stage 1.
        states, layout = whole, replace(layout, stage=1)
    usual = states, sending_of(trained, shape, layout, passes=passes)
    if layout.stage not in (1, 2) or layout.num_shards == 1:
        return [usual]
    copy, kept = optimizer_bytes(layout)
    first = whole | {"optimizer state": states["optimizer state"] * (copy / (copy + kept) if is_half else 0.0)}
    return [usual, (first, sending_of(trained, shape, layout, is_first=True))]


def _deepspeed_buffers(parameters: float, shape: ModelShape, layout: Layout, element: int) -> dict[str, float]:
    sizes, stage = layout.buffers, layout.stage
    overlap = stage == 3 if sizes.overlap is None else sizes.overlap
    reduce = element * min(_trained(parameters, shape), sizes.reduce_bucket) * (2 if overlap and stage < 3 else 1)
    if stage == 3:
        gathered = min(sizes.live, GATHERED_BLOCKS * shape.block / layout.tp_size, parameters)
        ahead = element * min(parameters, sizes.prefetch)
        return {GATHERED: element * gathered, "prefetch": ahead, "reduce bucket": reduce}
    found = {"reduce bucket": reduce, "all-gather bucket": element * min(parameters, sizes.allgather_bucket)}
    if layout.offload_optimizer != "none":
        found["largest parameter, twice"] = 2 * element * shape.largest / layout.tp_size
    return found


def parameters_of_ranks(shape: ModelShape, layout: Layout) -> list[float]:
    """Parameters of each rank of a pipeline, divided by tp_size: all large ones are taken to be sharded."""
    if layout.pp_size == 1:
        outside = shape.parameters - shape.layers * shape.block
        own = part_of_tables(outside, shape.positions, layout.tp_size)
        return [own + shape.layers * _block_of_rank(shape, layout)]
    placement, found = layout.schedule.placement, blocks_of_ranks(shape, layout)
    head = shape.head - (placement[0] == placement[-1] and shape.tied) * shape.vocab * shape.hidden
    found[placement[0]] += part_of_tables(shape.embedding, shape.positions, layout.tp_size)
    found[placement[-1]] += head / layout.tp_size
    return found


def blocks_of_ranks(shape: ModelShape, layout: Layout) -> list[float]:
    """Like `parameters_of_ranks`, counting the blocks alone."""
    block = _block_of_rank(shape, layout)
    if layout.pp_size == 1:
        return [shape.layers * block]
    found = [0.0] * layout.pp_size
    for rank, count in zip(layout.schedule.placement, blocks_of_stages(shape, layout), strict=True):
        found[rank] += count * block
    return found


def tables_of_ranks(shape: ModelShape, layout: Layout) -> list[float]:
    """Like `parameters_of_ranks`, counting what is before the first block alone."""
    first = layout.schedule.placement[0] if layout.pp_size > 1 else 0
    own = part_of_tables(shape.embedding, shape.positions, layout.tp_size)
    return [own * (rank == first) for rank in range(layout.pp_size)]


def part_of_tables(parameters: float, positions: float, tp_size: int) -> float:
    """Parameters outside of blocks on a rank of tensor parallelism: `positions` of them are whole on each."""
    return (parameters - positions) / tp_size + positions


def _block(shape: ModelShape, layout: Layout) -> float:
    """Parameters of a block without the experts that other replicas have."""
    return shape.block - shape.experts * (1 - 1 / layout.ep_size)


def _block_of_rank(shape: ModelShape, layout: Layout) -> float:
    """Parameters of a block that a tensor-parallel rank has."""
    whole = shape.experts / layout.ep_size if stay_whole(shape.expert_width, layout.tp_size) else 0.0
    queries, keys = beyond_even(shape.heads, shape.kv_heads, layout.tp_size, shape.numbers)
    beyond = 2.0 * shape.hidden * shape.head_dim * (queries * shape.heads + keys * shape.kv_heads)
    if not shape.expert_width:
        wide = most_of(shape.intermediate, layout.tp_size) - shape.intermediate / layout.tp_size
        beyond += (2 + shape.gated) * shape.hidden * wide
    return whole + (_block(shape, layout) - whole) / layout.tp_size + beyond


def _lasting(
    parameters: float, blocks: float, embedding: float, shape: ModelShape, layout: Layout
) -> dict[str, float]:
    """States, buffers and extras of a rank that holds `parameters` of the model, or trains its share of adapters to them.

    Args:
        parameters: Parameters of the rank.
        blocks: Parameters of the rank that are in blocks.
        embedding: Parameters of the rank that are in the token embedding.
        shape: Shape of the model.
        layout: Division among the ranks.
    """
    if not shape.adapters:
        experts = blocks * shape.experts / layout.ep_size / _block(shape, layout)
        terms = states(parameters, layout, experts, embedding) | buffers(parameters, shape, layout)
        return terms | {name: size * parameters for name, size in layout.extra.items()}
    own, whole = replace(layout, precision="fp32"), states(parameters, layout)
    # Adapters lie beside the products of blocks, of which ranks have different numbers.
    trained = shape.adapters / layout.tp_size * blocks / max(1.0, shape.layers * _block_of_rank(shape, layout))
    terms = states(trained, own)
    terms["weights"] += whole["weights"] - blocks * _spared(shape, layout)
    terms |= unpacked(shape)
    return terms | buffers(parameters, shape, layout) | {name: size * trained for name, size in layout.extra.items()}


def unpacked(shape: ModelShape) -> dict[str, float]:
    """Bytes of the largest matrix of a quantised block, which a product unpacks."""
    return {"a matrix unpacked": 2.0 * shape.hidden * shape.intermediate} if shape.block_bits else {}


def _spared(shape: ModelShape, layout: Layout) -> float:
    """Bytes that quantisation spares of each parameter of a block."""
    return WHOLE[layout.engine, layout.precision][0] - shape.block_bits / 8 if shape.block_bits else 0.0


def passing_gathers(lasting: dict[str, float], layout: Layout) -> float:
    """Bytes that are whole only while a block runs, taken out of those that last."""
    return lasting.pop(GATHERED, 0.0) if layout.engine == "fsdp2" and layout.stage == 3 else 0.0


def _recorded_peaks(shape: ModelShape, recorded: Recorded, layout: Layout, work: Work) -> list[dict[str, float]]:
    """Terms of each rank of a pipeline at the moment when it has most."""
    _, schedule = schedule_of(layout, work)
    if layout.pp_size == 1 and work.accumulation > 1:
        schedule = build_schedule("1f1b", 1, 2)  # those after the second are like it
    held, inside = parameters_of_ranks(shape, layout), blocks_of_ranks(shape, layout)
    tables = tables_of_ranks(shape, layout)
    stages, found = stages_of(shape, layout, work), []
    passes = work.accumulation if layout.pp_size == 1 else 1
    for rank, actions in enumerate(schedule):
        lasting = _lasting(held[rank], inside[rank], tables[rank], shape, layout)
        sent = lasting.pop(SENT, 0.0)
        lasting.pop(CASTS, 0.0)  # they are recorded
        whole = passing_gathers(lasting, layout)
        moments = moments_of(actions, stages.of_rank(rank), len(stages.counts) - 1)
        steps = steps_of(lasting, _trained(held[rank], shape), shape, layout, passes, sent)
        parts_of = functools.partial(stage_parts, shape, recorded, layout, stages, rank)
        there, terms = fullest_step(steps, moments, parts_of, whole, updating_bytes(held[rank], shape, layout))
        terms[GATHERED] += there.pop(GATHERED, 0.0)
        found.append(there | terms)
    return found


def updating_bytes(parameters: float, shape: ModelShape, layout: Layout) -> float:
    """Bytes that the optimizer's step takes for a while on a rank of so many parameters; those of adapters are small."""
    if shape.adapters or layout.offload_optimizer != "none":
        return 0.0
    return passing_bytes(layout.optim, 2.0 if _updates_in_half(layout) else 4.0) * min(
        shape.largest / layout.tp_size, parameters
    )


def fullest_step(
    steps: Sequence[tuple[dict[str, float], Sending]],
    moments: Sequence[Moment],
    parts_of: Callable[[float], Sequence[StageParts]],
    gathered: float,
    updating: float,
) -> tuple[dict[str, float], dict[str, float]]:
    """States but gradients, and the terms of `fullest`, of the step of `steps` that takes most, the optimizer's included.

    Args:
        steps: See `steps_of`.
        moments: Moments of the rank.
        parts_of: Parts of its stages, from the bytes of its gradients.
        gathered: Bytes of parameters that are whole while a block runs.
        updating: See `updating_bytes`.
    """
    found = []
    for had, sending in steps:
        there, gradients = dict(had), had.get("gradients", 0.0)
        there.pop("gradients", None)
        passes = fullest(moments, parts_of(gradients), sending, gathered)
        update = dict.fromkeys(NAMES, 0.0) | {"gradients": gradients, TEMPORARY: updating}
        found += [(there, passes), (there, update)]
    return max(found, key=lambda one: sum(one[0].values()) + sum(one[1].values()))


def estimate(shape: ModelShape, layout: Layout, work: Work, *, on_gpu: bool = True) -> Memory:
    """Everything that a run needs, of the rank that needs most.

    Args:
        shape: Shape of the model; all parameters are trained, or its adapters.
        layout: Division among the ranks.
        work: Rows and tokens.
        on_gpu: Whether ranks have a CUDA context; else the same terms are in RAM.

    Raises:
        ScheduleError: The schedule does not fit the ranks.
    """
    held, inside = parameters_of_ranks(shape, layout), blocks_of_ranks(shape, layout)
    tables = tables_of_ranks(shape, layout)
    ranks, waiting = [], []
    peaks = None if shape.recorded is None else _recorded_peaks(shape, shape.recorded, layout, work)
    for rank, kept in enumerate(activations(shape, layout, work)):
        waiting.append(kept.pop(ON_HOST))
        terms = (
            _lasting(held[rank], inside[rank], tables[rank], shape, layout) | kept if peaks is None else peaks[rank]
        )
        context = CONTEXT_BYTES if on_gpu else 0.0
        ranks.append(terms | {OVERHEAD: context + FRAGMENTATION * sum(terms.values())})
    worst = max(range(len(ranks)), key=lambda rank: sum(ranks[rank].values()))
    host = host_states(max(held), layout)
    element = 2.0 if layout.precision == "half" else 4.0
    loaded = element * shape.parameters - shape.layers * shape.block * _spared(shape, layout)
    loading = loaded * min(layout.ranks_per_node, layout.num_processes)
    # Parameters and gradients are pinned; torch's optimizers make their states of them with zeros_like, which does not.
    pinned = layout.pinned * sum(host.values()) * (1.0 if layout.engine == "deepspeed" else 0.5)
    if any(waiting):  # as much as all ranks of the node if each held as much as the one that holds most
        host[ON_HOST] = max(waiting) * min(layout.ranks_per_node, layout.num_processes)
        pinned += host[ON_HOST]
    return Memory(worst, {name: size for name, size in ranks[worst].items() if size}, host, pinned, loading)
