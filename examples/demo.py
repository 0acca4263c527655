"""What the demos of the examples have in place of a download: a small Llama, a tokenizer of bytes, Python's help texts."""

from __future__ import annotations

from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def texts() -> list[str]:
    """Python's help texts by topic."""
    return [topics[name] for name in sorted(topics)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")  # type: ignore[no-untyped-call]


def model() -> LlamaForCausalLM:
    """Random weights; the same ones after the same seed."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=260, max_position_embeddings=256, **sizes))
