"""Train a LoRA adapter on a model in 4 bit (QLoRA) with a stock Trainer, on replicas, ZeRO 1 and 2 or pipeline stages.

    accelerate launch --config_file recipes/cpu_pp2.yaml examples/qlora.py --demo
    accelerate launch --config_file recipes/qlora_2x24gb.yaml examples/qlora.py \
        --model_name_or_path MODEL --train_file data.jsonl --block_size 2048 \
        --output_dir runs/qlora --per_device_train_batch_size 8 --num_train_epochs 1

Arguments and data are those of finetune_lora.py. Each process loads the whole model in 4 bit, on its GPU, before it is cut.
The demo quantises a small Llama with random weights on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import finetune_lora
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def load(lora: finetune_lora.LoraArguments) -> tuple[Any, Callable[[str], list[int]], list[str]]:
    """Return the frozen model in 4 bit, what turns a text into tokens, and the texts."""
    if lora.demo:
        model, tokenize, texts = finetune_lora.load(lora)
        return quantised(None, type(model), config=model.config, state_dict=model.state_dict()), tokenize, texts
    return quantised(lora.model_name_or_path), *finetune_lora.load_texts(lora)


def quantised(name: str | None, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """The model of a folder, or of a name on the hub, with blocks in NF4 on the device of this process."""
    device = PartialState().device
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return kind.from_pretrained(name, quantization_config=how, dtype=dtype, device_map={"": device}, **options)


if __name__ == "__main__":
    finetune_lora.main(load)
