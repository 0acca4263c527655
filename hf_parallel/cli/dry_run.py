"""The `hf-parallel dry-run` command: one rank's training step on fake tensors, counted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_parallel.cli.answers import log_lines_on_stderr, working
from hf_parallel.errors import ParallelError


if TYPE_CHECKING:
    from hf_parallel.dry_run.rank.report import DryRun


def dry_run(  # noqa: PLR0913 - each is an option
    file: Annotated[str, typer.Argument(help="An accelerate config file, or the name of a recipe.")],
    model: Annotated[str, typer.Option(help="A config.json, its folder, or a name.")],
    rank: Annotated[int, typer.Option(min=0, help="Which rank of the run.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch on each replica.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 2048,
    accumulation: Annotated[
        int | None, typer.Option(min=1, help="Batches of an optimizer step.  [default: the file's, else 1]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Parameters: fp32, half or autocast.  [default: as the file trains]")
    ] = None,
    mask: Annotated[
        bool, typer.Option("--mask", help="Give batches an attention mask, as padding collators do.")
    ] = False,
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Train LoRA of this rank on every linear layer instead of the model.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a step of one rank on tensors without memory: peak, messages, and where the host waits."""
    from hf_parallel.dry_run.rank.recipe import dry_run_recipe

    precision: Any = dtype
    try:
        with working("running a step on fake tensors"), log_lines_on_stderr():
            found: DryRun = dry_run_recipe(
                *(file, model),
                rank=rank,
                rows=rows,
                length=length,
                accumulation=accumulation,
                precision=precision,
                mask=mask,
                lora_rank=lora_rank,
            )
    except ParallelError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))
