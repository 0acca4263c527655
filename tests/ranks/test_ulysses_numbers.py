"""What is no number hides nothing when parts of rows are compared with whole ones.

If this fails, NaN counts as equal to NaN, and a model that mixes tokens, or one that is broken, trains on parts of rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.engine.plan.share_rows import judge_rows
from hf_parallel.errors import PlanError
from hf_parallel.model.probes import Probes
from hf_parallel.ulysses.attention import Shared
from hf_parallel.ulysses.exchange import SequenceGroup


def judged(rank: int, world_size: int) -> dict[str, str]:
    """Refusals of models whose loss, or a gradient alone, is no number."""
    found = {}
    for name, value in (("lm_head.weight", float("inf")), ("model.layers.1.input_layernorm.weight", float("nan"))):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**tiny.SMALL))
        with torch.no_grad():
            model.get_parameter(name)[..., :1] = value
        with pytest.raises(PlanError) as refused:
            judge_rows(model, Shared(SequenceGroup(dist.group.WORLD)), Probes(model, torch.device("cpu")))
        found[name] = str(refused.value)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**tiny.SMALL))
    model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(PlanError) as refused:
        judge_rows(model, Shared(SequenceGroup(dist.group.WORLD)), Probes(model, torch.device("cpu")))
    return found | {"gradient": str(refused.value)}


@pytest.mark.long
def test_a_model_whose_loss_or_gradient_is_no_number_is_not_taken_for_an_exact_one(tmp_path: Path) -> None:
    for found in run_ranks(judged, 2, tmp_path=tmp_path, env={"ACCELERATE_USE_CPU": "true"}):
        assert "with sp_size=2: the gradient of model.norm.weight of the whole model is not finite" in found.pop(
            "gradient"
        )
        for refusal in found.values():
            assert "with sp_size=2: the loss of the whole model is not finite on a batch of the check" in refusal
            assert refusal.endswith("Load weights with which it is.")
