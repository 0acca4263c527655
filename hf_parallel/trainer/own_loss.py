"""A user's `compute_loss_func` on pipeline stages: whether it is computed microbatch by microbatch, and how long that holds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.guards.calls.additive import why_not_additive
from hf_parallel.guards.calls.reads import Reads


logger = logging.getLogger(__name__)

MOST_ASKED: Final = 8  # times; each calls the function up to ten times


@dataclass(frozen=True)
class Judged:
    """Whether a loss function may be computed by microbatches, and what that answer depends on.

    Args:
        function: The function.
        adds_up: Whether it may be computed microbatch by microbatch.
        reads: Values that it read when it was judged: a change may make it another function. None if it does not add up.
        times: Number of times it was judged.
    """

    function: Callable[..., Any]
    adds_up: bool
    reads: Reads | None
    times: int

    def holds_for(self, function: Callable[..., Any]) -> bool:
        """Whether nothing speaks against it; computed on whole batches, a function may do anything."""
        return function is self.function and (self.reads is None or not self.reads.changed())


def judge(
    function: Callable[..., Any],
    before: Judged | None,
    *,
    pipeline: PipelineEngine,
    config: Any,
    device: torch.device | str,
) -> Judged:
    """Ask about a function; collective over the model copy.

    Args:
        function: `compute_loss_func`.
        before: Verdict on it, or on another one, before.
        pipeline: The model's engine.
        config: Config of the model.
        device: Device to try it on.
    """
    times = before.times + 1 if before is not None and before.function is function else 1
    why = "what it reads changes from step to step"
    if times <= MOST_ASKED:
        why = why_not_additive(function, config, device)
    believed = torch.tensor(int(not why), device=device)
    with pipeline.attachment.watchdog.waiting("waits for what other stages think of compute_loss_func"):
        dist.all_reduce(believed, dist.ReduceOp.MIN, group=pipeline.mesh.mp_group)
    if not believed:
        _warn(function, why)
    return Judged(function, bool(believed), Reads(function) if believed else None, times)


def _warn(function: Callable[..., Any], why: str) -> None:
    """Say that the loss costs GPipe memory because it cannot be split."""
    logger.warning(
        "compute_loss_func %s is not known to be a sum over labels divided by num_items_in_batch (%s), so it is not "
        "computed microbatch by microbatch: it gets the logits of the whole batch on every stage, and all activations "
        "stay in memory until its backward. Divide a summed loss by num_items_in_batch to train with 1F1B memory.",
        getattr(function, "__qualname__", function),
        why or "on another rank",
    )
