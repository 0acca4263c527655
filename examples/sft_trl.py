"""Supervised fine-tuning with TRL's SFTTrainer and one extra line, on replicas, ZeRO, pipeline stages or shards.

    accelerate launch --config_file recipes/cpu_pp2.yaml examples/sft_trl.py --demo
    accelerate launch --config_file RECIPE.yaml examples/sft_trl.py \
        --model_name_or_path meta-llama/Llama-2-7b-hf --train_file data.jsonl --lora_r 16 \
        --output_dir runs/sft --per_device_train_batch_size 8 --num_train_epochs 1

The extra line is `callbacks=[HFParallelCallback()]`. `--train_file` has one JSON object a line in a format of TRL (`text`,
`prompt` and `completion`, or `messages`). All other arguments are SFTConfig's: `--packing`, `--assistant_only_loss`,
`--loss_type dft`. Without `--lora_r` all parameters are trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import demo
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import SFTConfig, SFTTrainer

from hf_parallel import HFParallelCallback  # before SFTConfig is made: it prepares a launched CPU process


# Recomputation is a setting of the recipe (activation_checkpointing).
DEFAULTS: dict[str, Any] = {"gradient_checkpointing": False}
DEMO_DEFAULTS: dict[str, Any] = {
    "output_dir": "build/demo_sft",
    "bf16": False,
    "max_length": 96,
    "max_steps": 10,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass
class ScriptArguments:
    """The model, the data and the adapter."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Name on the hub, or a directory."})
    dtype: str = field(default="auto", metadata={"help": "Type in which the model is loaded."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines."})
    lora_r: int = field(default=0, metadata={"help": "Rank of an adapter on all linear layers; 0 trains the model."})
    demo: bool = field(default=False, metadata={"help": "Small model, small data, few steps: defaults for a CPU."})


def parse_arguments() -> tuple[ScriptArguments, SFTConfig]:
    """Return the settings: those of the command line, then the demo's if it is one."""
    parser = HfArgumentParser([ScriptArguments, SFTConfig])  # type: ignore[list-item]
    parser.set_defaults(**DEFAULTS)
    given, _ = parser.parse_known_args()
    if given.demo:
        parser.set_defaults(**DEMO_DEFAULTS)
    elif given.model_name_or_path is None or given.train_file is None:
        raise SystemExit("give --model_name_or_path and --train_file, or --demo.")
    script, training = parser.parse_args_into_dataclasses()
    return script, training


def load(script: ScriptArguments) -> tuple[Any, Any, Any]:
    """Return the model, its tokenizer and the rows."""
    if script.demo:
        return demo.model(), demo.tokenizer(), Dataset.from_dict({"text": [text[:96] for text in demo.texts()]})
    name = str(script.model_name_or_path)
    rows = load_dataset("json", data_files=script.train_file, split="train")
    return AutoModelForCausalLM.from_pretrained(name, dtype=script.dtype), AutoTokenizer.from_pretrained(name), rows


def main() -> None:
    """Load, train, export."""
    script, training = parse_arguments()
    set_seed(training.seed)
    model, tokenizer, rows = load(script)
    adapter = LoraConfig(r=script.lora_r, lora_alpha=2 * script.lora_r, target_modules="all-linear")
    trainer = SFTTrainer(
        model=model,
        args=training,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter if script.lora_r else None,
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
