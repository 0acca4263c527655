"""What the usual rules of thumb say of a model and a cluster, beside what the search found.

The usual order: plain replicas where the states fit, ZeRO where the parameters do, tensor parallelism inside of a node and a
pipeline between nodes where they do not. The thresholds (`ROOM`, `FAST`) are judged, not from a publication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import STATE_BYTES, LayoutSpec
from hf_parallel.planner.profile import ModelProfile, profile_of


ROOM: Final = 0.7  # of a GPU, for states: the rest is for activations
FAST: Final = 0.25  # of NVLink: a network from which on partitioned parameters may cross it


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        when: What it is for.
        axes: What it uses, of "replicas", "zero", "tp" and "pp".
        say: In words.
    """

    when: str
    axes: frozenset[str]
    say: str


def rule_for(profile: ModelProfile, cluster: Cluster) -> Rule:
    """The row that a model and a cluster fall in."""
    weights, gradients, optimizer = (one * profile.parameters for one in STATE_BYTES["native", True])
    room = ROOM * cluster.gpu_bytes
    if cluster.num_gpus == 1:
        return Rule("one GPU", frozenset(), "no parallelism; offload and recomputation if it does not fit")
    if weights + gradients + optimizer <= room:
        return Rule("the whole model fits a GPU", frozenset({"replicas"}), "plain replicas")
    if weights + gradients + optimizer / cluster.num_gpus <= room:
        return Rule("parameters and gradients fit a GPU", frozenset({"replicas", "zero"}), "replicas with ZeRO 1 or 2")
    everything = (weights + gradients + optimizer) / cluster.num_gpus
    fast = cluster.nodes == 1 or cluster.inter_bytes_s / cluster.gpus_per_node >= FAST * cluster.intra_bytes_s
    if everything <= room and fast:
        return Rule("parameters fit all GPUs together, and links are fast", frozenset({"replicas", "zero"}), "ZeRO 3")
    if cluster.nodes == 1:
        return Rule("the model does not fit", frozenset({"tp"}), "tensor parallelism, and offload")
    inside = frozenset({"tp", "pp", "replicas"} if cluster.has_nvlink else {"pp", "replicas"})
    words = "tp inside of a node, stages between nodes, replicas of these"
    return Rule(
        "several nodes on a slow network", inside, words if "tp" in inside else "stages, and replicas of these"
    )


def axes_of(spec: LayoutSpec) -> frozenset[str]:
    """Axes that a layout uses."""
    used = {"tp": spec.tp > 1, "pp": spec.pp > 1, "zero": spec.zero > 0, "replicas": spec.dp > 1}
    return frozenset(name for name, uses in used.items() if uses)


def guide(model: Any, cluster: Cluster, spec: LayoutSpec) -> str:
    """The row in a line, and where the search's first plan differs from it.

    Args:
        model: A transformers config, or a path to one.
        cluster: The machines.
        spec: Spec of the first plan.
    """
    rule, found = rule_for(profile_of(model), cluster), axes_of(spec)
    line = f"rule of thumb ({rule.when}): {rule.say}"
    more, fewer = (", ".join(sorted(one)) for one in (found - rule.axes, rule.axes - found))
    notes = [f"the first plan also uses {more}"] * bool(more) + [f"it does without {fewer}"] * bool(fewer)
    return f"{line}; {', '.join(notes)}" if notes else f"{line}; so is the first plan"
