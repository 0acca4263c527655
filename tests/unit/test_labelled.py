"""A labelled output before an engine has taken it: what a model's own forward hooks go over gathers nothing.

If it fails, `fully_shard` of torch 2.11 and 2.12, which flattens what each module returns, cannot run below tp.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree
from transformers.modeling_outputs import CausalLMOutput

from hf_parallel.head.labelled import LabelledOutput


def test_logits_are_among_the_leaves_when_an_engine_offers_them() -> None:
    stock = CausalLMOutput(loss=torch.tensor(1.0), logits=torch.arange(3.0))
    gathered = []

    def gather(local: torch.Tensor) -> torch.Tensor:
        gathered.append(local)
        return torch.cat([local, local])

    made = LabelledOutput().hide(stock, gather)
    assert [leaf.item() for leaf in _pytree.tree_leaves(made)] == [1.0]
    assert list(made) == ["loss"]
    assert not gathered

    made.again(made, lambda: None, lambda logits: logits)
    assert list(made) == ["loss", "logits"]
    assert [leaf.numel() for leaf in _pytree.tree_leaves(made)] == [1, 6]
    assert len(gathered) == 1
