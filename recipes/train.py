"""A stock Trainer that hf_parallel makes parallel; `hf-parallel init` copies this script.

accelerate launch --config_file FILE.yaml train.py                                     # a tiny model, no downloads
accelerate launch --config_file FILE.yaml train.py --experts 4                         # the same with experts
accelerate launch --config_file FILE.yaml train.py --model PATH_OR_NAME --text FILE.txt   # yours
"""

from __future__ import annotations

import argparse
import inspect

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig, Trainer, TrainingArguments

from hf_parallel import HFParallelCallback  # before TrainingArguments are made


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a causal language model on a text file.")
    parser.add_argument("--model", help="a folder or a name of the Hub; without it a tiny model that reads bytes")
    parser.add_argument("--text", help="a text file; without it the documentation of transformers.Trainer")
    parser.add_argument("--experts", type=int, default=0, help="of each block of the tiny model")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--output_dir", default="out")
    known, rest = parser.parse_known_args()
    options = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", known.output_dir, "--logging_steps", "1", "--report_to", "none", "--max_steps", "20", *rest]
    )[0]

    torch.manual_seed(options.seed)  # the same weights on every rank
    text = open(known.text, encoding="utf-8").read() if known.text else inspect.getdoc(Trainer) or ""  # noqa: SIM115
    if known.model:
        model = AutoModelForCausalLM.from_pretrained(known.model)
        tokens = AutoTokenizer.from_pretrained(known.model)(text)["input_ids"]
    else:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
        sizes |= {"vocab_size": 256, "num_hidden_layers": 8}
        experts = MixtralConfig(num_local_experts=known.experts, **sizes) if known.experts else None
        model = AutoModelForCausalLM.from_config(experts or LlamaConfig(**sizes))
        tokens = list(text.encode())
    if len(tokens) <= known.length:
        parser.error(f"--text {known.text} has {len(tokens)} tokens: give more, or a --length below that")
    rows = [tokens[start : start + known.length] for start in range(0, len(tokens) - known.length, known.length)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})

    trainer = Trainer(model=model, args=options, train_dataset=data, callbacks=[HFParallelCallback()])
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
