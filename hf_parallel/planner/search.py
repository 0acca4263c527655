"""Which layouts fit a cluster, which of them is the fastest, and why the others lose."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from hf_parallel.errors import ConfigError
from hf_parallel.planner.constants import constants
from hf_parallel.planner.hardware import Cluster, choose, whole
from hf_parallel.planner.layout import KEYS, LayoutSpec, layout_of
from hf_parallel.planner.memory import memory_bytes
from hf_parallel.planner.predict import Estimate, estimate, step_of
from hf_parallel.planner.profile import ModelProfile, profile_of
from hf_parallel.settings.sections import STAGES_PER_RANK


Objective = Literal["tokens", "memory"]
SIMULATED: Final = 20  # of the fastest by closed forms, those whose schedule is simulated
TIE: Final = 0.03  # of a step: closer layouts count as equally fast, and the simpler one comes first
SCHEDULES: Final = ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Plan:
    """A layout with its estimate.

    Attributes:
        layout: The mapping that `predict` takes.
        estimate: What it costs.
        limit_bytes: Memory of a GPU.
        why: What it loses against the first plan, or what makes it the first.
    """

    layout: Mapping[str, Any]
    estimate: Estimate
    limit_bytes: float
    why: str = ""
    spec: LayoutSpec = field(default_factory=LayoutSpec, repr=False)

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
        objective: "tokens" ranks by time, "memory" by the fullest rank.
        layout: Keys that are given, such as kernels or recompute; the search leaves them alone.
        most: Plans that are returned.

    Raises:
        ConfigError: A key or value is unknown, or no layout fits; says by how much the smallest one does not.
    """
    whole("seq_len", seq_len), whole("global_batch", global_batch), whole("most", most)
    choose("objective", objective, ("tokens", "memory"))
    given = dict(layout or {})
    fixed = layout_of(given)
    profile = profile_of(model)
    fitting: list[tuple[float, LayoutSpec]] = []
    smallest: tuple[float, LayoutSpec] | None = None
    c = constants()
    for spec in candidates(profile, cluster, fixed, frozenset(given), global_batch):
        size = _bytes(profile, spec, seq_len)
        if smallest is None or size < smallest[0]:
            smallest = size, spec
        if size > cluster.gpu_bytes:
            continue
        key = step_of(profile, cluster, spec, seq_len, c, exact=False).total if objective == "tokens" else size
        fitting.append((key, spec))
    if not fitting:
        raise ConfigError(_fits_nowhere(cluster, smallest, global_batch))
    fitting.sort(key=lambda pair: pair[0])
    plans = [
        Plan(_mapping(spec), estimate(profile, cluster, spec, seq_len), cluster.gpu_bytes, "", spec)
        for _, spec in fitting[: max(most, SIMULATED)]
    ]
    return _explained(_ranked(plans, objective)[:most])


def candidates(
    profile: ModelProfile, cluster: Cluster, fixed: LayoutSpec, given: frozenset[str], global_batch: int
) -> Iterator[LayoutSpec]:
    """Every layout of the cluster's GPUs that this package can run, with the keys that are given."""
    ranks, heads = cluster.num_gpus, min(kind.kv_heads or kind.heads or 1 for kind in profile.kinds)

    def values(key: str, usual: Iterable[Any]) -> list[Any]:
        return [getattr(fixed, key)] if key in given else list(usual)

    for tp, pp in itertools.product(values("tp", _divisors(ranks)), values("pp", _divisors(ranks))):
        left, rest = divmod(ranks, tp * pp * fixed.sp)
        if rest or pp > len(profile.layers) or heads % tp or (tp > cluster.gpus_per_node and "tp" not in given):
            continue
        if left != fixed.dp and "dp" in given:
            continue
        stages_of_zero = (0, 1) if pp > 1 else (0, 1, 2, 3)  # of a pipeline, gathers would repeat for every pass
        zeros = values("zero", stages_of_zero if left > 1 else (0,))
        for zero, recompute, micro in itertools.product(
            zeros, values("recompute", ("none", "full")), values("micro_batch", MICRO_BATCHES)
        ):
            passes, odd = divmod(global_batch, left * micro)
            if odd or passes < 1 or ("num_microbatches" in given and passes != fixed.num_microbatches):
                continue
            for schedule in values("schedule", SCHEDULES if pp > 1 else ("1f1b",)):
                stages = STAGES_PER_RANK[schedule][0] if pp > 1 else 1
                if "stages_per_rank" in given:
                    stages = fixed.stages_per_rank
                if pp * stages > len(profile.layers):
                    continue
                yield replace(
                    fixed,
                    tp=tp,
                    pp=pp,
                    dp=left,
                    zero=zero,
                    recompute=recompute,
                    micro_batch=micro,
                    num_microbatches=passes,
                    schedule=schedule,
                    stages_per_rank=stages,
                )


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _bytes(profile: ModelProfile, spec: LayoutSpec, seq_len: int) -> float:
    """Of the fullest rank under an even cut, which needs no costs."""
    stages, layers = spec.num_stages, len(profile.layers)
    counts = [layers // stages + (index < layers % stages) for index in range(stages)]
    return sum(memory_bytes(profile, spec, counts, seq_len).values())


def _mapping(spec: LayoutSpec) -> dict[str, Any]:
    """The keys that differ from the defaults, and the sizes."""
    sizes = ("tp", "pp", "dp", "zero", "micro_batch", "num_microbatches", "schedule", "recompute")
    usual = LayoutSpec()
    return {key: getattr(spec, key) for key in KEYS if key in sizes or getattr(spec, key) != getattr(usual, key)}


def _simplicity(spec: LayoutSpec) -> tuple[int, int, int]:
    """Fewer axes, then a lower ZeRO stage, then less recomputation."""
    return (spec.tp > 1) + (spec.pp > 1) + (spec.stages_per_rank > 1), spec.zero, spec.recompute != "none"


def _ranked(plans: list[Plan], objective: Objective) -> list[Plan]:
    """The fastest first; of those that are as fast, the simplest."""
    if objective == "memory":
        return sorted((one for one in plans if one.fits), key=lambda one: one.estimate.total_bytes)
    left = sorted((one for one in plans if one.fits), key=lambda one: one.estimate.step_s)
    found = []
    while left:
        tied = [one for one in left if one.estimate.step_s <= left[0].estimate.step_s * (1 + TIE)]
        best = min(tied, key=lambda one: (_simplicity(one.spec), one.estimate.step_s))
        found.append(best)
        left.remove(best)
    return found


def _explained(plans: list[Plan]) -> list[Plan]:
    if not plans:
        return []
    best = plans[0].estimate
    found = [replace(plans[0], why="the fastest that fits, or the simplest of those within 3 % of it")]
    for one in plans[1:]:
        own, step = one.estimate, one.estimate.step_s / best.step_s - 1
        lost = {
            "waiting of stages": own.bubble * own.step_s - best.bubble * best.step_s,
            "messages": own.exposed_communication_s - best.exposed_communication_s,
        }
        lost["compute"] = own.step_s - best.step_s - sum(lost.values())
        name = max(lost, key=lambda part: lost[part])
        words = (
            "as fast, and less simple"
            if abs(step) <= TIE
            else f"{step:+.0%} time, most of it {name} ({lost[name]:+.2f} s)"
        )
        found.append(replace(one, why=words))
    return found


def _fits_nowhere(cluster: Cluster, smallest: tuple[float, LayoutSpec] | None, global_batch: int) -> str:
    if smallest is None:
        return (
            f"global_batch={global_batch}: no layout of {cluster.num_gpus} GPUs divides it. Choose a multiple of "
            f"{cluster.num_gpus}, or give tp and pp."
        )
    size, spec = smallest
    missing = size - cluster.gpu_bytes
    return (
        f"no layout fits: the smallest, tp={spec.tp} pp={spec.pp} dp={spec.dp} zero={spec.zero} "
        f"micro_batch={spec.micro_batch} recompute={spec.recompute}, needs {size / 1e9:.1f} GB and a GPU has "
        f"{cluster.gpu_bytes / 1e9:.1f} GB, {missing / 1e9:.1f} GB less. Use a GPU of {size / 1e9:.0f} GB, more GPUs, a "
        "shorter seq_len, or layout={'zero': 3, 'offload_optimizer': 'cpu'}."
    )
