"""Words the lines that rank 0 logs when a run begins, one for each question that users have then; tables are details."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hf_parallel.engine.plan.held import holding_of
from hf_parallel.engine.plan.plans import Plans
from hf_parallel.engine.plan.setup import Setup
from hf_parallel.engine.run.expected import states_with_zero
from hf_parallel.machine.facts import this_machine
from hf_parallel.pipeline_parallel.plan.predict_cut import Holding, Prediction, predict
from hf_parallel.pipeline_parallel.schedule.asynchronous import delay_of, delays_of
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS


MAX_NAMED = 4  # stages that are named one by one


def opening(
    plans: Plans,
    setup: Setup,
    holdings: Sequence[Holding],
    replicas: Sequence[str],
    seconds: float,
    *,
    compared: bool,
) -> list[str]:
    """The lines of the start-up message, without those of the layout and of the batch, which are made elsewhere.

    Args:
        plans: Plans of the run.
        setup: The settings and the mesh.
        holdings: Holding of each pipeline rank, before the model was changed; see `holdings_of`.
        replicas: Description of the replicas' exchange, a line each.
        seconds: Duration of planning and comparing.
        compared: Whether the planned parts were compared with the whole model.
    """
    details = "details with HF_PARALLEL_LOG=debug"
    if setup.config.monitor.report:
        details += ", and in hf_parallel_report.html of output_dir after training"
    lines = [f"{_how(plans, compared=compared)} in {max(seconds, 0.1):.1f} s; {details}"]
    parts = [*_stages(plans), *_shards(plans), *_whole_rows(plans), *_recomputed(plans), *replicas]
    lines += ["; ".join(parts)] if parts else []
    lines.append(_memory(holdings, plans.prediction, setup))
    if plans.prediction is not None:
        lines.append(_idle(plans, plans.prediction))
    return lines


def for_inference(plans: Plans, setup: Setup, holdings: Sequence[Holding], seconds: float, *, compared: bool) -> str:
    """The line of a model of which nothing is trained; arguments as of `opening`."""
    zero, group = setup.config.zero, setup.mesh.dp_shard_group
    parts = [*_stages(plans), *_shards(plans)]
    if zero.shards_parameters and group is not None:
        parts.append(f"parameters in {group.size()} parts (fully_shard)")
    fullest = max(holdings, key=lambda held: held.weights)
    here = states_with_zero((fullest.weights, 0, 0), zero, group)[0]
    whole = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in plans.ledger)
    return (
        f"{setup.name}, a model for inference: {'; '.join(parts)}; the fullest rank has {_gb(here)} of its {_gb(whole)} GB; "
        f"{_how(plans, compared=compared)} in {max(seconds, 0.1):.1f} s"
    )


def _how(plans: Plans, *, compared: bool) -> str:
    if plans.cut is None and plans.tensor_parallel is None and plans.experts is None:
        return "ready"
    return "planned and compared with the whole model" if compared else "planned, not compared with the whole model,"


def holdings_of(plans: Plans, setup: Setup) -> list[Holding]:
    """Count the bytes that each pipeline rank will keep of the model, which is still whole."""
    shape = setup.mesh.shape
    # Of experts fewer replicas have copies, so each keeps a larger part.
    copies = shape.ep_size if setup.config.zero.stage else 1
    return [holding_of(setup.model, plans.ledger, rank, shape.parts_size, copies) for rank in range(shape.pp_size)]


def _stages(plans: Plans) -> list[str]:
    if plans.prediction is None:
        return []
    stages = plans.prediction.stages
    if len(stages) > MAX_NAMED:
        sizes = [hi - lo for lo, hi in (stage.blocks for stage in stages)]
        shares = [stage.share for stage in stages]
        return [
            f"{len(stages)} stages of {min(sizes)} to {max(sizes)} blocks with {min(shares):.1%} to {max(shares):.1%} of the compute"
        ]
    named = []
    for index, stage in enumerate(stages):
        lo, hi = stage.blocks
        blocks = f"blocks {lo} to {hi - 1}" if hi > lo else "the head alone"
        named.append(f"stage {index} on rank {stage.rank} {blocks} ({stage.share:.0%} of the compute)")
    return [", ".join(named)]


def _shards(plans: Plans) -> list[str]:
    if plans.experts is not None:
        return [plans.experts.describe()]
    if plans.tensor_parallel is None:
        return []
    share = plans.tensor_parallel.coverage()
    return [
        f"tensor parallel: {share.paired + share.gathered:.0%} of the parameters sharded, {share.replicated:.0%} whole on every rank"
    ]


def _whole_rows(plans: Plans) -> list[str]:
    names = [] if plans.rows is None else sorted(plans.rows.whole.places)
    return [f"positions of whole rows on every rank for {', '.join(names)}"] if names else []


def _recomputed(plans: Plans) -> list[str]:
    if not plans.recomputed:
        return []
    return [f"activation checkpointing of {sum(map(len, plans.recomputed))} blocks in {len(plans.recomputed)} groups"]


def _memory(holdings: Sequence[Holding], prediction: Prediction | None, setup: Setup) -> str:
    """Compare the bytes that the fullest rank keeps for its parameters with the bytes it has."""
    zero = setup.config.zero
    pipeline, pp_size = setup.config.pipeline, setup.config.pp_size
    is_late = pipeline.schedule in ASYNCHRONOUS
    delays = delays_of(pipeline.schedule, pp_size, vertical_sync=pipeline.vertical_sync) if is_late else (0,) * pp_size
    found = []
    for held, delay in zip(holdings, delays, strict=True):
        shared = states_with_zero((held.weights, held.gradients, held.optimizer), zero, setup.mesh.dp_shard_group)
        found.append(dict(zip(("weights", "gradients", "Adam"), shared, strict=True)))
        if is_late:
            found[-1]["older weights"] = found[-1]["weights"] * delay
    terms = max(found, key=lambda terms: sum(terms.values()))
    offloaded = [
        name for name, key in (("Adam", zero.offload_optimizer), ("weights", zero.offload_param)) if key != "none"
    ]
    here = " + ".join(f"{name} {_gb(size)}" for name, size in terms.items())
    text = f"memory of the fullest rank: {here} = {_gb(sum(terms.values()))} GB of {_gb(_limit(setup))} GB"
    if offloaded:
        text += f" ({' and '.join(offloaded)} in host memory)"
    if prediction is not None:
        kept = 1000 * max(rank.activations for rank in prediction.ranks)
        text += f", and activations of {_gb(kept)} GB for 1000 tokens of a microbatch"
    return text


def _limit(setup: Setup) -> float:
    """Bytes of the card; on the CPU a process's share of the RAM."""
    if setup.device.type == "cuda":
        return float(torch.cuda.get_device_properties(setup.device).total_memory)
    return this_machine().ram_bytes / max(setup.mesh.shape.world_size, 1)


def _gb(size: float) -> str:
    """At least three digits, so that the terms of a sum add up on the screen."""
    return f"{size / 1e9:.1f}" if size >= 1e11 else f"{size / 1e9:.3g}"


def _idle(plans: Plans, prediction: Prediction) -> str:
    """The bubble, and what twice the microbatches would leave of it."""
    cut, count = plans.cut, prediction.num_microbatches
    if cut is not None and cut.schedule.settings.schedule in ASYNCHRONOUS:
        return _staleness(cut.schedule)
    text = f"expected: ranks are idle for {prediction.bubble:.0%} of a step of {count} microbatches"
    if cut is None or cut.schedule.settings.schedule == "csv":
        return text
    held = [rank.holding for rank in prediction.ranks]
    other = predict(cut.stages, cut.bounds, cut.costs, cut.schedule.training(2 * count), held)
    text += f" ({cut.schedule.settings.schedule})"
    less = f"{other.bubble:.0%}"
    return text if less == f"{prediction.bubble:.0%}" else f"{text}; num_microbatches: {2 * count} would leave {less}"


def _staleness(schedule: ScheduleChoice) -> str:
    """Tell the cost that only an asynchronous schedule has: older weights."""
    delay, together = delay_of(schedule.settings.schedule, schedule.pp_size), schedule.settings.vertical_sync
    old = "one optimizer step" if delay == 1 else f"{delay} optimizer steps"
    most = "" if together else "up to "
    return (
        f"{schedule.settings.schedule}: ranks are idle at the beginning and end of an epoch only, but gradients are those of weights "
        f"that are {most}{old} old: expect next to no change of the loss in fine-tuning at small learning rates, and several percent more "
        f"loss from scratch (measured in docs/asynchronous.md); memory holds {most}{delay + 1} versions of the weights"
    )


def batch_line(rows: int, steps: int, dp_size: int, config: HFParallelConfig) -> str:
    """Say what a step trains on, and which run of one process it equals.

    Args:
        rows: Rows of a batch on each replica.
        steps: Batches of an optimizer step.
        dp_size: Replicas.
        config: The settings.
    """
    lossy = []
    if config.gradient_compression.method != "none":
        lossy.append(f"gradients are sent as {config.gradient_compression.method}")
    if config.pipeline.schedule in ASYNCHRONOUS:
        lossy.append("gradients are those of older weights")
    if config.local_sgd.sync_every > 1:
        lossy.append(f"replicas meet every {config.local_sgd.sync_every} steps")
    equal = f"not those of one process: {' and '.join(lossy)}" if lossy else "those of one process with these rows"
    batches = "1 batch" if steps == 1 else f"{steps} batches"
    several = "rows" if rows * steps * dp_size > 1 else "row"
    return (
        f"an optimizer step has {rows * steps * dp_size} {several} ({rows} a batch x {batches} x dp {dp_size}); its loss and "
        f"gradients are {equal}{_too_few(rows * steps, config)}"
    )


def _too_few(rows: int, config: HFParallelConfig) -> str:
    """A clause that says so if a replica has fewer rows than microbatches of a step; else ""."""
    wanted = config.pipeline.parts_of_batch(config.pp_size) if config.pp_size > 1 else 1
    if rows >= wanted:
        return ""
    parts = "1 microbatch" if rows == 1 else f"{rows} microbatches"
    return (
        f"; these are {parts} of a replica where num_microbatches is {wanted}, so that ranks are idle for longer than is expected with "
        f"{wanted}: raise per_device_train_batch_size to {wanted}"
    )
