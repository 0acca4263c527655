"""Bugs of the kinds that have shipped in parallel training code, each put into every rank of a layout before its first step.

Each function gets the rank's Trainer. Where a bug sits in code of hf_parallel, the function there is replaced; where it is one
of data, the tensor is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_parallel.batches import count_targets
from hf_parallel.compat.private_torch import in_backward_pass
from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.engine.gradients import GradientSync
from hf_parallel.engine.microbatch_loss import MicrobatchLoss
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.tensor_parallel.run import functions, linear


def around(owner: Any, name: str, make: Callable[..., Any]) -> None:
    """Replace `owner.name` by `make(original)(...)`."""
    setattr(owner, name, make(getattr(owner, name)))


def mesh_of(trainer: Any) -> Any:
    """Where this rank is."""
    return trainer.accelerator.hf_parallel.mesh


def blocks_of(trainer: Any) -> list[nn.Module]:
    """The blocks of this rank."""
    base = trainer.model.base_model
    found = [*getattr(base, "layers", getattr(base, "h", ()))]
    return [block for block in found if any(True for _ in block.parameters())]


def forward_sum_missing(trainer: Any) -> None:
    functions._ReduceFromTP.forward = staticmethod(lambda ctx, x, group, widens, dtype: x.to(dtype))


def forward_sum_doubled(trainer: Any) -> None:
    sum_over = functions.sum_over

    def doubled(ctx: Any, x: Any, group: Any, widens: bool, dtype: Any) -> Any:
        return (2 * sum_over(x, group, widens=widens)).to(dtype)

    functions._ReduceFromTP.forward = staticmethod(doubled)


def input_gradient_not_summed(trainer: Any) -> None:
    linear.start_sum = lambda x, group: lambda: x


def gradient_sum_instead_of_mean(trainer: Any) -> None:
    Replicas._share = property(lambda self: 1.0)


def tied_gradient_not_summed(trainer: Any) -> None:
    GradientSync._reduce_shared = lambda self: None


def norm_counts_twice(trainer: Any) -> None:
    around(GradientSync, "_norm", lambda norm: lambda self, p: norm(self, p) * 2**0.5)


def mean_of_means(trainer: Any) -> None:
    def make(cut: Any) -> Any:
        def wrong(self: Any, index: int, batch: Any) -> Any:
            parts = list(cut(self, index, batch))
            for microbatch, share in parts:
                if "num_items_in_batch" in microbatch:
                    microbatch["num_items_in_batch"] = len(parts) * count_targets(microbatch, self._shifted)
                yield microbatch, share

        return wrong

    around(MicrobatchLoss, "cut", make)


def stale_recomputation(trainer: Any) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.05 if in_backward_pass() else output

    for block in blocks_of(trainer)[:1]:
        block.mlp.register_forward_hook(hook)


def loss_scale_wrong(trainer: Any) -> None:
    def make(run: Any) -> Any:
        return lambda self, *args, **kwargs: run(self, *args, **{**kwargs, "seed": 2 * kwargs.get("seed", 1.0)})

    around(PipelineRuntime, "run", make)


def microbatch_dropped(trainer: Any) -> None:
    calls = []

    def make(of: Any) -> Any:
        def wrong(self: Any, output: Any, share: Any) -> Any:
            calls.append(1)
            loss = of(self, output, share)
            return loss if len(calls) % 4 != 2 else loss * 0

        return wrong

    around(MicrobatchLoss, "of", make)


def shards_swapped(trainer: Any) -> None:
    for block in blocks_of(trainer)[1:2]:
        weight = block.mlp.down_proj.weight
        weight.data = weight.data.flip(1).contiguous()


def bias_on_every_rank(trainer: Any) -> None:
    for block in blocks_of(trainer)[1:2]:
        block.mlp.c_proj.register_forward_hook(lambda module, args, output: output + module.bias)


def kv_heads_mixed(trainer: Any) -> None:
    for block in blocks_of(trainer)[1:2]:
        attention = block.self_attn
        for linear_ in (attention.k_proj, attention.v_proj):
            linear_.weight.data = linear_.weight.data.roll(attention.head_dim, 0).contiguous()


def _in_second_stage(trainer: Any, change: Callable[[dict[str, Any]], None]) -> None:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        change(kwargs)
        return args, kwargs

    if mesh_of(trainer).pp_rank == 1:
        for block in blocks_of(trainer):
            block.register_forward_pre_hook(hook, with_kwargs=True)


def positions_wrong(trainer: Any) -> None:
    def change(kwargs: dict[str, Any]) -> None:
        kwargs["position_embeddings"] = tuple(each.flip(1) for each in kwargs["position_embeddings"])

    _in_second_stage(trainer, change)


def mask_dropped(trainer: Any) -> None:
    _in_second_stage(trainer, lambda kwargs: kwargs.update(attention_mask=None))


def router_gradient_lost(trainer: Any) -> None:
    routers = [p for name, p in trainer.model.named_parameters() if ".gate." in name]

    def make(reduce: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            for parameter in routers:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            reduce(self, factor)

        return wrong

    around(GradientSync, "reduce", make)


def clipped_before_the_reduction(trainer: Any) -> None:
    def make(reduce: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            for gradient in gradients:
                gradient.mul_((0.1 / norm).clamp(max=1.0))
            reduce(self, factor)

        return wrong

    around(GradientSync, "reduce", make)


def gradients_rounded_to_bf16(trainer: Any) -> None:
    def make(reduce: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.copy_(parameter.grad.bfloat16())
            reduce(self, factor)

        return wrong

    around(GradientSync, "reduce", make)


def hidden_states_rounded_to_bf16(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank == 1:
        blocks_of(trainer)[0].register_forward_pre_hook(lambda module, args: (args[0].bfloat16().float(), *args[1:]))


def gradient_between_stages_scaled(trainer: Any) -> None:
    def hook(module: nn.Module, args: Any) -> None:
        args[0].register_hook(lambda gradient: gradient * 0.9)

    if mesh_of(trainer).pp_rank == 1:
        blocks_of(trainer)[0].register_forward_pre_hook(hook)


def optimizer_shard_stale(trainer: Any) -> None:
    if mesh_of(trainer).dp_rank != 1:
        return
    before: list[torch.Tensor] = []

    def make_before(step: Any) -> Any:
        def wrong(self: Any, *args: Any) -> None:
            before[:] = [self.shards[0].master.detach().clone()]
            step(self, *args)

        return wrong

    def make_gather(gather: Any) -> Any:
        def wrong(self: Any) -> None:
            if before:
                self.shards[0].master.data.copy_(before[0])
            gather(self)

        return wrong

    around(ZeroPartition, "take_edits", lambda take: make_before(lambda self: take(self)))
    around(ZeroPartition, "gather", make_gather)


def replica_not_updated(trainer: Any) -> None:
    if mesh_of(trainer).dp_rank == 1:
        bare = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        bare.param_groups[0]["lr"] *= 0.5
        trainer.lr_scheduler.base_lrs[0] *= 0.5


def labels_shifted_twice(trainer: Any) -> None:
    def make(cut: Any) -> Any:
        def wrong(self: Any, index: int, batch: Any) -> Any:
            for microbatch, share in cut(self, index, batch):
                if "labels" in microbatch:
                    microbatch["labels"] = microbatch["labels"].roll(-1, 1)
                yield microbatch, share

        return wrong

    around(MicrobatchLoss, "cut", make)


def decay_on_norms(trainer: Any) -> None:
    for group in getattr(trainer.optimizer, "optimizer", trainer.optimizer).param_groups:
        group["weight_decay"] = 10.0


def buffer_of_another_mode(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank == 1:
        for name, buffer in trainer.model.named_buffers():
            if "inv_freq" in name:
                buffer.mul_(0.5)


def first_batch_lost(trainer: Any) -> None:
    def make(accumulate: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            accumulate(self, factor)
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()

        return wrong

    around(GradientSync, "accumulate", make)


def one_weight_differs(trainer: Any) -> None:
    if mesh_of(trainer).dp_rank == 1:
        with torch.no_grad():
            blocks_of(trainer)[1].mlp.up_proj.weight.data.mul_(1.001)
