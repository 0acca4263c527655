"""Train a language model from scratch on a stream of texts, with a stock Trainer and one extra line.

    accelerate launch --config_file recipes/cpu_pp2.yaml examples/pretrain_streaming.py --demo
    accelerate launch --config_file RECIPE.yaml examples/pretrain_streaming.py \
        --config_name path/to/config.json --tokenizer_name meta-llama/Llama-2-7b-hf \
        --dataset_name HuggingFaceFW/fineweb-edu --dataset_config_name sample-10BT --block_size 2048 \
        --output_dir runs/pretrain --max_steps 20000 --per_device_train_batch_size 8

The extra line is `callbacks=[HFParallelCallback()]`. Texts are read, tokenized and packed into blocks while the model
trains; nothing is prepared on disk. A stream has no length, so `--max_steps` says when to stop. Every rank reads the same
stream and replicas take turns, so that any layout with the same rows a step trains on the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import demo
import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_parallel import HFParallelCallback  # before TrainingArguments are made: it prepares a launched CPU process


DEMO_DEFAULTS: dict[str, Any] = {
    "output_dir": "build/demo_pretrain",
    "block_size": 64,
    "max_steps": 12,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass
class ScriptArguments:
    """The model and the stream."""

    config_name: str | None = field(default=None, metadata={"help": "Config of the model: a name, or a path."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Name on the hub, or a directory."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the hub, with a column `text`."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(
        default=None, metadata={"help": "JSON lines with a `text`, in place of a data set."}
    )
    shuffle_buffer: int = field(default=1000, metadata={"help": "Texts from which the next one is drawn."})
    block_size: int = field(default=1024, metadata={"help": "Tokens in a row."})
    demo: bool = field(default=False, metadata={"help": "Small model, small data, few steps: defaults for a CPU."})


class PackedStream(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """Texts one after another, cut into blocks of one length; a block may hold the end of one text and the next."""

    def __init__(self, texts: Any, tokenize: Callable[[str], list[int]], block_size: int) -> None:
        self.texts, self.tokenize, self.block_size = texts, tokenize, block_size

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer when the texts begin again: another order."""
        self.texts.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        held: list[int] = []
        for row in self.texts:
            held += self.tokenize(row["text"])
            while len(held) >= self.block_size:
                block, held = held[: self.block_size], held[self.block_size :]
                yield {"input_ids": block, "labels": block}


def parse_arguments() -> tuple[ScriptArguments, TrainingArguments]:
    """Return the settings: those of the command line, then the demo's if it is one."""
    parser = HfArgumentParser([ScriptArguments, TrainingArguments])  # type: ignore[list-item]
    given, _ = parser.parse_known_args()
    if given.demo:
        parser.set_defaults(**DEMO_DEFAULTS)
    elif None in (given.config_name, given.tokenizer_name, given.dataset_name or given.train_file):
        raise SystemExit("give --config_name, --tokenizer_name and --dataset_name or --train_file, or --demo.")
    elif given.max_steps < 1:
        raise SystemExit("give --max_steps: a stream has no length.")
    script, training = parser.parse_args_into_dataclasses()
    return script, training


def load(script: ScriptArguments) -> tuple[Any, Any, Any]:
    """Return a model with random weights, its tokenizer and the stream of texts."""
    if script.demo:
        texts = Dataset.from_dict({"text": demo.texts()}).to_iterable_dataset(num_shards=4)
        return demo.model(), demo.tokenizer(), texts
    if script.train_file is not None:
        texts = load_dataset("json", data_files=script.train_file, split="train", streaming=True)
    else:
        texts = load_dataset(script.dataset_name, script.dataset_config_name, split="train", streaming=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(script.config_name))
    return model, AutoTokenizer.from_pretrained(script.tokenizer_name), texts


def main() -> None:
    """Make the model, train, export."""
    script, training = parse_arguments()
    set_seed(training.seed)
    model, tokenizer, texts = load(script)
    texts = texts.shuffle(seed=training.seed, buffer_size=script.shuffle_buffer)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=PackedStream(
            texts, lambda text: [*tokenizer(text)["input_ids"], tokenizer.eos_token_id], script.block_size
        ),
        data_collator=default_data_collator,
        processing_class=tokenizer,
        callbacks=[HFParallelCallback()],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if losses:
            print(f"train loss {losses[0]:.4f} -> {losses[-1]:.4f} in {trainer.state.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
