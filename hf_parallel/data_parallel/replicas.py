"""The data-parallel axis of one rank: combines buckets, overlap, ZeRO, compression and local steps, whatever tp and pp are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from hf_parallel.data_parallel.host import host_memory
from hf_parallel.data_parallel.local_sgd import LocalSteps
from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.replica_wire import (
    ReplicaSettings,
    WarmUp,
    describe_compression,
    make_node_wire,
    make_replica_wire,
)
from hf_parallel.data_parallel.wire import Compared, Comparing, Traffic
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import UnsupportedError
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.monitor.recorder import Recorder


class Replicas:
    """Reduces the gradients of one rank's parameters over its replicas.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh. Building the groups of a compressed wire is collective.
        settings: Settings of the data-parallel axis.
        counted: Chooses the elements of a parameter that this rank counts in the gradient norm.
        compared: What replicas compare beside the gradients that they sum; see `Traffic`.

    Attributes:
        wire: Compresses gradients; None without compression.
        nodes: Sums gradients inside of nodes first; None where one ring does.
        zero: The partition of the optimizer (ZeRO 1 and 2); None without one.
        sharded: The model with sharded parameters (ZeRO 3); None without one.
        local: Synchronises replicas after local steps; None without local steps.
        before_reading: Functions to call before code outside of training reads the model.
        noticed: Called when a gradient has arrived at a parameter that replicas share, in whichever backward pass.
        partitioned: Called when an optimizer has been partitioned.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        settings: ReplicaSettings,
        counted: Callable[[str, nn.Parameter], bool | torch.Tensor],
        compared: Comparing | None = None,
    ) -> None:
        self._ledger, self._parameters, self._mesh = ledger, dict(parameters), mesh
        self._compared = compared
        self._settings, self._counted = settings, counted
        self.zero: ZeroPartition | None = None
        self.local: LocalSteps | None = None
        self.before_reading: list[Callable[[], None]] = []
        self.noticed: Callable[[], None] = lambda: None
        self.partitioned: Callable[[ZeroPartition], None] = lambda zero: None
        self.sharded = settings.sharded
        self._steps_locally = settings.local_sgd.sync_every > 1 and mesh.dp_group is not None
        self._compression = settings.local_sgd.compression if self._steps_locally else settings.compression
        self.wire = make_replica_wire(settings, self._compression, ledger, parameters, mesh)
        self.nodes = make_node_wire(settings, parameters, mesh)
        # What local steps send has no warm-up.
        self._warm_up = WarmUp(settings.compression, None if self._steps_locally else self.wire)
        self._reducer: GradientReducer | None = None
        self._experts: GradientReducer | None = None
        self.lay_out()

    @property
    def partitions(self) -> bool:
        """Whether an optimizer will be, or is, partitioned."""
        return self._settings.zero.stage > 0 and self._mesh.dp_shard_group is not None

    @property
    def _reducers(self) -> list[GradientReducer]:
        """The reducers of gradients that are not partitioned."""
        return [reducer for reducer in (self._reducer, self._experts) if reducer is not None]

    @property
    def compared(self) -> list[Compared]:
        """Comparisons of this rank with those that update the same weights by themselves."""
        return [reducer.compared for reducer in self._reducers if reducer.compared is not None]

    @property
    def reduces_every_backward(self) -> bool:
        """Whether no whole gradients are kept between the backward passes of a step (ZeRO-2)."""
        return self.zero is not None and self.zero.stage == 2

    def lay_out(self) -> None:
        """Make the buckets for the parameters that are trained now."""
        if self.sharded is not None:
            return
        for reducer in self._reducers:
            reducer.close()
        taken = frozenset(self.zero.names) if self.zero is not None else frozenset()
        named = [(name, p) for name, p in self._parameters.items() if name not in taken]
        group = None if self._steps_locally else self._mesh.copies_group
        experts = [(name, p) for name, p in named if self._is_expert(name)]
        dense = [(name, p) for name, p in named if not self._is_expert(name)] if experts else named
        traffic = self._traffic()
        self._reducer = GradientReducer(
            dense, group, traffic if self.nodes is None else replace(traffic, wire=self.nodes)
        )
        # Over fewer replicas, by the same factor: an expert's gradient is the sum over all tokens that reached it.
        self._experts = GradientReducer(experts, self._mesh.expert_group, self._traffic()) if experts else None

    def _is_expert(self, name: str) -> bool:
        """Whether replicas have different parts of a parameter."""
        return self._mesh.shape.ep_size > 1 and self._ledger.entries[name].spec is not None

    def relay(self, frozen: Sequence[str], unfrozen: Sequence[str]) -> None:
        """Make the buckets again after parameters were frozen or unfrozen.

        Args:
            frozen: Names of those that were trained before and are not now.
            unfrozen: Names of those that are trained now and were not before.

        Raises:
            UnsupportedError: The optimizer was partitioned for the old ones.
        """
        self.refuse(self.fixed(frozen, unfrozen))
        self.lay_out()

    def fixed(self, frozen: Sequence[str], unfrozen: Sequence[str]) -> list[str]:
        """Names of parameters that were frozen or unfrozen too late to take effect."""
        if self.sharded is not None:
            return [*unfrozen, *frozen]
        updated = {name for group in (self.zero.groups if self.zero is not None else ()) for name in group}
        late = [name for name in unfrozen if name in updated]
        return late if late or self.local is None else self.local.unknown(self._parameters)

    def refuse(self, names: Sequence[str]) -> None:
        """Refuse what `fixed` has found, on this rank or on another stage.

        Raises:
            UnsupportedError: There are any.
        """
        if not names:
            return
        stage, local = self._settings.zero.stage, self._settings.local_sgd
        if self.sharded is not None:
            when = f"frozen or unfrozen after zero.stage={stage} had sharded the parameters"
        elif self.zero is not None:
            when = f"unfrozen after zero.stage={stage} partitioned the optimizer, whose parts each have one step count"
        else:
            when = f"unfrozen after local_sgd.sync_every={local.sync_every} had begun: replicas would never synchronise it"
        setting = "local_sgd.sync_every to 1" if self.sharded is None and self.zero is None else "zero.stage to 0"
        raise UnsupportedError(
            f"{names[0]} ({len(names)} parameters) was {when}. Set requires_grad before training starts, or {setting}."
        )

    def _traffic(self) -> Traffic:
        """Settings of the reduction. Tied parameters are summed over their stages first, so their buckets wait for that."""
        data_parallel, wire = self._settings.data_parallel, self.wire

        def kind(name: str, parameter: nn.Parameter) -> tuple[tuple[int, ...], bool, bool, bool]:
            """Parameters of different kinds do not share a bucket. Tied parameters wait for other stages. And if one
            compressed block held a shard beside common values, ranks would decode the common values differently.
            """
            entry = self._ledger.entries[name]
            holders = entry.holders if len(entry.holders) > 1 else ()
            lossy = wire is not None and not wire.keeps_dense(name, parameter.shape)
            return holders, lossy, lossy and entry.spec is None, self._is_expert(name)

        return Traffic(
            bucket_bytes=int(data_parallel.bucket_cap_mb * 2**20),
            kind=kind,
            late=lambda kind: isinstance(kind, tuple) and bool(kind[0]),
            overlaps=self._settings.overlaps and data_parallel.overlap,
            wire=wire,
            sharers=lambda name: self._mesh.expert_group if self._is_expert(name) else self._mesh.dp_shard_group,
            waiting=self._settings.waiting,
            dtype=getattr(torch, data_parallel.reduce_dtype),
            recorder=self._settings.recorder,
            noticed=(lambda: self.noticed())
            if self._mesh.shape.pp_size == 1
            else None,  # else hooks on parameters tell
            compared=self._compared,
        )

    @property
    def recorder(self) -> Recorder:
        """Records when gradients are under way."""
        return self._settings.recorder

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank handed to collectives over the replicas so far."""
        if self.sharded is not None:
            return self.sharded.sent_bytes
        zero = self.zero
        found = zero.gathered_bytes if zero is not None else 0
        if zero is not None and zero.copies is not None:
            found += zero.copies.counters.bytes
        if self.wire is not None:
            return found + self.wire.meter.wire_bytes
        wires = [zero.wire, *zero.wires.values()] if zero is not None else []
        found += sum(wire.counters.bytes for wire in wires)
        found += self.local.sent_bytes if self.local is not None else 0
        return found + sum(reducer.counters.bytes for reducer in self._reducers)

    def plan_steps(self, total: int, done: int) -> None:
        """Set the number of optimizer steps of the run, of which the warm-up of a compression is a share.

        Args:
            total: Optimizer steps of the whole run.
            done: Steps done before this start, if the run resumes.
        """
        self._warm_up.plan(total, done)

    def describe(self) -> list[str]:
        """The data-parallel settings in lines for the start of a run; warnings among them."""
        if self._mesh.copies_group is None:
            return []
        lines, settings = [], self._settings
        if settings.zero.stage:
            size = self._mesh.dp_shard_group.size() if self._mesh.dp_shard_group is not None else 1
            what = "optimizer state" if settings.zero.stage == 1 else "optimizer state and gradients"
            where = (
                ", updated in host memory" if self.sharded is None and settings.zero.offload_optimizer == "cpu" else ""
            )
            ep_size = self._mesh.shape.ep_size
            experts = f", of experts in {size // ep_size}" if ep_size > 1 else ""
            lines.append(
                f"zero stage {settings.zero.stage}: {what} in {size} parts{experts}{where}" + self._describe_sharded()
            )
        if self._steps_locally:
            lines.append(f"local steps: replicas synchronise every {settings.local_sgd.sync_every} optimizer steps")
        if self.wire is not None:
            lines += describe_compression(self._compression, self.wire, self._parameters)
        return lines

    def _describe_sharded(self) -> str:
        """Describe in words how parameters are sharded; "" if they are not."""
        if self.sharded is None:
            return ""
        where = ", kept in host memory" if self.sharded.offload else ""
        carried = self._settings.compression.method
        sums = "" if carried == "none" else f"; gradients are summed in {carried}"
        return f", parameters too (fully_shard), gathered in {len(self.sharded.parts)} pieces{where}{sums}"

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around every forward pass: the gather of updated parameters may still run."""
        late = self.zero.late if self.zero is not None else None
        with nullcontext() if late is None else late.forward():
            yield

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer that may have been made before the model was prepared update what the model has now."""
        if self.sharded is not None:
            self.sharded.take_over(optimizer)

    def adopt(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
        """Partition an optimizer, or follow its steps, as the settings say.

        Args:
            optimizer: The optimizer.
            model: The model, if its forward passes go through `forward`; updated parameters may then arrive during the next one.

        Raises:
            UnsupportedError: Another optimizer was adopted before.
        """
        self._warm_up.follow(optimizer)
        if self.partitions and self.sharded is None:
            self._partition(optimizer)
            if self.zero is not None and model is not None and self._settings.zero.overlap_gather:
                self.zero.gather_late(model)
        if self._steps_locally:
            self._start_local_steps(optimizer)

    def _partition(self, optimizer: torch.optim.Optimizer) -> None:
        """Let every rank of the shard group update its part.

        Raises:
            UnsupportedError: There is a partition already.
        """
        if self.zero is not None:
            raise UnsupportedError(
                f"zero.stage={self._settings.zero.stage} with a second optimizer ({type(optimizer).__name__}): the "
                "parameters were partitioned for the first. Put all parameters into the groups of one optimizer."
            )
        group = self._mesh.dp_shard_group
        if group is None:
            return
        self.zero = ZeroPartition(
            optimizer,
            list(self._parameters.items()),
            group,
            self._mesh.dp_replicate_group,
            stage=self._settings.zero.stage,
            traffic=self._traffic(),
            counted=self._counted,
            host=host_memory(self._settings.zero, next(iter(self._parameters.values())).device),
        )
        self.lay_out()
        self.partitioned(self.zero)

    def _start_local_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Start local steps.

        Raises:
            UnsupportedError: They were started for another optimizer.
        """
        group, settings = self._mesh.dp_group, self._settings.local_sgd
        if self.local is not None:
            raise UnsupportedError(
                f"local_sgd.sync_every={settings.sync_every} with a second optimizer: only the steps of the first one "
                "lead to a synchronisation. Put all parameters into the groups of one optimizer."
            )
        if group is not None:
            trained = [(name, p) for name, p in self._parameters.items() if p.requires_grad]
            self.local = LocalSteps(
                trained,
                group,
                sync_every=settings.sync_every,
                outer_lr=settings.outer_lr,
                outer_momentum=settings.outer_momentum,
                traffic=self._traffic(),
                waiting=self._settings.waiting,
            )
            optimizer.register_step_post_hook(self.local.after_step)

    @property
    def _share(self) -> float:
        """Factor of a sum over the copies that makes it their mean; 1 with local steps, which sum over one replica."""
        return 1.0 if self._steps_locally else 1.0 / self._mesh.shape.num_copies

    def arm(self, factor: float | None, *, last: bool) -> None:
        """Allow a bucket to be reduced in the next backward pass as soon as it is complete.

        Args:
            factor: Factor that `reduce` or `accumulate` will be given after it; None if that is not known yet.
            last: Whether it is the last of its step; between others only ZeRO-2 sends anything.
        """
        self._warm_up.choose()
        share = None if factor is None else factor * self._share
        if self.zero is not None and (last or self.zero.stage == 2):
            self.zero.arm(share)
        for reducer in self._reducers if last else []:
            reducer.arm(share)

    def accumulate(self, factor: float) -> None:
        """End a backward pass that is not the last of its step: ZeRO-2 keeps no whole gradients until the next one."""
        if self.zero is not None and self.zero.stage == 2:
            self._warm_up.choose()
            self.zero.reduce(factor * self._share)

    def reduce(self, factor: float) -> None:
        """Once per optimizer step: every gradient becomes `factor` x its mean over the replicas."""
        self._warm_up.choose()
        if self.zero is not None:
            self.zero.reduce(factor * self._share)
        for reducer in self._reducers:
            reducer.reduce(factor * self._share)

    def let_others_look(self, others: bool) -> None:
        """Set whether user code may read or change parameters between two forward passes; then they are gathered at once."""
        if self.zero is not None and self.zero.late is not None:
            self.zero.late.at_once = others

    @property
    def arriving(self) -> bool:
        """Whether updated parameters may still be gathered; then no user code reads them between two passes."""
        return self.zero is not None and self.zero.late is not None and self.zero.late.arriving

    def synchronise(self) -> None:
        """Synchronise the replicas and complete gathers, before code outside of training reads the model; collective."""
        for settle in self.before_reading:
            settle()
        if self.local is not None:
            self.local.synchronise()
        if self.zero is not None:
            self.zero.take_edits()
        if self.sharded is not None:
            self.sharded.reshard()

    def reloaded(self) -> None:
        """Copy the parameters, which were loaded, to wherever there are copies of them."""
        if self.zero is not None:
            self.zero.refresh()
        if self.local is not None:
            self.local.refresh()
        if self.sharded is not None:
            self.sharded.reshard()

    def zero_grad(self) -> None:
        """Drop the gradients of the optimizer's parts; those of the model's parameters stay."""
        if self.zero is not None:
            self.zero.zero_grad()
        if self.sharded is not None:
            self.sharded.zero_grad()
