"""The `hf-parallel init` command: a folder with a recipe, a script and the schema, ready to be launched."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Annotated, Final

import typer

from hf_parallel.cli.answers import writing
from hf_parallel.cli.schema import file_schema
from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import gpus
from hf_parallel.settings.recipes import find_recipe, recipes_folder


SCRIPT: Final = "train.py"
SCHEMA: Final = "settings.schema.json"


def init(
    folder: Annotated[Path, typer.Argument(help="The folder; it is made if it does not exist.")] = Path(),
    recipe: Annotated[
        str | None, typer.Option(help="A recipe, or a file.  [default: ddp with several GPUs, else cpu_pp2]")
    ] = None,
) -> None:
    """Copy a recipe and a script into a folder, ready to be launched; nothing that is there is replaced."""
    try:
        source = find_recipe(recipe or default_recipe())
        copies = {SCRIPT: recipes_folder() / SCRIPT, source.name: source}
        present = [name for name in (*copies, SCHEMA) if (folder / name).exists()]
        if present:
            raise ConfigError(
                f"{folder}: it has {', '.join(present)} already. Name another folder, or move what is there."
            )
        with writing(folder / SCRIPT):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(copies[SCRIPT], folder / SCRIPT)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    settings = source.read_text(encoding="utf-8").replace("recipes/", "")
    started = f"{SCRIPT} --experts 4" if re.search(r"^ +ep_size:", settings, re.MULTILINE) else SCRIPT
    settings = settings.replace("SCRIPT.py", started)
    if recipe is None:
        settings = re.sub(
            r"^num_processes: \d+", f"num_processes: {max(len(gpus()), 2)}", settings, flags=re.MULTILINE
        )
    text = f"# yaml-language-server: $schema={SCHEMA}\n{settings}"
    (folder / source.name).write_text(text, encoding="utf-8")
    (folder / SCHEMA).write_text(json.dumps(file_schema(), indent=2) + "\n", encoding="utf-8")
    typer.echo(f"wrote {', '.join(str(folder / name) for name in (SCRIPT, source.name, SCHEMA))}")
    typer.echo(f"check it:  hf-parallel validate {folder / source.name}")
    typer.echo(f"start it:  accelerate launch --config_file {folder / source.name} {folder / started}")


def default_recipe() -> str:
    """The recipe that runs here: replicas on several GPUs, else two stages on the CPU."""
    return "ddp" if len(gpus()) > 1 else "cpu_pp2"
