"""Models that can be cut and sharded are language models and classifiers of text; others are refused by the task of their class.

If a test fails here, planning dies in the middle of a forward with a shape error that names nothing a user knows.
"""

from __future__ import annotations

import pytest
import tiny
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from hf_parallel.errors import UnsupportedError
from hf_parallel.model.support import refuse_model


CONFIG = LlamaConfig(
    vocab_size=13, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1
)


class Answers(LlamaForQuestionAnswering):
    """A user's class of another name."""


@pytest.mark.parametrize("kind", [LlamaForQuestionAnswering, Answers])
def test_a_model_for_another_task_is_named(kind: type) -> None:
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} is made for QuestionAnswering with 2 ranks a copy"):
        refuse_model(kind(CONFIG), 2)
    refuse_model(kind(CONFIG), 1, shares_parameters=True)


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaForTokenClassification])
def test_a_classifier_may_be_cut_and_sharded_but_its_rows_stay_whole(kind: type) -> None:
    refuse_model(kind(CONFIG), 2)
    refuse_model(kind(CONFIG), 4, tp_size=2)
    with pytest.raises(
        UnsupportedError, match=rf"{kind.__name__} is made for \w+Classification with sp_size=2.*sp_size to 1"
    ):
        refuse_model(kind(CONFIG), 2, sp_size=2)


def test_adapters_that_stages_do_not_know_are_named() -> None:
    from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

    for config in (PromptTuningConfig, PrefixTuningConfig):
        prompted = get_peft_model(tiny.llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=2))
        with pytest.raises(UnsupportedError, match=rf"{config.__name__} with 2 ranks a copy.*virtual tokens"):
            refuse_model(prompted, 2)
        with pytest.raises(UnsupportedError, match=rf"{config.__name__} with zero.stage=3.*LoraConfig"):
            refuse_model(prompted, 1, shares_parameters=True)
        refuse_model(prompted, 1)
    adapted = tiny.llama_lora()
    refuse_model(adapted, 2)
    refuse_model(adapted, 2, tp_size=2)
    adapted.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=r"2 adapters \(default, second\) with 2 ranks"):
        refuse_model(adapted, 2)


def test_adapters_that_a_trainer_of_several_processes_cannot_tie_or_save_are_named() -> None:
    from peft import LoHaConfig, LoraConfig, get_peft_model

    tied = tiny.MODELS["llama_tied_lora_tied"]()
    mixed = get_peft_model(tiny.llama(), LoraConfig(target_modules=["q_proj"]), mixed=True)
    mixed.add_adapter("other", LoHaConfig(target_modules=["v_proj"]))
    for mp_size in (1, 2):
        with pytest.raises(UnsupportedError, match=r"adapter on lm_head that PEFT ties.*ensure_weight_tying to False"):
            refuse_model(tied, mp_size)
        with pytest.raises(UnsupportedError, match=r"PeftMixedModel has adapters of several methods.*one method"):
            refuse_model(mixed, mp_size)
    refuse_model(tiny.MODELS["llama_tied_lora_saved_tied"](), 2)


def test_quantised_weights_are_taken_by_stages_and_named_by_shards() -> None:
    model = tiny.llama_lora()
    model.quantization_method = "bitsandbytes"
    refuse_model(model, 2)
    with pytest.raises(UnsupportedError, match=r"quantised weights \(bitsandbytes\) with tp_size=2.*Set tp_size to 1"):
        refuse_model(model, 2, tp_size=2)
    with pytest.raises(UnsupportedError, match=r"zero\.stage=3"):
        refuse_model(model, 1, shares_parameters=True)


def test_causal_language_models_are_taken_whatever_their_class_is_called() -> None:
    class Mine(LlamaForCausalLM):
        pass

    for model in (LlamaForCausalLM(CONFIG), Mine(CONFIG), tiny.gpt2()):
        refuse_model(model, 4)


def test_an_embedding_that_rescales_what_a_batch_looks_up_is_named_where_others_have_the_table_too() -> None:
    model, tied = tiny.llama(), tiny.llama(tied=True)
    for one in (model, tied):
        one.get_input_embeddings().max_norm = 1.0
    refuse_model(model, 4, tp_size=2)
    refuse_model(tied, 1)
    with pytest.raises(
        UnsupportedError, match=r"model.embed_tokens has max_norm=1 with 2 copies.*Set max_norm to None"
    ):
        refuse_model(model, 1, num_copies=2)
    with pytest.raises(
        UnsupportedError, match=r"model.embed_tokens has max_norm=1 with another module that has the same"
    ):
        refuse_model(tied, 2)


def test_modules_that_were_compiled_in_place_are_refused_where_parts_are_made() -> None:
    model = tiny.llama()
    model.model.layers[1].compile(backend="eager")
    refuse_model(model, 1)
    with pytest.raises(
        UnsupportedError, match=r"model.layers.1 was compiled in place \(module.compile\(\)\) with 2 ranks"
    ):
        refuse_model(model, 2)
