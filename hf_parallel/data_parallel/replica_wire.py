"""Gradient compression between the replicas of a run: its settings, its wire, and the steps that are not compressed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from hf_parallel.data_parallel.compression.build_wire import make_wire
from hf_parallel.data_parallel.compression.compressed_wire import CompressedWire
from hf_parallel.data_parallel.compression.fsdp2 import compress_fsdp2
from hf_parallel.data_parallel.compression.predict_bytes import predict
from hf_parallel.data_parallel.fsdp import ShardedModel
from hf_parallel.data_parallel.node_wire import NodeWire
from hf_parallel.errors import UnsupportedError
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.monitor.recorder import Recorder, silent
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
    """The settings of the data-parallel axis.

    Args:
        data_parallel: Buckets and overlap.
        zero: Partition of the optimizer.
        compression: Compression of gradients.
        local_sgd: Interval at which replicas synchronise.
        reduction: Sums of gradients that are not compressed: "flat", "hierarchical", or "auto" where nodes suit it.
        overlaps: Whether gradients are reduced during the backward pass: not with schedules that delay weight gradients.
        waiting: Context for waits on other ranks inside an optimizer's step.
        sharded: The model, if its parameters are sharded (ZeRO 3); it then reduces gradients itself, in every backward pass.
        recorder: Keeps when gradients were under way.
    """

    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    compression: GradientCompressionConfig = field(default_factory=GradientCompressionConfig)
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    reduction: Literal["auto", "flat", "hierarchical"] = "auto"
    overlaps: bool = False
    waiting: Callable[[str], AbstractContextManager[None]] = lambda text: nullcontext()
    sharded: ShardedModel | None = None
    recorder: Recorder = field(default_factory=silent)


def make_replica_wire(
    settings: ReplicaSettings,
    compression: GradientCompressionConfig,
    ledger: Ledger,
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
) -> CompressedWire | None:
    """The wire that compresses, on process groups of its own; None without compression. Collective over the replicas.

    Args:
        settings: Settings of the data-parallel axis.
        compression: Compression of the wire; with local steps that of `local_sgd`.
        ledger: The model's ledger.
        parameters: Ledger name -> this rank's parameter.
        mesh: This rank's mesh.

    Raises:
        UnsupportedError: `topology: hierarchical`, but the replicas are not in nodes of equal numbers.
    """
    if compression.method == "none" or mesh.dp_group is None:
        return None
    if settings.sharded is not None:
        compress_fsdp2(settings.sharded.model, compression)
        return None
    group = mesh.replica_group()
    flat = compression.topology == "flat" or settings.zero.stage > 0
    nodes = None if flat else mesh.node_groups()
    if compression.topology == "hierarchical" and nodes is None:
        raise UnsupportedError(
            f"gradient_compression.topology=hierarchical with {mesh.links.ranks_per_node} ranks on a node and "
            f"{mesh.shape.dp_size} replicas: it needs several nodes, each with two or more replicas. Set "
            "gradient_compression.topology to flat or auto."
        )
    device = next(iter(parameters.values())).device
    if group is None:
        return None
    return make_wire(compression, _trained_shapes(parameters), group, nodes, device, _held_in_part(ledger, parameters))


def make_node_wire(settings: ReplicaSettings, parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> NodeWire | None:
    """The wire that sums inside nodes first, on process groups of its own; None where one ring does. Collective over the replicas.

    Raises:
        UnsupportedError: `reduction: hierarchical`, but there are no nodes with several copies each, as many on all.
    """
    divided = settings.zero.stage > 0 or settings.compression.method != "none" or settings.local_sgd.sync_every > 1
    if settings.reduction == "flat" or divided or mesh.copies_group is None or not parameters:
        return None
    links = mesh.links
    nodes = mesh.node_groups()
    if nodes is not None:
        return NodeWire(*nodes, next(iter(parameters.values())).device)
    if settings.reduction == "hierarchical":
        raise UnsupportedError(
            f"topology.reduction=hierarchical with {links.describe()} and {mesh.shape.num_copies} replicas: it needs several nodes, each "
            "with as many replicas of a part as any other, and two or more. Set topology.reduction to auto."
        )
    return None


def _trained_shapes(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in parameters.items() if p.requires_grad}


def _held_in_part(ledger: Ledger, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Shards with sections that all tp ranks hold in common: their codes would differ from rank to rank."""
    specs = {name: ledger.entries[name].spec for name in parameters}
    return frozenset(name for name, spec in specs.items() if spec is not None and spec.sharded_share < 1.0)


class WarmUp:
    """The first steps of a run, in which gradients are not compressed.

    Args:
        compression: Its `warmup` is a share of the steps of the run.
        wire: Compresses; None: nothing does.
    """

    def __init__(self, compression: GradientCompressionConfig, wire: CompressedWire | None) -> None:
        self._compression, self._wire = compression, wire
        self._length: int | None = None  # in steps; None: not known yet
        self._done = 0
        self._follows = False  # an optimizer: with several, the first one's steps are those of the run

    def plan(self, total: int, done: int) -> None:
        """Set the number of optimizer steps of the run.

        Args:
            total: Optimizer steps of the whole run.
            done: Steps done before this start, if the run resumes.
        """
        compression = self._compression
        self._length, self._done = math.ceil(compression.warmup * total), done
        if self._wire is not None and compression.method == "topk" and total < 10 / compression.density:
            logger.warning(
                "hf_parallel: %d steps with gradient_compression.density=%g: an element is sent about once in %d steps, too "
                "seldom in so short a run. Set gradient_compression.density to %g, or the method to int8.",
                total,
                compression.density,
                round(1 / compression.density),
                min(0.25, 10 / max(total, 1)),
            )

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of the first optimizer, and warn about one that suffers without a warm-up."""
        if not self._follows:
            self._follows = True
            optimizer.register_step_pre_hook(self._count)
        compression = self._compression
        adaptive = type(optimizer).__name__ in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
        if self._wire is not None and compression.method in BIASED and compression.warmup == 0 and adaptive:
            logger.warning(
                "hf_parallel: gradient_compression.method=%s with %s and no warm-up: sparse and 1-bit gradients from the first "
                "step cost the most (docs/compression.md). Set gradient_compression.warmup_ratio to 0.1 or auto.",
                compression.method,
                type(optimizer).__name__,
            )

    def _count(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._done += 1  # a step that the loss scaler skips does not come here

    def choose(self) -> None:
        """Compress, or not yet, from the next bucket on.

        Raises:
            UnsupportedError: The warm-up is a share of a number of steps that is not known.
        """
        if self._wire is None:
            return
        if self._length is None and self._compression.warmup > 0:
            raise UnsupportedError(
                f"gradient_compression.warmup_ratio={self._compression.warmup} is a share of the steps of the "
                "run, which are not known outside of a Trainer. Pass HFParallelPlugin(total_steps=...), or set "
                "gradient_compression.warmup_ratio to 0."
            )
        self._wire.warm = self._done >= (self._length or 0)


def describe_compression(
    compression: GradientCompressionConfig, wire: CompressedWire, parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    """Bytes and times of an exchange, in lines for the start of a run; a warning if compression does not pay."""
    prediction = predict(wire, _trained_shapes(parameters), next(iter(parameters.values())).device)
    link = compression.link_gbit_s
    lines = [prediction.line(f"gradient compression {compression.method}", link)]
    if link is not None and prediction.seconds(link)[0] < prediction.seconds(link)[1]:
        lines.append(
            f"warning: on {link:g} Gbit/s compression takes longer than it saves (it pays below "
            f"{prediction.break_even:.3g} Gbit/s). Set gradient_compression.method to none or bf16."
        )
    return lines
