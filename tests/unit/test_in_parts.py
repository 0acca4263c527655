"""The reference of a model whose loss is no sum over rows sees them in the parts of the layout."""

from __future__ import annotations

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from hf_parallel.proof.in_parts import compute_in_parts, merged, parts_of
from hf_parallel.proof.job import Job


JOB = Job("", {"pp_size": 2, "num_microbatches": 2}, processes=4, rows=3)


def test_every_row_is_in_one_part_and_no_part_has_rows_of_two_replicas() -> None:
    assert parts_of(JOB) == [(0, 2), (2, 1), (3, 2), (5, 1)]


def test_the_sum_over_labels_is_that_of_the_batch_and_routers_losses_are_averaged_over_a_replicas_rows() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(
        **sizes, num_key_value_heads=2, vocab_size=31, num_local_experts=4, output_router_logits=True
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).train()
    ids = torch.randint(31, (6, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    count = torch.tensor(6 * 7)

    def loss(coefficient: float, **part: torch.Tensor) -> torch.Tensor:
        model.router_aux_loss_coef = coefficient
        found: torch.Tensor = model(**part, num_items_in_batch=count).loss.detach()
        return found

    plain = loss(0.0, **batch)
    extra = [
        loss(1.0, **{name: value[start : start + rows] for name, value in batch.items()})
        - loss(0.0, **{name: value[start : start + rows] for name, value in batch.items()})
        for start, rows in parts_of(JOB)
    ]
    expected = plain + sum(each * rows / JOB.rows for each, (_, rows) in zip(extra, parts_of(JOB), strict=True))
    assert compute_in_parts(model, JOB) == 4
    assert torch.allclose(loss(1.0, **batch), expected, rtol=1e-6)


def test_calls_of_parts_are_one_call_of_the_batch() -> None:
    noted = [
        {
            "module": "a",
            "kind": "forward",
            "call": call,
            "order": call,
            "part": 0,
            "numbers": torch.tensor([[float(call)]]),
        }
        for call in (1, 0, 2, 3)  # a backward pass notes the last part first
    ]
    found = merged(noted, 2)
    assert [each["call"] for each in found] == [0, 1]
    assert [each["numbers"].flatten().tolist() for each in found] == [[0.0, 1.0], [2.0, 3.0]]
    assert merged(noted, 1) == [{**each} for each in noted]
