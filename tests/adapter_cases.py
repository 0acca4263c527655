"""The models that adapters are compared on under every layout, and what must be equal of two folders that a run saved."""

from __future__ import annotations

from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file


# Plain, Conv1D, experts, tied, fused projections. The loss of Mixtral's router is of a whole batch, so it is left out.
FIVE = ("llama_lora", "gpt2_lora", "mixtral_plain_lora", "llama_tied_lora", "phi3_lora")


def same_folder(mine: Path, expected: Path, model: str) -> None:
    """Files, names, shapes and values of adapters, and the logits of a stock PeftModel that has read them."""
    assert {path.name for path in mine.iterdir()} - {path.name for path in expected.iterdir()} <= {
        "training_args.json"
    }
    assert (mine / "adapter_config.json").read_bytes() == (expected / "adapter_config.json").read_bytes()
    saved, wanted = (load_file(folder / "adapter_model.safetensors") for folder in (mine, expected))
    assert list(saved) == list(wanted)
    for name, tensor in wanted.items():
        assert (saved[name].shape, saved[name].dtype) == (tensor.shape, tensor.dtype)
        assert float((saved[name] - tensor).norm()) <= 1e-5 * float(tensor.norm()), name
    if model.removesuffix("_attention") in FIVE:
        here, there = (reloaded(folder, model) for folder in (mine, expected))
        assert float((here - there).norm()) <= 1e-5 * float(there.norm())


def reloaded(folder: Path, model: str) -> torch.Tensor:
    """Logits of the base of a model with the adapters that a folder has."""
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(tiny.MODELS[model.split("_lora")[0]](), folder).eval()
    with torch.no_grad():
        logits: torch.Tensor = loaded(torch.arange(24).reshape(2, 12)).logits
    return logits
