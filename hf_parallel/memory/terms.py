"""The inputs of memory estimates: sizes of a model, who holds what, and the batches of a step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hf_parallel.memory.moments import Recorded
from hf_parallel.memory.optimizers import ADAMW
from hf_parallel.pipeline_parallel.schedule.asynchronous import delay_of
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.replica_sections import GradientCompressionConfig, LocalSgdConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.settings.sections import ActivationCheckpointingConfig, PipelineConfig
from hf_parallel.tensor_parallel.units import NONE


Engine = Literal["native", "fsdp2", "deepspeed"]
Precision = Literal["fp32", "half", "autocast"]
Device = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that autograd keeps of one block for each token, as traced in one precision.

    Args:
        shared: Bytes that every tensor-parallel rank keeps (of the width of the residual stream).
        split: Bytes that these ranks share.
        square: More of them for each token of the length (stored attention matrices).
    """

    shared: float
    split: float
    square: float


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that memory depends on.

    Args:
        parameters: All of them; tied ones count once.
        layers: Repeated blocks.
        hidden: Width of the residual stream.
        intermediate: Width of the feed-forward part that one token passes (of all its experts).
        vocab: Entries of the vocabulary.
        heads: Attention heads.
        kv_heads: Key-value heads.
        head_dim: Width of a head.
        embedding: Parameters before the first block, positions included.
        head: Parameters after the last block, the tied ones included.
        positions: Parameters of tables beside that of the tokens, which ranks of tensor parallelism have whole.
        tied: Whether the head's weight is the embedding's.
        gated: Whether the feed-forward part has a gate (SwiGLU and the like).
        largest: Elements of the largest parameter.
        experts: Parameters of a block that are in stacks of experts.
        expert_width: Width of the feed-forward part of one expert.
        saved: Bytes that a block keeps, if it was traced; else it is counted as Llama's block.
        recorded: Bytes of the parts of a step on a GPU, if they were recorded; then `saved` is not needed.
        adapters: Parameters beside these, in fp32, that alone are trained (LoRA); 0 trains all of the model. What a block
            keeps is counted as if all of it were trained.
        block_bits: Bits of a frozen parameter of a block, its share of the scales included (quantised weights); 0 for
            that of the precision.
        numbers: Numbers of the module and config of attention: a plan may keep as many parts together where tensor parallelism does
            not divide the heads.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    embedding: int = 0
    head: int = 0
    tied: bool = False
    gated: bool = True
    largest: int = 0
    experts: float = 0.0
    expert_width: int = 0
    saved: SavedBytes | None = None
    recorded: Recorded | None = None
    adapters: int = 0
    block_bits: float = 0.0
    numbers: frozenset[int] = NONE
    positions: int = 0

    @property
    def block(self) -> float:
        """Parameters of one block, the mean."""
        shared = self.vocab * self.hidden if self.tied else 0
        return (self.parameters - self.embedding - self.head + shared) / max(1, self.layers)


@dataclass(frozen=True)
class Buffers:
    """DeepSpeed's buffers, in elements; the defaults are those of DeepSpeed 0.19.8.

    Args:
        reduce_bucket: Gradients in one message.
        allgather_bucket: Parameters in one message (stages 1 and 2).
        prefetch: Parameters fetched ahead (stage 3).
        live: Parameters that may be whole at once (stage 3).
        overlap: Whether messages and computing overlap, which doubles the reduce bucket; None is the stage's default.
    """

    reduce_bucket: float = 5e8
    allgather_bucket: float = 5e8
    prefetch: float = 5e7
    live: float = 1e9
    overlap: bool | None = None


@dataclass(frozen=True)
class Layout:
    """Division of parameters, gradients and optimizer states among ranks, and the memory in which they lie.

    Args:
        num_processes: Processes of the run; a multiple of tp_size * pp_size * sp_size.
        ranks_per_node: Ranks that share a node's RAM.
        tp_size: Ranks that share each layer.
        pp_size: Ranks that share the stack of blocks.
        sequence_parallel: Whether tp ranks share the sequence between the sharded layers as well.
        shards: Ranks that share one copy of what the stage partitions; None is all replicas.
        stage: Stage of ZeRO, 0 to 3.
        engine: Engine that partitions.
        precision: fp32; half (parameters in 16 bit); autocast (fp32 parameters, products in 16 bit).
        offload_optimizer: Memory of Adam's state instead of the GPU's.
        offload_param: Memory of the parameters (stage 3).
        pinned: Whether the host memory of what is offloaded is pinned.
        recompute: Activation checkpointing.
        pipeline: Schedule, microbatches and cut.
        bucket_cap_mb: MiB in one of the native engine's messages.
        buffers: DeepSpeed's.
        chunked_loss: Whether the loss is computed without logits.
        extra: Further bytes per parameter on the GPU, by name, such as residuals of compression.
        ep_size: Replicas that share the experts of each block.
        sp_size: Ranks that share the sequence of each row, and hold the same parameters.
        sp_attention: How attention of these reaches the whole of a row, as in the settings.
        optim: The optimizer, a key of `OPTIMIZERS`.
    """

    num_processes: int
    ranks_per_node: int
    tp_size: int = 1
    pp_size: int = 1
    sequence_parallel: bool = False
    shards: int | None = None
    stage: int = 0
    engine: Engine = "native"
    precision: Precision = "half"
    offload_optimizer: Device = "none"
    offload_param: Device = "none"
    pinned: bool = True
    recompute: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    bucket_cap_mb: float = 25.0
    buffers: Buffers = Buffers()
    chunked_loss: bool = False
    extra: Mapping[str, float] = field(default_factory=dict)
    ep_size: int = 1
    sp_size: int = 1
    sp_attention: str = "auto"
    optim: str = ADAMW

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy."""
        return self.shards or max(1, self.num_processes // (self.tp_size * self.pp_size))

    @functools.cached_property
    def schedule(self) -> ScheduleChoice:
        """The schedule that the pipeline settings ask for.

        Raises:
            ScheduleError: The schedule does not fit the ranks.
        """
        return ScheduleChoice(self.pipeline, self.pp_size)


@dataclass(frozen=True)
class Work:
    """The batches of an optimizer step, as a rank gets them.

    Args:
        rows: Sequences a replica has in one forward (`per_device_train_batch_size`), 1 or more.
        length: Tokens of a sequence, 1 or more.
        eager_attention: Whether attention matrices are stored (not flash, not SDPA).
        accumulation: Batches of an optimizer step, which a pipeline runs in one schedule.
    """

    rows: int
    length: int
    eager_attention: bool = False
    accumulation: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes by term.

    Args:
        rank: The rank of a pipeline that needs most.
        gpu: Terms of that rank, on its GPU.
        host: Terms of a node, for what is offloaded.
        host_pinned: Bytes of `host` in pinned memory, which torch rounds up to a power of two for each block: up to
            as much again (`DS_PIN_MEMORY_BACKEND=native` rounds to pages).
        loading: Bytes of a node while every rank holds the whole model, before it is cut or partitioned.
    """

    rank: int
    gpu: Mapping[str, float]
    host: Mapping[str, float]
    host_pinned: float
    loading: float

    @property
    def gpu_bytes(self) -> float:
        """All terms of the GPU."""
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> float:
        """All terms of the host."""
        return sum(self.host.values())


def layout_of(
    config: HFParallelConfig, num_processes: int, ranks_per_node: int, precision: Precision = "half"
) -> Layout:
    """The layout that a config asks for.

    Args:
        config: The settings.
        num_processes: Processes of the run.
        ranks_per_node: Ranks on each node.
        precision: See `Layout`.

    Raises:
        ConfigError: The processes do not divide into whole model copies.
    """
    config.dp_size(num_processes)
    zero, shards = config.zero, config.zero.dp_shard_size
    engine: Engine = zero.engine if zero.engine != "auto" else "fsdp2" if zero.stage == 3 else "native"
    return Layout(
        num_processes,
        ranks_per_node,
        config.tp_size,
        config.pp_size,
        config.tensor_parallel.sequence_parallel,
        shards if isinstance(shards, int) else None,
        zero.stage,
        engine,
        precision,
        zero.offload_optimizer,
        zero.offload_param,
        zero.pin_memory is not False,
        config.activation_checkpointing,
        config.pipeline,
        config.data_parallel.bucket_cap_mb,
        chunked_loss=config.chunks_loss,
        extra=_extras(config, precision),
        ep_size=config.ep_size,
        sp_size=config.sp_size,
        sp_attention=config.sp_attention,
    )


def _extras(config: HFParallelConfig, precision: Precision) -> dict[str, float]:
    """Bytes per parameter of what slow networks cost, and weights of several updates."""
    found: dict[str, float] = {}
    if config.pipeline.schedule in ASYNCHRONOUS:
        size = 2.0 if precision == "half" else 4.0
        found["older weights"] = size * delay_of(config.pipeline.schedule, config.pp_size)
        if config.pipeline.vertical_sync:
            found["gradients of the next step"] = size
    local = config.local_sgd
    return found | of_slow_networks(local.compression if local.sync_every > 1 else config.gradient_compression, local)


def of_slow_networks(compression: GradientCompressionConfig, local: LocalSgdConfig) -> dict[str, float]:
    """Bytes per parameter of what compressed messages and local steps keep.

    Args:
        compression: Compression of what replicas send.
        local: Steps between two synchronisations, of which parameters and momentum are in fp32.
    """
    found = {}
    if compression.feeds_back:
        found["residual of compression"] = 2.0 if compression.residual_dtype == "bf16" else 4.0
    if local.sync_every > 1:
        found["parameters of the last synchronisation"] = 8.0 if local.outer_momentum else 4.0
    return found
