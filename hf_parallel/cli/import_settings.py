"""The `hf-parallel import` command: a file of ours from one of DeepSpeed, FSDP or Megatron-LM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hf_parallel.cli.foreign_settings import Taken, from_accelerate, from_deepspeed
from hf_parallel.cli.recipe_file import accelerate_settings, write_recipe
from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import gpus
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.file import MAX_JSON_BYTES, parse_json, parse_yaml, read_bounded


def import_settings(
    file: Annotated[
        Path, typer.Argument(help="A DeepSpeed JSON, or an accelerate file with FSDP, DeepSpeed or Megatron-LM.")
    ],
    output: Annotated[Path, typer.Option(help="File to write; is not replaced.")] = Path("imported.yaml"),
    num_processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes.  [default: the file's, else the GPUs of this machine, else two copies of the model]",
        ),
    ] = None,
    use_cpu: Annotated[bool | None, typer.Option("--use-cpu/--use-gpu", help="Train on the CPU.")] = None,
) -> None:
    """Write what another engine's settings are here; what has no place here is named with what to do instead."""
    try:
        if output.exists():
            raise ConfigError(f"{output}: is there already. Name another file with --output.")
        taken = read_foreign(file)
        accelerate = _accelerate(taken, num_processes, use_cpu)
        config = _config(taken)
        write_recipe(output, config, accelerate, f"# From {file.name}, by `hf-parallel import`.\n")
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    for note in taken.notes:
        typer.echo(f"not taken over: {note}", err=True)
    settings = yaml.safe_dump(config.to_yaml_section(), default_flow_style=True, width=1000).strip()
    typer.echo(f"wrote {output}: {settings}")


def read_foreign(file: Path) -> Taken:
    """The settings of a file, by its kind.

    Raises:
        ConfigError: It cannot be read, or its engine is not known.
    """
    is_json = file.suffix == ".json"
    text = read_bounded(file, MAX_JSON_BYTES, "a DeepSpeed JSON or an accelerate config")
    content = parse_json(text, file) if is_json else parse_yaml(text, file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a mapping, found {type(content).__name__}. Name a settings file.")
    try:
        return from_deepspeed(content) if is_json else from_accelerate(content)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _config(taken: Taken) -> HFParallelConfig:
    """The settings of hf_parallel; DeepSpeed goes on to do what only it can."""
    try:
        return HFParallelConfig.from_mapping(taken.section, source="imported")
    except ConfigError:
        zero = taken.section.get("zero", {})
        if not zero.get("stage"):
            raise
        try:
            with_engine = HFParallelConfig.from_mapping(taken.section | {"zero": zero | {"engine": "deepspeed"}})
        except ConfigError:
            with_engine = None
        if with_engine is None:
            raise
        taken.notes.append(
            "the engine of ZeRO is still DeepSpeed (zero.engine: deepspeed), for what it alone offloads"
        )
        return with_engine


def _accelerate(taken: Taken, num_processes: int | None, use_cpu: bool | None) -> dict[str, Any]:
    ours = taken.section
    copies = (
        2 * (ours.get("tp_size") or 1) * (ours.get("pp_size") or 1)
    )  # with fewer ZeRO would have nothing to share out
    processes = num_processes or taken.accelerate.get("num_processes") or len(gpus()) or copies
    precision = str(taken.accelerate.get("mixed_precision", "no"))
    on_cpu = bool(taken.accelerate.get("use_cpu", False)) if use_cpu is None else use_cpu
    machines = taken.accelerate.get("num_machines", 1)
    found = accelerate_settings(processes, precision, on_cpu, nodes=machines) | {"distributed_type": "MULTI_GPU"}
    given = {key: value for key, value in taken.accelerate.items() if value is not None}
    return found | given | {"num_processes": processes, "use_cpu": on_cpu}
