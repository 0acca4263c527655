"""A tiny tokenizer, two tiny models and four data sets on disk, for scripts that want paths; no network."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)


WORDS = [
    "the",
    "a",
    "one",
    "this",
    "that",
    "cat",
    "dog",
    "bird",
    "fish",
    "tree",
    "sees",
    "likes",
    "eats",
    "finds",
    "red",
    "old",
    "and",
    "or",
]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
ROWS = 32  # of each kind of data
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *WORDS, *(f"w{number}" for number in range(36)), "user", "assistant", ":"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, model_max_length=64, **names)


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 10))) for _ in range(count)]


def data_sets() -> dict[str, list[dict[str, Any]]]:
    """Rows by kind: text, completion, preference, unpaired."""
    prompts, good, bad = (sentences(ROWS, seed) for seed in (1, 2, 3))
    together = list(zip(prompts, good, bad, strict=True))
    return {
        "text": [{"text": f"{prompt} {answer}"} for prompt, answer, _ in together],
        "completion": [{"prompt": f"{prompt} :", "completion": f" {answer}"} for prompt, answer, _ in together],
        "preference": [
            {"prompt": f"{prompt} :", "chosen": f" {answer}", "rejected": f" {other}"}
            for prompt, answer, other in together
        ],
        "unpaired": [
            {"prompt": f"{prompt} :", "completion": f" {answer if index % 2 else other}", "label": bool(index % 2)}
            for index, (prompt, answer, other) in enumerate(together)
        ],
    }


def write_all(folder: Path) -> None:
    """`llama`, `gpt2` and `reward` with their tokenizer, and a folder of rows for each kind."""
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}
    llama = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ENDS)
    shape = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "initializer_range": 0.15}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(0)
    made = {
        "llama": LlamaForCausalLM(llama),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape, **still, **ENDS)),
        "reward": LlamaForSequenceClassification(LlamaConfig(**{**llama.to_dict(), "num_labels": 1})),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for kind, rows in data_sets().items():
        place = folder / "data" / kind
        place.mkdir(parents=True)
        for split, part in (("train", rows[:24]), ("test", rows[24:])):
            (place / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in part) + "\n")
