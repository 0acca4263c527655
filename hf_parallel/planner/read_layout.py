"""A layout from a mapping: the values of its keys, and what cannot be."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final, get_args

from hf_parallel.errors import ConfigError
from hf_parallel.memory.optimizers import ADAMW, OPTIMIZERS
from hf_parallel.planner.checks import bits, choose, share, triple, whole
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.settings.replica_sections import Method
from hf_parallel.settings.schedule_names import ASYNCHRONOUS, STAGES_PER_RANK, full_name
from hf_parallel.settings.values import spelled


CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "zero": (0, 1, 2, 3),
    "schedule": tuple(STAGES_PER_RANK),
    "recompute": ("none", "selective", "full"),
    "dtype": ("bf16", "fp16", "fp8", "fp32"),
    "kernels": ("eager", "compiled", "norms", "fused"),
    "attention": ("eager", "sdpa", "flash"),
    "loss": ("auto", "logits", "gathered", "fused"),
    "param_dtype": ("auto", "fp32"),
    "reduce_dtype": ("fp32", "bf16"),
    "engine": ("auto", "native", "fsdp2", "deepspeed"),
    "offload_param": ("none", "cpu", "nvme"),
    "offload_optimizer": ("none", "cpu", "nvme"),
    "compression": get_args(Method),
    "split": ("auto", "balanced", "even"),
    "adapters_are": ("auto", "beside", "own"),
    "optim": tuple(OPTIMIZERS),
}
OPTIONAL: Final = (
    *("engine", "offload_param", "offload_optimizer", "compression", "loss", "param_dtype", "reduce_dtype"),
    *("dp_inside", "split", "adapters_are", "optim"),
)
COUNTS: Final = ("tp", "pp", "dp", "sp", "ep", "micro_batch", "num_microbatches", "stages_per_rank", "local_steps")
SWITCHES: Final = (
    *("sequence_parallel", "experts_over_tp", "chunked_loss", "overlap_dp", "overlap_tp", "overlap_pp"),
    *("blocking_launches", "zero_owners", "overlap_gather"),
)
# Stages of each rank that a schedule cannot do without.
FIXED: Final = {name: count for name, (count, only) in STAGES_PER_RANK.items() if only}
NUMBERS: Final[Mapping[str, Callable[[Any], float]]] = {"block_bits": bits, "recompute_share": share}
KEYS: Final = tuple(field.name for field in fields(LayoutSpec))


def layout_of(layout: Mapping[str, Any] | LayoutSpec, cluster: Cluster | None = None) -> LayoutSpec:
    """The checked layout.

    Args:
        layout: See `LayoutSpec`; what is left out has its default.
        cluster: The layout's ranks must be its GPUs.

    Raises:
        ConfigError: Keys or values are unknown, or the sizes do not fit; all problems at once.
    """
    problems: list[str] = []
    if isinstance(layout, LayoutSpec):
        spec = layout
    elif isinstance(layout, Mapping):
        spec, problems = _read(layout)
    else:
        raise ConfigError(f"layout={spelled(layout)}: expected a mapping, such as {{'tp': 2, 'dp': 4}}. Give one.")
    problems += _conflicts(spec, cluster) if not problems else []
    if problems:
        raise ConfigError("\n".join(problems))
    return spec


def _read(layout: Mapping[str, Any]) -> tuple[LayoutSpec, list[str]]:
    """The layout of what can be read, and what cannot."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, value in layout.items():
        try:
            values[str(key)] = _checked(key, value)
        except ConfigError as error:
            problems.append(str(error))
    schedule, given = values.get("schedule", LayoutSpec.schedule), values.get("stages_per_rank")
    if values.get("pp", 1) > 1 and (given is None or (given == 1 and schedule in FIXED)):
        values["stages_per_rank"] = STAGES_PER_RANK[schedule][0]
    if values.get("engine", "auto") == "auto":
        values["engine"] = "fsdp2" if values.get("zero") == 3 else "native"
    return LayoutSpec(**values), problems


def _checked(key: object, value: Any) -> Any:
    if not isinstance(key, str) or key not in KEYS:
        near = difflib.get_close_matches(str(key), KEYS, 1, 0.0)[0]
        raise ConfigError(f"{key}: unknown key of a layout. Did you mean {near}? Known keys: {', '.join(KEYS)}.")
    if key in COUNTS or key == "adapters":
        return whole(key, value, int(key in COUNTS))
    if key in SWITCHES:
        if not isinstance(value, bool):
            raise ConfigError(f"{key}={spelled(value)}: expected true or false. Correct {key}.")
        return value
    if key == "dp_inside":
        return 0 if value in ("auto", None) else whole(key, value, 1)
    if key in NUMBERS:
        return NUMBERS[key](value)
    if key == "split" and isinstance(value, (list, tuple)):
        return tuple(whole(key, one, 0) for one in value)
    if key == "state_bytes":
        return None if value is None else triple(value)
    if value is None and key in OPTIONAL:
        return "auto" if key == "engine" else getattr(LayoutSpec, key)
    if isinstance(value, bool):  # true and false are numbers to Python
        raise ConfigError(
            f"{key}={spelled(value)}: expected one of {', '.join(map(str, CHOICES[key]))}. Correct {key}."
        )
    if key == "schedule" and value in ASYNCHRONOUS:
        raise ConfigError(
            f"schedule={value}: it trains with older weights than one process does, so no plan chooses it or predicts its time. Plan "
            "with 1f1b, and set pipeline.schedule in the file."
        )
    return choose(key, full_name(value) if key == "schedule" else value, CHOICES[key])


def _without_effect(spec: LayoutSpec) -> list[str]:
    """Keys that need another one which is not given."""
    found = []
    if spec.block_bits and not spec.adapters:
        found.append(
            f"block_bits={spec.block_bits:g} without adapters: quantised weights are not trained. Give adapters, the parameters that "
            "are, or leave block_bits out."
        )
    if spec.adapters_are != "auto" and not spec.adapters:
        found.append(
            f"adapters_are={spec.adapters_are} without adapters: it says of the trained parameters whose they are. Give adapters, their "
            "number, or leave adapters_are out."
        )
    if spec.adapters_are == "own" and spec.block_bits:
        found.append(
            f"adapters_are=own with block_bits={spec.block_bits:g}: quantised weights are not trained. Set adapters_are to beside, or leave "
            "block_bits out."
        )
    if spec.recompute_share != 1 and spec.recompute != "full":
        found.append(
            f"recompute_share={spec.recompute_share:g} with recompute={spec.recompute}: it says of how many blocks recompute=full is true. "
            "Set recompute to full, or leave recompute_share out."
        )
    if spec.state_bytes is not None and spec.optim != ADAMW:
        found.append(
            f"optim={spec.optim} with state_bytes={spelled(list(spec.state_bytes))}: its third number is what an optimizer keeps. Leave out "
            "one of them."
        )
    if spec.zero_owners and spec.zero != 1:
        found.append(
            f"zero_owners with zero={spec.zero}: ranks own whole tensors where the optimizer alone is partitioned. Set zero to 1, or leave "
            "zero_owners out."
        )
    return found


def _conflicts(spec: LayoutSpec, cluster: Cluster | None) -> list[str]:
    found = _without_effect(spec)
    ranks = spec.num_ranks
    if cluster is not None and ranks != cluster.num_gpus:
        found.append(
            f"dp={spec.dp} * tp={spec.tp} * pp={spec.pp} * sp={spec.sp} = {ranks} ranks, and the cluster has "
            f"nodes={cluster.nodes} * gpus_per_node={cluster.gpus_per_node} = {cluster.num_gpus} GPUs: they must be equal. "
            f"Change dp, or the cluster."
        )
    fixed = FIXED.get(spec.schedule)
    if spec.pp > 1 and fixed is not None and spec.stages_per_rank != fixed:
        found.append(
            f"stages_per_rank={spec.stages_per_rank}: schedule {spec.schedule} has {fixed} on each rank. Leave it out, or "
            "choose interleaved_1f1b."
        )
    if spec.pp == 1 and spec.stages_per_rank != 1 and spec.schedule not in ("zbv_zero_bubble", "dualpipev"):
        found.append(f"stages_per_rank={spec.stages_per_rank}: with pp=1 there is one stage. Leave it out.")
    if isinstance(spec.split, tuple) and len(spec.split) != (spec.num_stages if spec.pp > 1 else 1):
        found.append(
            f"split={list(spec.split)} has {len(spec.split)} entries for pp={spec.pp} * stages_per_rank={spec.stages_per_rank}: it "
            f"holds the number of blocks of each stage. Give {spec.num_stages} integers, or leave split out."
        )
    if spec.dp_inside and spec.pp == 1:
        found.append(f"dp_inside={spec.dp_inside}: with pp=1 replicas are neighbours in any case. Leave it out.")
    elif spec.dp_inside and not spec.places_replicas:
        found.append(f"dp_inside={spec.dp_inside}: other systems number stages last. Leave it out.")
    elif spec.dp_inside and spec.dp % spec.dp_inside:
        found.append(
            f"dp_inside={spec.dp_inside}: every replica has as many neighbours. Set dp_inside to a divisor of dp={spec.dp}."
        )
    if spec.experts_over_tp and (spec.ep % spec.tp or spec.dp % spec.sharing_replicas):
        found.append(
            f"ep={spec.ep} with experts_over_tp: all tp={spec.tp} ranks of some of the dp={spec.dp} replicas have experts. Set ep to "
            "tp times a divisor of dp."
        )
    elif spec.dp % spec.sharing_replicas and (cluster is not None or spec.dp > 1):  # else a search chooses dp
        found.append(
            f"ep={spec.ep}: neighbouring replicas share the experts of each block. Set ep to a divisor of dp={spec.dp}."
        )
    if spec.local_steps > 1 and (spec.zero or spec.compression != "none"):
        found.append(
            f"local_steps={spec.local_steps}: replicas differ between averages, so that they cannot share an optimizer, and no "
            "gradient travels. Set zero to 0 and compression to none, or local_steps to 1."
        )
    return found
