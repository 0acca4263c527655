"""Whether this process is one of several that a cluster's launcher started, without telling torch about the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


# Variables of each launcher: number of tasks, rank of this one.
MPI: Final = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun"),
    ("PMI_SIZE", "PMI_RANK", "mpirun"),
    ("MPI_LOCALNRANKS", "MPI_LOCALRANKID", "mpirun"),
    ("PALS_SIZE", "PALS_RANKID", "mpiexec"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun"),
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK", "flux run"),
    ("", "PMIX_RANK", "the launcher"),
)
# Slurm numbers the steps that are no `srun` from here on: interactive, external, batch script.
FIRST_SPECIAL_STEP: Final = 0xFFFFFF00


@dataclass(frozen=True)
class Tasks:
    """Tasks that were started together.

    Args:
        launcher: Command that started them, in words.
        variable: The variable that says so.
        value: Its value.
    """

    launcher: str
    variable: str
    value: int


def unconnected_task(environ: Mapping[str, str]) -> Tasks | None:
    """The tasks that this process is one of although torch's variables are missing, so that each would run alone.

    None if WORLD_SIZE says how many processes belong together, or if there is one task. The shell of an allocation and
    the script of a batch job know how many tasks were allocated, but are one process: they are not tasks of a step.
    """
    if environ.get("WORLD_SIZE"):
        return None
    slurm = _of_slurm(environ)
    if slurm is not None:
        return slurm
    for size, rank, launcher in MPI:
        count, position = _whole(environ, size), _whole(environ, rank)
        if count > 1:
            return Tasks(launcher, size, count)
        if position > 0 and count != 1:
            return Tasks(launcher, rank, position)
    return None


def _of_slurm(environ: Mapping[str, str]) -> Tasks | None:
    step = max(_whole(environ, "SLURM_STEP_ID"), _whole(environ, "SLURM_STEPID"))
    in_step = -1 < step < FIRST_SPECIAL_STEP
    for size in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        count = _whole(environ, size)
        if count < 0 or (size != "SLURM_STEP_NUM_TASKS" and not in_step and _is_script_or_shell(environ)):
            continue
        # A step says itself how many tasks it has; what was allocated may be more.
        return Tasks("srun", size, count) if count > 1 and step < FIRST_SPECIAL_STEP else None
    position = _whole(environ, "SLURM_PROCID")
    return Tasks("srun", "SLURM_PROCID", position) if position > 0 else None


def _is_script_or_shell(environ: Mapping[str, str]) -> bool:
    """Whether this process is a job's script or shell, and no task of it but perhaps the first."""
    of_job = any(name in environ for name in ("SLURM_JOB_ID", "SLURM_JOBID"))
    return of_job and _whole(environ, "SLURM_PROCID") <= 0


def _whole(environ: Mapping[str, str], name: str) -> int:
    """The number that a variable holds, -1 if none."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
