"""One verdict for all ranks."""

from __future__ import annotations

import torch.distributed as dist

from hf_parallel.errors import CheckpointError


def raise_anywhere(problem: str | None) -> None:
    """Raise on every rank what went wrong on any; collective over the world.

    Args:
        problem: What went wrong here, None if nothing.

    Raises:
        CheckpointError: With the text of the first rank that had a problem.
    """
    problems = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    first = next((text for text in problems if text is not None), None)
    if first is not None:
        raise CheckpointError(first)
