"""One verdict for all ranks."""

from __future__ import annotations

import torch.distributed as dist

from hf_parallel.errors import CheckpointError


def raise_anywhere(problem: str | Exception | None) -> None:
    """Raise on every rank what went wrong on any; collective over the world.

    Args:
        problem: What went wrong here, None if nothing.

    Raises:
        CheckpointError: With the text of the first rank that had a problem.
    """
    cause = problem if isinstance(problem, Exception) else None
    known = cause is None or isinstance(cause, CheckpointError)
    text = None if problem is None else str(problem) if known else f"{type(cause).__name__}: {problem}"
    texts = [text]
    if dist.is_initialized() and dist.get_world_size() > 1:
        texts = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
    first = next((text for text in texts if text is not None), None)
    if first is not None:
        raise CheckpointError(first) from cause
