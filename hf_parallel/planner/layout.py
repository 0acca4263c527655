"""A layout: its keys, their defaults, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_parallel.memory.estimate import ADAM
from hf_parallel.memory.optimizers import ADAMW, kept_bytes
from hf_parallel.memory.terms import Precision


# Bytes per parameter of weights, gradients and Adam's state. Source: ZeRO (arXiv:1910.02054) section 3.1; FSDP keeps
# an fp32 shard.
STATE_BYTES: Final[Mapping[tuple[str, bool], tuple[float, float, float]]] = {
    ("native", True): (2, 2, 12),
    ("native", False): (4, 4, 8),
    ("fsdp2", True): (4, 4, 8),
    ("fsdp2", False): (4, 4, 8),
    ("deepspeed", True): (2, 2, 12),
    ("deepspeed", False): (4, 4, 12),
}
ROUNDED: Final = 0.005  # of a share that is written with few digits, such as 0.333
# What only other systems have: the one value that this package runs.
ONLY: Final[Mapping[str, Any]] = {
    "sp": 1,
    "experts_over_tp": False,
    "overlap_tp": False,
    "overlap_pp": False,
    "blocking_launches": False,
    "state_bytes": None,
    "loss": "auto",
    "zero_owners": False,
}


@dataclass(frozen=True)
class LayoutSpec:
    """A checked layout.

    Attributes:
        tp: Ranks that share each product.
        pp: Ranks that share the stack of blocks.
        dp: Replicas of these.
        sp: Ranks that share the sequence of a row (Ulysses).
        ep: Neighbouring replicas that share the experts of each block, a divisor of dp.
        experts_over_tp: Whether the tp ranks of these replicas are counted in `ep` and have whole experts each, instead of a part
            of every one.
        zero: What replicas partition: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters.
        zero_owners: Whether ``zero: 1`` gives each tensor whole to one rank, to which gradients are summed after the last backward and
            which sends the tensor to all others.
        micro_batch: Rows of one pass.
        num_microbatches: Passes of a replica in an optimizer step.
        schedule: Order of the passes.
        stages_per_rank: Stages on each rank of the pipeline; 1 is two for the schedules that always have two.
        split: Blocks of each stage: their numbers, "balanced" by cost, "even" as Megatron cuts; "auto" is that of the kernels.
        recompute: What the backward computes again.
        recompute_share: Share of the blocks of which "full" is true, above 0 to 1: one in so many, or those that a number of them
            names.
        sequence_parallel: Whether tp ranks share the sequence between the sharded products.
        dtype: Dtype of the products.
        kernels: How norms, gates and residuals run: "norms" has kernels of its own for norms and attention alone, "fused" for all.
        attention: How attention runs.
        loss: What it keeps of each logit: "logits" copies in fp32, "gathered" the same of the whole vocabulary on every tp rank,
            "fused" the logit and its gradient in 16 bit; "auto" is that of the kernels.
        overlap_dp: Whether messages of replicas travel during the passes.
        overlap_gather: Whether parameters that ``zero: 1`` and 2 gather travel so, too, and not in the optimizer's step.
        overlap_tp: Whether messages of tp ranks travel during products.
        overlap_pp: Whether messages between stages travel during passes.
        blocking_launches: Whether the host waits for each kernel before it launches the next (CUDA_LAUNCH_BLOCKING=1).
        param_dtype: Dtype of the parameters: "fp32" if products in 16 bit cast them (mixed precision of a model that
            was loaded in fp32), "auto" that of the products.
        reduce_dtype: Dtype in which this package sums gradients of replicas.
        state_bytes: Bytes of weights, gradients and optimizer per parameter, before sharding; None takes the engine's, in
            16 bit those of mixed precision with a copy of the weights in fp32.
        engine: Who partitions the replicas' states; "auto" is fsdp2 for zero=3, else native.
        offload_param: Where parameters wait.
        offload_optimizer: Where the optimizer's state lies.
        compression: Compression of the replicas' gradients.
        local_steps: Optimizer steps of a replica between two averages of the replicas' parameters.
        chunked_loss: Whether the loss is computed without logits.
        adapters: Parameters that are trained instead of the model's (LoRA); 0 trains the model.
        adapters_are: Whether these are "beside" the model or some of its "own"; "auto" is what their number tells.
        block_bits: Bits of a frozen parameter of a block, its share of the scales included (a quantised base: 4.13 for
            NF4); 0 for those of `dtype`.
        optim: The optimizer, by a name of TrainingArguments.optim; "sgd_momentum" is sgd with momentum in optim_args.
        dp_inside: Replicas of a stage that are neighbours, a divisor of dp; 0 is "auto", with which a step is shortest.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: int = 1
    ep: int = 1
    experts_over_tp: bool = False
    zero: int = 0
    zero_owners: bool = False
    micro_batch: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    split: str | tuple[int, ...] = "auto"
    recompute: str = "none"
    recompute_share: float = 1.0
    sequence_parallel: bool = False
    dtype: str = "bf16"
    kernels: str = "eager"
    attention: str = "sdpa"
    loss: str = "auto"
    overlap_dp: bool = True
    overlap_gather: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = False
    blocking_launches: bool = False
    param_dtype: str = "auto"
    reduce_dtype: str = "fp32"
    state_bytes: tuple[float, float, float] | None = None
    engine: str = "native"
    offload_param: str = "none"
    offload_optimizer: str = "none"
    compression: str = "none"
    local_steps: int = 1
    chunked_loss: bool = False
    adapters: int = 0
    adapters_are: str = "auto"
    block_bits: float = 0.0
    dp_inside: int = 0
    optim: str = ADAMW

    @property
    def states(self) -> tuple[float, float, float]:
        """Bytes of weights, gradients and optimizer per parameter, whole."""
        is_half = self.dtype != "fp32" and (self.param_dtype != "fp32" or self.engine == "deepspeed")
        if self.state_bytes is not None:
            return self.state_bytes
        weights, gradients, optimizer = STATE_BYTES[self.engine, is_half]
        return weights, gradients, optimizer - ADAM + kept_bytes(self.optim, 4.0)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of an element of a gradient as a backward makes it."""
        return min(4.0, self.states[1])

    @property
    def precision(self) -> Precision:
        """Precision of the parameters."""
        if self.dtype == "fp32":
            return "fp32"
        return "autocast" if self.param_dtype == "fp32" else "half"

    @property
    def is_own(self) -> bool:
        """Whether this package runs it, as far as the layout says: of `sp` others have another kind, too."""
        return self.sp == 1 and self._may_be_own

    @property
    def _may_be_own(self) -> bool:
        kept = all(getattr(self, key) == value for key, value in ONLY.items() if key != "sp")
        return kept and self.dtype != "fp8" and self.kernels != "norms" and self.recompute_every is not None

    @property
    def repeated(self) -> float:
        """Share of the blocks that run again as a whole."""
        return self.recompute_share if self.recompute == "full" else 0.0

    @property
    def repeats_all(self) -> bool:
        """Whether a block that runs again runs to its end, as in Megatron and DeepSpeed; torch and this package stop where all is there
        that a backward reads.
        """
        return self.engine == "deepspeed" or (self.engine == "native" and self.kernels in ("fused", "norms"))

    @property
    def recompute_every(self) -> int | None:
        """Blocks of which one runs again, as this package counts; None if the share is not one in so many."""
        every = round(1 / self.recompute_share)
        return every if abs(every * self.recompute_share - 1) <= ROUNDED else None

    @property
    def cuts_evenly(self) -> bool:
        """Whether stages have equal numbers of blocks where these divide."""
        return self.split == "even" or (self.split == "auto" and self.kernels in ("fused", "norms"))

    @property
    def sharing_replicas(self) -> int:
        """Replicas among which the experts of a block are shared out."""
        return max(1, self.ep // self.tp) if self.experts_over_tp else self.ep

    @property
    def places_replicas(self) -> bool:
        """Whether replicas may lie around stages or stages around replicas, as in this package; others number stages last."""
        return self._may_be_own and self.kernels != "fused"

    @property
    def neighbours(self) -> int:
        """Replicas of a stage that are."""
        return (self.dp_inside or 1) if self.places_replicas else self.dp

    @property
    def sums_in_nodes(self) -> bool:
        """Whether gradients that several ranks of several nodes have are summed inside each node first, as this package does."""
        return self.places_replicas and self.zero == 0 and self.local_steps == 1 and self.compression == "none"

    @property
    def chunks_by_itself(self) -> bool:
        """Whether this package computes the loss without logits if nothing else is asked for."""
        return self.is_own and self.tp * self.pp > 1 and self.zero < 3 and self.engine == "native"

    @property
    def reduces_early(self) -> bool:
        """Whether gradients of replicas travel in the last backward: DeepSpeed's pipeline reduces them when all passes are done."""
        return self.overlap_dp and not (self.engine == "deepspeed" and self.pp > 1)

    @property
    def gathers_once(self) -> bool:
        """Whether this package's own ZeRO gathers updated parameters once a step: when it ends, unless settings say otherwise."""
        return self.engine == "native" and self.zero in (1, 2)

    @property
    def gathers_late(self) -> bool:
        """Whether parameters of ``zero: 1`` and 2 travel in the first forward: DeepSpeed's optimizer gathers them in its step."""
        return self.overlap_dp and self.overlap_gather and self.engine != "deepspeed"

    def trained(self, parameters: float) -> float:
        """Parameters that get gradients of the `parameters` of a rank, which adapters are spread over evenly."""
        return self.adapters / self.tp / self.pp if self.adapters else parameters

    @property
    def element(self) -> int:
        """Bytes of an element of what passes through the blocks."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def passed(self) -> int:
        """Bytes of an element of what stages send: this package's residual stream under autocast is as wide as the parameters."""
        return 4 if self.places_replicas and self.param_dtype == "fp32" else self.element

    @property
    def summed(self) -> float:
        """Bytes of an element of a gradient on its way to a sum over replicas; this package widens those of 16 bits."""
        if self.places_replicas and self.engine != "deepspeed":
            return 2.0 if self.reduce_dtype == "bf16" else 4.0
        return self.gradient_bytes

    @property
    def splits_results(self) -> bool:
        """Whether each tp rank sends its part of what a stage passes on; in this package each sends all of it."""
        return self.tp > 1 and not self.places_replicas and (self.sequence_parallel or self.kernels == "fused")

    @property
    def reduces_each_pass(self) -> bool:
        """Whether no rank keeps whole gradients from one micro-batch to the next; a pipeline reduces after its last."""
        return self.pp == 1 and self.zero >= 2

    @property
    def repeats_attention_alone(self) -> bool:
        """Whether selective recomputation is Megatron's (the core of attention), not that of every other product."""
        return self.recompute == "selective" and (self.attention == "eager" or self.kernels == "fused")

    @property
    def gathers_each_pass(self) -> bool:
        """Whether parameters and gradients in parts travel for every micro-batch; in a pipeline once in a step."""
        return self.pp == 1 and (self.zero == 3 or (self.zero == 2 and self.engine == "fsdp2"))

    @property
    def global_batch(self) -> int:
        return self.dp * self.micro_batch * self.num_microbatches

    @property
    def num_ranks(self) -> int:
        """GPUs that it needs."""
        return self.dp * self.tp * self.pp * self.sp

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank
