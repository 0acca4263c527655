"""Train a LoRA adapter with a stock Trainer on replicas, ZeRO or pipeline stages: the recipe decides.

    accelerate launch --config_file recipes/cpu_pp2.yaml examples/finetune_lora.py --demo
    accelerate launch --config_file RECIPE.yaml examples/finetune_lora.py \
        --model_name_or_path meta-llama/Llama-2-7b-hf --train_file data.jsonl --block_size 2048 \
        --output_dir runs/adapter --per_device_train_batch_size 8 --num_train_epochs 1

`--train_file` has one JSON object with a `text` a line. `--output_dir` gets the folder that PEFT writes; load it with
`PeftModel.from_pretrained(base, folder)`. The demo needs no network: a small Llama with random weights reads the bytes
of Python's own help texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_parallel import HFParallelCallback  # before TrainingArguments are made: it prepares a launched CPU process


DEMO_DEFAULTS: dict[str, Any] = {
    "output_dir": "build/demo_lora",
    "block_size": 64,
    "max_steps": 12,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass
class LoraArguments:
    """The model, the data and the adapter."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Name on the hub, or a directory."})
    dtype: str = field(default="auto", metadata={"help": "Type of the frozen weights; adapters are trained in fp32."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines with a `text`."})
    block_size: int = field(default=1024, metadata={"help": "Tokens in a row."})
    lora_r: int = field(default=8, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=16, metadata={"help": "Its scale is lora_alpha / lora_r."})
    target_modules: str = field(default="all-linear", metadata={"help": "all-linear, or names with commas."})
    demo: bool = field(default=False, metadata={"help": "Small model, small data, few steps: defaults for a CPU."})


def parse_arguments() -> tuple[LoraArguments, TrainingArguments]:
    """Return the settings: those of the command line, then the demo's if it is one."""
    parser = HfArgumentParser([LoraArguments, TrainingArguments])  # type: ignore[list-item]
    given, _ = parser.parse_known_args()
    if given.demo:
        parser.set_defaults(**DEMO_DEFAULTS)
    elif given.model_name_or_path is None or given.train_file is None:
        raise SystemExit("give --model_name_or_path and --train_file, or --demo.")
    lora, training = parser.parse_args_into_dataclasses()
    return lora, training


Loads: TypeAlias = Callable[[LoraArguments], tuple[Any, Callable[[str], list[int]], list[str]]]


def load(lora: LoraArguments) -> tuple[Any, Callable[[str], list[int]], list[str]]:
    """Return the frozen model, what turns a text into tokens, and the texts."""
    if lora.demo:
        from pydoc_data.topics import topics

        sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=256, max_position_embeddings=128, num_attention_heads=4, **sizes)
        )
        return model, lambda text: list(text.encode()), [topics[name] for name in sorted(topics)]
    base = AutoModelForCausalLM.from_pretrained(str(lora.model_name_or_path), dtype=lora.dtype)
    return base, *load_texts(lora)


def load_texts(lora: LoraArguments) -> tuple[Callable[[str], list[int]], list[str]]:
    """Return what turns a text into tokens, and the texts."""
    tokenizer = AutoTokenizer.from_pretrained(str(lora.model_name_or_path))
    lines = Path(str(lora.train_file)).read_text(encoding="utf-8").splitlines()
    texts = [str(json.loads(line)["text"]) for line in lines if line.strip()]
    return lambda text: [*tokenizer(text)["input_ids"], tokenizer.eos_token_id], texts


def main(load: Loads = load) -> None:
    """Load, adapt, train, export.

    Args:
        load: Gives the frozen model, what turns a text into tokens, and the texts.
    """
    lora, training = parse_arguments()
    set_seed(training.seed)
    model, tokenize, texts = load(lora)
    tokens = [token for text in texts for token in tokenize(text)]
    size = lora.block_size
    blocks = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
    targets: str | list[str] = lora.target_modules
    if targets != "all-linear":
        targets = lora.target_modules.split(",")
    settings = LoraConfig(r=lora.lora_r, lora_alpha=lora.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, settings)
    if training.process_index == 0:
        adapted.print_trainable_parameters()
    trainer = Trainer(
        model=adapted,
        args=training,
        train_dataset=Dataset.from_dict({"input_ids": blocks, "labels": blocks}),
        data_collator=default_data_collator,
        callbacks=[HFParallelCallback()],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if losses:
            print(f"train loss {losses[0]:.4f} -> {losses[-1]:.4f} in {trainer.state.global_step} steps")
        print(f"adapter in {Path(str(training.output_dir)).resolve()}", flush=True)


if __name__ == "__main__":
    main()
