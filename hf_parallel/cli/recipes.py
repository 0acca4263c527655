"""The `hf-parallel recipes` command: the recipes that come with the package, and what each of them does."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import find_recipe, list_recipes, read_recipe


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print the path of this recipe's file only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the recipes that come with the package, or say where one is."""
    if name is not None:
        try:
            typer.echo(str(find_recipe(name)))
        except ConfigError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        return
    rows = [facts(name) for name in list_recipes()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("recipe", "layout and settings; memory of a GPU; what is assumed", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for row in rows:
        settings = f"{row['layout']}{', ' * bool(row['also'])}{row['also']}"
        memory = f"; {row['gpu_memory']} GB" if row["gpu_memory"] else ""
        table.add_row(row["name"], f"{settings}{memory}\n[dim]{row['assumes']}[/dim]")
    Console(highlight=False).print(table)


def facts(name_or_path: str) -> dict[str, Any]:
    """Facts about a valid file, for tables.

    Args:
        name_or_path: A recipe or a file.

    Raises:
        ConfigError: It is not valid.
    """
    path = find_recipe(name_or_path)
    checked, accelerate = read_recipe(path)
    text = path.read_text(encoding="utf-8")
    processes = accelerate.get("num_processes")
    found: dict[str, Any] = {"name": path.stem, "path": str(path), "num_processes": processes}
    found |= {"tp_size": checked.tp_size, "pp_size": checked.pp_size, "dp_size": None}
    found |= {"sp_size": checked.sp_size} if checked.sp_size > 1 else {}
    if isinstance(processes, int) and processes > 0:
        found["dp_size"] = checked.dp_size(processes)
    found["layout"] = _layout(checked, found["dp_size"])
    found["also"] = ", ".join(_also(checked, accelerate.get("mixed_precision")))
    assumes = re.search(r"^# Assumes:(.*)", text, re.MULTILINE)
    found["assumes"] = assumes[1].strip() if assumes else ""
    found["gpu_memory"] = _gpu_memory(text)
    found["fingerprint"] = checked.fingerprint()
    found["config"] = checked.model_dump(mode="json")
    return found


def _layout(config: HFParallelConfig, dp_size: int | None) -> str:
    if config.layout == "auto":
        return "auto"
    sequence = f" x sp {config.sp_size}" if config.sp_size > 1 else ""
    experts = f", ep {config.ep_size}" if config.ep_size > 1 else ""  # among the replicas
    return f"tp {config.tp_size} x pp {config.pp_size}{sequence} x dp {dp_size or '(processes / tp / pp)'}{experts}"


def _also(config: HFParallelConfig, precision: object) -> list[str]:
    """List a recipe's features besides its layout: schedule, ZeRO, offload, recomputation, compression, precision."""
    zero = config.zero
    found: list[str] = []
    if config.pp_size > 1:
        found.append(config.pipeline.schedule)
    if config.tensor_parallel.sequence_parallel:
        found.append("sequence parallel")
    if zero.stage:
        found.append(f"ZeRO {zero.stage}" + (f" ({zero.engine})" if zero.engine != "auto" else ""))
    offloaded = {"optimizer": zero.offload_optimizer, "parameters": zero.offload_param}
    where = {place for place in offloaded.values() if place != "none"}
    if where:
        what = " and ".join(name for name, place in offloaded.items() if place != "none")
        found.append(f"offload of {what} to {'/'.join(sorted(where))}")
    if config.activation_checkpointing.every is not None:
        found.append(f"checkpointing every {config.activation_checkpointing.every}")
    if config.gradient_compression.method != "none":
        found.append(f"gradients {config.gradient_compression.method}")
    if config.local_sgd.sync_every > 1:
        found.append(f"local steps {config.local_sgd.sync_every}")
    if precision in ("bf16", "fp16"):
        found.append(str(precision))
    return found


def _gpu_memory(text: str) -> str:
    """The sum that the head of a GPU recipe ends its memory with: `8.5 GB of 24`."""
    head = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    found = re.search(r"GPU: .*? = ([\d.]+ GB of \d+)", head)
    return found[1] if found else ""
