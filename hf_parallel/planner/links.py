"""Bytes that each link carries in an optimizer step: between the GPUs of a node, and between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_parallel.mesh.links import NETWORK, NODE, Links
from hf_parallel.mesh.placement import Placement, Sent
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.planner.cost import unrepeated
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.memory import experts_of_ranks, parameters_of_ranks
from hf_parallel.planner.pipeline import placement
from hf_parallel.planner.predict import COMPRESSED, step_of, tied_bytes
from hf_parallel.planner.profile import ModelProfile


@dataclass(frozen=True)
class Traffic:
    """Bytes of an optimizer step, in one direction.

    Attributes:
        gpu: Bytes that the busiest GPU sends to others of its node.
        node: Bytes that the busiest node sends to others, over all its links.
    """

    gpu: float
    node: float


def traffic(profile: ModelProfile, cluster: Cluster, spec: LayoutSpec, seq_len: int) -> dict[str, Traffic]:
    """Bytes that each axis sends in a step, by its name: "tp", "pp", "dp", "sp" or "ep".

    Collectives are rings, in which every rank sends to its neighbour: of a group on several nodes, one rank of each node
    sends to another node. Gradients of this package's own replicas are summed inside each node first.

    Args:
        profile: The model.
        cluster: The machines.
        spec: The layout, as `placed` lays it on them.
        seq_len: Tokens of a row.
    """
    sent = sent_of_ranks(profile, cluster, spec, seq_len)
    shape = MeshShape(spec.dp, spec.pp, spec.tp, spec.sp, spec.sharing_replicas, spec.neighbours)
    links = Links(cluster.nodes, cluster.gpus_per_node, cluster.gpus_per_node)
    in_nodes = spec.sums_in_nodes and shape.copies_in_nodes(links.ranks_per_node) > 1
    laid = Placement(shape, links, sums_in_nodes=in_nodes, sent=sent)
    found = {axis: laid.carried(axis) for axis in ("tp", "sp", "ep", "dp", "pp")}
    return {
        axis: Traffic(own.get(NODE, 0.0), own.get(NETWORK, 0.0)) for axis, own in found.items() if any(own.values())
    }


def sent_of_ranks(profile: ModelProfile, cluster: Cluster, spec: LayoutSpec, seq_len: int) -> Sent:
    """Bytes that the busiest rank sends in an optimizer step, by axis; those of axes with one rank are left out.

    "dp" has a number for each rank of a pipeline, and so has "experts", the sums of the gradients of experts that other ranks have,
    too; "ep" is what travels to experts of other ranks and back. "pp" is what stages send to their neighbours; "ends" is what the first and the
    last rank of a pipeline send to each other.

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
        "ep": _of_experts(profile, spec, seq_len, counts),
        "pp": _of_results(profile, spec, seq_len),
        "ends": _of_ends(profile, spec, seq_len),
    }
    found: dict[str, float | tuple[float, ...]] = {axis: total for axis, each in sizes.items() if (total := sum(each))}
    held, routed = parameters_of_ranks(profile, spec, counts), experts_of_ranks(profile, spec, counts)
    copies = spec.dp * spec.sp
    if spec.sharing_replicas > 1:
        held = [whole - experts for whole, experts in zip(held, routed, strict=True)]
        found["experts"] = tuple(sum(_of_replicas(one, copies // spec.sharing_replicas, spec)) for one in routed)
    found["dp"] = tuple(sum(_of_replicas(one, copies, spec)) for one in held)
    return {axis: sent for axis, sent in found.items() if not isinstance(sent, tuple) or any(sent)}


def _passed(profile: ModelProfile, spec: LayoutSpec, seq_len: int) -> float:
    """Bytes of the residual stream of one micro-batch."""
    return spec.element * spec.micro_batch * seq_len / spec.sp * profile.hidden


def _blocks_of_a_rank(spec: LayoutSpec, counts: Sequence[int]) -> int:
    """Blocks of the rank with most."""
    return max(counts) * spec.stages_per_rank if spec.pp > 1 else sum(counts)


def _of_products(profile: ModelProfile, spec: LayoutSpec, seq_len: int, counts: Sequence[int]) -> Iterator[float]:
    """All-reduces of a block: two forward, two backward, and two more if it runs again; one each if whole experts are on each rank.

    Then tokens go to experts of other tp ranks and back.
    """
    stops = min(unrepeated(profile, kind, spec) for kind in profile.kinds)
    times = 4 + (2 - stops) * spec.repeated
    blocks = _blocks_of_a_rank(spec, counts) * spec.num_microbatches
    reduced = times * blocks * 2 * (spec.tp - 1) / spec.tp * _passed(profile, spec, seq_len)
    yield reduced / (2 if spec.experts_over_tp else 1)
    if spec.experts_over_tp:
        routed = max(kind.routed for kind in profile.kinds)
        yield times * blocks * (spec.tp - 1) / spec.ep * routed / spec.tp * _passed(profile, spec, seq_len)


def _of_sequence(profile: ModelProfile, spec: LayoutSpec, seq_len: int, counts: Sequence[int]) -> Iterator[float]:
    """Exchanges of heads for tokens: queries, keys, values and results, there and back."""
    kind = max(profile.kinds, key=lambda one: one.heads)
    width = 2 * (kind.heads + kind.kv_heads) * kind.head_dim / spec.tp
    tokens = spec.micro_batch * seq_len / spec.sp
    times = 2 + spec.repeated
    blocks = _blocks_of_a_rank(spec, counts) * spec.num_microbatches
    yield times * blocks * (spec.sp - 1) / spec.sp * spec.element * tokens * width


def _of_experts(profile: ModelProfile, spec: LayoutSpec, seq_len: int, counts: Sequence[int]) -> Iterator[float]:
    """Tokens to experts of other replicas and back, forward and backward, and forward again if blocks run again."""
    routed = max(kind.routed for kind in profile.kinds)
    times = 4 + 2 * spec.repeated
    blocks = _blocks_of_a_rank(spec, counts) * spec.num_microbatches
    others = spec.ep - (spec.tp if spec.experts_over_tp else 1)
    yield times * blocks * others / spec.ep * routed / spec.tp * _passed(profile, spec, seq_len)


def _of_replicas(parameters: float, copies: int, spec: LayoutSpec) -> Iterator[float]:
    """Reductions of the gradients of so many parameters, and gathers of parameters that are partitioned.

    Args:
        parameters: Parameters of a rank.
        copies: Number of ranks that have them.
        spec: The layout.
    """
    part = (copies - 1) / copies * parameters
    trained = spec.trained(parameters) / max(parameters, 1.0)
    each = spec.summed if spec.compression == "none" else 4.0 * COMPRESSED[spec.compression]
    if spec.local_steps > 1:
        yield 2 * spec.summed * part * trained / spec.local_steps
        return
    yield (1 if spec.zero else 2) * each * part * trained * (spec.num_microbatches if spec.reduces_each_pass else 1)
    if spec.zero == 3:
        yield 2 * spec.element * part * (spec.num_microbatches if spec.gathers_each_pass else 1)
    elif spec.zero:
        yield spec.element * part * trained


def _of_results(profile: ModelProfile, spec: LayoutSpec, seq_len: int) -> Iterator[float]:
    """Results of stages forward, their gradients backward."""
    if spec.pp > 1:
        yield 2 * spec.stages_per_rank * _passed_in_step(profile, spec, seq_len)


def _of_ends(profile: ModelProfile, spec: LayoutSpec, seq_len: int) -> Iterator[float]:
    """Results that go from the last rank to the first one again, where stages go round, and the gradient of a tied table."""
    if spec.pp > 1 and placement(spec)[0] != placement(spec)[-1]:
        yield (spec.stages_per_rank - 1) * _passed_in_step(profile, spec, seq_len)
        yield tied_bytes(profile, spec)


def _passed_in_step(profile: ModelProfile, spec: LayoutSpec, seq_len: int) -> float:
    """Bytes of the results that a rank sends one way in a step, for one stage."""
    passed = spec.passed / spec.element * _passed(profile, spec, seq_len)
    return spec.num_microbatches * passed / (spec.tp if spec.splits_results else 1)
