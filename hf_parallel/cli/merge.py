"""The `hf-parallel merge` command: a training checkpoint as one plain Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from hf_parallel.cli.answers import working
from hf_parallel.errors import CheckpointError


def merge(
    checkpoint: Annotated[Path, typer.Argument(help="A folder checkpoint-N of a training run.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make; must not exist, or be empty.")],
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 5GB.")] = "50GB",
    trainer_state: Annotated[
        bool, typer.Option("--trainer-state", help="Also write what a stock Trainer resumes from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Copy the model out of a checkpoint, one tensor in memory at a time; exit with 1 if something is damaged."""
    from hf_parallel.checkpoints.state.merge import merge as merge_checkpoint

    try:
        with working("merging"):
            found = merge_checkpoint(checkpoint, folder, max_shard_size, trainer_state=trainer_state)
    except (CheckpointError, ValueError, OSError) as error:
        typer.echo(str(error)[:1600], err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), **dataclasses.asdict(found)}, indent=2))
        return
    count = len(found.files)
    typer.echo(
        f"wrote {folder}: {found.num_tensors} tensors, {found.num_bytes / 1e9:.2f} GB, in {count} file{'s' * (count > 1)}"
    )
