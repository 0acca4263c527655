"""Counts the disk space that offload to files needs, and checks that it is there."""

from __future__ import annotations

import shutil
from pathlib import Path

from hf_parallel.memory.estimate import HOST_OPTIMIZER, HOST_PARAMETERS
from hf_parallel.settings.replica_sections import ZeroConfig


def disk_bytes(parameters: float, zero: ZeroConfig) -> float:
    """Bytes that all ranks together write for a model of `parameters`, in the terms of `estimate.host_states`.

    Args:
        parameters: Parameters of the whole model.
        zero: Settings of ZeRO: what is offloaded, and where.
    """
    optimizer = HOST_OPTIMIZER if zero.offload_optimizer == "nvme" else 0.0
    return parameters * (optimizer + (HOST_PARAMETERS if zero.offload_param == "nvme" else 0.0))


def disk_shortages(parameters: int, zero: ZeroConfig, num_machines: int) -> list[str]:
    """Why the files of an offload do not fit, in a line; nothing is said of a folder that is not on this machine.

    Args:
        parameters: Parameters of the whole model.
        zero: Settings of ZeRO: what is offloaded, and where.
        num_machines: Number of machines that share the files, each on a disk of its own.
    """
    path, share = zero.nvme_path, disk_bytes(parameters, zero) / num_machines
    if path is None or not Path(path).is_dir():
        return []
    free = shutil.disk_usage(path).free
    if share <= free:
        return []
    return [
        f"zero.nvme_path={path!r}: the processes of a machine write {share / 1e9:.1f} GB for {parameters / 1e9:.2f} billion "
        f"parameters, and {free / 1e9:.1f} GB are free. Set zero.nvme_path to a larger disk, or use more machines."
    ]
