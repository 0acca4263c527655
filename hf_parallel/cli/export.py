"""The `hf-parallel export` command: a recipe's ZeRO and precision settings in the words of another engine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
import yaml

from hf_parallel.cli.answers import log_lines_on_stderr
from hf_parallel.cli.engine_configs import Target, arguments_for, to_accelerate, to_deepspeed, to_fsdp
from hf_parallel.deepspeed.keys import zero_keys
from hf_parallel.errors import ParallelError
from hf_parallel.settings.recipes import read_recipe


def export(
    file: Annotated[str, typer.Argument(help="An accelerate config file with our section, or the name of a recipe.")],
    to: Annotated[Target, typer.Option(help="deepspeed, fsdp or accelerate.")],
) -> None:
    """Print the DeepSpeed JSON, FSDP2 arguments or accelerate YAML that a file's ZeRO settings amount to."""
    try:
        config, accelerate = read_recipe(file)
        found: dict[str, Any]
        with log_lines_on_stderr():  # DeepSpeed logs to stdout when it is imported
            keys = None if to == "fsdp" else zero_keys()
        if to == "deepspeed":
            found = to_deepspeed(config, keys)
        elif to == "fsdp":
            found = to_fsdp(config, accelerate)
        else:
            found = to_accelerate(config, accelerate, keys)
    except ParallelError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    precision = str(accelerate.get("mixed_precision", "no")).lower()
    notes = arguments_for(config) if to == "deepspeed" or "deepspeed_config" in found else []
    if to == "deepspeed" and precision in ("bf16", "fp16"):
        notes.append(f"the precision is 'auto', so give TrainingArguments({precision}=True)")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(yaml.safe_dump(found, sort_keys=False).rstrip() if to == "accelerate" else json.dumps(found, indent=2))
