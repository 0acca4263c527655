"""Local steps: replicas train independently and exchange their parameter changes every H optimizer steps.

A replica sends its pseudo-gradient: the common parameters minus its own. An outer optimizer applies the mean to the common
parameters, from which all replicas continue. The mean is linear in what is sent, so error feedback is valid whatever
the inner optimizer is.

Source: Douillard et al. 2023 (arXiv:2311.08105), algorithm 1 (DiLoCo); Stich 2019 (arXiv:1805.09767) for H steps of SGD
with outer learning rate 1 and no momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_parallel.data_parallel.buckets import lay_out
from hf_parallel.data_parallel.wire import PLAIN, PlainWire, Traffic, Wire


MOMENTUM = "momentum_buffer"


class LocalSteps:
    """The common parameters of the replicas, and their synchronisation.

    Args:
        params: Names and parameters of this rank, in the same order on all replicas.
        group: The replicas.
        sync_every: Optimizer steps between two synchronisations, 2 or more.
        outer_lr: Learning rate of the outer SGD, above 0.
        outer_momentum: Its Nesterov momentum, from 0 to below 1.
        traffic: Way in which pseudo-gradients are sent.
        waiting: Context for waits on other ranks.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        *,
        sync_every: int,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        traffic: Traffic = PLAIN,
        waiting: Callable[[str], AbstractContextManager[None]] = lambda text: nullcontext(),
    ) -> None:
        self.sync_every = sync_every
        self.steps = 0  # since the last synchronisation
        self._wire: Wire = traffic.wire or PlainWire(group)
        self._ranks = group.size()
        self._waiting = waiting
        self._buckets = lay_out(params, traffic.bucket_bytes, kind=traffic.kind)
        self._common = [nn.Parameter(self._flat(index)) for index in range(len(self._buckets))]
        self._outer: Optimizer = torch.optim.SGD(
            self._common or [nn.Parameter(torch.zeros(0))],
            lr=outer_lr,
            momentum=outer_momentum,
            nesterov=outer_momentum > 0,
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank handed to collectives so far."""
        return self._wire.counters.bytes

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Count a step of the inner optimizer, and synchronise when it is time."""
        self.steps += 1
        if self.steps >= self.sync_every:
            self.synchronise()

    @torch.no_grad()
    def synchronise(self) -> None:
        """Make all replicas equal, if they took steps since the last synchronisation; collective."""
        if not self.steps:
            return
        self.steps = 0
        with self._waiting("waits for the pseudo-gradients of the other replicas"):
            waits = []
            for index, (bucket, common) in enumerate(zip(self._buckets, self._common, strict=True)):
                common.grad = (common.detach() - self._flat(index)).div_(self._ranks)  # (bucket elements,)
                waits.append(self._wire.all_reduce(common.grad, bucket))
            self._wire.flush()
            for wait in waits:
                wait()
        self._outer.step()
        for bucket, common in zip(self._buckets, self._common, strict=True):
            common.grad = None
            for param, start in zip(bucket.params, bucket.offsets, strict=True):
                param.copy_(common[start : start + param.numel()].view_as(param))

    @torch.no_grad()
    def refresh(self) -> None:
        """Start from the parameters as they are now, equal on all replicas."""
        self.steps = 0
        for index, common in enumerate(self._common):
            common.copy_(self._flat(index))

    def unknown(self, params: Mapping[str, nn.Parameter]) -> list[str]:
        """Names of parameters that are trained now and are not synchronised."""
        known = {id(param) for bucket in self._buckets for param in bucket.params}
        return [name for name, param in params.items() if param.requires_grad and id(param) not in known]

    def _flat(self, index: int) -> Tensor:
        """The parameters of a bucket as they are here, in fp32."""
        bucket = self._buckets[index]
        return torch.cat(
            [param.detach().reshape(-1).to(bucket.dtype) for param in bucket.params]
        )  # (bucket elements,)

    def state(self) -> dict[str, Tensor]:
        """Parameter name -> outer momentum, in its shape; equal on all replicas, empty without momentum."""
        found = {}
        for bucket, common in zip(self._buckets, self._common, strict=True):
            buffer = self._outer.state.get(common, {}).get(MOMENTUM)
            if buffer is not None:
                for name, param, start in zip(bucket.names, bucket.params, bucket.offsets, strict=True):
                    found[name] = buffer[start : start + param.numel()].view_as(param).clone()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, and start from the parameters as they are now."""
        self.refresh()
        for bucket, common in zip(self._buckets, self._common, strict=True):
            if all(name in state for name in bucket.names):
                buffer = torch.cat([state[name].reshape(-1).to(bucket.dtype) for name in bucket.names])
                self._outer.state[common][MOMENTUM] = buffer.to(common.device)
