"""The adapters of a PEFT model, to and from the files that PEFT writes; the model that they are on is not in a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_parallel.checkpoints.reader import Reader, Stored
from hf_parallel.checkpoints.weights.gather import gather_tensors
from hf_parallel.data_parallel.fsdp_parts import local_of, rows_of
from hf_parallel.errors import CheckpointError
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.one_rank import on_rank_zero
from hf_parallel.pipeline_parallel.run.cut import with_dropped_names


ADAPTERS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
DEFAULT = "default"  # PEFT writes the adapter of this name into the folder itself


def has_adapters(model: object) -> bool:
    """Whether it is a PEFT model, which saves only its adapters."""
    return hasattr(model, "peft_config")


def adapter_names(model: Any, ledger: Ledger) -> dict[str, dict[str, str | None]]:
    """Adapter -> key in its file -> name of the tensor in the model, None if PEFT makes it of others; collective.

    PEFT picks and names them itself, from a state dict without values. Rank 0 asks it: PEFT may look for the base model's
    config on the hub, and ranks may get different answers.
    """

    def find() -> dict[str, dict[str, str | None]]:
        from peft import PeftMixedModel, PeftModel, get_peft_model_state_dict

        # transformers writes the adapters that it put on a model itself (`add_adapter`) as those of a PeftModel.
        lead = "" if isinstance(model, (PeftModel, PeftMixedModel)) else "base_model.model."
        stands = {}
        for name in ledger.names:
            entry = ledger.find(name)
            stands[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        name_of = {id(stand): name for name, stand in stands.items()}
        found = {}
        with warnings.catch_warnings(), with_dropped_names(model):
            warnings.simplefilter("ignore")  # what it warns of it says again when it writes
            for adapter in model.peft_config:
                picked = get_peft_model_state_dict(model, state_dict=dict(stands), adapter_name=adapter)
                found[adapter] = {lead + key: name_of.get(id(stand)) for key, stand in picked.items()}
        return found

    return on_rank_zero(find, "asks PEFT what belongs to the adapters", explain=CheckpointError)


def gather_adapters(
    model: Any, ledger: Ledger, held: Mapping[str, torch.Tensor], mesh: Mesh, *, everything: bool
) -> dict[str, torch.Tensor]:
    """The part of the model's state dict that PEFT writes, whole, on world rank 0; {} elsewhere. Collective.

    Args:
        model: The PEFT model, cut and sharded.
        ledger: Its ledger.
        held: Ledger name -> this rank's tensor or shard.
        mesh: This rank's mesh.
        everything: Whether to gather all of it.
    """
    chosen = [] if everything else [n for names in adapter_names(model, ledger).values() for n in names.values()]
    # What PEFT makes of others may need any tensor.
    whole = everything or None in chosen
    wanted = None if whole else {ledger.find(name).name for name in chosen if name is not None}
    state = gather_tensors(ledger, held, mesh, wanted=lambda entry: wanted is None or entry.name in wanted)
    return {name: state[entry.name] for name in ledger.names if (entry := ledger.find(name)).name in state}


@torch.no_grad()
def load_adapters(
    folder: str | Path, model: Any, ledger: Ledger, held: Mapping[str, torch.Tensor], mesh: Mesh
) -> None:
    """Copy this rank's part of every adapter out of a checkpoint of any layout; collective.

    Args:
        folder: The checkpoint.
        model: The PEFT model, cut and sharded.
        ledger: Its ledger.
        held: Ledger name -> this rank's tensor or shard, to be overwritten.
        mesh: This rank's mesh.

    Raises:
        CheckpointError: A file is missing, unreadable, or of other adapters.
    """
    for adapter, names in adapter_names(model, ledger).items():
        path = Path(folder, ADAPTERS) if adapter == DEFAULT else Path(folder, adapter, ADAPTERS)
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist: the checkpoint has no adapter {adapter!r}. Resume from another one."
            )
        made = [key for key, name in names.items() if name is None]
        if made:
            raise CheckpointError(
                f"{path}: PEFT makes {len(made)} of its tensors of others when it saves (first: {made[0]}), so training "
                "cannot go on from it. Start a new run from the adapters with PeftModel.from_pretrained."
            )
        entries = {key: ledger.find(name) for key, name in names.items() if name is not None}
        with Reader() as reader:
            saved = reader.tensors(path)
            _check(path, saved, entries)
            for key, entry in entries.items():
                if entry.name in held:
                    local_of(held[entry.name]).copy_(rows_of(held[entry.name], _read(reader, saved[key], entry, mesh)))


def _check(path: Path, saved: Mapping[str, Stored], entries: Mapping[str, Entry]) -> None:
    odd = sorted(saved.keys() ^ entries.keys()) or [
        key for key, entry in entries.items() if saved[key].shape != entry.shape
    ]
    if odd:
        raise CheckpointError(
            f"{path} is of other adapters: {len(odd)} tensors are on one side only, or of other shapes (first: {odd[0]}). "
            "Resume with the LoraConfig it was saved with."
        )


def _read(reader: Reader, stored: Stored, entry: Entry, mesh: Mesh) -> torch.Tensor:
    """Read this tensor-parallel rank's part of a tensor."""
    spec = entry.spec
    if spec is None:
        return reader.read(stored)
    return reader.read(stored, spec.dim, spec.ranges(mesh.parts.size, mesh.parts.rank))
