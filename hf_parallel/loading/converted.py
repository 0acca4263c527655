"""Tensors of a checkpoint that transformers stores under other names, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from hf_parallel.errors import CheckpointError
from hf_parallel.loading.conversions import Group, groups_to_load
from hf_parallel.weights import weight_files


def conversion_of(folder: Path, model: object) -> Callable[[str], torch.Tensor | None]:
    """What makes the model's tensors of those in a folder, by name; None for one that the folder has nothing for.

    Args:
        folder: The checkpoint.
        model: The model, cut and sharded or not: only names are read of it.
    """
    groups: dict[str, Group] | None = None
    files: dict[str, Path] = {}

    def read(name: str) -> torch.Tensor | None:
        nonlocal groups, files
        if not isinstance(model, PreTrainedModel):
            return None
        if groups is None:
            files = weight_files(folder)
            groups = groups_to_load(model, get_model_conversion_mapping(model), files)
        group = groups.get(name)
        return None if group is None else group.convert(_sources(group, files), model).get(name)

    return read


def _sources(group: Group, files: dict[str, Path]) -> dict[str, torch.Tensor]:
    found = {}
    for name in group.names:
        try:
            with safe_open(files[name], framework="pt") as file:
                found[name] = file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{files[name]}: {name} cannot be read: {error}. The file is truncated or damaged."
            ) from error
    return found
