"""Work that rank 0 does for all: its result, or whatever it raised, reaches every rank."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch.distributed as dist

from hf_parallel import errors
from hf_parallel.errors import ParallelError, PlanError, RankFailure


T = TypeVar("T")
Waiting = Callable[[str], AbstractContextManager[None]]


def on_rank_zero(
    function: Callable[[], T],
    doing: str,
    *,
    waiting: Waiting | None = None,
    explain: Callable[[str], ParallelError] = PlanError,
) -> T:
    """`function()` of rank 0, on every rank; collective over the default group, alone without one.

    Whatever rank 0 raises is raised on all ranks, with the same text: an error of ours as it is, any other as
    `explain` words it. Only an interruption (Ctrl-C, `sys.exit`) stays what it is on rank 0.

    Args:
        function: Called on rank 0 alone; what it returns is pickled.
        doing: Work in words: "plans the shards".
        waiting: Marks a block that waits for other ranks.
        explain: Makes the error of what is no error of ours, given as `rank 0 ...: KeyError: 'x'`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return _alone(function, doing, explain)
    sent: list[Any] = [None]
    cause: BaseException | None = None
    if dist.get_rank() == 0:
        sent[0], cause = _outcome(function, doing, explain)
        if waiting is None:
            dist.broadcast_object_list(sent, src=0)
        else:
            with waiting(f"tells the other ranks that it {doing}"):
                dist.broadcast_object_list(sent, src=0)
    elif waiting is None:
        dist.broadcast_object_list(sent, src=0)
    else:
        with waiting(f"waits for rank 0, which {doing}"):
            dist.broadcast_object_list(sent, src=0)
    kind, content = sent[0]
    if kind == "result":
        result: T = pickle.loads(content)
        return result
    if cause is not None and (kind == "interrupted" or isinstance(cause, ParallelError)):
        raise cause
    raise _error_of(kind, content) from cause


def _alone(function: Callable[[], T], doing: str, explain: Callable[[str], ParallelError]) -> T:
    try:
        return function()
    except ParallelError:
        raise
    except Exception as error:
        raise explain(_worded(error, doing)) from error


def _outcome(
    function: Callable[[], Any], doing: str, explain: Callable[[str], ParallelError]
) -> tuple[tuple[str, Any], BaseException | None]:
    """Call the function; return the message for the other ranks (the result, or class and text of an error), and the error."""
    try:
        return ("result", pickle.dumps(function())), None
    except ParallelError as error:
        return (type(error).__name__, str(error)), error
    except Exception as error:  # noqa: BLE001 - the other ranks wait, whatever happens here
        traceback.clear_frames(error.__traceback__)  # what they hold may be the memory that was missing
        explained = explain(_worded(error, doing))
        return (type(explained).__name__, str(explained)), error
    except BaseException as error:  # noqa: BLE001 - as above; raised again by the caller
        return ("interrupted", f"{_worded(error, doing)}. Look at the messages of rank 0."), error


def _worded(error: BaseException, doing: str) -> str:
    return f"rank 0, which {doing}, failed with {type(error).__name__}: {error}"


def _error_of(kind: str, text: str) -> ParallelError:
    """An error of the same class on this rank; of the nearest one that takes a text alone."""
    if kind == "interrupted":
        return RankFailure(text)
    found = getattr(errors, kind, PlanError)
    is_ours = isinstance(found, type) and issubclass(found, ParallelError)
    error: ParallelError = found(text) if is_ours else PlanError(text)
    return error
