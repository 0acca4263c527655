"""Exact sums over replicas on several nodes: inside each node first, so that every element crosses the network once a node."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hf_parallel.data_parallel.buckets import Bucket
from hf_parallel.data_parallel.compression.exchange import HierarchicalAllReduce, Meter
from hf_parallel.data_parallel.compression.lane import Job, Lane
from hf_parallel.data_parallel.wire import Wait, WireCounters


class NodeWire:
    """A `Wire`: ranks of a node sum parts, the ranks with the same part sum it over the nodes, each node collects the parts.

    All ranks get the same numbers, bit for bit: a part is summed in one place of each node and by one all-reduce between them.

    Args:
        inside: The copies on this rank's node.
        across: The copies with this rank's place on the other nodes.
        device: Device of the gradients.

    Attributes:
        counters: Collectives and bytes so far.
        meter: Counts the bytes between nodes.
    """

    lossy = False

    def __init__(self, inside: dist.ProcessGroup, across: dist.ProcessGroup, device: torch.device) -> None:
        self.counters, self.meter = WireCounters(), Meter()
        self._lane = Lane(device)
        self._method = HierarchicalAllReduce(inside, across, None, self.meter)

    def all_reduce(self, flat: Tensor, bucket: Bucket | None) -> Wait:
        """Begin to replace `flat` by its sum over the nodes."""
        self.counters.collectives += 1
        self.counters.bytes += flat.nbytes
        return self._lane.submit(self._sum(flat))

    def reduce_scatter(self, flat: Tensor, bucket: Bucket) -> tuple[Tensor, Wait]:
        """Nobody's: an optimizer in parts has groups of its own."""
        raise NotImplementedError

    def flush(self) -> None:
        """Finish what waits for a successor."""
        self._lane.flush()

    def _sum(self, flat: Tensor) -> Job:
        whole = F.pad(flat, (0, -flat.numel() % self._method.multiple))
        total = yield from self._method.total(whole, None, lambda part: part)
        flat.copy_(total[: flat.numel()])
