"""Models that can be cut and sharded are causal language models; others are refused by the task of their class.

If a test fails here, planning dies in the middle of a forward with a shape error that names nothing a user knows.
"""

from __future__ import annotations

import pytest
import tiny
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

from hf_parallel.errors import UnsupportedError
from hf_parallel.model.support import refuse_model


CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1
)


class Reward(LlamaForSequenceClassification):
    """A user's class of another name."""


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaForTokenClassification, Reward])
def test_a_model_for_another_task_is_named(kind: type) -> None:
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} is made for \w+Classification with 2 ranks a copy"):
        refuse_model(kind(CONFIG), 2)
    refuse_model(kind(CONFIG), 1, shares_parameters=True)


def test_causal_language_models_are_taken_whatever_their_class_is_called() -> None:
    class Mine(LlamaForCausalLM):
        pass

    for model in (LlamaForCausalLM(CONFIG), Mine(CONFIG), tiny.gpt2()):
        refuse_model(model, 4)
