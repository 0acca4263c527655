"""The `hf-parallel prebuild` command: compile what a DeepSpeed run needs before its processes start."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from hf_parallel.cli.answers import log_lines_on_stderr
from hf_parallel.deepspeed.ops import build, needed_ops
from hf_parallel.deepspeed.worker import refuse_missing_deepspeed
from hf_parallel.errors import ConfigError, ParallelError
from hf_parallel.machine.facts import extensions_folder, gpus
from hf_parallel.settings.recipes import find_recipe, read_recipe


def prebuild(
    file: Annotated[str, typer.Argument(help="An accelerate config file, or the name of a recipe.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compile DeepSpeed's ops for a file with zero.engine: deepspeed, in this process; takes minutes the first time."""
    try:
        names, on_cpu = _ops_of(file)
        refuse_missing_deepspeed()
        if on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"
        with log_lines_on_stderr():  # the compiler's too
            seconds = build(names)
    except ParallelError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps({"folder": str(extensions_folder()), "seconds": seconds}, indent=2))
        return
    for name, taken in seconds.items():
        typer.echo(f"{name}: ready in {extensions_folder()} ({taken:.1f} s)")
    if not seconds:
        typer.echo(f"{file}: nothing has to be compiled")


def _ops_of(file: str) -> tuple[list[str], bool]:
    """Name the ops that a file's run compiles, and whether it runs on the CPU.

    Raises:
        ConfigError: It is not a file for DeepSpeed.
    """
    path = find_recipe(file)
    config, accelerate = read_recipe(path)
    if config.zero.engine != "deepspeed":
        raise ConfigError(
            f"{path}: zero.engine={config.zero.engine} compiles nothing. Set zero.engine to deepspeed, or start the run."
        )
    on_cpu = accelerate.get("use_cpu") is True or not gpus()
    return needed_ops(config, on_cpu=on_cpu), on_cpu
