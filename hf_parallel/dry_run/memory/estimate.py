"""What a run needs of a GPU and of a node's RAM, term by term, before anything is started.

Pure arithmetic: no torch, no model, only numbers of it. Nothing here is a measurement of a GPU: terms say what they
leave out, and `OVERHEAD` is from experience.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from hf_parallel.dry_run.memory.terms import Engine, Layout, Memory, ModelShape, Precision, Work
from hf_parallel.pipeline_parallel.schedule.actions import Schedule, placement_of
from hf_parallel.pipeline_parallel.schedule.schedules import build_schedule
from hf_parallel.pipeline_parallel.schedule.simulate import peak_held


CONTEXT_BYTES: Final = 1.5e9  # CUDA context and NCCL: from experience, not measured
FRAGMENTATION: Final = 0.08  # of everything else: from experience, not measured
OVERHEAD: Final = "overhead (not measured)"
ON_HOST: Final = "inputs of checkpointed blocks"
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
ADAM_IN_HALF: Final = 4.0  # without ZeRO the native optimizer keeps both states in the parameters' own dtype
GRADIENT_PARTS: Final = 4.0
HOST_OPTIMIZER: Final = 16.0  # fp32 master, two states and an fp32 gradient
HOST_PARAMETERS: Final = 4.0  # half-precision parameters and gradients


def states(parameters: float, layout: Layout) -> dict[str, float]:
    """Bytes on the GPU of weights, gradients and optimizer state of a rank that holds `parameters`.

    Source: ZeRO (arXiv:1910.02054) figure 1; offload as measured with DeepSpeed 0.19.8: with the optimizer on the host
    the gradient's partition goes there as well (stage 3). The native engine sums gradients next to the parameters: stage 2
    holds a part of them while it brings them down.
    """
    weights, gradients, optimizer = WHOLE[layout.engine, layout.precision]
    if layout.engine == "native" and layout.precision == "half" and layout.stage == 0:
        optimizer = ADAM_IN_HALF
    if (layout.engine, layout.precision, layout.stage, layout.offload_optimizer) == ("native", "half", 2, "none"):
        gradients = GRADIENT_PARTS  # what is summed is the gradient of the fp32 copy
    parts, stage, sharded_weights = layout.num_shards, layout.stage, layout.stage == 3
    if layout.engine == "fsdp2" and stage > 0:  # the shard is all that lasts; what is whole is a buffer
        sharded_weights, stage = True, 3
    found = {
        "weights": weights * parameters / (parts if sharded_weights else 1),
        "gradients": gradients * parameters / (parts if stage >= 2 else 1),
        "optimizer state": optimizer * parameters / (parts if stage >= 1 else 1),
    }
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
        found[name] = HOST_OPTIMIZER * share
    if layout.offload_param == "cpu" and layout.engine != "fsdp2":
        found["parameters and gradients"] = HOST_PARAMETERS * share
    return found


def buffers(parameters: float, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """Bytes on the GPU of what a partition needs for a while; from the meaning of the settings, peaks not measured."""
    if layout.engine == "native":
        if layout.precision == "autocast":
            return {"weights cast to 16 bit": 2 * parameters, **_native_messages(parameters, layout)}
        return _native_messages(parameters, layout)
    if layout.stage == 0:
        return {}
    element = 4 if layout.precision == "fp32" else 2
    block = shape.block / layout.tp_size
    if layout.engine == "fsdp2":
        block *= _blocks_at_once(shape, layout)
        whole = min(parameters, GATHERED_BLOCKS * block) if layout.stage == 3 else parameters
        found = {"gathered parameters": element * whole, "gradients on their way": 4 * min(parameters, block)}
        if layout.stage == 3:  # what is outside of the blocks stays gathered, in fp32 unless it is half itself
            rest = max(0.0, parameters - shape.layers * shape.block / layout.tp_size)
            found["gathered embedding and head"] = (2 if layout.precision == "half" else 4) * rest
        if layout.stage == 1:
            found["whole gradients between backward passes"] = 4 * parameters
        return found
    return _deepspeed_buffers(parameters, shape, layout, element)


def _blocks_at_once(shape: ModelShape, layout: Layout) -> int:
    """Blocks that `fully_shard` gathers together: those of a checkpoint."""
    recompute = layout.recompute
    return min(recompute.every or 1, shape.layers) if recompute.mode == "block" else 1


def _native_messages(parameters: float, layout: Layout) -> dict[str, float]:
    """One bucket that fills and one that travels, summed in fp32."""
    if layout.num_processes == layout.tp_size * layout.pp_size:
        return {}
    scale = 2 if layout.precision == "half" else 1
    return {"gradients on their way": min(4 * parameters, 2 * scale * layout.bucket_cap_mb * 2**20)}


def _deepspeed_buffers(parameters: float, shape: ModelShape, layout: Layout, element: int) -> dict[str, float]:
    sizes, stage = layout.buffers, layout.stage
    overlap = stage == 3 if sizes.overlap is None else sizes.overlap
    reduce = element * min(parameters, sizes.reduce_bucket) * (2 if overlap and stage < 3 else 1)
    if stage == 3:
        gathered = min(sizes.live, GATHERED_BLOCKS * shape.block / layout.tp_size, parameters)
        ahead = element * min(parameters, sizes.prefetch)
        return {"gathered parameters": element * gathered, "prefetch": ahead, "reduce bucket": reduce}
    found = {"reduce bucket": reduce, "all-gather bucket": element * min(parameters, sizes.allgather_bucket)}
    if layout.offload_optimizer != "none":
        found["largest parameter, twice"] = 2 * element * shape.largest / layout.tp_size
    return found


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
    rows, schedule = _schedule(layout, work)
    tokens, every = rows * work.length, layout.recompute.every
    whole = tokens * saved_by_block(shape, layout, work)
    entry = tokens * shape.hidden * (2.0 if layout.precision == "half" else 4.0)
    entry /= layout.tp_size if layout.sequence_parallel else 1
    counts = blocks_of_stages(shape.layers, layout)
    together = _blocks_at_once(shape, layout) if every is not None else 0
    alone = [_without_checkpoint(count, layout) for count in counts]
    results = tokens * kept_results(shape, layout)
    kept = [single * whole + (count - single) * results for single, count in zip(alone, counts, strict=True)]
    inputs = [entry * entries for entries in _entries(counts, layout)]
    moved, again = layout.recompute.offload, together * whole
    if moved:
        again += 2 * entry
    else:
        kept = [one + other for one, other in zip(kept, inputs, strict=True)]
    waiting = peak_held(schedule, inputs) if moved else [0.0] * layout.pp_size
    logits, last = 12.0 * tokens * shape.vocab / layout.tp_size, placement_of(schedule)[-1]
    return [
        {"activations": held, "recomputed blocks": again, "logits and loss": logits * (rank == last), ON_HOST: apart}
        for rank, (held, apart) in enumerate(zip(peak_held(schedule, kept), waiting, strict=True))
    ]


def _entries(counts: Sequence[int], layout: Layout) -> list[int]:
    """Inputs that each stage keeps, one for each of its checkpoints."""
    every, mode = layout.recompute.every, layout.recompute.mode
    if every is None:
        return [0] * len(counts)
    if mode == "selective":
        return list(counts)
    return [math.ceil(count / every) if mode == "block" else count // every for count in counts]


def _without_checkpoint(count: int, layout: Layout) -> int:
    """Of so many blocks of a stage, those that autograd keeps whole."""
    every = layout.recompute.every
    if every is None:
        return count
    return count - count // every if layout.recompute.mode == "alternate" else 0


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


def _schedule(layout: Layout, work: Work) -> tuple[int, Schedule]:
    """Rows of the largest microbatch, and the actions of an optimizer step."""
    if layout.pp_size == 1:
        return work.rows, build_schedule("gpipe", 1, 1)
    count = min(work.rows, layout.schedule.num_microbatches)
    return math.ceil(work.rows / count), layout.schedule.training(count * work.accumulation)


def blocks_of_stages(layers: int, layout: Layout) -> list[int]:
    """Blocks of each stage: as listed in `pipeline.split`, else evenly (the balanced cut depends on costs)."""
    if layout.pp_size == 1:
        return [layers]
    split = layout.pipeline.split
    if not isinstance(split, str):
        return list(split)
    count = len(layout.schedule.placement)
    return [layers // count + (index < layers % count) for index in range(count)]


def parameters_of_ranks(shape: ModelShape, layout: Layout) -> list[float]:
    """Parameters of each rank of a pipeline, divided by tp_size: all large ones are taken to be sharded."""
    if layout.pp_size == 1:
        return [shape.parameters / layout.tp_size]
    placement, found = layout.schedule.placement, blocks_of_ranks(shape, layout)
    head = shape.head - (placement[0] == placement[-1] and shape.tied) * shape.vocab * shape.hidden
    found[placement[0]] += shape.embedding / layout.tp_size
    found[placement[-1]] += head / layout.tp_size
    return found


def blocks_of_ranks(shape: ModelShape, layout: Layout) -> list[float]:
    """As `parameters_of_ranks`, of the blocks alone."""
    if layout.pp_size == 1:
        return [shape.layers * shape.block / layout.tp_size]
    found = [0.0] * layout.pp_size
    for rank, count in zip(layout.schedule.placement, blocks_of_stages(shape.layers, layout), strict=True):
        found[rank] += count * shape.block / layout.tp_size
    return found


def _lasting(parameters: float, blocks: float, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """States, buffers and extras of a rank that holds `parameters` of the model, or trains its share of adapters to them.

    Args:
        parameters: Of the rank.
        blocks: Those of them that are in blocks.
        shape: Of the model.
        layout: Who holds what.
    """
    if not shape.adapters:
        terms = states(parameters, layout) | buffers(parameters, shape, layout)
        return terms | {name: size * parameters for name, size in layout.extra.items()}
    own, whole = replace(layout, precision="fp32"), states(parameters, layout)
    trained = shape.adapters * parameters / shape.parameters
    terms = states(trained, own)
    terms["weights"] += whole["weights"] - blocks * _spared(shape, layout)
    moved = trained if layout.engine == "native" else parameters
    if shape.block_bits:
        terms["a matrix unpacked"] = 2.0 * shape.hidden * shape.intermediate
    return terms | buffers(moved, shape, own) | {name: size * trained for name, size in layout.extra.items()}


def _spared(shape: ModelShape, layout: Layout) -> float:
    """Bytes that quantisation spares of each parameter of a block."""
    return WHOLE[layout.engine, layout.precision][0] - shape.block_bits / 8 if shape.block_bits else 0.0


def estimate(shape: ModelShape, layout: Layout, work: Work, *, on_gpu: bool = True) -> Memory:
    """Everything that a run needs, of the rank that needs most.

    Args:
        shape: Of the model; all parameters are trained, or its adapters.
        layout: Who holds what.
        work: Rows and tokens.
        on_gpu: Whether ranks have a CUDA context; else the same terms are in RAM.

    Raises:
        ScheduleError: The schedule does not fit the ranks.
    """
    held, inside = parameters_of_ranks(shape, layout), blocks_of_ranks(shape, layout)
    ranks, waiting = [], []
    for parameters, blocks, kept in zip(held, inside, activations(shape, layout, work), strict=True):
        waiting.append(kept.pop(ON_HOST))
        terms = _lasting(parameters, blocks, shape, layout) | kept
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
