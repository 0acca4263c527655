"""Private names of torch.distributed: its store, and what its collectives wait for and raise.

Each function checks what it relies on and says which package moved when the check fails.
"""

from __future__ import annotations

import dis
import re
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any, Final, Protocol


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from torch import Tensor, device, dtype
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.distributed_c10d import Store


def private_store() -> Store | None:
    """A connection of its own to the default process group's key-value store; None when this torch gives none.

    Its own, because a call that blocks on one connection blocks every other thread that uses it.
    """
    from torch.distributed import distributed_c10d

    getter = getattr(distributed_c10d, "_get_default_store", None)
    clone = getattr(getter(), "clone", None) if getter is not None else None
    return clone() if clone is not None else None


def blocked_collective() -> tuple[tuple[int, int] | None, str | None]:
    """The call of a torch.distributed collective that another thread of this process is in, and its name.

    The call is equal as long as the thread stays in it. NCCL's collectives return at once, so they are not seen.
    """
    from torch.distributed import distributed_c10d

    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        # The innermost frame alone: `f_back` of a thread that has gone on meanwhile may read freed memory (CPython 3.11).
        if thread != own and frame.f_globals is vars(distributed_c10d):
            return (id(frame), frame.f_lasti), frame.f_code.co_name
        if thread != own and frame.f_code is wait_for.__code__:
            return (id(frame), frame.f_lasti), "a collective"
    return None, None


def wait_for(work: Work | Pending | None, group: ProcessGroup | None = None) -> None:
    """Wait for a collective that was begun, where `blocked_collective` sees it: torch's own wait leaves no frame.

    Args:
        work: The collective.
        group: Its ranks, which `blocked_ranks` then knows.
    """
    if work is not None:
        work.wait()


def blocked_ranks() -> list[int] | None:
    """The ranks of the group whose collective another thread of this process is in; None if there is none, or it is not known.

    Only of a thread that stays there: what its frame holds is read while it cannot go on.
    """
    from torch.distributed import distributed_c10d, get_process_group_ranks

    own = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        is_waiting = frame.f_code is wait_for.__code__ and frame.f_locals.get("group") is not None
        is_inside = frame.f_globals is vars(distributed_c10d) and "group" in frame.f_code.co_varnames
        if thread != own and (is_waiting or is_inside):
            try:
                return list(get_process_group_ranks(frame.f_locals.get("group")))
            except (RuntimeError, ValueError, KeyError):  # a group that is gone, or not this process's
                return None
    return None


RECORD_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the name before torch 2.8
RECORD_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Bytes from which messages of their own are faster than one collective that copies.
WORTH_MESSAGES: Final = 1 << 16
# Bytes up to which two ranks sum faster by one message each than by two of half the size.
WORTH_HALVES: Final = 1 << 19


def record_collectives(environment: MutableMapping[str, str]) -> None:
    """Let torch record the last collectives of NCCL, unless the user has chosen; before a process group exists."""
    if not any(name in environment for name in RECORD_SIZES):
        environment[RECORD_SIZES[1]] = "2000"
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def record_prefix(environment: Mapping[str, str]) -> str | None:
    """Path, without the rank at its end, of the files with recorded collectives; None if nothing is recorded."""
    if not any(environment.get(name, "0") not in ("", "0") for name in RECORD_SIZES):
        return None
    chosen = (environment.get(name) for name in RECORD_FILES)
    return next(filter(None, chosen), f"{tempfile.gettempdir()}/nccl_trace_rank_")


def write_record(path: str) -> bool:
    """Write what torch recorded, for `torchfrtrace`; whether there is anything."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None) or getattr(_distributed_c10d, "_dump_fr_trace", None)
    content: bytes = dump() if dump is not None else b""
    if not content:
        return False
    with open(path, "wb") as file:
        file.write(content)
    return True


class Pending(Protocol):
    """A collective on its way."""

    def wait(self) -> object:
        """Return when its result is there."""
        ...


def all_reduce_flat(x: Tensor, group: ProcessGroup, *, async_op: bool = True) -> Pending | None:
    """Begin to replace `x`, contiguous, by its sum over the ranks, the same bits on all.

    gloo sends halves of it in two messages one after the other (torch 2.13), and each waits for a thread to wake up. Two ranks send
    each other small tensors whole, which are as many bytes.

    Args:
        x: The tensor.
        group: The ranks.
        async_op: Whether to return while it runs, as in torch, whose collective otherwise ends before it returns, on
            the current stream.
    """
    import torch.distributed as dist

    if group.size() == 2 and x.nbytes <= WORTH_HALVES and _sends_by_gloo(x, group):
        return _SumOfTwo(x, group)
    work: Work | None = dist.all_reduce(x, group=group, async_op=async_op)
    return work


def all_gather_flat(whole: Tensor, mine: Tensor, group: ProcessGroup, *, async_op: bool = True) -> Pending | None:
    """Begin to gather the ranks' `mine`, f[n], into `whole`, f[N n], of which it may be this rank's part.

    gloo's own copies all of it once more (torch 2.13), so two ranks send each other theirs. `async_op` as of torch.
    """
    if group.size() != 2 or mine.nbytes < WORTH_MESSAGES or not _sends_by_gloo(mine, group):
        return _gather(whole, mine, group, async_op=async_op)
    parts, rank = whole.view(2, -1), group.rank()
    if parts[rank].data_ptr() != mine.data_ptr():
        parts[rank].copy_(mine)
    return Exchange([(mine, 1 - rank)], [(parts[1 - rank], 1 - rank)], group)


def all_gather_new(x: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' `x`, all of one shape, in rank order in new memory, [N, ...]; NCCL would copy each of a list once more."""
    x = x.contiguous()
    everyone = x.new_empty((group.size(), *x.shape))
    wait_for(all_gather_flat(everyone.view(-1), x.view(-1), group, async_op=False), group)
    return everyone


def _gather(whole: Tensor, mine: Tensor, group: ProcessGroup, *, async_op: bool) -> Work | None:
    """The same by one collective; torch 2.13 gave the function another name."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work | None = gather(whole, mine, group=group, async_op=async_op)
    return work


def _sends_by_gloo(tensor: Tensor, group: ProcessGroup) -> bool:
    """Whether messages between two ranks are gloo's, which has them of host memory only."""
    import torch.distributed as dist

    return "gloo" in dist.get_backend(group) and tensor.device.type == "cpu"


# Messages that nobody has waited for yet. Where an exception ends a step nobody will, but the other rank's still have to arrive.
_BEGUN: set[Exchange] = set()


class Exchange:
    """Messages to and from other ranks, in one batch; tensors are kept until all has arrived.

    Args:
        sends: Tensors, contiguous, each with the rank that gets it, counted in the group.
        receives: Tensors to be filled, each with the rank that sends it.
        group: The ranks.
    """

    def __init__(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: ProcessGroup
    ) -> None:
        import torch.distributed as dist

        self._kept, self._group = [*sends, *receives], group
        batch = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sends]
        batch += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in receives]
        self._works = dist.batch_isend_irecv(batch) if batch else []  # of one rank there are none
        _BEGUN.add(self)

    def wait(self) -> None:
        """Return when all have arrived; on CUDA, the current stream waits."""
        for work in self._works:
            wait_for(work, self._group)
        self._kept = []
        _BEGUN.discard(self)


class _SumOfTwo:
    """A tensor on its way to the other of two ranks, and that one's on its way here; `wait` adds it."""

    def __init__(self, x: Tensor, group: ProcessGroup) -> None:
        self._x, self._other, peer = x, x.new_empty(x.shape), 1 - group.rank()
        self._messages = Exchange([(x, peer)], [(self._other, peer)], group)

    def wait(self) -> None:
        self._messages.wait()
        self._x.add_(self._other)


def rows_of_ranks(mine: Tensor, group: ProcessGroup) -> Tensor:
    """Few numbers of every rank of a group, `mine` f[n] of each as a row of f[N n]; waits for them.

    An all-reduce of gloo sends two messages one after the other for each of these (torch 2.13): twice the wait over a slow network.
    """
    rows = mine.reshape(1, -1).repeat(group.size(), 1)
    _gather(rows.view(-1), mine.reshape(-1), group, async_op=False)
    return rows


def reduce_scatter_flat(
    mine: Tensor,
    whole: Tensor,
    group: ProcessGroup,
    empty: Callable[[int, dtype, device], Tensor] | None = None,
) -> Pending | None:
    """Begin to sum the ranks' `whole`, f[N n], of which each rank gets its part, f[n], in `mine`.

    On gloo, whose own sends the bytes of an all-reduce (torch 2.13), ranks exchange parts and whoever waits sums them; `empty` makes the
    memory for these. `whole` is to be left alone until then.
    """
    import torch.distributed as dist

    if "gloo" not in dist.get_backend(group):
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work: Work | None = scatter(mine, whole, group=group, async_op=True)
        return work
    parts = whole.new_empty(whole.numel()) if empty is None else empty(whole.numel(), whole.dtype, whole.device)
    rows, own = parts.view(group.size(), -1), whole.view(group.size(), -1)
    if not _sends_by_gloo(whole, group):
        sent = dist.all_to_all_single(parts, whole, group=group, async_op=True)
        return _PartsToSum(sent, rows, None, group.rank(), mine)
    others = [peer for peer in range(group.size()) if peer != group.rank()]
    messages = Exchange([(own[peer], peer) for peer in others], [(rows[peer], peer) for peer in others], group)
    return _PartsToSum(messages, rows, own[group.rank()], group.rank(), mine)


class _PartsToSum:
    """The ranks' parts on their way here; `wait` sums them.

    Args:
        work: Waits until the parts are here; None if they are.
        parts: Buffer in which they arrive, f[N, n].
        own: This rank's part, f[n], if it is not among them.
        rank: This rank.
        mine: Buffer of the sum, f[n].
    """

    def __init__(self, work: Pending | None, parts: Tensor, own: Tensor | None, rank: int, mine: Tensor) -> None:
        self._work, self._parts, self._own, self._rank, self._mine = work, parts, own, rank, mine

    def wait(self) -> None:
        import torch

        if self._work is not None:
            self._work.wait()
        if self._own is not None and len(self._parts) == 2:
            torch.add(self._own, self._parts[1 - self._rank], out=self._mine)
            return
        if self._own is not None:
            self._parts[self._rank] = self._own
        torch.sum(self._parts, 0, out=self._mine)


# Where in gloo's own source a failed transfer was noticed stands at the head of its messages.
_OF_GLOO = re.compile(r"\[[^\]\s]*\bgloo/[^\]\s]*\.(cc|h):\d+\] ")


def is_connection_loss(error: BaseException, *, in_collective: bool = False) -> bool:
    """Whether a collective failed because another rank is gone.

    NCCL's and the network's errors have classes of their own. gloo raises plain RuntimeErrors (torch 2.13): they begin
    with the place in its source, and no Python code has raised them.

    Args:
        error: The error that was raised.
        in_collective: Whether only a collective can have raised it, so that who did need not be found out.
    """
    from torch.distributed import DistBackendError, DistNetworkError

    if isinstance(error, (DistBackendError, DistNetworkError)):
        return True
    if type(error) is not RuntimeError or _OF_GLOO.match(str(error)) is None:
        return False
    return in_collective or not _raised_by_python(error)


def _raised_by_python(error: BaseException) -> bool:
    """Whether a `raise` statement made this error, and no compiled function that was called."""
    trace = error.__traceback__
    if trace is None:
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code
    return code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def count_traffic(part: Any, count: Callable[[int], None], *, replicates: bool) -> None:
    """Count the bytes that this rank hands to collectives for a part of a model that `fully_shard` shards.

    Args:
        part: The part, an `FSDPModule`.
        count: Gets the bytes of each collective.
        replicates: Whether what was scattered is summed over copies as well.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class Gather(DefaultAllGather):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            count(input_tensor.nbytes)
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    class Scatter(DefaultReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            count(input_tensor.nbytes + (output_tensor.nbytes if replicates else 0))
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    part.set_custom_all_gather(Gather())
    part.set_custom_reduce_scatter(Scatter())
