"""Bytes that each link carries in an optimizer step: between the GPUs of a node, and between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_parallel.planner.collectives import Group, groups_of, senders, stays_on_node
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.memory import parameters_of_ranks
from hf_parallel.planner.predict import COMPRESSED, step_of
from hf_parallel.planner.profile import ModelProfile


@dataclass(frozen=True)
class Traffic:
    """Bytes of an optimizer step, in one direction.

    Attributes:
        gpu: That the busiest GPU sends to others of its node.
        node: That the busiest node sends to others, over all its links.
    """

    gpu: float
    node: float


def traffic(profile: ModelProfile, cluster: Cluster, spec: LayoutSpec, seq_len: int) -> dict[str, Traffic]:
    """What each axis sends, by its name: "tp", "pp", "dp" or "sp".

    Collectives are rings, in which every rank sends to its neighbour: of a group on several nodes, one rank of each node
    sends to another node.

    Args:
        profile: The model.
        cluster: The machines.
        spec: The layout, as `placed` lays it on them.
        seq_len: Tokens of a row.
    """
    groups, sent = groups_of(spec, cluster), sent_of_ranks(profile, cluster, spec, seq_len)
    found = {axis: _of_ring(sent.get(axis, 0.0), groups[axis], cluster) for axis in ("tp", "sp", "dp")}
    found["pp"] = _of_stages(sent.get("pp", 0.0), cluster, spec)
    return {axis: own for axis, own in found.items() if own.gpu or own.node}


def sent_of_ranks(profile: ModelProfile, cluster: Cluster, spec: LayoutSpec, seq_len: int) -> dict[str, float]:
    """Bytes that the busiest rank sends in an optimizer step, by axis; those of axes with one rank are left out.

    Args:
        profile: The model.
        cluster: The machines, which decide how blocks are shared out.
        spec: The layout.
        seq_len: Tokens of a row.
    """
    c = cluster.constants(spec.micro_batch * seq_len / spec.sp)
    counts = step_of(profile, cluster, spec, seq_len, c, exact=False).counts
    sizes = {
        "tp": _of_products(profile, spec, seq_len, counts),
        "sp": _of_sequence(profile, spec, seq_len, counts),
        "dp": _of_replicas(profile, spec, counts),
        "pp": _of_results(profile, spec, seq_len),
    }
    return {axis: total for axis, each in sizes.items() if (total := sum(each))}


def _of_ring(sent: float, group: Group, cluster: Cluster) -> Traffic:
    """What a ring sends in which each rank sends `sent`."""
    if group.size == 1:
        return Traffic(0.0, 0.0)
    crossing = 0.0 if group.nodes == 1 else sent * cluster.gpus_per_node / group.on_node
    return Traffic(sent if group.on_node > 1 else 0.0, crossing)


def _passed(profile: ModelProfile, spec: LayoutSpec, seq_len: int) -> float:
    """Bytes of the residual stream of one micro-batch."""
    return spec.element * spec.micro_batch * seq_len / spec.sp * profile.hidden


def _blocks_of_a_rank(spec: LayoutSpec, counts: Sequence[int]) -> int:
    """Blocks of the rank with most."""
    return max(counts) * spec.stages_per_rank if spec.pp > 1 else sum(counts)


def _of_products(profile: ModelProfile, spec: LayoutSpec, seq_len: int, counts: Sequence[int]) -> Iterator[float]:
    """All-reduces of a block: two forward, two backward, and two more if it runs again."""
    times = 6 if spec.recompute == "full" else 4
    blocks = _blocks_of_a_rank(spec, counts) * spec.num_microbatches
    yield times * blocks * 2 * (spec.tp - 1) / spec.tp * _passed(profile, spec, seq_len)


def _of_sequence(profile: ModelProfile, spec: LayoutSpec, seq_len: int, counts: Sequence[int]) -> Iterator[float]:
    """Exchanges of heads for tokens: queries, keys, values and results, there and back."""
    kind = max(profile.kinds, key=lambda one: one.heads)
    width = 2 * (kind.heads + kind.kv_heads) * kind.head_dim / spec.tp
    tokens = spec.micro_batch * seq_len / spec.sp
    times = 3 if spec.recompute == "full" else 2
    blocks = _blocks_of_a_rank(spec, counts) * spec.num_microbatches
    yield times * blocks * (spec.sp - 1) / spec.sp * spec.element * tokens * width


def _of_replicas(profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int]) -> Iterator[float]:
    """Reductions of gradients, and gathers of parameters that are partitioned."""
    shards = spec.dp * spec.sp
    parameters = max(parameters_of_ranks(profile, spec, counts))
    part = (shards - 1) / shards * parameters
    trained = spec.trained(parameters) / max(parameters, 1.0)
    each = min(4.0, spec.states[1]) if spec.compression == "none" else 4.0 * COMPRESSED[spec.compression]
    if spec.local_steps > 1:
        yield 2 * min(4.0, spec.states[0]) * part * trained / spec.local_steps
        return
    passes = spec.num_microbatches if spec.gathers_each_pass else 1
    yield (1 if spec.zero else 2) * each * part * trained * passes
    if spec.zero == 3:
        yield 2 * spec.element * part * passes
    elif spec.zero:
        yield spec.element * part * trained


def _of_results(profile: ModelProfile, spec: LayoutSpec, seq_len: int) -> Iterator[float]:
    """Results of stages forward, their gradients backward."""
    if spec.pp > 1:
        split = spec.tp if spec.tp > 1 and (spec.sequence_parallel or spec.kernels == "fused") else 1
        yield 2 * spec.stages_per_rank * spec.num_microbatches * _passed(profile, spec, seq_len) / split


def _of_stages(sent: float, cluster: Cluster, spec: LayoutSpec) -> Traffic:
    """What stages send, which only neighbours exchange."""
    if spec.pp == 1:
        return Traffic(0.0, 0.0)
    if stays_on_node(spec, cluster):
        return Traffic(sent, 0.0)
    if not spec.places_replicas:
        return Traffic(0.0, sent * cluster.gpus_per_node)
    own = senders(spec, cluster)  # what the last stage of a node sends forward, and its first one backward
    return Traffic(sent if cluster.gpus_per_node > own else 0.0, sent * own)
