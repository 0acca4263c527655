"""Tensors of a checkpoint that transformers stores under other names, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from hf_parallel.checkpoints.reader import Reader
from hf_parallel.checkpoints.weights.conversions import Group, groups_to_load
from hf_parallel.checkpoints.weights.gather import weight_files


def conversion_of(folder: Path, model: object) -> Callable[[str], torch.Tensor | None]:
    """A function that makes the model's tensors, by name, of those in a folder; it gives None where the folder has nothing.

    Args:
        folder: The checkpoint.
        model: The model, cut and sharded or not: only names are read of it.
    """
    groups: dict[str, Group] | None = None
    files: dict[str, Path] = {}
    reader = Reader()

    def read(name: str) -> torch.Tensor | None:
        nonlocal groups, files
        if not isinstance(model, PreTrainedModel):
            return None
        if groups is None:
            files = weight_files(folder, reader)
            groups = groups_to_load(model, get_model_conversion_mapping(model), files)
        group = groups.get(name)
        if group is None:
            return None
        sources = {each: reader.read(reader.find(files[each], each)) for each in group.names}
        return group.convert(sources, model).get(name)

    return read
