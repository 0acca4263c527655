"""Bugs of the kinds that have shipped in parallel training code, each put into every rank of a layout before its first step.

Each function gets the rank's Trainer. Where a bug sits in code of hf_parallel, the function there is replaced; where it is one
of data, the tensor is changed. Where its code runs it says so with `fired`: a bug that never ran proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked_proofs import note_imports
from torch import nn
from transformers.models.llama import modeling_llama

from hf_parallel.batches import count_targets
from hf_parallel.compat.private_torch import in_backward_pass
from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.engine.gradients.global_norm import GlobalNorm
from hf_parallel.engine.gradients.sync import GradientSync
from hf_parallel.engine.run.microbatch_loss import MicrobatchLoss
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime
from hf_parallel.tensor_parallel.run import linear, vocab


FIRED = "fired"


def fired() -> None:
    """This bug has had its effect, in this rank's folder."""
    if not Path(FIRED).exists():
        Path(FIRED).touch()
        note_imports()


def around(owner: Any, name: str, make: Callable[..., Any]) -> None:
    """Replace `owner.name` by `make(original)(...)`."""
    wrong = make(getattr(owner, name))

    def noted(*args: Any, **kwargs: Any) -> Any:
        fired()
        return wrong(*args, **kwargs)

    setattr(owner, name, noted)


def mesh_of(trainer: Any) -> Any:
    """Where this rank is."""
    return trainer.accelerator.hf_parallel.mesh


def blocks_of(trainer: Any) -> list[nn.Module]:
    """The blocks of this rank."""
    base = trainer.model.base_model
    found = [*getattr(base, "layers", getattr(base, "h", ()))]
    return [block for block in found if any(True for _ in block.parameters())]


def optimizer_of(trainer: Any) -> Any:
    """The one inside of accelerate's."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def forward_sum_missing(trainer: Any) -> None:
    around(linear, "reduce_from_tp", lambda reduce: lambda partial, group, dtype: partial)


def embedding_sum_missing(trainer: Any) -> None:
    around(vocab, "reduce_from_tp", lambda reduce: lambda rows, group: rows)


def forward_sum_doubled(trainer: Any) -> None:
    around(
        linear, "reduce_from_tp", lambda reduce: lambda partial, group, dtype: 2 * reduce(partial, group, dtype=dtype)
    )


def input_gradient_not_summed(trainer: Any) -> None:
    around(linear, "start_sum", lambda start: lambda x, group: lambda: x)


def gradient_sum_instead_of_mean(trainer: Any) -> None:
    def share(self: Replicas) -> float:
        fired()
        return 1.0

    Replicas._share = property(share)


def tied_gradient_not_summed(trainer: Any) -> None:
    around(GradientSync, "_reduce_shared", lambda reduce: lambda self: None)


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
        if not in_backward_pass():
            return output
        fired()
        return output * 1.05

    for block in blocks_of(trainer)[:1]:
        block.input_layernorm.register_forward_hook(hook)  # a recomputation ends with the last value that is needed


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
            if len(calls) % 4 != 2:
                return loss
            fired()
            return loss * 0

        return wrong

    around(MicrobatchLoss, "of", make)


def shards_swapped(trainer: Any) -> None:
    for block in blocks_of(trainer)[1:2]:
        weight = block.mlp.down_proj.weight
        weight.data = weight.data.flip(1).contiguous()
        fired()


def bias_on_every_rank(trainer: Any) -> None:
    for block in blocks_of(trainer)[1:2]:
        block.mlp.c_proj.register_forward_hook(lambda module, args, output: output + module.bias)
        fired()


def kv_heads_mixed(trainer: Any) -> None:
    for block in blocks_of(trainer)[1:2]:
        attention = block.self_attn
        for linear_ in (attention.k_proj, attention.v_proj):
            linear_.weight.data = linear_.weight.data.roll(attention.head_dim, 0).contiguous()
            fired()


def _in_second_stage(trainer: Any, change: Callable[[dict[str, Any]], None]) -> None:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        change(kwargs)
        fired()
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
    if not routers:
        raise RuntimeError("the model has no routers")

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
            norm = torch.cat([torch.zeros(1), *(g.flatten() for g in gradients)]).norm()
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
        fired()


def gradient_between_stages_scaled(trainer: Any) -> None:
    def hook(module: nn.Module, args: Any) -> None:
        args[0].register_hook(lambda gradient: gradient * 0.9)
        fired()

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
                fired()
            gather(self)

        return wrong

    ZeroPartition.take_edits = make_before(ZeroPartition.take_edits)
    ZeroPartition.gather = make_gather(ZeroPartition.gather)


def replica_not_updated(trainer: Any) -> None:
    if mesh_of(trainer).dp_rank == 1:
        optimizer_of(trainer).param_groups[0]["lr"] *= 0.5
        trainer.lr_scheduler.base_lrs[0] *= 0.5
        fired()


def labels_shifted_twice(trainer: Any) -> None:
    def make(cut: Any) -> Any:
        def wrong(self: Any, index: int, batch: Any) -> Any:
            for microbatch, share in cut(self, index, batch):
                if "labels" in microbatch:
                    microbatch["labels"] = microbatch["labels"].roll(-1, 1)
                    fired()
                yield microbatch, share

        return wrong

    around(MicrobatchLoss, "cut", make)


def decay_on_norms(trainer: Any) -> None:
    for group in optimizer_of(trainer).param_groups:
        if not group["weight_decay"]:
            group["weight_decay"] = 0.1
            fired()


def buffer_of_another_mode(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank == 1:
        for name, buffer in trainer.model.named_buffers():
            if "inv_freq" in name:
                buffer.mul_(0.5)
                fired()


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
        fired()


def rotary_base_of_one_shard(trainer: Any) -> None:
    if mesh_of(trainer).tp_rank == 1:
        for name, buffer in trainer.model.named_buffers():
            if "inv_freq" in name:
                buffer.pow_(1.05)  # base ** (-i / n) of a larger base
                fired()


def weight_gradient_of_a_microbatch_lost(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank != 1:
        return
    layer, calls = blocks_of(trainer)[0].mlp.down_proj, []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) % 4 != 2:
            return nn.functional.linear(x, layer.weight)
        fired()
        return nn.functional.linear(x, layer.weight.detach())

    layer.forward = wrong


def tied_gradient_doubled(trainer: Any) -> None:
    tied = [p for name, p in trainer.model.named_parameters() if "embed_tokens" in name]

    def make(reduce: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            for parameter in tied:
                parameter.grad.mul_(2)
            reduce(self, factor)

        return wrong

    around(GradientSync, "reduce", make)


def norm_epsilon_of_a_stage(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank == 1:
        blocks_of(trainer)[0].input_layernorm.variance_epsilon = 1e-4
        fired()


def clipped_by_each_stage(trainer: Any) -> None:
    def make(norm: Any) -> Any:
        def wrong(self: Any, p: float) -> Any:
            mine = [g for n, w in self._parameters.items() for g in self._counted.gradients(n, w)]
            norm(self, p)
            return self.power_of(mine, p).pow(1 / p).float()

        return wrong

    around(GlobalNorm, "of", make)


def beta_of_one_rank(trainer: Any) -> None:
    if mesh_of(trainer).rank == 1:
        for group in optimizer_of(trainer).param_groups:
            group["betas"] = (0.8, 0.999)
        fired()


def stale_weights_at_a_boundary(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank != 1:
        return
    layer = blocks_of(trainer)[0].mlp.down_proj
    seen = [layer.weight.detach().clone()]  # of the last step and this one
    calls = []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        if len(calls) % 4 == 0:
            seen.append(layer.weight.detach().clone())
        calls.append(1)
        if len(calls) > 4:
            fired()
        return nn.functional.linear(x, layer.weight + (seen[-2] - layer.weight).detach())

    layer.forward = wrong


def loss_divided_by_all_tokens(trainer: Any) -> None:
    def make(cut: Any) -> Any:
        def wrong(self: Any, index: int, batch: Any) -> Any:
            for microbatch, share in cut(self, index, batch):
                if "num_items_in_batch" in microbatch:
                    microbatch["num_items_in_batch"] = batch["labels"].numel()
                    fired()
                yield microbatch, share

        return wrong

    MicrobatchLoss.cut = make(MicrobatchLoss.cut)


class _RolledBackward(torch.autograd.Function):
    """Heads (batch, heads, length, size) as they are, whose gradients come back as those of other heads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shift: int) -> torch.Tensor:
        ctx.shift = shift
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        fired()
        return gradients[0].roll(ctx.shift, 1), None


def kv_heads_mixed_in_backward(trainer: Any) -> None:
    calls: list[int] = []

    def make(rotate: Any) -> Any:
        def wrong(queries: torch.Tensor, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) % len(blocks_of(trainer)) == 2:  # the second block
                keys = _RolledBackward.apply(keys, 1)
            return rotate(queries, keys, *args, **kwargs)

        return wrong

    modeling_llama.apply_rotary_pos_emb = make(modeling_llama.apply_rotary_pos_emb)


def replica_with_rows_of_another(trainer: Any) -> None:
    if mesh_of(trainer).dp_rank != 1:
        return
    step = trainer.training_step

    def wrong(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs["input_ids"] = inputs["input_ids"].roll(1, 0)
        fired()
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = wrong


def gradients_kept_on_a_stage(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank != 1:
        return
    weight = blocks_of(trainer)[0].mlp.down_proj.weight
    kept: list[torch.Tensor] = []

    def make(reduce: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            if kept:
                weight.grad.add_(kept[-1])
                fired()
            kept.append(weight.grad.detach().clone())
            reduce(self, factor)

        return wrong

    GradientSync.reduce = make(GradientSync.reduce)


def tied_copy_not_updated(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank != 1:
        return
    tied = next(p for name, p in trainer.model.named_parameters() if "embed_tokens" in name or "lm_head" in name)
    for group in optimizer_of(trainer).param_groups:
        left = [p for p in group["params"] if p is not tied]
        if len(left) < len(group["params"]):
            group["params"] = left
            fired()


def parameter_left_out_of_the_reduction(trainer: Any) -> None:
    weight = blocks_of(trainer)[2].self_attn.q_proj.weight

    def make(reduce: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            own = None if weight.grad is None else weight.grad.detach().clone()
            reduce(self, factor)
            if own is not None:
                weight.grad.copy_(own)
                fired()

        return wrong

    GradientSync.reduce = make(GradientSync.reduce)


def norm_gradient_of_one_shard(trainer: Any) -> None:
    if mesh_of(trainer).tp_rank != 1:
        return

    def halved(gradient: torch.Tensor) -> torch.Tensor:
        fired()
        return gradient * 0.5

    blocks_of(trainer)[1].input_layernorm.weight.register_hook(halved)


def forward_sum_in_bf16(trainer: Any) -> None:
    around(
        linear,
        "reduce_from_tp",
        lambda reduce: lambda partial, group, dtype: reduce(partial.bfloat16().to(partial.dtype), group, dtype=dtype),
    )


def scheduler_stepped_twice(trainer: Any) -> None:
    if mesh_of(trainer).rank == 1:
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        around(scheduler, "step", lambda step: lambda: (step(), step()))
