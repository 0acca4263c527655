"""Changing a whole model into this rank's part of it, in place, one technique a function; each does nothing if not asked for.

Parameter objects survive all of it but `shard_over_replicas`, so an optimizer that was made before stays right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from hf_parallel.activation_checkpointing.host_copies import Follow
from hf_parallel.activation_checkpointing.recompute import recompute_blocks
from hf_parallel.data_parallel.fsdp import ShardedModel
from hf_parallel.data_parallel.host import pins
from hf_parallel.engine.plan.plans import Plans
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.errors import PlanError
from hf_parallel.expert_parallel.apply import apply_expert_parallel
from hf_parallel.head.defer import defer_logits
from hf_parallel.model.stack import blocks_of
from hf_parallel.pipeline_parallel.run.stage import Stage, cut_stages
from hf_parallel.pipeline_parallel.run.weight_gradients import WeightGradients
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.run.functions import Metered, TPGroup
from hf_parallel.tensor_parallel.run.sequence import SequenceMode, install_blocks


@dataclass(frozen=True)
class Stages:
    """The stages that a rank of a pipeline runs.

    Args:
        by_index: Stage index -> stage.
        weights: Defers weight gradients, for a schedule that splits backwards.
    """

    by_index: Mapping[int, Stage]
    weights: WeightGradients | None


def compile_blocks(setup: Setup, plans: Plans) -> None:
    """Compile each block that this rank runs by itself: a stage ends by an exception, which breaks a graph of the whole.

    Comes first, so that recomputation, hooks and gathering of parameters stay around what is compiled.
    """
    backend = setup.config.pipeline.compile_blocks
    if backend == "none":
        return
    for index in _blocks_here(setup, plans):
        block = blocks_of(setup.model, plans.stack)[index]
        block.forward = torch.compile(block.forward, backend=backend)


def _blocks_here(setup: Setup, plans: Plans) -> list[int]:
    """The blocks that this rank runs."""
    if plans.cut is None:
        return list(range(len(blocks_of(setup.model, plans.stack))))
    return [index for span in plans.cut.spans_of(setup.mesh.pp_rank) for index in range(span.lo, span.hi)]


def shard_sequence(setup: Setup, plans: Plans) -> SequenceMode | None:
    """Between the sharded layers each tensor-parallel rank keeps its part of the sequence.

    Comes before stages and recomputation are put over the blocks: whole hidden states enter and leave each stage.

    Raises:
        PlanError: The pipeline cuts another stack than the one that is sharded.
    """
    mesh, cut = setup.mesh, plans.cut
    sequence = plans.tensor_parallel.sequence if plans.tensor_parallel is not None else None
    if sequence is None or mesh.tp_group is None:
        return None
    if cut is not None and cut.stages.stack != sequence.stack:
        raise PlanError(
            f"tensor_parallel.sequence_parallel: true: the sharded layers are in {sequence.stack}, the pipeline cuts "
            f"{cut.stages.stack}. Set one of sequence_parallel: false and pp_size: 1."
        )
    sections = None if cut is None else [range(span.lo, span.hi) for span in cut.spans_of(mesh.pp_rank)]
    return install_blocks(setup.model, sequence, _recorded(mesh.tp_group, setup), sections)


def _recorded(group: ProcessGroup, setup: Setup, axis: Literal["tp", "ep"] = "tp") -> TPGroup:
    """The group whose collectives are recorded, if anything is."""
    return Metered(group, setup.recorder, axis) if setup.recorder.on else group


def cut_into_stages(setup: Setup, plans: Plans) -> Stages | None:
    """Keep the stages of this rank and take the rest out of the model; None with pp_size 1.

    Comes before the layers are sharded: deferring weight gradients knows plain layers only, and a sharded layer takes
    over what it finds.
    """
    cut = plans.cut
    if cut is None:
        return None
    mine = cut.schedule.stages_of_ranks[setup.mesh.pp_rank]
    stages = cut_stages(setup.model, cut.stages, cut.bounds, mine, plans.forward)
    return Stages(stages, WeightGradients(setup.model) if cut.schedule.splits_backward else None)


def checkpoint_activations(setup: Setup, plans: Plans, sequence: SequenceMode | None) -> None:
    """Groups of blocks keep no activations and run again in the backward pass."""
    if not plans.recomputed:
        return
    here = set(_blocks_here(setup, plans))
    held = [group for group in plans.recomputed if group.start in here]
    how = setup.config.activation_checkpointing
    follow: Follow = sequence.follow if sequence is not None else lambda tensor: None
    recompute_blocks(setup.model, plans.stack, held, offload=how.offload, products=how.products, follow=follow)


def shard_layers(setup: Setup, plans: Plans, stages: Stages | None) -> None:
    """Keep this tensor-parallel rank's shard of the layers that it holds."""
    mesh = setup.mesh
    if plans.tensor_parallel is None or mesh.tp_group is None:
        return
    apply_tensor_parallel(
        setup.model,
        plans.tensor_parallel,
        _recorded(mesh.tp_group, setup),
        mesh.tp_rank,
        holds=lambda name: plans.ledger.holds(mesh.pp_rank, name),
        deferral=None if stages is None else stages.weights,
        reduces_in_fp32=setup.config.tensor_parallel.reduces_in_fp32,
        defers_logits=plans.head.is_deferred,
    )


def spread_experts(setup: Setup, plans: Plans) -> None:
    """Keep this replica's part of the experts that it shares with others."""
    mesh = setup.mesh
    if plans.experts is not None and mesh.ep_group is not None:
        holds = partial(plans.ledger.holds, mesh.pp_rank)
        group = _recorded(mesh.ep_group, setup, "ep")
        apply_expert_parallel(setup.model, plans.experts, group, mesh.ep_rank, holds)


def defer_head(setup: Setup, plans: Plans) -> None:
    """Let the head leave its logits unmade for the loss, on the ranks that hold it.

    Comes after the layers are sharded: a head that is sharded over the vocabulary does so by itself.
    """
    name, shards = plans.head.name, plans.tensor_parallel
    is_sharded = shards is not None and name in shards.linears
    if plans.head.is_deferred and not is_sharded and plans.ledger.holds(setup.mesh.pp_rank, f"{name}.weight"):
        defer_logits(setup.model.get_submodule(name))


def shard_over_replicas(
    setup: Setup, units: Sequence[Sequence[str]], compute_dtype: torch.dtype | None
) -> ShardedModel | None:
    """Share parameters out over the replicas (ZeRO 3 and fully sharded 2); the model gets new Parameter objects."""
    zero, mesh = setup.config.zero, setup.mesh
    if not zero.shards_parameters or mesh.dp_shard_group is None:
        return None
    return ShardedModel(
        setup.model,
        units,
        mesh.dp_shard_group,
        mesh.dp_replicate_group,
        stage=zero.stage,
        device=setup.device,
        offload="none" if zero.offload_param == "none" else "pinned" if pins(zero, setup.device) else "pageable",
        compute_dtype=compute_dtype,
    )
