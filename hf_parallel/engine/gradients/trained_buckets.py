"""The buckets in which gradients are reduced: fixed for the parameters that are trained, and again when others are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch.distributed import ProcessGroup

from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.guards.weights.trained import SameChange
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh


class TrainedBuckets:
    """Sums gradients over the stages that share a parameter, and follows parameters that are frozen or unfrozen.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.
        groups: Pipeline ranks that hold parameters together, this one among them -> their group.
        replicas: Reduction over the replicas, whose buckets follow too.
        waiting: Context for waits on other ranks.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        *,
        groups: Mapping[tuple[int, ...], ProcessGroup | None],
        replicas: Replicas,
        waiting: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._ledger, self._parameters, self._groups, self._replicas = ledger, parameters, groups, replicas
        self._same_change = SameChange(mesh, waiting)
        self._lay_out()

    def _lay_out(self) -> None:
        self._trained = self._now_trained()
        self._shared = []
        for holders, group in self._groups.items():
            named = [(n, p) for n, p in self._parameters.items() if self._ledger.entries[n].holders == holders]
            self._shared.append(GradientReducer(named, group))

    def _now_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]

    @property
    def are_current(self) -> bool:
        """Whether the parameters that are trained now are those that the buckets were fixed for."""
        return self._trained == self._now_trained()

    @property
    def shared_bytes(self) -> int:
        """Bytes of gradients that this rank handed to sums over stages so far."""
        return sum(reducer.counters.bytes for reducer in self._shared)

    def sum_over_stages(self) -> None:
        """Sum the gradients of shared parameters over the stages that hold them; collective over these stages."""
        if not self._shared:
            return
        with self._replicas.recorder.span("shared"):
            for reducer in self._shared:
                reducer.reduce(1.0)

    @contextmanager
    def trained_so_far(self) -> Iterator[None]:
        """Inside, what was frozen since the buckets were fixed is trained: earlier batches of the step may have given it gradients."""
        now = self._now_trained()
        if now == self._trained:
            yield
            return
        parameters = zip(self._parameters.values(), self._trained, now, strict=True)
        late = [parameter for parameter, was_trained, is_trained in parameters if was_trained and not is_trained]
        late = late if self._replicas.sharded is None else []  # which refuses it
        for parameter in late:
            parameter.requires_grad_(True)
        try:
            self.follow_freezing()
            yield
        finally:
            for parameter in late:
                parameter.requires_grad_(False)
        self.follow_freezing()

    def follow_freezing(self) -> None:
        """Fix the buckets anew if parameters were frozen or unfrozen since, alike on the ranks that hold them.

        Raises:
            UnsupportedError: A parameter was unfrozen after ZeRO partitioned the optimizer.
        """
        if self.are_current:
            return
        now = zip(self._parameters, self._trained, self._now_trained(), strict=True)
        changed = [(name, is_trained) for name, was_trained, is_trained in now if was_trained != is_trained]
        if self._replicas.zero is None and self._replicas.sharded is None:  # else a norm tells, or it is refused
            self._same_change.meet(changed)
        self._replicas.relay(
            [name for name, is_trained in changed if not is_trained],
            [name for name, is_trained in changed if is_trained],
        )
        self._lay_out()
