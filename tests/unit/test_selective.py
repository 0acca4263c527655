"""Selective recomputation keeps less than no checkpointing and computes less than checkpointing of whole blocks.

A failure here is a result that is kept and was changed afterwards, random numbers that a kept kernel drew and the second
run does not, or a policy that saves nothing.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import saved_tensors
import torch
from stage_models import BLOCKS, assert_same_gradients, batch, build
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hf_parallel.activation_checkpointing.host_copies import HostCopy
from hf_parallel.activation_checkpointing.kept import Kept
from hf_parallel.activation_checkpointing.recompute import groups_for, recompute_blocks
from hf_parallel.activation_checkpointing.selective import KeptResults
from hf_parallel.memory.activations import ON_HOST, activations
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import Layout, Work
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.settings.config import HFParallelConfig


BATCH = {
    name: batch(4, 32)[name] for name in ("input_ids", "labels")
}  # unpadded: attention is one kernel on a CPU too


def kept_bytes(loss: Tensor) -> int:
    """Bytes of distinct storages that checkpoints hold on the device while `loss` is alive."""
    assert loss.requires_grad
    found = [item for item in gc.get_objects() if type(item) in (Kept, KeptResults)]
    tensors = [item.here for item in found if isinstance(item, Kept) and item.here is not None]
    tensors += [tensor for item in found if isinstance(item, KeptResults) for tensor in item.tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def counted(products: int | None, blocks: bool = True, offload: bool = False) -> tuple[int, int, int, dict[str, Any]]:
    """Bytes on the device, bytes in host memory, flops of a forward and a backward, gradients."""
    model = build("llama")
    model.set_attn_implementation("sdpa")
    if blocks:
        plan = discover_stages(model, BATCH)
        groups = groups_for([0, BLOCKS], 1, "block", plan)
        recompute_blocks(model, plan.stack, groups, products=products, offload=offload)
    outside = saved_tensors.saved_bytes(model, BATCH)
    model.zero_grad()
    with FlopCounterMode(display=False) as flops:
        loss = model(**BATCH, use_cache=False).loss
        inside = kept_bytes(loss)
        host = sum(item.host.nbytes for item in gc.get_objects() if type(item) is HostCopy)
        loss.backward()
    return outside + inside, host, flops.get_total_flops(), {n: p.grad for n, p in model.named_parameters()}


def test_bytes_and_flops_lie_between_those_of_nothing_and_of_whole_blocks() -> None:
    none, block = counted(None, blocks=False), counted(None)
    half, all_products, attention = counted(2), counted(1), counted(1000)
    for found in (block, half, all_products, attention):
        assert_same_gradients(none[3], found[3])
    assert none[0] > all_products[0] > half[0] > attention[0] > block[0]
    assert none[2] == all_products[2] < half[2] < attention[2] < block[2]


def arithmetic(**recompute: Any) -> dict[str, float]:
    """Bytes that one rank keeps of the blocks of the same model and batch, as counted before a run."""
    settings = HFParallelConfig(activation_checkpointing=recompute).activation_checkpointing
    shape = shape_of_config(build("llama").config)
    [found] = activations(shape, Layout(1, 1, precision="fp32", recompute=settings), Work(4, 32))
    return found


def test_what_is_kept_is_what_the_arithmetic_says() -> None:
    whole = counted(None)[0] - arithmetic(every=1)["activations"]
    for every in (1, 2, 3):
        found, expected = counted(every)[0], arithmetic(every=every, mode="selective")["activations"]
        assert found - whole == pytest.approx(expected, rel=0.01)


def test_inputs_wait_in_host_memory() -> None:
    here, moved = counted(None), counted(None, offload=True)
    entries = arithmetic(every=1, offload=True)[ON_HOST]
    assert moved[1] == entries == BLOCKS * 4 * 32 * 32 * 4
    assert here[0] - moved[0] == entries
    assert_same_gradients(here[3], moved[3])


class Drawing(nn.Module):
    """Stands for an attention kernel that draws its dropout mask itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.ops.hf_parallel_test.scaled_dot_product_noise(self.linear(x))
        return nn.functional.dropout(x, 0.5), x


@torch.library.custom_op("hf_parallel_test::scaled_dot_product_noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


noise.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output / inputs[0]),
)


class Changed(nn.Module):
    """Writes to the result of its matrix product, and hands out that of another, to which its caller writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result = self.second(self.first(x).mul_(2).sin())
        return result, (result + 1).sin()


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], scaled: bool) -> None:
        super().__init__()
        self.blocks, self.scaled = nn.ModuleList(kind() for _ in range(3)), scaled

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            x, other = block(x)
            x, total = x.mul_(3) if self.scaled else x, total + other.sum()
        return x.square().sum() + total


@pytest.mark.parametrize("kind", [Drawing, Changed])
def test_draws_and_changes_in_place_are_repeated(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Stack(kind, scaled=kind is Changed), torch.randn(5, 8)
    found = []
    for on in (False, True):
        if on:
            recompute_blocks(model, "blocks", [range(j, j + 1) for j in range(3)], products=1)
        torch.manual_seed(1)
        loss = model(x)
        loss.backward()
        found.append(({n: p.grad.clone() for n, p in model.named_parameters()}, loss.detach(), torch.rand(1)))
        model.zero_grad()
    assert_same_gradients(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1:], found[1][1:], rtol=0, atol=0)
