"""`from_pretrained` that reads no weights: the model is built as usual and records where its weights are."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model

from hf_parallel.checkpoints.weights.conversions import Group, groups_to_load
from hf_parallel.checkpoints.weights.unread import Source, Unread
from hf_parallel.checkpoints.weights.writer import Reader, Stored, read_header
from hf_parallel.compat.private_transformers import replaced_loading
from hf_parallel.errors import CheckpointError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import find_launch, resolve_config


logger = logging.getLogger(__name__)

Settings = HFParallelConfig | Mapping[str, Any] | str | Path | None
ROWS_COMPARED = 1024


@contextlib.contextmanager
def sharded_loading(config: Settings = None, **overrides: Any) -> Iterator[None]:
    """Inside, `from_pretrained` reads no weights: each rank reads only its stages and shards when the model is prepared.

    The model has all its parameters, without values. It may be cast, frozen and given to a Trainer with
    `HFParallelCallback`, or to an Accelerator with `HFParallelPlugin`, of the same settings; it cannot run before. What
    cannot be read in parts (GGUF, pickled weights) is read whole, with a warning. In a run of one process, or without
    pipeline, tensor and expert parallelism, everything is as without it.

    Args:
        config: Settings as `HFParallelCallback` takes them: None (the YAML given to `accelerate launch`), a path, a
            recipe name, a mapping, or an `HFParallelConfig`.
        **overrides: Settings that win over `config`, such as `pp_size=2`.

    Raises:
        ConfigError: All problems of the settings at once.
        CheckpointError: From inside: a file is missing, truncated or of another model; names it and the tensor.

    Example:
        `with sharded_loading(): model = AutoModelForCausalLM.from_pretrained(name)`
    """
    resolved, _ = resolve_config(config, **overrides)
    if find_launch().world_size == 1 or resolved.weight_parts * resolved.ep_size == 1:
        yield
        return
    with replaced_loading(_Loading(resolved).load, _check_files):
        yield


def from_pretrained(name: str | Path, config: Settings = None, **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model of which each rank reads only its stages and shards, when it is prepared.

    It is `AutoModelForCausalLM.from_pretrained` inside of `sharded_loading`.

    Args:
        name: A folder or the name of a model.
        config: hf_parallel's settings, as of `HFParallelCallback`; None: the YAML given to `accelerate launch`.
        **kwargs: Arguments of `AutoModelForCausalLM.from_pretrained`, such as `dtype`.

    Raises:
        ConfigError, CheckpointError: For the reasons of `sharded_loading`.

    Example:
        `model = hf_parallel.from_pretrained("folder", dtype=torch.bfloat16)`
    """
    with sharded_loading(config):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    return model


@dataclass(frozen=True)
class _Loading:
    """Replaces transformers' loading of weights into a model on the meta device."""

    config: HFParallelConfig

    def load(
        self,
        stock: Any,
        model: PreTrainedModel,
        state_dict: Any,
        checkpoint_files: Sequence[str] | None,
        load_config: Any,
        *more: Any,
    ) -> Any:
        """Record where weights are; tensors that the checkpoint lacks are left to transformers, which makes them up."""
        reason = _why_whole(state_dict, checkpoint_files, load_config)
        if reason is not None:
            logger.warning(
                "hf_parallel: %s is loaded whole on every rank (%.1f GB), because %s.",
                type(model).__name__,
                sum(p.nbytes for p in model.parameters()) / 1e9,
                reason,
            )
            return stock(model, state_dict, checkpoint_files, load_config, *more)
        files = [Path(file) for file in checkpoint_files or ()]
        stored = {name: tensor for file in files for name, tensor in read_header(file).items()}
        _check_index(files, load_config.sharded_metadata, stored)
        shapes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in stored.items()}
        groups = groups_to_load(model, load_config.weight_mapping or (), stored)
        found = convert_and_load_state_dict_in_model(
            model=model, state_dict=shapes, load_config=replace(load_config, device_map={"": "meta"})
        )
        _refuse_damage(model, found[0], stored, groups, load_config.ignore_mismatched_sizes)
        _compare_ties(model, found[0].missing_keys, groups, stored)
        sources = _sources(model, groups, shapes, {key for key, *_ in found[0].mismatched_keys})
        Unread(self.config, stored, sources).settle(model)
        return found


def _why_whole(state_dict: Any, files: Sequence[str] | None, load_config: Any) -> str | None:
    if state_dict is not None or not files:
        return "its weights are given as tensors (GGUF files are unpacked as a whole)"
    if load_config.hf_quantizer is not None:
        return "it is quantised"
    if load_config.device_map is not None:
        return "device_map is given"
    if not all(str(file).endswith(".safetensors") for file in files):
        return f"{files[0]} is not a safetensors file. Save it once with save_pretrained"
    return None


def _check_files(stock: Any, *args: Any, **kwargs: Any) -> Any:
    """Find the files of a checkpoint as transformers does, and look at each before anything is made of them.

    Raises:
        CheckpointError: The index or a file is missing or damaged.
    """
    try:
        found = stock(*args, **kwargs)
    except (json.JSONDecodeError, KeyError) as error:
        where = kwargs.get("pretrained_model_name_or_path", args[0] if args else "the checkpoint")
        raise CheckpointError(f"{where}: its index cannot be read: {error!r}. It is truncated or damaged.") from error
    for file in found[0] or ():
        if str(file).endswith(".safetensors"):
            read_header(Path(file))
    return found


def _check_index(files: Sequence[Path], index: Mapping[str, Any] | None, stored: Mapping[str, Stored]) -> None:
    """Refuse files that do not hold what the index says."""
    for name, file in ((index or {}).get("weight_map") or {}).items():
        if name not in stored or stored[name].path.name != Path(file).name:
            folder = files[0].parent
            raise CheckpointError(
                f"{folder / Path(file).name} does not hold {name}, which the index says it does. The folder is half written "
                "or mixed from two; copy or save it again."
            )


def _refuse_damage(
    model: PreTrainedModel, info: Any, stored: Mapping[str, Stored], groups: Mapping[str, Group], any_shape: bool
) -> None:
    """Refuse a checkpoint that transformers would complete with random numbers although it is damaged.

    Raises:
        CheckpointError: Names the file and the tensor.
    """
    folder = next(iter(stored.values())).path.parent if stored else Path()
    for key, found, needed in sorted(info.mismatched_keys, key=lambda item: item[0]):
        if not any_shape:
            path = stored[groups[key].names[0]].path if key in groups else folder
            raise CheckpointError(
                f"{path}: {key} has shape {tuple(found)}, the model needs {tuple(needed)}. The config is of another model: take "
                "its own, or name another checkpoint."
            )
    tied = set(model.all_tied_weights_keys)
    missing = {key for key in info.missing_keys if key not in tied}
    known = set(model.state_dict())
    if len(missing) > len(known) / 2:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(known)} tensors of {type(model).__name__} are not in it, among them "
            f"{min(missing)}. It holds another model ({min(stored, default='nothing')})."
        )
    kinds = {re.sub(r"\d+", "*", key): key for key in known - missing}
    for key in sorted(missing):
        like = kinds.get(re.sub(r"\d+", "*", key))
        if like is not None:
            raise CheckpointError(
                f"{folder}: {key} is in none of its files and not in its index, while {like} is. The checkpoint is "
                "incomplete; copy or save it again."
            )


def _compare_ties(
    model: PreTrainedModel, missing: set[str], groups: Mapping[str, Group], stored: Mapping[str, Stored]
) -> None:
    """Tie what is stored twice with equal values, and untie what differs, as transformers does with values at hand."""
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing or target not in groups or source not in groups:
            continue
        pair = [stored[groups[name].names[0]] for name in (target, source)]
        if _are_equal(*pair):
            missing.add(target)
        else:
            logger.warning(
                "hf_parallel: %s and %s are tied by the config and have different values: not tied.", target, source
            )
            model.all_tied_weights_keys.pop(target)


def _are_equal(first: Stored, second: Stored) -> bool:
    """Whether two matrices are equal, a few rows at a time."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    reader, rows = Reader(), first.shape[0] if first.shape else 1
    for row in range(0, rows, ROWS_COMPARED):
        ranges = [(row, min(ROWS_COMPARED, rows - row))] if first.shape else None
        if not torch.equal(reader.read(first, 0, ranges), reader.read(second, 0, ranges)):
            return False
    return True


def _sources(
    model: PreTrainedModel, groups: Mapping[str, Group], shapes: Mapping[str, torch.Tensor], refused: set[str]
) -> dict[str, Source]:
    known = model.state_dict()
    sources = {}
    for group in groups.values():
        made = group.convert(shapes, model)
        for name in made:
            if name in known and name not in refused:
                sources[name] = Source(group, known[name].dtype, tuple(known[name].shape))
    return sources
