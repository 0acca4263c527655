"""The adapters of a PEFT model, back from the files that PEFT wrote; the model that they are on is not in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_parallel.checkpoints.reader import Reader
from hf_parallel.data_parallel.fsdp import local_of, rows_of
from hf_parallel.errors import CheckpointError


ADAPTERS = "adapter_model.safetensors"
DEFAULT = "default"  # PEFT writes the adapter of this name into the folder itself


def has_adapters(model: object) -> bool:
    """Whether it is a PEFT model, which saves only its adapters."""
    return hasattr(model, "peft_config")


@torch.no_grad()
def load_adapters(folder: str | Path, model: Any) -> None:
    """Copy every adapter of a PEFT model out of a checkpoint, whole or sharded over replicas.

    Raises:
        CheckpointError: A file is missing, unreadable, or of other adapters.
    """
    from peft import get_peft_model_state_dict

    for name in model.peft_config:
        path = Path(folder, ADAPTERS) if name == DEFAULT else Path(folder, name, ADAPTERS)
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist: the checkpoint has no adapter {name!r}. Resume from another one."
            )
        with Reader() as reader:
            _load_adapter(reader, path, get_peft_model_state_dict(model, adapter_name=name))


def _load_adapter(reader: Reader, path: Path, held: dict[str, torch.Tensor]) -> None:
    saved = reader.tensors(path)
    odd = sorted(saved.keys() ^ held.keys()) or [
        key for key, tensor in held.items() if saved[key].shape != tuple(tensor.shape)
    ]
    if odd:
        raise CheckpointError(
            f"{path} is of other adapters: {len(odd)} tensors are on one side only, or of other shapes (first: {odd[0]}). "
            "Resume with the LoraConfig it was saved with."
        )
    for key, tensor in held.items():
        local_of(tensor).copy_(rows_of(tensor, reader.read(saved[key])))
