"""Search the layouts that fit a cluster: the fastest ones, and why the others lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from hf_parallel.errors import ConfigError
from hf_parallel.planner.candidates import Request, candidates, even_bytes, smaller_clusters
from hf_parallel.planner.checks import all_of, choose, whole
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.links import Traffic, traffic
from hf_parallel.planner.predict import Estimate, check_experts, estimate, placed, step_of
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.read_layout import KEYS, layout_of
from hf_parallel.planner.remedies import fits_nowhere
from hf_parallel.settings.values import spelled


Objective = Literal["tokens", "memory", "min-gpus"]
SIMULATED: Final = 20  # of the fastest by closed forms, those whose schedule is simulated
MARGIN: Final = 0.1  # of a GPU's memory: the mean error of predicted memory
TIE: Final = 0.03  # of a step: closer layouts count as equally fast, and the simpler one comes first


@dataclass(frozen=True)
class Plan:
    """A layout with its estimate.

    Attributes:
        layout: The mapping that `predict` takes.
        estimate: What it costs.
        cluster: The GPUs that it runs on.
        spec: The layout with all its keys.
        why: What it loses against the first plan, or what makes it the first.
        links: What each axis sends in a step.
    """

    layout: Mapping[str, Any]
    estimate: Estimate
    cluster: Cluster
    spec: LayoutSpec
    why: str = ""
    links: Mapping[str, Traffic] = field(default_factory=dict)

    @property
    def link_bytes(self) -> Traffic:
        """Bytes that a link inside a node and a node's links to others carry in a step, for all axes."""
        own = self.links.values()
        return Traffic(sum(one.gpu for one in own), sum(one.node for one in own))

    @property
    def limit_bytes(self) -> float:
        """Memory of a GPU."""
        return self.cluster.gpu_bytes

    @property
    def fits(self) -> bool:
        return self.estimate.total_bytes <= self.limit_bytes


def plan(
    model: Any,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    objective: Objective = "tokens",
    layout: Mapping[str, Any] | None = None,
    most: int = 10,
) -> list[Plan]:
    """Search the layouts of a cluster, the best first.

    Args:
        model: A transformers config, or a path to one.
        cluster: The machines.
        seq_len: Tokens of a row.
        global_batch: Rows of an optimizer step.
        objective: "tokens" ranks by time, "memory" by the fullest rank; "min-gpus" ranks by time on the smallest part of
            the cluster that the model fits on.
        layout: Keys that are given, such as kernels or recompute; the search leaves them alone.
        most: Plans that are returned.

    Raises:
        ConfigError: A key or value is unknown, or no layout fits; says by how much the smallest one does not, and what
            would make it fit.
    """
    if not isinstance(cluster, Cluster):
        raise ConfigError(f"cluster={spelled(cluster)}: expected a Cluster. Give Cluster(1, 8, 'h100') or another.")
    given = {} if layout is None else layout
    checked = all_of(
        {
            "seq_len": lambda: whole("seq_len", seq_len),
            "global_batch": lambda: whole("global_batch", global_batch),
            "most": lambda: whole("most", most),
            "objective": lambda: choose("objective", objective, ("tokens", "memory", "min-gpus")),
            "layout": lambda: layout_of(given),
        }
    )
    request = Request(profile_of(model), cluster, seq_len, global_batch, checked["layout"], frozenset(given))
    check_experts(request.profile, request.fixed)
    if objective == "min-gpus":
        request = _smallest(request)
    plans = _explained(_ranked(_fitting(request, objective, most), objective)[:most])
    return [replace(one, links=traffic(request.profile, one.cluster, one.spec, seq_len)) for one in plans]


def _smallest(request: Request) -> Request:
    """The same request on the fewest GPUs that some layout fits on."""
    for cluster in smaller_clusters(request.cluster):
        own = replace(request, cluster=cluster)
        if any(even_bytes(own, spec) <= cluster.gpu_bytes for spec in candidates(own)):
            return own
    raise ConfigError(fits_nowhere(request))


def _fitting(request: Request, objective: Objective, most: int) -> list[Plan]:
    """Plans of the layouts that fit, the best by closed forms first, at least `most` of them if there are as many."""
    limit, by_time = request.cluster.gpu_bytes, objective != "memory"
    profile, cluster, seq_len = request.profile, request.cluster, request.seq_len
    fitting: list[tuple[float, LayoutSpec]] = []
    for spec in candidates(request):
        size = even_bytes(request, spec)
        if size <= limit:
            c = cluster.constants(spec.micro_batch * seq_len / spec.sp)
            own = placed(profile, cluster, spec, seq_len)
            fitting.append((step_of(profile, cluster, own, seq_len, c, exact=False).total if by_time else size, own))
    fitting.sort(key=lambda pair: pair[0])
    plans: list[Plan] = []
    for _, spec in fitting:
        found = Plan(_mapping(spec), estimate(profile, cluster, spec, seq_len, roomy=True), cluster, spec)
        plans += [found] if found.fits else []  # under its real cut
        if len(plans) >= max(most, SIMULATED):
            break
    if not plans:
        raise ConfigError(fits_nowhere(request))
    return plans


def _mapping(spec: LayoutSpec) -> dict[str, Any]:
    """The keys that differ from the defaults, and the sizes."""
    sizes = ("tp", "pp", "dp", "zero", "micro_batch", "num_microbatches", "schedule", "recompute")
    usual = LayoutSpec()
    return {key: getattr(spec, key) for key in KEYS if key in sizes or getattr(spec, key) != getattr(usual, key)}


def _simplicity(spec: LayoutSpec) -> tuple[int, int, int]:
    """Fewer axes, then a lower ZeRO stage, then less recomputation."""
    return (
        (spec.tp > 1) + (spec.pp > 1) + (spec.stages_per_rank > 1) + (spec.ep > 1),
        spec.zero,
        spec.recompute != "none",
    )


def _ranked(plans: list[Plan], objective: Objective) -> list[Plan]:
    """The fastest first; of those that are as fast, the simplest."""
    if objective == "memory":
        return sorted(plans, key=lambda one: one.estimate.total_bytes)
    left = sorted(plans, key=lambda one: one.estimate.step_s)
    found = []
    while left:
        tied = [one for one in left if one.estimate.step_s <= left[0].estimate.step_s * (1 + TIE)]
        best = min(tied, key=lambda one: (_simplicity(one.spec), one.estimate.step_s))
        found.append(best)
        left.remove(best)
    return found


def _explained(plans: list[Plan]) -> list[Plan]:
    first = plans[0]
    words = ["first of what fits: the best, or the simplest of those within 3 % of it"]
    words += [_loss(one.estimate, first.estimate) for one in plans[1:]]
    return [replace(one, why=why + _tight(one)) for one, why in zip(plans, words, strict=True)]


def _loss(own: Estimate, best: Estimate) -> str:
    """Reason for which a plan comes after the first."""
    step = own.step_s / best.step_s - 1
    lost = {
        "waiting of stages": own.bubble * own.step_s - best.bubble * best.step_s,
        "messages": own.exposed_communication_s - best.exposed_communication_s,
    }
    lost["compute"] = own.step_s - best.step_s - sum(lost.values())
    name = max(lost, key=lambda part: lost[part])
    if step < -TIE:
        return f"{step:+.0%} time, {(own.total_bytes - best.total_bytes) / 1e9:+.1f} GB"
    return "as fast, and less simple" if step <= TIE else f"{step:+.0%} time, most of it {name} ({lost[name]:+.2f} s)"


def _tight(plan: Plan) -> str:
    left = 1 - plan.estimate.total_bytes / plan.limit_bytes
    return f"; only {left:.0%} of the memory is left, and the prediction may be off by more" if left < MARGIN else ""
