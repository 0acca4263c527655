"""The compressed wire under torch's DistributedDataParallel, for training loops that hf_parallel does not drive.

No `from __future__ import annotations` here: DDP compares the annotation of the hook's second argument itself.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_parallel.data_parallel.compression.build_wire import make_wire
from hf_parallel.data_parallel.compression.compressed_wire import CompressedWire
from hf_parallel.data_parallel.compression.lane import Job
from hf_parallel.errors import UnsupportedError
from hf_parallel.settings.replica_sections import GradientCompressionConfig


@dataclass(frozen=True)
class _Part:
    """The gradients of one of DDP's buckets that are sent alike."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    numel: int
    slices: tuple[slice, ...]  # of DDP's buffer


@dataclass
class HookState:
    """State of the hook: the wire, and the names of parameters.

    Args:
        wire: Carries the gradients.
        names: Id of a parameter -> its name.
    """

    wire: CompressedWire
    names: dict[int, str]
    _parts: dict[tuple[int, ...], list[_Part]] = field(default_factory=dict)

    def parts(self, bucket: dist.GradBucket) -> list[_Part]:  # type: ignore[name-defined]  # missing in torch's stub
        """The bucket's gradients that are compressed, and those that are not; DDP moves parameters between buckets."""
        params = bucket.parameters()
        key = tuple(map(id, params))
        if key not in self._parts:
            rows, start = [], 0
            for param in params:
                rows.append((self.names[id(param)], param.shape, slice(start, start + param.numel())))
                start += param.numel()
            dense = [row for row in rows if self.wire.keeps_dense(row[0], row[1])]
            lossy = [row for row in rows if row not in dense]
            self._parts[key] = [_part(group) for group in (lossy, dense) if group]
        return self._parts[key]


def _part(rows: list[tuple[str, torch.Size, slice]]) -> _Part:
    offsets, end = [], 0
    for _, shape, _ in rows:
        offsets.append(end)
        end += shape.numel()
    names, shapes, slices = zip(*rows, strict=True)
    return _Part(names, tuple(offsets), shapes, end, slices)


def compressed_allreduce_hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # missing in torch's stub
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that replaces each bucket by the mean over the ranks, through the compressed wire.

    `DistributedDataParallel.register_comm_hook(state, compressed_allreduce_hook)`; see `compress_ddp`.
    """
    buffer = bucket.buffer()
    devices = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    ranks, wire = state.wire.group.size(), state.wire
    jobs = []
    for part in state.parts(bucket):
        flat = torch.cat([buffer[piece] for piece in part.slices]).div_(ranks)
        jobs.append((part, flat, wire.job(flat, part)))

    def run() -> Job:
        try:
            for part, flat, job in jobs:
                yield from job
                for piece, offset, shape in zip(part.slices, part.offsets, part.shapes, strict=True):
                    buffer[piece] = flat[offset : offset + shape.numel()]
            future.set_result(buffer)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's stub has the wrong type
            raise

    wire.lane.submit(run())
    if bucket.is_last():
        wire.flush()
    return future


def compress_ddp(ddp: DistributedDataParallel, settings: GradientCompressionConfig) -> CompressedWire:
    """Compress the gradients of a DDP model; collective over its process group.

    Args:
        ddp: The wrapped model, before its first backward pass.
        settings: With a method; a warm-up must be 0, since the length of the run is not known here.

    Returns:
        The wire: what it counted, and the state that belongs into checkpoints.

    Raises:
        UnsupportedError: The settings cannot be followed, or the model has a hook already.
    """
    if settings.warmup > 0:
        raise UnsupportedError(
            f"warmup_ratio={settings.warmup} is a share of the steps of a run, whose number DDP does not know. Set it to 0. During your "
            "own warm-up steps set `warm` of the returned wire to False: it then sends gradients uncompressed."
        )
    if settings.topology == "hierarchical":
        raise UnsupportedError("topology=hierarchical is not available under DDP. Set it to flat.")
    named = dict(ddp.module.named_parameters())
    trained = {name: param.shape for name, param in named.items() if param.requires_grad}
    ranks = dist.get_process_group_ranks(ddp.process_group)
    group = dist.new_group(ranks, use_local_synchronization=True)
    if group is None:
        raise UnsupportedError("this rank is not in the process group of the model. Make the group that it is in.")
    wire = make_wire(settings, trained, group, None, next(iter(named.values())).device)
    state = HookState(wire, {id(param): name for name, param in named.items()})
    try:
        ddp.register_comm_hook(state, compressed_allreduce_hook)
    except RuntimeError as error:
        raise UnsupportedError(
            f"the model has a communication hook already, and DDP takes one: {error}. Leave the other out."
        ) from error
    return wire
