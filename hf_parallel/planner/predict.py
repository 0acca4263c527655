"""What one layout costs on one cluster: time of a step with its band, and memory of the fullest rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.planner.adapters import stored_bytes
from hf_parallel.planner.checks import all_of, whole
from hf_parallel.planner.collectives import (
    Group,
    all_reduce,
    by_copies,
    groups_of,
    hop,
    one_way,
    orders_of,
    sum_in_nodes,
    to_owners,
)
from hf_parallel.planner.constants import Constants
from hf_parallel.planner.cost import Pass, Place, block_pass, embedding_pass, head_pass, whole_experts
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.memory import memory_bytes
from hf_parallel.planner.pipeline import cut, makespan, placement
from hf_parallel.planner.profile import ModelProfile, profile_of
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.settings.values import spelled


BAND: Final = (0.8, 1.3)  # of the prediction, where published runs were fitted; judged from their errors
WIDE: Final = (0.7, 1.6)  # elsewhere: PCIe, consumer cards, offload, experts, compression, adapters, Ulysses
MOST: Final = 3.0  # high_s over low_s
# What the reduction of gradients may take more for each doubling of nodes. Source: all-reduces of 2 to 64 nodes in the
# ultra-scale playbook (nanotron), 362 to 33 GB/s on a network of 400.
SLOWER: Final = 0.7
FITTED: Final = frozenset({"a100_80", "a100_40", "h100", "h100_96", "h200"})
NORMS: Final = 2  # vectors of a block beside its matrices
ADAM_BYTES: Final = 34.0  # of memory traffic for each parameter
# What is left of a gradient's fp32 bytes on the wire.
COMPRESSED: Final = {
    "none": 1.0,
    "fp16": 0.5,
    "bf16": 0.5,
    "int8": 0.27,
    "int4": 0.14,
    "onebit": 0.035,
    "topk": 0.02,
    "powersgd": 0.03,
}


@dataclass(frozen=True)
class Estimate:
    """Predicted cost of a layout; seconds and bytes.

    Attributes:
        step_s: An optimizer step.
        low_s: Lower end of its band.
        high_s: Upper end.
        tokens_per_s: Tokens per second of the whole job.
        mfu: FLOPs of the model over the dense bf16 peak, nothing recomputed.
        bubble: Share of the step in which stages wait for each other.
        exposed_communication_s: Seconds of a step that messages add.
        memory_bytes: Bytes of the fullest rank: weights, gradients, optimizer, activations, logits, buffers, overhead.
    """

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s: float
    mfu: float
    bubble: float
    exposed_communication_s: float
    memory_bytes: Mapping[str, float]

    @property
    def total_bytes(self) -> float:
        """Bytes of the fullest GPU, as `nvidia-smi` would show them."""
        return sum(self.memory_bytes.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory_bytes": dict(self.memory_bytes)}


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step by part, and the cut that they are of."""

    counts: tuple[int, ...]
    passes: float
    ideal: float
    exposed: float
    rest: float
    reduction: float
    nodes: int

    @property
    def total(self) -> float:
        return self.passes + self.rest


def predict(model: Any, cluster: Cluster, layout: Mapping[str, Any] | LayoutSpec, *, seq_len: int) -> Estimate:
    """Predict an optimizer step of a layout on a cluster.

    Args:
        model: A transformers config, or a path to one.
        cluster: The machines.
        layout: A mapping; see `LayoutSpec` for its keys.
        seq_len: Tokens of a row.

    Raises:
        ConfigError: A key or value is unknown, or the layout's ranks are not the cluster's GPUs.
    """
    if not isinstance(cluster, Cluster):
        raise ConfigError(f"cluster={spelled(cluster)}: expected a Cluster. Give Cluster(1, 8, 'h100') or another.")
    checks = {"seq_len": lambda: whole("seq_len", seq_len), "layout": lambda: layout_of(layout, cluster)}
    spec = all_of(checks)["layout"]
    profile = profile_of(model)
    check_sizes(profile, spec, seq_len)
    return estimate(profile, cluster, spec, seq_len)


def check_sizes(profile: ModelProfile, spec: LayoutSpec, seq_len: int) -> None:
    """Refuse what does not fit the model: more stages than blocks, more tp ranks than heads, odd parts of a sequence.

    Heads that tp does not divide are shared unevenly, as the engine shares them; the rank with most of them counts.

    Raises:
        ConfigError: All such problems at once.
    """
    problems, heads = [], min((kind.heads for kind in profile.kinds if kind.heads), default=0)
    try:
        check_experts(profile, spec)
    except ConfigError as error:
        problems.append(str(error))
    if spec.pp > 1 and spec.num_stages > len(profile.layers) + 2:
        problems.append(
            f"pp={spec.pp} * stages_per_rank={spec.stages_per_rank} = {spec.num_stages} stages, and the model has "
            f"{len(profile.layers)} blocks. Lower pp or stages_per_rank."
        )
    if isinstance(spec.split, tuple) and sum(spec.split) != len(profile.layers):
        problems.append(
            f"split={list(spec.split)}: its stages have {sum(spec.split)} blocks, and the model has {len(profile.layers)}. Give every "
            "block to one stage."
        )
    if heads and spec.tp > heads:
        problems.append(f"tp={spec.tp}: attention has {heads} heads to share. Set tp to {heads} or less.")
    if heads and spec.sp > 1 and heads % (spec.tp * spec.sp):
        problems.append(
            f"sp={spec.sp}: ranks of a sequence exchange whole heads, and {heads} heads do not divide into "
            f"tp={spec.tp} * sp={spec.sp} parts. Set sp so that they do."
        )
    if seq_len % spec.sp:
        problems.append(f"sp={spec.sp} does not divide seq_len={seq_len}. Set sp to a divisor of it.")
    if problems:
        raise ConfigError("\n".join(problems))


def check_experts(profile: ModelProfile, spec: LayoutSpec) -> None:
    """Refuse more ranks that share experts than there are.

    Raises:
        ConfigError: There are.
    """
    experts = max(kind.num_experts for kind in profile.kinds)
    if spec.ep > experts == 1:
        raise ConfigError(f"ep={spec.ep}: the model has no experts that replicas could share. Set ep to 1.")
    if spec.ep > experts:
        raise ConfigError(
            f"ep={spec.ep}: the model has {experts} experts, and each rank needs one. Set ep to {experts} or a divisor of it."
        )


def estimate(
    profile: ModelProfile,
    cluster: Cluster,
    spec: LayoutSpec,
    seq_len: int,
    c: Constants | None = None,
    *,
    exact: bool = True,
    roomy: bool = False,
) -> Estimate:
    """`predict` of a checked layout; ``roomy`` leaves fragments the room they take where there is any."""
    c = c or cluster.constants(spec.micro_batch * seq_len / spec.sp)
    spec = placed(profile, cluster, spec, seq_len)
    step = step_of(profile, cluster, spec, seq_len, c, exact=exact)
    total, tokens = step.total, spec.global_batch * seq_len
    low, high = BAND if _is_fitted(profile, cluster, spec) else WIDE
    slower = high * total + SLOWER * math.log2(step.nodes) * step.reduction
    work = profile.flops(seq_len) * tokens
    return Estimate(
        step_s=total,
        low_s=low * total,
        high_s=min(slower, MOST * low * total),
        tokens_per_s=tokens / total,
        mfu=work / total / (cluster.num_gpus * cluster.card.peak),
        bubble=max(0.0, step.passes - step.ideal) / total,
        exposed_communication_s=step.exposed,
        memory_bytes=memory_bytes(profile, spec, step.counts, seq_len, math.inf if roomy else cluster.gpu_bytes),
    )


def _is_fitted(profile: ModelProfile, cluster: Cluster, spec: LayoutSpec) -> bool:
    offloads = {spec.offload_param, spec.offload_optimizer, spec.compression} != {"none"}
    experts = any(kind.routed for kind in profile.kinds)
    other = offloads or experts or spec.sp > 1 or spec.adapters
    return cluster.gpu in FITTED and cluster.has_nvlink and not other


def placed(profile: ModelProfile, cluster: Cluster, spec: LayoutSpec, seq_len: int) -> LayoutSpec:
    """The layout with as many replicas next to each other as make a step shortest, unless it says how many."""
    c = cluster.constants(spec.micro_batch * seq_len / spec.sp)
    found = [replace(spec, dp_inside=count) for count in orders_of(spec, cluster)]
    if len(found) == 1:
        return found[0]
    return min(found, key=lambda one: step_of(profile, cluster, one, seq_len, c, exact=False).total)


def step_of(
    profile: ModelProfile, cluster: Cluster, spec: LayoutSpec, seq_len: int, c: Constants, *, exact: bool = True
) -> Step:
    """Seconds of a step."""
    place = Place(spec, cluster, seq_len, c)
    kinds = [block_pass(profile, kind, place) for kind in profile.kinds]
    blocks = [kinds[kind] for kind in profile.layers]
    first, last = embedding_pass(profile, place), head_pass(profile, place)
    computed = [one.both - one.exposed for one in blocks]  # of links, the cut knows nothing
    counts = (
        cut(computed, first.both, last.both, spec.num_stages, even=spec.cuts_evenly)
        if isinstance(spec.split, str)
        else list(spec.split)
    )
    stages, forward, backward, weights = _stages(blocks, counts, first, last)
    sent, way = _between_stages(profile, place)
    per_stage = c.t_micro / 2 + sent
    passes = makespan(
        *(spec, [one + per_stage for one in forward], [one + per_stage for one in backward], way),
        weights=weights,
        exact=exact,
    )
    busy = sum(forward) + sum(backward) + 2 * per_stage * len(forward)
    ideal = spec.num_microbatches * busy / spec.pp
    passes -= cluster.regained * max(0.0, passes - ideal)  # rates were measured with all ranks at once
    messages = sum(stages) / spec.pp * spec.num_microbatches + 2 * (spec.pp > 1) * spec.stages_per_rank * (
        spec.num_microbatches * sent + way
    )
    reduced = _reduction(profile, place, counts, blocks)
    tied = tied_bytes(profile, spec)
    reduced += hop(tied, spec, cluster, c) if tied else 0.0
    nodes = groups_of(spec, cluster)["dp"].nodes
    rest = reduced + _update(profile, place, counts) + c.t_step
    return Step(tuple(counts), passes, ideal, messages + reduced, rest, reduced, nodes)


def blocks_of_stages(model: Any, cluster: Cluster, spec: LayoutSpec, seq_len: int) -> tuple[int, ...]:
    """Blocks of each stage, as time and memory are predicted for."""
    c = cluster.constants(spec.micro_batch * seq_len / spec.sp)
    return step_of(profile_of(model), cluster, spec, seq_len, c).counts


def _stages(
    blocks: Sequence[Pass], counts: Sequence[int], first: Pass, last: Pass
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Exposed messages, forward, backward and gradients of weights of each stage."""
    exposed, forward, backward, weights, layer = [], [], [], [], 0
    for count in counts:
        own = blocks[layer : layer + count]
        exposed.append(sum(one.exposed for one in own))
        forward.append(sum(one.forward for one in own))
        backward.append(sum(one.backward for one in own))
        weights.append(sum(one.weights for one in own))
        layer += count
    forward[0], backward[0] = forward[0] + first.forward, backward[0] + first.backward
    forward[-1], backward[-1] = forward[-1] + last.forward, backward[-1] + last.backward
    weights[-1] += last.weights
    return exposed, forward, backward, weights


def _between_stages(profile: ModelProfile, place: Place) -> tuple[float, float]:
    """Seconds that a message keeps a stage from its next pass, and those that it is on its way besides."""
    spec, c = place.spec, place.c
    if spec.pp == 1:
        return 0.0, 0.0
    size = spec.passed * place.tokens * profile.hidden
    split = spec.splits_results
    one = c.p2p * hop(size / (spec.tp if split else 1), spec, place.cluster, c)
    if split and not spec.sequence_parallel:
        one += one_way(size, groups_of(spec, place.cluster)["tp"], place.cluster, c)
    return (one * c.pp_overlapped, one * c.pp_overlapped) if spec.overlap_pp else (one, 0.0)


def _largest_rank(profile: ModelProfile, spec: LayoutSpec, counts: Sequence[int]) -> tuple[float, float]:
    """Parameters of the rank that holds most, about, and those of them in experts: blocks of its stages and the larger table."""
    kinds, blocks = [profile.kinds[kind] for kind in profile.layers], sum(counts) / spec.pp / len(profile.layers)
    tables = profile.embedding + (0 if profile.tied else profile.head)
    held = sum(kind.held(spec.sharing_replicas, whole_experts(kind, spec)) for kind in kinds)
    experts = sum(kind.experts * whole_experts(kind, spec) for kind in kinds) / spec.sharing_replicas
    return (blocks * held + tables / min(spec.pp, 2)) / spec.tp, blocks * experts / spec.tp


def _trained(profile: ModelProfile, place: Place, counts: Sequence[int]) -> list[tuple[float, Group]]:
    """Parameters of the rank that holds most which get gradients, and the ranks that have copies of them."""
    spec = place.spec
    held, experts = _largest_rank(profile, spec, counts)
    trained = spec.trained(held)  # adapters are spread evenly
    return by_copies(trained, experts * trained / held, spec, place.cluster)


def tied_bytes(profile: ModelProfile, spec: LayoutSpec) -> float:
    """Bytes of the gradient of a table that the first and the last rank of a pipeline share, which each sends to the other."""
    ranks = placement(spec)
    if not profile.tied or ranks[0] == ranks[-1] or spec.adapters:
        return 0.0
    return spec.gradient_bytes * profile.head / spec.tp


def _reduction(profile: ModelProfile, place: Place, counts: Sequence[int], blocks: Sequence[Pass]) -> float:
    """Seconds that the gradients of replicas add to a step."""
    spec, cluster, c = place.spec, place.cluster, place.c
    if spec.dp * spec.sp == 1 or spec.gathers_each_pass:
        return 0.0
    trained = _trained(profile, place, counts)
    if spec.zero_owners:  # after the last backward, and before the next forward
        tensors = round(sum(len(profile.kinds[kind].products) + NORMS for kind in profile.layers) / spec.pp)
        return sum(
            to_owners(each * one, tensors, group, cluster, c)
            for one, group in trained
            for each in (spec.summed, spec.element)
        )
    if spec.local_steps > 1:  # the parameters themselves, between two steps
        return sum(all_reduce(spec.summed * one, group, cluster, c) for one, group in trained) / spec.local_steps
    element = spec.summed if spec.compression == "none" else 4.0 * COMPRESSED[spec.compression]
    reduce = one_way if spec.zero else sum_in_nodes if spec.sums_in_nodes else all_reduce
    sent = sum(reduce(element * one, group, cluster, c) for one, group in trained)
    gathered = sum(one_way(spec.element * one, group, cluster, c) for one, group in trained) if spec.zero else 0.0
    if spec.reduces_early:
        sent = max(sent - c.dp_overlapped * sum(one.backward for one in blocks) / spec.pp, 0.05 * sent)
    if spec.gathers_late:
        gathered = max(gathered - c.dp_overlapped * sum(one.forward for one in blocks) / spec.pp, 0.05 * gathered)
    sent += gathered
    if spec.compression not in ("none", "fp16", "bf16"):
        sent += 20.0 * sum(one for one, _ in trained) / place.moved
    return sent


def _update(profile: ModelProfile, place: Place, counts: Sequence[int]) -> float:
    """Seconds of the optimizer, on the device or on the host."""
    spec, cluster, c = place.spec, place.cluster, place.c
    own = sum(one / (group.size if spec.zero else 1) for one, group in _trained(profile, place, counts))
    moved = 0.0
    if spec.offload_param != "none":  # for every pass
        rate = cluster.card.pcie if spec.offload_param == "cpu" else cluster.disk_bytes_s / cluster.gpus_per_node
        held = _largest_rank(profile, spec, counts)[0] / (spec.dp * spec.sp if spec.zero == 3 else 1)
        blocks = sum(profile.kinds[kind].parameters for kind in profile.layers)
        moved = 2 * spec.num_microbatches * stored_bytes(blocks, profile.parameters, spec) * held / rate
    if spec.offload_optimizer == "none":
        return moved + own * (c.update_s or ADAM_BYTES / place.moved)
    on_node = own * cluster.gpus_per_node
    moved += 4.0 * own / cluster.card.pcie + on_node / c.cpu_adam
    if spec.offload_optimizer == "nvme":
        moved += 2 * 12.0 * on_node / cluster.disk_bytes_s
    return moved
