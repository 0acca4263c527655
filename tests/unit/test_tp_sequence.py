"""Sequence parallelism is planned, proved and refused without process groups: all ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from thinning import in_turns
from tiny import gemma3n, mamba, mixtral
from torch import Tensor, nn
from tp_models import CASES, plan_sample, tiny_batch, tiny_model

from hf_parallel.errors import ConfigError, PlanError
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.cost import report, traffic
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.sequence_plan import shard_sequence
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_virtual_ranks, virtual_groups
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary
from hf_parallel.tensor_parallel.run.functions import TPGroup
from hf_parallel.tensor_parallel.run.sequence_functions import (
    Entry,
    gather_from_sequence,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
    sequence_sizes,
)
from hf_parallel.tensor_parallel.shard_plan import SequencePlan, TPPlan


WIDTH = 8


def planned(model: nn.Module, tp_size: int, sample: dict[str, Tensor] | None = None) -> TPPlan:
    sample = plan_sample() if sample is None else sample
    return shard_sequence(model, plan_tensor_parallel(model, tp_size, sample), sample)


def sequence(plan: TPPlan) -> SequencePlan:
    assert plan.sequence is not None
    return plan.sequence


# -- functions ---------------------------------------------------------------------------------------------------------


def on_ranks(tp_size: int, main: Callable[[TPGroup, list[int]], Any], length: int) -> list[Any]:
    groups = virtual_groups(tp_size, 10.0)
    return run_virtual_ranks(groups, lambda rank: main(groups[rank], sequence_sizes(length, groups[rank])))


@pytest.mark.parametrize(("tp_size", "length"), [(2, 8), (2, 7), (3, 7), (4, 6), (4, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_functions_move_parts_and_their_gradients(tp_size: int, length: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(*((length, 3) if dim == 0 else (3, length)), WIDTH, generator=generator)
    cotangents = [torch.randn(whole.shape, generator=generator) for _ in range(tp_size)]

    def main(group: TPGroup, sizes: Sequence[int]) -> list[Tensor]:
        along, rank = (group, dim, sizes), group.rank()
        x = whole.clone().requires_grad_()
        part = scatter_to_sequence(x, *along)
        back = gather_from_sequence(part, *along, sums=False)
        (plain,) = torch.autograd.grad(back, x, cotangents[0], retain_graph=True)
        (of_part,) = torch.autograd.grad(gather_from_sequence(part, *along, sums=True), part, cotangents[rank])
        total = reduce_scatter_to_sequence(x * (rank + 1), *along)
        (of_total,) = torch.autograd.grad(total, x, scatter_to_sequence(cotangents[0], *along))
        return [part.detach(), back.detach(), plain, of_part, total.detach(), of_total]

    results = on_ranks(tp_size, main, length)
    sizes = [result[0].shape[dim] for result in results]
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    summed = torch.stack(cotangents).sum(0)
    factor = sum(range(1, tp_size + 1))
    for rank, (part, back, plain, of_part, total, of_total) in enumerate(results):
        own = (dim, sum(sizes[:rank]), sizes[rank])
        torch.testing.assert_close(part, whole.narrow(*own))
        torch.testing.assert_close(back, whole)
        torch.testing.assert_close(plain, cotangents[0])
        torch.testing.assert_close(of_part, summed.narrow(*own))
        torch.testing.assert_close(total, whole.narrow(*own) * factor)
        torch.testing.assert_close(of_total, cotangents[0] * (rank + 1))


def test_a_gathered_input_tells_partial_from_whole_gradients() -> None:
    whole = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))

    def main(group: TPGroup, sizes: list[int]) -> tuple[Tensor, list[int]]:
        x = scatter_to_sequence(whole, group, 1, sizes).requires_grad_()
        entry = Entry(x, group, 1, sizes)
        assert entry.find(whole) is None
        assert entry.find(entry.full[:, :3]) is None
        assert entry.find(entry.full.transpose(0, 1)) is None
        partial = entry.find(entry.full.view(-1, WIDTH))
        assert partial is not None
        torch.testing.assert_close(entry.again(entry.shard), whole)
        (grad,) = torch.autograd.grad(entry.full.sum() + 10 * partial.sum(), x)
        return grad, sizes

    for rank, (grad, sizes) in enumerate(on_ranks(2, main, 5)):
        assert torch.equal(grad, torch.full((2, sizes[rank], WIDTH), 1.0 + 2 * 10.0))


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "tp_size"), in_turns(sorted(CASES), [2, 3, 4]))
def test_loss_and_gradients_on_uneven_parts_equal_one_process(case: str, tp_size: int) -> None:
    model = tiny_model(case)
    plan = planned(model, tp_size)
    assert not any(block.whole for block in sequence(plan).blocks)
    verify_model(model, plan, tiny_batch(length=7))
    verify_model(model, plan, tiny_batch(length=4))


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3", "phi3"])
def test_attention_and_mlp_gather_at_their_entry_and_scatter_at_their_row(case: str) -> None:
    for block in sequence(planned(tiny_model(case), 2)).blocks:
        assert [region.exit for region in block.regions] == ["row", "row"]
        assert [len(region.rows) for region in block.regions] == [1, 1]


def test_parameters_on_parts_are_the_norms_and_the_bias_of_rows() -> None:
    (block, _) = sequence(planned(tiny_model("gpt2"), 2)).blocks
    norms = {f"ln_{i}.{key}" for i in (1, 2) for key in ("weight", "bias")}
    assert set(block.partial) == norms | {"attn.c_proj.bias", "mlp.c_proj.bias"}


def test_experts_and_mixers_share_the_sequence() -> None:
    for model, region in ((mixtral(), ("mlp", "sum")), (mamba(), ("mixer", "row"))):
        plan = planned(model.eval(), 2)
        assert region in [(r.module, r.exit) for r in sequence(plan).blocks[0].regions]
        verify_model(model, plan, tiny_batch())


def test_whole_experts_on_each_rank_go_with_parts_of_the_sequence() -> None:
    model = mixtral().eval()
    plan = plan_model(model, 2, plan_sample(), experts="whole", sequence=True)
    assert any(pair.routing is not None for pair in plan.pairs)
    assert not any(block.whole for block in sequence(plan).blocks)
    verify_model(model, plan, tiny_batch())


def test_a_loss_on_parts_of_the_vocabulary_goes_with_parts_of_the_sequence() -> None:
    model = tiny_model("llama_tied")
    plan = shard_vocabulary(model, plan_tensor_parallel(model, 2, plan_sample()), plan_sample())
    assert plan.linears["lm_head"].role == "vocab_head"
    verify_model(model, shard_sequence(model, plan, plan_sample()), tiny_batch())


def test_the_plan_is_deterministic_survives_json_and_leaves_the_model_alone() -> None:
    model = tiny_model("gpt2")
    before = {name: p.clone() for name, p in model.named_parameters()}
    plan = planned(model, 2)
    assert TPPlan.from_json(plan.to_json()) == plan == planned(model, 2)
    assert plan.fingerprint() != replace(plan, sequence=None).fingerprint()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(vars(module).keys() & {"tp_block", "tp_region", "tp_scatter"} for module in model.modules())


def test_the_whole_model_check_sees_a_missing_sum() -> None:
    model = tiny_model("llama")
    plan = planned(model, 2)
    blocks = tuple(replace(block, partial=()) for block in sequence(plan).blocks)
    damaged = replace(plan, sequence=replace(sequence(plan), blocks=blocks))
    with pytest.raises(PlanError, match=r"gradient of model.layers.0.input_layernorm.weight"):
        verify_model(model, damaged, tiny_batch())


# -- refusals ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Norm, pair and residual; `mixes` adds what needs all positions outside of the pair."""

    def __init__(self, *, mixes: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mixes = mixes

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        x = x + x.mean(1, keepdim=True) if self.mixes else x
        x = x if table is None else x + table
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a list; `between` and `table` are what a model may do beside running them one after the other."""

    def __init__(
        self, layers: list[nn.Module], between: Callable[[Tensor], Tensor] | None = None, *, table: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.between = between
        self.table = nn.Parameter(torch.randn(5, WIDTH)) if table else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.table is None else layer(x, self.table)
            x = x if self.between is None else self.between(x)
        return x


def floats() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()}


def test_a_plain_stack_shares_the_sequence() -> None:
    model = Stack([Layer(), Layer()])
    plan = planned(model, 2, floats())
    assert [region.module for region in sequence(plan).blocks[0].regions] == ["up"]
    verify_model(model, plan, floats())


def test_a_model_that_computes_between_its_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"sequence_parallel: true is not possible for Stack: layers\.\d: .*Set it to"):
        planned(Stack([Layer(), Layer(), Layer()], lambda x: x * 2.0), 2, floats())


def test_a_model_that_looks_at_what_a_block_returned_is_refused() -> None:
    seen: list[Tensor] = []

    def look(x: Tensor) -> Tensor:
        seen.append(x.mean())
        return x

    with pytest.raises(PlanError, match=r"layers\.0: the model itself computes with what it returns \(mean\)"):
        planned(Stack([Layer(), Layer()], look), 2, floats())


def test_blocks_that_mix_positions_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"layers\.0: the output differs"):
        planned(Stack([Layer(mixes=True), Layer(mixes=True)]), 2, floats())


def test_a_tensor_of_all_positions_inside_a_block_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"layers\.0: raises RuntimeError: The size of tensor"):
        planned(Stack([Layer(), Layer()], table=True), 2, floats())
    with pytest.raises(PlanError, match=r"Gemma3nForCausalLM: model\.layers\.0"):
        planned(gemma3n().eval(), 2)


def test_a_block_that_does_not_verify_runs_on_the_whole_sequence() -> None:
    for order in ([False, True, False], [True, False, False], [False, False, True]):
        model = Stack([Layer(mixes=mixes) for mixes in order])
        plan = planned(model, 2, floats())
        assert [bool(block.whole) for block in sequence(plan).blocks] == order
        verify_model(model, plan, floats())
        assert any("2 of 3 blocks" in line for line in report(plan, 4))


class Scored(Stack):
    """Norms whose outputs, collected by hooks, reach the output beside the hidden states, like scores of routers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        seen: list[Tensor] = []
        handle = self.layers[1].norm.register_forward_hook(lambda *call: seen.append(call[-1]))
        try:
            return super().forward(x), seen[0].square().mean()
        finally:
            handle.remove()


def test_a_block_of_which_more_is_read_runs_on_the_whole_sequence() -> None:
    model = Scored([Layer(), Layer()])
    plan = planned(model, 2, floats())
    assert [block.whole for block in sequence(plan).blocks] == [
        "",
        "what norm returns is read outside of the block",
    ]
    verify_model(model, plan, floats())


def test_sequence_parallel_with_one_rank_is_refused() -> None:
    from hf_parallel.settings.config import HFParallelConfig

    with pytest.raises(ConfigError, match=r"sequence_parallel=true with tp_size=1 has no effect"):
        HFParallelConfig(tensor_parallel={"sequence_parallel": True})
    assert HFParallelConfig(tp_size=2, tensor_parallel={"sequence_parallel": True}).tensor_parallel.sequence_parallel


def test_the_traffic_is_that_of_gathers_and_reduce_scatters() -> None:
    plan = planned(tiny_model("llama_tied"), 2)
    gather = 4 * 32 * (2 - 1) / 2  # fp32, hidden size 32
    # 2 layers of 2 pairs: gather, reduce-scatter, gather, gather again, reduce-scatter; and both ends of the stack.
    assert traffic(plan, 4).per_token == (2 * 2 * 5 + 2) * gather
    assert traffic(plan, 4).per_pass == 2 * 2 * 32 * 4, "2 layers of 2 norms, all-reduced"
