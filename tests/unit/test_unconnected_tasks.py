"""Tasks that a cluster starts without torch's variables are refused: each would train alone, without a word."""

from __future__ import annotations

import os

import pytest

from hf_parallel.errors import ConfigError
from hf_parallel.machine.tasks import unconnected_task
from hf_parallel.settings import launch


SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
LONELY = {
    "srun": SRUN,
    "srun, another task": SRUN | {"SLURM_PROCID": "5", "SLURM_LOCALID": "5"},
    "srun of an old Slurm": {k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"},
    "srun, only part of the variables": {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"},
    "number of tasks alone": {"SLURM_NTASKS": "2"},
    "two of eight tasks": SRUN | {"SLURM_STEP_NUM_TASKS": "2"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2"},
    "PMI": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "Intel MPI, local size": {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
    "PMIx, rank alone": {"PMIX_RANK": "1"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "6"},
    "rank without a world size": SRUN | {"RANK": "0"},
    "an empty world size": SRUN | {"WORLD_SIZE": ""},
    "mpirun inside a batch script": BATCH | {"OMPI_COMM_WORLD_SIZE": "8"},
}
ALONE = {
    "nothing": {},
    "launched by torch": SRUN | {"WORLD_SIZE": "8", "RANK": "0"},
    "meant to be alone": SRUN | {"WORLD_SIZE": "1"},
    "batch script": BATCH,
    "batch script with its step": BATCH | {"SLURM_STEP_ID": "4294967291", "SLURM_STEPID": "4294967291"},
    "interactive step": BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    "shell of an allocation": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8"},
    "srun of one task": SRUN | {"SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_STEP_NUM_TASKS": "1"},
    "one task of an allocation of eight": SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    "one MPI process": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    "nonsense": {"PMI_SIZE": "many", "SLURM_NTASKS": "9" * 5000},
}


@pytest.mark.parametrize("case", LONELY)
def test_a_task_beside_others_is_found(case: str) -> None:
    assert unconnected_task(LONELY[case]) is not None


@pytest.mark.parametrize("case", ALONE)
def test_one_process_is_none(case: str) -> None:
    assert unconnected_task(ALONE[case]) is None


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MV2_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("case", ["srun", "Open MPI", "PMI"])
def test_every_way_into_a_run_refuses_it_with_the_line_to_use(case: str, clean: pytest.MonkeyPatch) -> None:
    from hf_parallel import HFParallelCallback, HFParallelPlugin

    for name, value in LONELY[case].items():
        clean.setenv(name, value)
    for begin in (HFParallelCallback, HFParallelPlugin, launch.resolve_config):
        for settings in ((), ("cpu_pp2",), ({},), ({"pp_size": 2},)):
            with pytest.raises(ConfigError, match=r"without WORLD_SIZE.*train alone.*accelerate launch.*WORLD_SIZE=1"):
                begin(*settings)


def test_a_batch_script_trains_in_one_process(clean: pytest.MonkeyPatch) -> None:
    for name, value in BATCH.items():
        clean.setenv(name, value)
    assert "one process" in launch.resolve_config({})[1]
