"""What offload to files needs of a disk; pure arithmetic."""

from __future__ import annotations

from hf_parallel.memory.estimate import HOST_OPTIMIZER, HOST_PARAMETERS
from hf_parallel.replica_sections import ZeroConfig


def disk_bytes(parameters: float, zero: ZeroConfig) -> float:
    """Bytes that all ranks together write for a model of `parameters`, in the terms of `estimate.host_states`.

    Args:
        parameters: Of the whole model.
        zero: What is offloaded, and where.
    """
    optimizer = HOST_OPTIMIZER if zero.offload_optimizer == "nvme" else 0.0
    return parameters * (optimizer + (HOST_PARAMETERS if zero.offload_param == "nvme" else 0.0))
