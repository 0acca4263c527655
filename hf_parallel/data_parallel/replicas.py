"""The data-parallel axis of one rank: what its replicas share, and how they are kept together.

One place in which buckets, overlap, ZeRO, compression and local steps meet, whatever tp and pp are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_parallel.data_parallel.compression.build_wire import make_wire
from hf_parallel.data_parallel.compression.compressed_wire import CompressedWire
from hf_parallel.data_parallel.compression.fsdp2 import compress_fsdp2
from hf_parallel.data_parallel.compression.predict_bytes import predict
from hf_parallel.data_parallel.fsdp import ShardedModel
from hf_parallel.data_parallel.host import host_memory
from hf_parallel.data_parallel.local_sgd import LocalSteps
from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.wire import Traffic
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import UnsupportedError
from hf_parallel.ledger import Ledger
from hf_parallel.mesh import Mesh
from hf_parallel.settings.replica_sections import (
    BIASED,
    DataParallelConfig,
    GradientCompressionConfig,
    LocalSgdConfig,
    ZeroConfig,
)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaSettings:
    """What the replicas do with each other.

    Args:
        data_parallel: Buckets and overlap.
        zero: Partition of the optimizer.
        compression: What travels.
        local_sgd: How often replicas are brought together.
        ranks_per_node: Ranks on each node.
        overlaps: Whether hooks on parameters are possible: a schedule that puts weight gradients off forbids them.
        waiting: Context for waits on other ranks inside an optimizer's step.
        sharded: The model, if its parameters are shared out; it then reduces gradients itself, in every backward pass.
    """

    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    compression: GradientCompressionConfig = field(default_factory=GradientCompressionConfig)
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    ranks_per_node: int = 1
    overlaps: bool = False
    waiting: Callable[[str], AbstractContextManager[None]] = lambda text: nullcontext()
    sharded: ShardedModel | None = None


class Replicas:
    """Reduces the gradients of one rank's parameters over its replicas.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh. Building the groups of a compressed wire is collective.
        settings: What the replicas do with each other.
        counted: Which elements of a parameter this rank counts in the gradient norm.

    Attributes:
        wire: What compresses, None without.
        zero: The partition of the optimizer, None without one.
        sharded: The model whose parameters are shared out, None without one.
        local: What brings replicas that train by themselves together, None if they never part.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        settings: ReplicaSettings,
        counted: Callable[[str, nn.Parameter], bool | torch.Tensor],
    ) -> None:
        self._ledger, self._parameters, self._mesh = ledger, dict(parameters), mesh
        self._settings, self._counted = settings, counted
        self.zero: ZeroPartition | None = None
        self.local: LocalSteps | None = None
        self.sharded = settings.sharded
        self._steps_locally = settings.local_sgd.sync_every > 1 and mesh.dp_group is not None
        self.wire = self._make_wire(settings.local_sgd.compression if self._steps_locally else settings.compression)
        self._warmup: int | None = None  # steps that are not compressed; None: not known yet
        self._steps = 0
        self._counted_by = False  # an optimizer: with several, the first one's steps are those of the run
        self._reducer: GradientReducer | None = None
        self.lay_out()

    @property
    def partitions(self) -> bool:
        """Whether an optimizer will be, or is, partitioned."""
        return self._settings.zero.stage > 0 and self._mesh.dp_shard_group is not None

    @property
    def reduces_every_backward(self) -> bool:
        """Whether no whole gradients are kept between the backward passes of a step (ZeRO-2)."""
        return self.zero is not None and self.zero.stage == 2

    def lay_out(self) -> None:
        """Fix the buckets for the parameters that are trained now."""
        if self.sharded is not None:
            return
        if self._reducer is not None:
            self._reducer.close()
        taken = frozenset(self.zero.names) if self.zero is not None else frozenset()
        named = [(name, p) for name, p in self._parameters.items() if name not in taken]
        group = None if self._steps_locally else self._mesh.dp_group
        self._reducer = GradientReducer(named, group, self._traffic())

    def relay(self, frozen: Sequence[str], unfrozen: Sequence[str]) -> None:
        """Parameters were frozen or unfrozen: lay out the buckets anew.

        Args:
            frozen: Names of those that were trained before and are not now.
            unfrozen: Names of those that are trained now and were not before.

        Raises:
            UnsupportedError: The optimizer was partitioned for the old ones.
        """
        stage = self._settings.zero.stage
        changed = [*unfrozen, *frozen]
        if self.sharded is not None and changed:
            raise UnsupportedError(
                f"{changed[0]} ({len(changed)} parameters) was frozen or unfrozen after zero.stage={stage} had shared out the "
                "parameters. Set requires_grad before training starts, or zero.stage to 0."
            )
        updated = {name for group in (self.zero.groups if self.zero is not None else ()) for name in group}
        late = [name for name in unfrozen if name in updated]
        if late:
            raise UnsupportedError(
                f"{late[0]} ({len(late)} parameters) was unfrozen after zero.stage={stage} partitioned the optimizer, which "
                "counts the steps of whole parts. Set requires_grad before training starts, or zero.stage to 0."
            )
        unknown = [] if self.local is None else self.local.unknown(self._parameters)
        if unknown:
            raise UnsupportedError(
                f"{unknown[0]} ({len(unknown)} parameters) was unfrozen after local_sgd.sync_every="
                f"{self._settings.local_sgd.sync_every} had begun: replicas would never meet in it. Set requires_grad before "
                "training starts, or local_sgd.sync_every to 1."
            )
        self.lay_out()

    def _traffic(self) -> Traffic:
        """Parameters that several stages hold are summed over these first, so their buckets must wait."""
        data_parallel, wire = self._settings.data_parallel, self.wire

        def kind(name: str, parameter: nn.Parameter) -> tuple[tuple[int, ...], bool, bool]:
            """What must not share a bucket: tied parameters wait for each other's stages, and a code of a block that
            also holds a shard would differ between the ranks that hold the rest of it in common.
            """
            entry = self._ledger.entries[name]
            holders = entry.holders if len(entry.holders) > 1 else ()
            lossy = wire is not None and not wire.keeps_dense(name, parameter.shape)
            return holders, lossy, lossy and entry.spec is None

        return Traffic(
            bucket_bytes=int(data_parallel.bucket_cap_mb * 2**20),
            kind=kind,
            late=lambda kind: isinstance(kind, tuple) and bool(kind[0]),
            overlaps=self._settings.overlaps and data_parallel.overlap,
            wire=wire,
            waiting=self._settings.waiting,
        )

    def _make_wire(self, settings: GradientCompressionConfig) -> CompressedWire | None:
        """The wire that compresses, on groups of its own; None without compression."""
        mesh = self._mesh
        if settings.method == "none" or mesh.dp_group is None:
            return None
        if self.sharded is not None:
            compress_fsdp2(self.sharded.model, settings)
            return None
        group = mesh.replica_group()
        flat = settings.topology == "flat" or self._settings.zero.stage > 0
        nodes = None if flat else mesh.node_groups(self._settings.ranks_per_node)
        if settings.topology == "hierarchical" and nodes is None:
            raise UnsupportedError(
                f"gradient_compression.topology=hierarchical with {self._settings.ranks_per_node} ranks on a node and "
                f"{mesh.shape.dp_size} replicas: no node holds several replicas while others hold more. Set "
                "gradient_compression.topology to flat or auto."
            )
        trained = {name: p.shape for name, p in self._parameters.items() if p.requires_grad}
        device = next(iter(self._parameters.values())).device
        return None if group is None else make_wire(settings, trained, group, nodes, device, self._held_in_part())

    def _held_in_part(self) -> frozenset[str]:
        """Shards with sections that all tp ranks hold in common: their codes would differ from rank to rank."""
        specs = {name: self._ledger.entries[name].spec for name in self._parameters}
        return frozenset(name for name, spec in specs.items() if spec is not None and spec.sharded_share < 1.0)

    def plan_steps(self, total: int, done: int) -> None:
        """Say how many optimizer steps the run has, for a warm-up that is a share of them.

        Args:
            total: Of the whole run.
            done: Of those that are behind it, when it resumes.
        """
        compression = self._settings.compression
        self._warmup, self._steps = math.ceil(compression.warmup * total), done
        if self.wire is not None and compression.method == "topk" and total < 10 / compression.density:
            logger.warning(
                "hf_parallel: %d steps with gradient_compression.density=%g: an element is sent about once in %d steps, too "
                "seldom in so short a run. Set gradient_compression.density to %g, or the method to int8.",
                total,
                compression.density,
                round(1 / compression.density),
                min(0.25, 10 / max(total, 1)),
            )

    def _choose_warmth(self) -> None:
        """Compress, or not yet, from the next bucket on.

        Raises:
            UnsupportedError: The warm-up is a share of a number of steps that is not known.
        """
        if self.wire is None or self._steps_locally:
            return
        if self._warmup is None and self._settings.compression.warmup > 0:
            raise UnsupportedError(
                f"gradient_compression.warmup_ratio={self._settings.compression.warmup} is a share of the steps of the "
                "run, which are not known outside of a Trainer. Pass HFParallelPlugin(total_steps=...), or set "
                "gradient_compression.warmup_ratio to 0."
            )
        self.wire.warm = self._steps >= (self._warmup or 0)

    def describe(self) -> list[str]:
        """What the replicas do with each other, in lines for the start of a run; warnings among them."""
        if self._mesh.dp_group is None:
            return []
        lines, settings = [], self._settings
        if settings.zero.stage:
            size = self._mesh.dp_shard_group.size() if self._mesh.dp_shard_group is not None else 1
            what = "optimizer state" if settings.zero.stage == 1 else "optimizer state and gradients"
            where = (
                ", updated in host memory" if self.sharded is None and settings.zero.offload_optimizer == "cpu" else ""
            )
            lines.append(f"zero stage {settings.zero.stage}: {what} in {size} parts{where}" + self._describe_sharded())
        if self._steps_locally:
            lines.append(f"local steps: replicas meet every {settings.local_sgd.sync_every} optimizer steps")
        if self.wire is not None:
            compression = settings.local_sgd.compression if self._steps_locally else settings.compression
            trained = {name: p.shape for name, p in self._parameters.items() if p.requires_grad}
            prediction = predict(self.wire, trained, next(iter(self._parameters.values())).device)
            link = compression.link_gbit_s
            lines.append(prediction.line(f"gradient compression {compression.method}", link))
            if link is not None and prediction.seconds(link)[0] < prediction.seconds(link)[1]:
                lines.append(
                    f"warning: on {link:g} Gbit/s compression takes longer than it saves (it pays below "
                    f"{prediction.break_even:.3g} Gbit/s). Set gradient_compression.method to none or bf16."
                )
        return lines

    def _describe_sharded(self) -> str:
        """How parameters are shared out, where they are."""
        if self.sharded is None:
            return ""
        where = ", kept in host memory" if self.sharded.offload else ""
        carried = self._settings.compression.method
        sums = "" if carried == "none" else f"; gradients are summed in {carried}"
        return f", parameters too (fully_shard), gathered in {len(self.sharded.parts)} pieces{where}{sums}"

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around every forward pass: parameters may still be arriving."""
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
            model: Whose forward passes go through `forward`; updated parameters may then arrive during the next one.

        Raises:
            UnsupportedError: Another optimizer was adopted before.
        """
        if not self._counted_by:
            self._counted_by = True
            optimizer.register_step_pre_hook(self._count_step)
        compression = self._settings.compression
        adaptive = type(optimizer).__name__ in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
        if self.wire is not None and compression.method in BIASED and compression.warmup == 0 and adaptive:
            logger.warning(
                "hf_parallel: gradient_compression.method=%s with %s and no warm-up: sparse and 1-bit gradients from the first "
                "step cost the most (docs/compression.md). Set gradient_compression.warmup_ratio to 0.1 or auto.",
                compression.method,
                type(optimizer).__name__,
            )
        if self.partitions and self.sharded is None:
            self._partition(optimizer)
            if self.zero is not None and model is not None and self._settings.zero.overlap_gather:
                self.zero.arrive_late(model)
        if self._steps_locally:
            self._part(optimizer)

    def _count_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._steps += 1  # a step that the loss scaler skips does not come here

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

    def _part(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the replicas train by themselves from here on.

        Raises:
            UnsupportedError: They do already, for another optimizer.
        """
        group, settings = self._mesh.dp_group, self._settings.local_sgd
        if self.local is not None:
            raise UnsupportedError(
                f"local_sgd.sync_every={settings.sync_every} with a second optimizer: the steps that count are those of "
                "the first. Put all parameters into the groups of one optimizer."
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
        """What a sum over the replicas is multiplied with; with local steps a replica uses its own gradient."""
        return 1.0 if self._steps_locally else 1.0 / self._mesh.shape.dp_size

    def arm(self, factor: float | None, *, last: bool) -> None:
        """A backward pass begins: buckets may leave as they fill up.

        Args:
            factor: What `reduce` or `accumulate` will be given after it; None if that is not known yet.
            last: Whether it is the last of its step; between others only ZeRO-2 sends anything.
        """
        self._choose_warmth()
        share = None if factor is None else factor * self._share
        if self.zero is not None and (last or self.zero.stage == 2):
            self.zero.arm(share)
        if self._reducer is not None and last:
            self._reducer.arm(share)

    def accumulate(self, factor: float) -> None:
        """After a backward pass that is not the last of its step: ZeRO-2 keeps no whole gradients until the next one."""
        if self.zero is not None and self.zero.stage == 2:
            self._choose_warmth()
            self.zero.reduce(factor * self._share)

    def reduce(self, factor: float) -> None:
        """Once per optimizer step: every gradient becomes `factor` x its mean over the replicas."""
        self._choose_warmth()
        for reducer in (self.zero, self._reducer):
            if reducer is not None:
                reducer.reduce(factor * self._share)

    def let_others_look(self, others: bool) -> None:
        """Whether code of others may read or change parameters between two forward passes."""
        if self.zero is not None and self.zero.late is not None:
            self.zero.late.at_once = others

    @property
    def arriving(self) -> bool:
        """Whether updated parameters may be on their way: nobody has code that looks at them between two passes then."""
        return self.zero is not None and self.zero.late is not None and self.zero.late.arriving

    def synchronise(self) -> None:
        """Make the model one and complete before anybody looks at it; collective."""
        if self.local is not None:
            self.local.synchronise()
        if self.zero is not None:
            self.zero.take_edits()
        if self.sharded is not None:
            self.sharded.reshard()

    def reloaded(self) -> None:
        """The parameters were loaded from elsewhere: take them over wherever there are copies."""
        if self.zero is not None:
            self.zero.refresh()
        if self.local is not None:
            self.local.refresh()
        if self.sharded is not None:
            self.sharded.reshard()

    def zero_grad(self) -> None:
        """Forget the gradients that the optimizer's parts have; those of the model are its own business."""
        if self.zero is not None:
            self.zero.zero_grad()
        if self.sharded is not None:
            self.sharded.zero_grad()
