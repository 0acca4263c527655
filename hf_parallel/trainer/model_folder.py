"""`save_pretrained` of a model that no rank has whole: all ranks call it, rank 0 writes."""

from __future__ import annotations

import functools
import inspect
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.checkpoints.agree import together
from hf_parallel.checkpoints.folders import STAGING
from hf_parallel.checkpoints.weights.adapters import gather_adapters, has_adapters
from hf_parallel.checkpoints.weights.gather import WEIGHTS, gather_tensors
from hf_parallel.checkpoints.weights.write import move_in, plan_export, streams, write_weights
from hf_parallel.data_parallel.fsdp_parts import local_of, rows_of
from hf_parallel.engine.run.engine import Engine
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.meeting import Meeting
from hf_parallel.guards.weights.state_dicts import mark_parts
from hf_parallel.pipeline_parallel.run.cut import with_dropped_names
from hf_parallel.tensor_parallel.run.parts import shard_of
from hf_parallel.trainer.given_state import refuse_part


def is_whole(engine: Engine) -> bool:
    """Whether every rank holds the whole model, equal on all, so that one may save it by itself."""
    replicas = engine.gradients.replicas
    return engine.mesh.model_group is None and replicas.sharded is None and replicas.local is None


def install_saving(engine: Engine, save: Callable[..., Any] | None, meeting: Meeting) -> None:
    """Put a `save_pretrained` on a model that gathers what ranks hold in parts, and waits for what is still arriving.

    Args:
        engine: The model's engine.
        save: The model's own `save_pretrained`, as it was before; None if it has none.
        meeting: Notices that some ranks did not call it.
    """
    if save is not None:
        vars(engine.model)["save_pretrained"] = functools.partial(_save_pretrained, engine, save, meeting)
    if engine.mesh.model_group is not None or engine.gradients.replicas.sharded is not None:
        held = engine.attachment.ledger.held_by(engine.mesh.pp_rank)
        tied = [entry.aliases for entry in held if len(entry.aliases) > 1]
        mark_parts(engine.model, functools.partial(take_whole, engine), shard_of, tied)


@dataclass(frozen=True)
class Counts:
    """Counts and names of the parameters of the whole model, taken before it is cut and sharded.

    Args:
        of_peft: All of them as PEFT counts; None for a model without adapters.
        trained: Names of those that are trained.
        embeddings: Names of the weights of embeddings.
    """

    of_peft: int | None
    trained: frozenset[str]
    embeddings: frozenset[str]


def counts_of(model: Any) -> Counts:
    """Count the parameters of a whole model."""
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    embeddings = frozenset(
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    )
    peft = has_adapters(model) and hasattr(model, "get_nb_trainable_parameters")
    return Counts(int(model.get_nb_trainable_parameters()[1]) if peft else None, trained, embeddings)


def install_counts(engine: Engine, whole: Counts) -> None:
    """Let a model count the parameters of the whole where a rank has a part of them (`num_parameters`, and PEFT's).

    Args:
        engine: The model's engine.
        whole: Counts of the model before it was cut and sharded.
    """
    sizes = {entry.name: math.prod(entry.shape) for entry in engine.attachment.ledger if entry.kind == "param"}

    def trained() -> set[str]:
        """Names of trained parameters; on other stages, those that were trained when the model was prepared."""
        here = engine.attachment.parameters
        flags = {name: here[name].requires_grad if name in here else name in whole.trained for name in sizes}
        return {name for name, trains in flags.items() if trains}

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        names = (trained() if only_trainable else sizes.keys()) - (whole.embeddings if exclude_embeddings else set())
        return sum(sizes[name] for name in names)

    def get_nb_trainable_parameters() -> tuple[int, int | None]:
        return sum(sizes[name] for name in trained()), whole.of_peft

    if engine.mesh.model_group is not None:
        own = vars(engine.model)
        if hasattr(engine.model, "num_parameters") and not getattr(engine.model, "is_loaded_in_4bit", False):
            own["num_parameters"] = num_parameters
        if whole.of_peft is not None:
            own["get_nb_trainable_parameters"] = get_nb_trainable_parameters


@torch.no_grad()
def take_whole(engine: Engine, state: dict[str, Any], prefix: str) -> None:
    """Put this rank's parts in the place of whole tensors in a state dict that is about to be loaded.

    Args:
        engine: The model's engine.
        state: To be changed: whole tensors under any of their names, this rank's own parts, or both.
        prefix: Prefix of its keys.
    """
    attachment, mesh = engine.attachment, engine.mesh
    held: dict[str, torch.Tensor] = {**attachment.parameters, **attachment.buffers}
    here = {
        name for name, _ in (*engine.model.named_parameters(remove_duplicate=False), *engine.model.named_buffers())
    }
    for entry in attachment.ledger:
        names = [prefix + name for name in entry.state_names]
        given = [state[name] for name in names if isinstance(state.get(name), torch.Tensor)]
        if not given:
            continue
        tensor, mine = held.get(entry.name), given[-1]  # torch copies one after the other, and the last one stays
        for alias, name in zip(entry.aliases, names, strict=True):
            if alias not in here:
                state.pop(name, None)
        if tensor is None:
            continue
        if tuple(mine.shape) == entry.shape and not isinstance(mine, DTensor):
            part = mine if entry.spec is None else entry.spec.shard(mine, mesh.parts.size, mesh.parts.rank)
            local_of(tensor).copy_(rows_of(tensor, part))
            mine = tensor.detach()
        for alias, name in zip(entry.aliases, names, strict=True):
            if alias in here:
                state[name] = mine


def _save_pretrained(engine: Engine, save: Callable[..., Any], meeting: Meeting, *args: Any, **kwargs: Any) -> Any:
    """Save as the model's own method does; where no rank holds the whole model, all must call it, without `state_dict`."""
    if kwargs.get("state_dict"):  # stock empties it, and a `_save` of the caller's may go on with it
        kwargs["state_dict"] = dict(kwargs["state_dict"])
    if is_whole(engine):
        engine.gradients.replicas.synchronise()
        return save(*args, **kwargs)
    options = dict(inspect.signature(save).bind_partial(*args, **kwargs).arguments)
    for name, parameter in inspect.signature(save).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            options |= options.pop(name, {})
    writes, folder = engine.mesh.rank == 0, Path(options.pop("save_directory"))
    options.pop("is_main_process", None)
    state = options.pop("state_dict", None)
    if state is not None:
        # What `accelerator.get_state_dict` gives to the other ranks is empty: they would write over rank 0's files.
        if not writes and not state:
            return None
        refuse_part(state, engine.attachment.ledger, engine.mesh.pp_rank)
        with _names_of_all(engine.model):
            return save(folder, state_dict=state, **options)
    meeting.meet("model.save_pretrained()")
    if streams(engine.model) and options.keys() <= {"max_shard_size", "safe_serialization", "save_function"}:
        given = {key: value for key, value in options.items() if key == "max_shard_size"}
        engine.complete_config()
        stream_model(engine, folder, functools.partial(save, state_dict={}), writes=writes, **given)
        return None
    if options.get("path_initial_model_for_weight_conversion"):
        raise UnsupportedError(
            "save_pretrained(path_initial_model_for_weight_conversion=...) loads a second adapter into the model, which no rank "
            "has whole. Save it without, load the folder with PeftModel.from_pretrained, and convert it there."
        )
    state = state_to_write(engine, everything=bool(options))
    with engine.attachment.watchdog.waiting("waits for rank 0 to save the model"), together(engine.mesh, folder):
        if writes:
            with _names_of_all(engine.model):
                save(folder, state_dict=state, **options)
    return None


def _names_of_all(model: nn.Module) -> AbstractContextManager[None]:
    """PEFT looks in the model for the names of what it saves, and other stages may hold it."""
    return with_dropped_names(model) if has_adapters(model) else nullcontext()


def state_to_write(engine: Engine, *, everything: bool = False) -> dict[str, Any]:
    """The `state_dict` argument of `save_pretrained` on world rank 0, {} elsewhere; collective.

    Args:
        engine: The model's engine.
        everything: Whether PEFT may write any tensor, because it was told something about what to write.
    """
    if not has_adapters(engine.model):
        return whole_state(engine)
    attachment = engine.attachment
    held = attachment.to_gather()
    with attachment.watchdog.waiting("waits for the adapters of the other ranks"):
        return gather_adapters(engine.model, attachment.ledger, held, engine.mesh, everything=everything)


def whole_state(engine: Engine) -> dict[str, Any]:
    """The full model's weights on world rank 0, {} elsewhere; collective."""
    attachment = engine.attachment
    held = attachment.to_gather()
    with attachment.watchdog.waiting("waits for the weights of the other ranks"):
        return gather_tensors(attachment.ledger, held, engine.mesh)


def stream_model(
    engine: Engine, folder: Path, save_rest: Callable[[Path], Any], *, writes: bool, **options: Any
) -> None:
    """Write all but the weights, then the weights one by one, into a staging folder inside `folder`; collective.

    Args:
        engine: The model's engine.
        folder: Folder to write to.
        save_rest: Writes all but the weights into a folder.
        writes: Whether this rank writes.
        **options: Options of `plan_export`.
    """
    attachment = engine.attachment
    model: Any = engine.model
    held = attachment.to_gather()
    staging, export = folder / STAGING, plan_export(model, attachment.ledger, **options)
    waiting = attachment.watchdog.waiting
    with waiting("waits for rank 0 to prepare the folder of the model"), together(engine.mesh, folder):
        if writes:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            save_rest(staging)
    into = staging if writes else None
    write_weights(export, into, model, attachment.ledger, held, attachment.mesh, attachment.watchdog)
    with waiting("waits for rank 0 to put the model in place"), together(engine.mesh, folder):
        if writes:
            move_in(staging, folder, export)


def write_model(engine: Engine, save: Callable[..., Any] | None, folder: Path) -> None:
    """Write the whole model into a folder that exists and is empty; collective.

    Args:
        engine: The model's engine.
        save: The model's own `save_pretrained`; None if it has none, and then the weights alone are written.
        folder: Folder to write to.
    """
    model: nn.Module = engine.model
    if save is not None and streams(model):
        engine.complete_config()
        stream_model(engine, folder, functools.partial(save, state_dict={}), writes=engine.mesh.rank == 0)
        return
    state = whole_state(engine) if save is None else state_to_write(engine)
    with engine.attachment.watchdog.waiting("waits for rank 0 to write the model"), together(engine.mesh, folder):
        if engine.mesh.rank == 0 and save is not None:
            with _names_of_all(engine.model):
                save(folder, state_dict=state)
        elif engine.mesh.rank == 0:
            save_file({name: tensor.clone() for name, tensor in state.items()}, folder / WEIGHTS)
