"""Bytes of what this package itself runs: what its eager blocks were recorded to take, at the moment with most."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from hf_parallel.memory.activations import Stages, stage_parts
from hf_parallel.memory.estimate import (
    CASTS,
    buffers,
    fullest_step,
    passing_gathers,
    steps_of,
    unpacked,
    updating_bytes,
)
from hf_parallel.memory.moments import GATHERED, SENT, TEMPORARY, Moment, Recorded, moments_of
from hf_parallel.memory.terms import Layout, ModelShape, SavedBytes, of_slow_networks
from hf_parallel.memory.variant import Variant
from hf_parallel.planner.adapters import is_beside, rank_of_all
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.pipeline import schedule_of
from hf_parallel.planner.profile import NONE, ModelProfile
from hf_parallel.settings.replica_sections import GradientCompressionConfig, LocalSgdConfig
from hf_parallel.settings.sections import ActivationCheckpointingConfig


RECOMPUTED: Final[Mapping[str, ActivationCheckpointingConfig]] = {
    "none": NONE,
    "full": ActivationCheckpointingConfig(every=1),
    "selective": ActivationCheckpointingConfig(every=2, mode="selective"),
}
ROUNDS: Final = 4  # of pp micro-batches, after which a step holds what it held


def recorded_of(profile: ModelProfile, spec: LayoutSpec, *, beside: bool | None = None) -> Recorded | None:
    """The recorded memory of a step of the model; None if another system runs the layout, or the model cannot be run.

    Args:
        profile: The model.
        spec: The layout.
        beside: Whether what is trained are adapters; None is what their number tells.
    """
    if profile.source is None or not _is_run_here(spec):
        return None
    precision, beside = spec.precision, is_beside(profile, spec) if beside is None else beside
    rank, on_experts = rank_of_all(profile, spec) if beside else (0, False)
    variant = Variant(
        attention="eager" if spec.attention == "eager" else None,
        gathers=precision == "autocast" and spec.engine == "fsdp2" and spec.zero > 0,
        adapted=rank,
        on_experts=on_experts,
    )
    return profile.source.recorded(precision, recomputed_of(spec), variant)


def traced_of(profile: ModelProfile, spec: LayoutSpec) -> SavedBytes | None:
    """Bytes that autograd keeps of a block of a model that this package runs and that cannot be recorded; else None."""
    if profile.source is None or not _is_run_here(spec) or recorded_of(profile, spec) is not None:
        return None
    return profile.source.traced(spec.precision)


def _is_run_here(spec: LayoutSpec) -> bool:
    """Whether this package runs the layout with the modules of the model; others run some such, too."""
    return spec.places_replicas and spec.kernels == "eager"


def recomputed_of(spec: LayoutSpec) -> ActivationCheckpointingConfig:
    """The section that computes as much again."""
    every = spec.recompute_every
    if spec.recompute == "full" and every is not None and every > 1:
        return ActivationCheckpointingConfig(every=every, mode="alternate")
    return RECOMPUTED[spec.recompute]


def peaks_of_ranks(
    shape: ModelShape,
    recorded: Recorded,
    spec: LayoutSpec,
    stages: Stages,
    held: Sequence[float],
    states: Sequence[Mapping[str, float]],
) -> list[dict[str, float]]:
    """Activations, logits and buffers of each rank of a pipeline: what they add to its states when it has most.

    Args:
        shape: Shape of the model.
        recorded: Recorded step of the model.
        spec: The layout.
        stages: Its stages.
        held: Parameters of each rank.
        states: States of each rank by term. All of them count as there: so long as gradients are not, others have their room.
    """
    layout = _layout(spec)
    if spec.adapters:
        shape = replace(shape, adapters=spec.adapters, block_bits=spec.block_bits)
    passes = spec.num_microbatches if spec.schedule == "gpipe" else min(spec.num_microbatches, ROUNDS * spec.pp)
    moments = _moments(spec.schedule, spec.pp, passes, spec.stages_per_rank)
    found = []
    for rank, own in enumerate(states):
        lasting = _lasting(held[rank], shape, layout, spec)
        sent, whole = lasting.pop(SENT, 0.0), passing_gathers(lasting, layout)
        there = {"gradients": own["gradients"], "optimizer state": own["optimizer"]}
        reduced = spec.num_microbatches if spec.pp == 1 else 1
        steps = steps_of(there, spec.trained(held[rank]), shape, layout, reduced, sent)
        parts_of = functools.partial(stage_parts, shape, recorded, layout, stages, rank)
        updating = updating_bytes(held[rank], shape, layout)
        had, terms = fullest_step(steps, moments[rank], parts_of, whole, updating)
        found.append(_added(terms, sum(there.values()) - had["optimizer state"]))
        found[-1]["buffers"] += sum(lasting.values())
    return found


def _added(terms: Mapping[str, float], counted: float) -> dict[str, float]:
    """Terms of a rank of which so many bytes of states are counted already, more or less than its gradients take."""
    found = {
        "activations": terms["activations"] + terms["recomputed blocks"] + terms[TEMPORARY],
        "logits": terms["logits and loss"],
        "buffers": terms[SENT] + terms[GATHERED] + max(0.0, terms["gradients"] - counted),
    }
    return in_room_of(max(0.0, counted - terms["gradients"]), found)


def in_room_of(missing: float, terms: Mapping[str, float]) -> dict[str, float]:
    """Bytes of each term that do not fit into `missing`, the room of gradients that are counted and not there yet."""
    found = {}
    for name, size in terms.items():
        taken = min(size, missing)
        found[name], missing = size - taken, missing - taken
    return found


def _lasting(parameters: float, shape: ModelShape, layout: Layout, spec: LayoutSpec) -> dict[str, float]:
    """Buffers of a rank that holds so many parameters, and what slow networks cost."""
    found = buffers(parameters, shape, layout)
    found.pop(CASTS, None)  # they are recorded
    if spec.zero == 3 and spec.pp > 1:  # whole from the first pass of a step to the last
        whole = spec.element * parameters + spec.states[1] * spec.trained(parameters)
        found = {"gathered parameters and gradients": whole}
    trained = spec.trained(parameters)
    return found | unpacked(shape) | {name: size * trained for name, size in layout.extra.items()}


@functools.lru_cache(maxsize=1024)
def _layout(spec: LayoutSpec) -> Layout:
    """The layout as `memory` knows it."""
    return Layout(
        spec.num_ranks,
        spec.num_ranks,
        spec.tp,
        spec.pp,
        spec.sequence_parallel and spec.tp > 1,
        stage=spec.zero,
        engine=spec.engine,  # type: ignore[arg-type]  # the words are the same
        precision=spec.precision,
        offload_optimizer=spec.offload_optimizer,  # type: ignore[arg-type]
        offload_param=spec.offload_param,  # type: ignore[arg-type]
        recompute=recomputed_of(spec),
        chunked_loss=spec.chunked_loss,
        extra=_extra(spec.compression, spec.local_steps),
        ep_size=spec.ep,
        sp_size=spec.sp,
        optim=spec.optim,
    )


@functools.cache
def _extra(compression: str, local_steps: int) -> Mapping[str, float]:
    sent = GradientCompressionConfig(method=compression)  # type: ignore[arg-type]
    return of_slow_networks(sent, LocalSgdConfig(sync_every=local_steps))


@functools.lru_cache(maxsize=256)
def _moments(schedule: str, pp: int, passes: int, stages_per_rank: int) -> tuple[tuple[Moment, ...], ...]:
    """The moments of each rank at which its memory may be highest."""
    if pp == 1:  # those after the second are like it
        return (moments_of(schedule_of("1f1b", 1, min(passes, 2), 1)[0], [0], 0),)
    made, last = schedule_of(schedule, pp, passes, stages_per_rank), pp * stages_per_rank - 1
    owned = [sorted({action.stage for action in actions}) for actions in made]
    return tuple(moments_of(one, own, last if last in own else None) for one, own in zip(made, owned, strict=True))
