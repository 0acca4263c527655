"""The hardware queues through which a GPU takes the work of its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
ONE_QUEUE: Final = (
    f"{QUEUES}=1 puts all streams of a GPU into one hardware queue: a receive blocks the computation that its sender waits "
    "for, so pipeline stages can hang"
)
ONE_QUEUE_FIX: Final = f"Unset {QUEUES}, or export {QUEUES}=32."


def has_one_queue(environment: Mapping[str, str]) -> bool:
    """Whether all streams of a GPU share one hardware queue (CUDA C++ Programming Guide, environment variables)."""
    return environment.get(QUEUES, "").strip() == "1"
