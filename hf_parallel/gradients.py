"""What happens to gradients between the last backward and the optimizer step, driven by the ledger.

Shared parameters are summed over the pipeline ranks that hold them, everything is reduced over dp once per optimizer step, and
the global norm counts every element of the full model exactly once, whatever the mesh. With ZeRO the gradients end up
in the flat parts that the optimizer updates, and the model's parameters have none after the reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.data_parallel.local_sgd import LocalSteps
from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.wire import Traffic
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.errors import UnsupportedError
from hf_parallel.gradient_compression.build import make_wire
from hf_parallel.gradient_compression.wire import CompressedWire
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.mesh import Mesh
from hf_parallel.sections import DataParallelConfig, GradientCompressionConfig, LocalSgdConfig, ZeroConfig


# Update rules that treat every element by itself: right on a shard. Others (Adafactor, LAMB, Muon, ...) use norms or
# factors of the whole tensor and would train silently wrong on a part of it.
ELEMENTWISE_OPTIMIZERS = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta", "Rprop", "ASGD"}
)


@dataclass(frozen=True)
class SyncSettings:
    """How gradients are reduced.

    Args:
        data_parallel: Buckets and overlap.
        zero: Partition of the optimizer.
        compression: What travels.
        local_sgd: How often replicas are brought together.
        ranks_per_node: Ranks on each node.
        overlaps: Whether hooks on parameters are possible: a schedule that puts weight gradients off forbids them.
        waiting: Context for waits on other ranks inside an optimizer's step.
    """

    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    compression: GradientCompressionConfig = field(default_factory=GradientCompressionConfig)
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    ranks_per_node: int = 1
    overlaps: bool = False
    waiting: Callable[[str], AbstractContextManager[None]] = lambda text: nullcontext()


class GradientSync:
    """Reduces and clips the gradients of one rank's parameters.

    Args:
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter (a shard where the entry has a spec).
        mesh: This rank's mesh. Building the groups of shared parameters is collective.
        settings: How gradients are reduced.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        settings: SyncSettings = SyncSettings(),
    ) -> None:
        self._ledger = ledger
        self._parameters = dict(parameters)
        self._mesh = mesh
        self._settings = settings
        self._reduced = False
        self._zero: ZeroPartition | None = None
        self._local: LocalSteps | None = None
        groups = {holders: mesh.holders_group(holders) for holders in ledger.shared_holders()}
        self._groups = {holders: group for holders, group in groups.items() if mesh.pp_rank in holders}
        self._replicas: GradientReducer | None = None
        self._walks_alone = settings.local_sgd.sync_every > 1 and mesh.dp_group is not None
        self.wire = self._make_wire(settings.local_sgd.compression if self._walks_alone else settings.compression)
        self._warmup: int | None = None  # steps that are not compressed; None: not known yet
        self._steps = 0
        self._lay_out()

    @property
    def zero(self) -> ZeroPartition | None:
        """The partition of the optimizer, None without one."""
        return self._zero

    @property
    def partitions(self) -> bool:
        """Whether an optimizer will be, or is, partitioned."""
        return self._settings.zero.stage > 0 and self._mesh.dp_shard_group is not None

    @property
    def local(self) -> LocalSteps | None:
        """What brings the replicas together, None if they never part."""
        return self._local

    def _make_wire(self, settings: GradientCompressionConfig) -> CompressedWire | None:
        """The wire that compresses, on groups of its own; None without compression."""
        mesh = self._mesh
        if settings.method == "none" or mesh.dp_group is None:
            return None
        group = mesh.replica_group()
        nodes = mesh.node_groups(self._settings.ranks_per_node) if settings.topology != "flat" else None
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
        self._warmup, self._steps = math.ceil(self._settings.compression.warmup * total), done

    def _choose_warmth(self) -> None:
        """Compress, or not yet, from the next bucket on.

        Raises:
            UnsupportedError: The warm-up is a share of a number of steps that nobody said.
        """
        if self.wire is None or self._walks_alone:
            return
        if self._warmup is None and self._settings.compression.warmup > 0:
            raise UnsupportedError(
                f"gradient_compression.warmup_ratio={self._settings.compression.warmup} is a share of the steps of the "
                "run, which are not known outside of a Trainer. Pass HFParallelPlugin(total_steps=...), or set "
                "gradient_compression.warmup_ratio to 0."
            )
        self.wire.warm = self._steps >= (self._warmup or 0)

    def _lay_out(self) -> None:
        """Fix the buckets for the parameters that are trained now."""
        self._trained = self._now_trained()
        self._shared = []
        for holders, group in self._groups.items():
            named = [(n, p) for n, p in self._parameters.items() if self._ledger.entries[n].holders == holders]
            self._shared.append(GradientReducer(named, group))
        if self._replicas is not None:
            self._replicas.close()
        taken = frozenset(self._zero.names) if self._zero is not None else frozenset()
        named = [(name, p) for name, p in self._parameters.items() if name not in taken]
        group = None if self._walks_alone else self._mesh.dp_group
        self._replicas = GradientReducer(named, group, self._traffic())

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
        )

    def _now_trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]

    def _partition(self, optimizer: torch.optim.Optimizer) -> None:
        """Let every rank of the shard group update its part.

        Raises:
            UnsupportedError: There is a partition already.
        """
        if self._zero is not None:
            raise UnsupportedError(
                f"zero.stage={self._settings.zero.stage} with a second optimizer ({type(optimizer).__name__}): the "
                "parameters were partitioned for the first. Put all parameters into the groups of one optimizer."
            )
        group = self._mesh.dp_shard_group
        if group is None:
            return
        self._zero = ZeroPartition(
            optimizer,
            list(self._parameters.items()),
            group,
            self._mesh.dp_replicate_group,
            stage=self._settings.zero.stage,
            traffic=self._traffic(),
            counted=self._counts,
            waiting=self._settings.waiting,
        )
        self._lay_out()

    def _part(self) -> None:
        """Let the replicas train by themselves from here on.

        Raises:
            UnsupportedError: They do already, for another optimizer.
        """
        group, settings = self._mesh.dp_group, self._settings.local_sgd
        if self._local is not None:
            raise UnsupportedError(
                f"local_sgd.sync_every={settings.sync_every} with a second optimizer: the steps that count are those of "
                "the first. Put all parameters into the groups of one optimizer."
            )
        if group is not None:
            trained = [(name, p) for name, p in self._parameters.items() if p.requires_grad]
            self._local = LocalSteps(
                trained,
                group,
                sync_every=settings.sync_every,
                outer_lr=settings.outer_lr,
                outer_momentum=settings.outer_momentum,
                traffic=self._traffic(),
                waiting=self._settings.waiting,
            )

    @property
    def _replicas_share(self) -> float:
        """What a sum over the replicas is multiplied with; a replica that walks alone has its own gradient."""
        return 1.0 if self._walks_alone else 1.0 / self._mesh.shape.dp_size

    def arm(self, factor: float | None, *, last: bool) -> None:
        """A backward pass begins: buckets may leave as they fill up.

        Args:
            factor: What `reduce` or `accumulate` will be given after it; None if that is not known yet.
            last: Whether it is the last of its step; between others only ZeRO-2 sends anything.
        """
        if self._trained != self._now_trained():
            return
        self._choose_warmth()
        share = None if factor is None else factor * self._replicas_share
        if self._zero is not None and (last or self._zero.stage == 2):
            self._zero.arm(share)
        if self._replicas is not None and last:
            self._replicas.arm(share)

    def accumulate(self, factor: float) -> None:
        """After a backward pass that is not the last of its step: ZeRO-2 keeps no whole gradients until the next one."""
        if self._zero is not None and self._zero.stage == 2:
            self._choose_warmth()
            self._reduce_shared()
            self._zero.reduce(factor * self._replicas_share)

    def reduce(self, factor: float) -> None:
        """Once per optimizer step: every gradient becomes `factor` x its sum over holders, averaged over dp.

        Raises:
            UnsupportedError: A parameter was frozen or unfrozen after ZeRO partitioned the optimizer.
        """
        if self._trained != self._now_trained():  # (un)frozen since, alike on the ranks that hold them
            if self._zero is not None:
                raise UnsupportedError(
                    f"parameters were frozen or unfrozen after zero.stage={self._settings.zero.stage} partitioned the "
                    "optimizer. Set requires_grad before training starts, or zero.stage to 0."
                )
            self._lay_out()
        self._choose_warmth()
        self._reduce_shared()
        for reducer in (self._zero, self._replicas):
            if reducer is not None:
                reducer.reduce(factor * self._replicas_share)
        self._reduced = True

    def _reduce_shared(self) -> None:
        for reducer in self._shared:
            reducer.reduce(1.0)

    def synchronise(self) -> None:
        """Make replicas that train by themselves equal, before anybody looks at the model; collective."""
        if self._local is not None:
            self._local.synchronise()

    def reloaded(self) -> None:
        """The parameters were loaded from elsewhere: take them over wherever there are copies."""
        if self._zero is not None:
            self._zero.refresh()
        if self._local is not None:
            self._local.refresh()

    def zero_grad(self) -> None:
        """Forget the gradients that the optimizer's parts have; those of the model are its own business."""
        if self._zero is not None:
            self._zero.zero_grad()

    def norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of the full model's gradient (0-d, float32), equal on every rank of a model copy.

        Args:
            norm_type: p of the p-norm, above 0; `inf` for the largest magnitude.
        """
        infinite = norm_type == float("inf")
        operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        total = self._power_sum([g for n, p in self._parameters.items() for g in self._counted(n, p)], norm_type)
        if self._zero is not None:
            parts = self._power_sum(self._zero.gradients(), norm_type)
            dist.all_reduce(parts, op=operation, group=self._mesh.dp_shard_group)
            total = torch.maximum(total, parts) if infinite else total + parts
        if self._mesh.mp_group is not None:
            dist.all_reduce(total, op=operation, group=self._mesh.mp_group)
        return (total if infinite else total.pow(1.0 / norm_type)).float()

    def _power_sum(self, gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Sum of the magnitudes to the power of `norm_type`, or the largest (0-d, float64)."""
        device = next(iter(self._parameters.values())).device if self._parameters else torch.device("cpu")
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=device)
        # Half-precision gradients are measured in fp32: their squares overflow or vanish.
        half = any(piece.dtype in (torch.bfloat16, torch.float16) for piece in gradients)
        each = torch._foreach_norm(gradients, norm_type, dtype=torch.float32 if half else None)
        norms = torch.stack([norm.to(device).double() for norm in each])
        return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before.

        The coefficient is that of `torch.nn.utils.clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1.
        """
        norm = self.norm(norm_type)
        if max_norm != float("inf"):
            gradients = self._gradients()
            if gradients:
                torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `optimizer` refuse to step on gradients that were never reduced, and keep only live parameters.

        Raises:
            UnsupportedError: The optimizer's update needs whole tensors but some of its parameters are shards.
        """
        live = {id(p) for p in self._parameters.values()}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in live]
        for parameter in [p for p in optimizer.state if isinstance(p, nn.Parameter) and id(p) not in live]:
            del optimizer.state[parameter]
        self._refuse_whole_tensor_updates(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        if self.partitions:
            self._partition(optimizer)
        if self._walks_alone:
            self._part()
            if self._local is not None:
                optimizer.register_step_post_hook(self._local.after_step)

    def _gradients(self) -> list[torch.Tensor]:
        """Every gradient on this rank: of parameters, and of the optimizer's parts."""
        owners = [*self._parameters.values(), *(shard.master for shard in (self._zero.shards if self._zero else []))]
        return [owner.grad for owner in owners if owner.grad is not None]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not self._reduced and self._gradients():
            raise UnsupportedError(
                "optimizer.step() was called on gradients that were never reduced: the loss did not come from the "
                "parallelized model's forward, or backward ran while gradients were still accumulating. Call "
                "accelerator.backward(loss) on model(**batch), and step when accelerator.sync_gradients is true."
            )
        self._reduced = False
        self._steps += 1  # a step that the loss scaler skips does not come here

    def _refuse_whole_tensor_updates(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        if kind in ELEMENTWISE_OPTIMIZERS:
            return
        sharded = [name for name in self._parameters if self._ledger.entries[name].spec is not None]
        if sharded:
            raise UnsupportedError(
                f"optimizer {kind} with tp_size={self._mesh.shape.tp_size}: its update may use norms or factors of "
                f"whole tensors, but {len(sharded)} parameters are shards (first: {sharded[0]}). Use one of "
                f"{', '.join(sorted(ELEMENTWISE_OPTIMIZERS))}, or tp_size 1."
            )
        if self.partitions:
            raise UnsupportedError(
                f"optimizer {kind} with zero.stage={self._settings.zero.stage}: its update may use norms or factors of "
                f"whole tensors, but each rank updates a part of a flat buffer. Use one of "
                f"{', '.join(sorted(ELEMENTWISE_OPTIMIZERS))}, or zero.stage 0."
            )

    def _counts(self, name: str, parameter: nn.Parameter) -> bool | torch.Tensor:
        """Which elements of a parameter this rank counts in the norm: all, none, or a mask of its shape."""
        entry: Entry = self._ledger.entries[name]
        if entry.owner != self._mesh.pp_rank:
            return False
        if entry.spec is None:
            return self._mesh.tp_rank == 0
        pieces = entry.spec.counted(self._mesh.shape.tp_size, self._mesh.tp_rank)
        if sum(length for _, length in pieces) == parameter.shape[entry.spec.dim]:
            return True
        mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
        for start, length in pieces:
            mask.narrow(entry.spec.dim, start, length).fill_(True)
        return mask

    def _counted(self, name: str, parameter: nn.Parameter) -> list[torch.Tensor]:
        """The parts of this rank's gradient of `name` that this rank counts in the norm."""
        entry: Entry = self._ledger.entries[name]
        gradient = parameter.grad
        if gradient is None or entry.owner != self._mesh.pp_rank:
            return []
        if entry.spec is None:
            return [gradient] if self._mesh.tp_rank == 0 else []
        pieces = entry.spec.counted(self._mesh.shape.tp_size, self._mesh.tp_rank)
        return [gradient.narrow(entry.spec.dim, start, length) for start, length in pieces]
