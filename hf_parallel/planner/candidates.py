"""The layouts of a cluster's GPUs that this package can run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.memory import memory_bytes
from hf_parallel.planner.profile import ModelProfile
from hf_parallel.settings.schedule_names import STAGES_PER_RANK


SCHEDULES: Final = ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Request:
    """A job to be planned: model, machines, batch, and what of the layout is given.

    Attributes:
        profile: The model.
        cluster: The machines.
        seq_len: Tokens of a row.
        global_batch: Rows of an optimizer step.
        fixed: The layout with the keys that are given.
        given: Their names.
    """

    profile: ModelProfile
    cluster: Cluster
    seq_len: int
    global_batch: int
    fixed: LayoutSpec
    given: frozenset[str]

    def values(self, key: str, usual: Iterable[Any]) -> list[Any]:
        """The given value of a key, else the usual ones."""
        return [getattr(self.fixed, key)] if key in self.given else list(usual)


def candidates(request: Request) -> Iterator[LayoutSpec]:
    """Every layout with the keys that are given."""
    for shape in _shapes(request):
        zeros = request.values("zero", _stages_of_zero(shape))
        recomputes = request.values("recompute", ("none", "full"))
        schedules = request.values("schedule", SCHEDULES if shape.pp > 1 else ("1f1b",))
        micros = request.values("micro_batch", MICRO_BATCHES)
        for zero, recompute, micro, schedule in itertools.product(zeros, recomputes, micros, schedules):
            passes, odd = divmod(request.global_batch, shape.dp * micro)
            if odd or passes not in request.values("num_microbatches", (passes,)) or passes < 1:
                continue
            (stages,) = request.values("stages_per_rank", (STAGES_PER_RANK[schedule][0] if shape.pp > 1 else 1,))
            if shape.pp * stages > len(request.profile.layers):
                continue
            if isinstance(shape.split, tuple) and len(shape.split) != shape.pp * stages:
                continue
            (engine,) = request.values("engine", ("fsdp2" if zero == 3 else "native",))
            bare = replace(shape, zero=zero, engine=engine)
            (chunked,) = request.values("chunked_loss", (bare.chunks_by_itself,))
            (gathers_late,) = request.values(
                "overlap_gather", (not (bare.is_own and bare.kernels != "fused" and bare.gathers_once),)
            )
            found = replace(
                bare,
                chunked_loss=chunked,
                overlap_gather=gathers_late,
                recompute=recompute,
                micro_batch=micro,
                num_microbatches=passes,
                schedule=schedule,
                stages_per_rank=stages,
            )
            shares = request.values("ep", _shares_of_experts(request.profile, found))
            yield from (replace(found, ep=ep) for ep in shares if found.dp % ep == 0)


def _stages_of_zero(spec: LayoutSpec) -> tuple[int, ...]:
    if spec.dp == 1:
        return (0,)
    if spec.pp > 1:  # gathers would repeat for every pass
        return (0, 1)
    return (0, 1, 2) if spec.block_bits else (0, 1, 2, 3)  # quantised weights are in one piece


def _shares_of_experts(profile: ModelProfile, spec: LayoutSpec) -> list[int]:
    """Numbers of replicas that may share experts where this package does it: equally many each."""
    experts = [kind.num_experts for kind in profile.kinds if kind.routed]
    other = spec.tp > 1 or spec.sp > 1 or spec.zero > 1 or spec.kernels != "eager" or spec.engine == "deepspeed"
    if not experts or other or spec.adapters or spec.local_steps > 1 or spec.compression != "none":
        return [1]
    return _divisors(math.gcd(spec.dp, *experts))


def _shapes(request: Request) -> Iterator[LayoutSpec]:
    """The sizes of the axes; tp stays inside a node unless it is given."""
    fixed, cluster, kinds = request.fixed, request.cluster, request.profile.kinds
    sizes, heads = _divisors(cluster.num_gpus), min(kind.kv_heads or kind.heads or 1 for kind in kinds)
    tps = [1] if fixed.block_bits else sizes
    for tp, pp in itertools.product(request.values("tp", tps), request.values("pp", sizes)):
        dp, rest = divmod(cluster.num_gpus, tp * pp * fixed.sp)
        if rest or dp not in request.values("dp", (dp,)):
            continue
        if "tp" not in request.given and (tp > cluster.gpus_per_node or heads % tp):
            continue
        yield replace(fixed, tp=tp, pp=pp, dp=dp)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def even_bytes(request: Request, spec: LayoutSpec) -> float:
    """Bytes of the fullest rank under an even cut, which needs no costs."""
    stages, layers = spec.num_stages, len(request.profile.layers)
    counts = [layers // stages + (index < layers % stages) for index in range(stages)]
    return sum(memory_bytes(request.profile, spec, counts, request.seq_len).values())


def smallest_layout(request: Request) -> tuple[float, LayoutSpec] | None:
    """The layout that needs least memory, and its bytes; None if the batch divides into none."""
    sized = ((even_bytes(request, spec), spec) for spec in candidates(request))
    return min(sized, key=lambda pair: pair[0], default=None)


def smaller_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Parts of a cluster: ever more GPUs of one node, then ever more nodes, and all of it."""
    for gpus in _divisors(cluster.gpus_per_node):
        yield replace(cluster, nodes=1, gpus_per_node=gpus)
    for nodes in range(2, cluster.nodes + 1):
        yield replace(cluster, nodes=nodes)
