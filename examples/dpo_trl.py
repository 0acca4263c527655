"""Preferences with TRL's DPOTrainer and one extra line, on replicas, ZeRO, pipeline stages or shards.

    accelerate launch --config_file recipes/cpu_pp2.yaml examples/dpo_trl.py --demo
    accelerate launch --config_file RECIPE.yaml examples/dpo_trl.py \
        --model_name_or_path meta-llama/Llama-2-7b-chat-hf --train_file pairs.jsonl --lora_r 16 \
        --output_dir runs/dpo --per_device_train_batch_size 4 --num_train_epochs 1

The extra line is `callbacks=[HFParallelCallback()]`. `--train_file` has one JSON object with `prompt`, `chosen` and
`rejected` a line; all other arguments are DPOConfig's. With `--lora_r` the reference is the base, with the adapter switched
off. Without it all parameters are trained, and the reference is a second copy of the model: whole on every rank, or with
`--precompute_ref_log_probs` nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import demo
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from trl import DPOConfig, DPOTrainer

from hf_parallel import HFParallelCallback  # before DPOConfig is made: it prepares a launched CPU process


# Recomputation is a setting of the recipe (activation_checkpointing).
DEFAULTS: dict[str, Any] = {"gradient_checkpointing": False}
DEMO_DEFAULTS: dict[str, Any] = {
    "output_dir": "build/demo_dpo",
    "lora_r": 8,
    "bf16": False,
    "max_steps": 8,
    "per_device_train_batch_size": 4,
    "learning_rate": 2e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass
class ScriptArguments:
    """The model, the data and the adapter."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Name on the hub, or a directory."})
    dtype: str = field(default="auto", metadata={"help": "Type in which the model is loaded."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines with prompt, chosen and rejected."})
    lora_r: int = field(default=0, metadata={"help": "Rank of an adapter on all linear layers; 0 trains the model."})
    demo: bool = field(default=False, metadata={"help": "Small model, small data, few steps: defaults for a CPU."})


def parse_arguments() -> tuple[ScriptArguments, DPOConfig]:
    """Return the settings: those of the command line, then the demo's if it is one."""
    parser = HfArgumentParser([ScriptArguments, DPOConfig])  # type: ignore[list-item]
    parser.set_defaults(**DEFAULTS)
    given, _ = parser.parse_known_args()
    if given.demo:
        parser.set_defaults(**DEMO_DEFAULTS)
    elif given.model_name_or_path is None or given.train_file is None:
        raise SystemExit("give --model_name_or_path and --train_file, or --demo.")
    script, training = parser.parse_args_into_dataclasses()
    return script, training


def load(script: ScriptArguments, training: DPOConfig) -> tuple[Any, Any, Any, Any]:
    """Return the model, its reference (None if it needs none), its tokenizer and the rows."""
    if script.demo:
        texts = [text[:64] for text in demo.texts() if len(text) > 64]
        pairs = [{"prompt": text[:16], "chosen": text[16:], "rejected": text[:15:-1]} for text in texts]
        return demo.model(), None, demo.tokenizer(), Dataset.from_list(pairs)
    name = str(script.model_name_or_path)
    rows = load_dataset("json", data_files=script.train_file, split="train")
    needs_copy = not script.lora_r and not training.precompute_ref_log_probs
    model, *copies = (AutoModelForCausalLM.from_pretrained(name, dtype=script.dtype) for _ in range(1 + needs_copy))
    return model, copies[0] if copies else None, AutoTokenizer.from_pretrained(name), rows


def main() -> None:
    """Load, train, export."""
    script, training = parse_arguments()
    set_seed(training.seed)
    model, reference, tokenizer, rows = load(script, training)
    adapter = LoraConfig(r=script.lora_r, lora_alpha=2 * script.lora_r, target_modules="all-linear")
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=training,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter if script.lora_r else None,
        callbacks=[HFParallelCallback()],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        if entries:
            first, last = entries[0], entries[-1]
            print(f"train loss {first['loss']:.4f} -> {last['loss']:.4f} in {trainer.state.global_step} steps")
            print(f"margin {first['rewards/margins']:.4f} -> {last['rewards/margins']:.4f}", flush=True)


if __name__ == "__main__":
    main()
