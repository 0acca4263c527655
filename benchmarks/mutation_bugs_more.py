"""More bugs, as those of `mutation_bugs`: of numbers, optimizers, shared rows and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mutation_bugs import around, blocks_of, fired, mesh_of, optimizer_of
from torch import nn

from hf_parallel.data_parallel.zero import ZeroPartition
from hf_parallel.engine.gradients.sync import GradientSync
from hf_parallel.engine.run.microbatch_loss import MicrobatchLoss
from hf_parallel.expert_parallel import exchange as tokens
from hf_parallel.ulysses import exchange as rows
from hf_parallel.ulysses import forward as row_forward
from hf_parallel.ulysses.whole import WholeRows


def last_microbatch_divided_twice(trainer: Any) -> None:
    calls: list[int] = []

    def make(of: Any) -> Any:
        def wrong(self: Any, output: Any, share: Any) -> Any:
            calls.append(1)
            loss = of(self, output, share)
            return loss if len(calls) % 4 else loss.detach() * 0.75 + loss / 4  # which is the same number

        return wrong

    around(MicrobatchLoss, "of", make)


class _OtherGelu(torch.autograd.Function):
    """One approximation forward, the other backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return nn.functional.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        fired()
        x = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            return torch.autograd.grad(nn.functional.gelu(x), x, gradients[0])[0]


def gelu_of_another_kind_in_backward(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank == 1:
        blocks_of(trainer)[0].mlp.act.forward = _OtherGelu.apply


def padding_in_the_loss_of_a_microbatch(trainer: Any) -> None:
    def make(cut: Any) -> Any:
        def wrong(self: Any, index: int, batch: Any) -> Any:
            for part, (microbatch, share) in enumerate(cut(self, index, batch)):
                if part == 1 and "labels" in microbatch:
                    labels, ids = microbatch["labels"], microbatch["input_ids"]
                    microbatch["labels"] = torch.where(labels == -100, ids, labels)
                yield microbatch, share

        return wrong

    around(MicrobatchLoss, "cut", make)


def mask_of_the_first_microbatch(trainer: Any) -> None:
    if mesh_of(trainer).pp_rank != 1:
        return
    for block in blocks_of(trainer):
        masks: list[torch.Tensor] = []

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], masks: Any = masks) -> Any:
            masks.append(kwargs["attention_mask"])
            if len(masks) % 4 != 1:
                kwargs["attention_mask"] = masks[(len(masks) - 1) // 4 * 4]
                fired()
            return args, kwargs

        block.register_forward_pre_hook(hook, with_kwargs=True)


def epsilon_of_one_rank(trainer: Any) -> None:
    if mesh_of(trainer).rank == 1:
        for group in optimizer_of(trainer).param_groups:
            group["eps"] /= 100
        fired()


def decay_on_norms_of_one_rank(trainer: Any) -> None:
    if mesh_of(trainer).rank == 1:
        for group in optimizer_of(trainer).param_groups:
            if not group["weight_decay"]:
                group["weight_decay"] = 0.1
                fired()


def _around_updates(trainer: Any, change: Callable[[], Callable[[], None]]) -> None:
    """`change` is called before each update, and what it returns after it."""
    after: list[Callable[[], None]] = []
    optimizer = optimizer_of(trainer)
    optimizer.register_step_pre_hook(lambda *args: after.append(change()))

    def hook(*args: Any) -> None:
        with torch.no_grad():
            after.pop()()
        fired()

    optimizer.register_step_post_hook(hook)


def tied_matrix_updated_twice(trainer: Any) -> None:
    tied = [p for name, p in trainer.model.named_parameters() if "embed_tokens" in name or "lm_head" in name]

    def change() -> Callable[[], None]:
        before = [p.detach().clone() for p in tied]
        return lambda: [p.data.add_(p.data - old) for p, old in zip(tied, before, strict=True)] and None

    _around_updates(trainer, change)


def second_moment_of_the_second_step(trainer: Any) -> None:
    """The third update of a rank's part is made with the second moment of the first one."""
    if mesh_of(trainer).dp_rank != 1:
        return
    optimizer, kept = optimizer_of(trainer), []

    def before(*args: Any) -> None:
        states = [state for state in optimizer.state.values() if "exp_avg_sq" in state]
        kept.append([state["exp_avg_sq"].clone() for state in states])
        if len(kept) == 3:
            for state, old in zip(states, kept[1], strict=True):
                state["exp_avg_sq"].copy_(old)
            fired()

    optimizer.register_step_pre_hook(before)


def gradients_accumulated_in_bf16(trainer: Any) -> None:
    def make(accumulate: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            accumulate(self, factor)
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.copy_(parameter.grad.bfloat16())

        return wrong

    around(GradientSync, "accumulate", make)


def _gradients_times(trainer: Any, part: str, factor: float) -> None:
    """Before they are reduced."""
    wrong_ones = [p for name, p in trainer.model.named_parameters() if part in name]
    if not wrong_ones:
        raise RuntimeError(f"no parameter has {part} in its name")

    def make(reduce: Any) -> Any:
        def wrong(self: Any, given: float) -> None:
            for parameter in wrong_ones:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
            reduce(self, given)

        return wrong

    around(GradientSync, "reduce", make)


def bias_gradient_doubled(trainer: Any) -> None:
    _gradients_times(trainer, "h.1.mlp.c_proj.bias", 2.0)


def router_gradient_a_little_small(trainer: Any) -> None:
    _gradients_times(trainer, ".gate.", 0.9)


def auxiliary_loss_times_microbatches(trainer: Any) -> None:
    trainer.model.router_aux_loss_coef *= 4
    fired()


def first_batch_of_a_part_lost(trainer: Any) -> None:
    """ZeRO 2: what an earlier backward pass of the step left in this rank's part."""

    def make(reduce: Any) -> Any:
        def wrong(self: Any, factor: float) -> None:
            for shard in self.shards:
                if shard.master.grad is not None:
                    shard.master.grad = None
                    fired()
            reduce(self, factor)

        return wrong

    ZeroPartition.reduce = make(ZeroPartition.reduce)


def positions_of_a_part_from_zero(trainer: Any) -> None:
    around(row_forward, "_counted_on", lambda counted_on: lambda positions, part, **_: positions[..., : part.size])
    around(WholeRows, "_of_whole_rows", lambda of_whole_rows: lambda self, x: None)  # tables see those of the part


def exchange_not_undone_in_backward(trainer: Any) -> None:
    class Wrong(rows._Exchange):
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            fired()
            return gradients[0], None

    rows._Exchange = Wrong


def label_between_parts_lost(trainer: Any) -> None:
    if mesh_of(trainer).sp_rank != 0:
        return

    def make(local_inputs: Any) -> Any:
        def wrong(*args: Any) -> Any:
            found = local_inputs(*args)
            found["shift_labels"][:, -1] = -100
            return found

        return wrong

    around(row_forward, "_local_inputs", make)


def gradients_of_parts_averaged(trainer: Any) -> None:
    class Wrong(rows._Sum):
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            fired()
            return gradients[0], None

    rows._Sum = Wrong


def weights_of_experts_without_gradient(trainer: Any) -> None:
    class Wrong(tokens._There):
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
            fired()
            hidden, weights, *others = super(Wrong, Wrong).backward(ctx, *gradients)
            return hidden, torch.zeros_like(weights), *others

    tokens._There = Wrong


def results_of_experts_in_another_order(trainer: Any) -> None:
    class Wrong(tokens._Back):
        @staticmethod
        def forward(ctx: Any, made: torch.Tensor, journey: Any) -> torch.Tensor:
            fired()
            return super(Wrong, Wrong).forward(ctx, made.flip(0), journey)

    tokens._Back = Wrong


def gradients_of_experts_averaged_twice(trainer: Any) -> None:
    _gradients_times(trainer, "experts", 0.5)
