"""The refusal of a model that runs on whole rows and not on parts of them, in the words of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.ulysses.verify import raised, refusal


if TYPE_CHECKING:
    from hf_parallel.dry_run.rank.run import Job


def refuse_parts(job: Job, model: nn.Module, error: Exception, run: Callable[[Job], object]) -> None:
    """Refuse a model whose step raised on parts of rows, if the same step of whole rows runs.

    Args:
        job: The job that was run.
        model: Its model.
        error: The error that was raised.
        run: Function that runs a job dry.

    Raises:
        PlanError: It runs on whole rows; names the module, as a run does that compares both when it starts.
    """
    config, size = job.config, job.config.sp_size
    section = {
        name: value for name, value in config.to_yaml_section().items() if name not in ("sp_size", "sp_attention")
    }
    world, node = job.world_size // size, max(1, job.ranks_per_node // size)
    plain = replace(
        job,
        config=HFParallelConfig.from_mapping(section),
        rank=job.rank // size,
        world_size=world,
        ranks_per_node=node,
    )
    try:
        run(plain)
    except Exception:  # noqa: BLE001 - it does not run in any case, and parts are not the cause
        return
    problem = raised(_module_of(model, error), error)
    raise refusal(model, size, problem, is_ring=config.sp_attention == "ring") from error


def _module_of(model: nn.Module, error: Exception) -> str:
    """Name of the module whose forward raised."""
    names, found, trace = {id(module): name for name, module in model.named_modules()}, "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "forward":
            found = names.get(id(trace.tb_frame.f_locals.get("self")), "") or found
        trace = trace.tb_next
    return found
