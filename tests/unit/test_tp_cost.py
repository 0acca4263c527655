"""The start-up lines: what they count must be what the ranks hold and send."""

from __future__ import annotations

import pytest
from tp_models import plan_sample, tiny_model

from hf_parallel.tensor_parallel.plan.cost import bytes_per_rank, flops_coverage, report, traffic
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.virtual_ranks import virtual_groups
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("case", ["llama", "llama_kv1", "smollm2", "gpt2"])
def test_bytes_per_rank_are_those_of_the_sharded_model(case: str, tp_size: int) -> None:
    plan = plan_tensor_parallel(tiny_model(case), tp_size, plan_sample())
    held = []
    for rank, group in enumerate(virtual_groups(tp_size, 1.0)):
        model = tiny_model(case)
        apply_tensor_parallel(model, plan, group, rank, lambda name: True)
        held.append(4 * sum(parameter.numel() for parameter in model.parameters()))
    assert bytes_per_rank(plan, 4) == held


def test_a_llama_layer_sends_two_all_reduces_forward_and_two_backward() -> None:
    plan = plan_tensor_parallel(tiny_model("llama_tied"), 2, plan_sample())
    all_reduce = 2 * 4 * 32 * (2 - 1) / 2  # ring, fp32, hidden size 32
    assert traffic(plan, 4).per_token == 2 * 4 * all_reduce, "2 layers of 4"
    assert traffic(plan, 4).per_pass == 0.0


def test_gradients_of_parameters_used_in_parts_are_sent_once_a_pass() -> None:
    plan = plan_tensor_parallel(tiny_model("qwen3"), 2, plan_sample())
    assert traffic(plan, 4).per_pass == 2 * 2 * 8 * 4, "2 layers, q and k norms of 8 elements"


def test_shares_of_the_work_follow_the_roles() -> None:
    plan = plan_tensor_parallel(tiny_model("llama"), 2, plan_sample())
    layers = 2 * 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48)
    head = 2 * 32 * 64
    share = flops_coverage(plan)
    assert sum(plan.flops.values()) == layers + head
    assert share.paired == pytest.approx(layers / (layers + head))
    assert share.gathered == pytest.approx(head / (layers + head))


def test_the_start_up_lines_name_all_four_numbers() -> None:
    text = " ".join(report(plan_tensor_parallel(tiny_model("llama"), 2, plan_sample()), 2))
    for word in ("column-row pairs", "matrix products", "per rank", "per token"):
        assert word in text
