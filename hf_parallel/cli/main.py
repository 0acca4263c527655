"""The `hf-parallel` command: write, check and list accelerate config files with our section."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from hf_parallel.cli.calibrate import calibrate
from hf_parallel.cli.doctor import doctor
from hf_parallel.cli.dry_run import dry_run
from hf_parallel.cli.export import export
from hf_parallel.cli.merge import merge
from hf_parallel.cli.plan import plan
from hf_parallel.cli.prebuild import prebuild
from hf_parallel.cli.recipe_file import accelerate_settings, write_recipe
from hf_parallel.cli.schedule import schedule
from hf_parallel.cli.validate import validate
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import find_recipe, list_recipes, read_recipe


app = typer.Typer(
    help="3D parallel training inside a stock transformers.Trainer.", no_args_is_help=True, add_completion=False
)

app.command()(schedule)
app.command()(export)
app.command()(doctor)
app.command()(merge)
app.command()(validate)
app.command()(plan)
app.command()(calibrate)
app.command(name="dry-run")(dry_run)
app.command()(prebuild)

T = TypeVar("T", int, str, bool)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print the path of this recipe's file only.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes that come with the package, or say where one is."""
    if name is not None:
        try:
            typer.echo(str(find_recipe(name)))
        except ConfigError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        return
    rows = [_facts(name) for name in list_recipes()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("recipe", "layout", "assumes")
    for row in rows:
        table.add_row(row["name"], row["layout"], row["assumes"])
    Console().print(table)


@app.command()
def config(
    output: Annotated[
        Path | None, typer.Option(help="File to write; accelerate's default config file if not given.")
    ] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="Processes on all machines.")] = None,
    tp_size: Annotated[int | None, typer.Option(min=1, help="Ranks that share each layer.")] = None,
    pp_size: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    num_microbatches: Annotated[str | None, typer.Option(help="Microbatches per forward: an integer or auto.")] = None,
    mixed_precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16.")] = None,
    use_cpu: Annotated[bool | None, typer.Option("--use-cpu/--use-gpu", help="Train on the CPU.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: defaults for what is not given, overwrite.")
    ] = False,
) -> None:
    """Write an accelerate config file; asks for every setting that is not given as an option."""
    from accelerate.commands.config.config_args import default_yaml_config_file

    ask = _Asker(yes)
    path = output or Path(default_yaml_config_file)
    if path.exists() and not yes:
        typer.confirm(f"{path} exists. Overwrite it?", abort=True)
    processes = ask("Processes on all machines", num_processes, 2)
    pipeline_stages = ask("Pipeline stages (pp_size)", pp_size, 1)
    microbatches: str | int = num_microbatches or "auto"
    if pipeline_stages > 1:
        microbatches = ask("Microbatches per forward (an integer or auto)", num_microbatches, "auto")
    settings = {
        "tp_size": ask("Ranks that share each layer (tp_size)", tp_size, 1),
        "pp_size": pipeline_stages,
        "pipeline": {"num_microbatches": microbatches},
    }
    cpu = ask("Train on the CPU", use_cpu, False)
    precision = ask("Mixed precision (no, bf16, fp16)", mixed_precision, "no")
    if precision not in ("no", "bf16", "fp16"):
        raise typer.BadParameter(f"{precision!r}: expected no, bf16 or fp16.", param_hint="--mixed-precision")
    accelerate = accelerate_settings(processes, precision, cpu)
    try:
        write_recipe(path, HFParallelConfig.from_mapping(settings, source="answers"), accelerate)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"wrote {path}: {_facts(str(path))['layout']}")
    typer.echo(f"start with: accelerate launch --config_file {path} SCRIPT.py")


class _Asker:
    """Asks on the terminal for what was not given as an option; asks nothing after `--yes`."""

    def __init__(self, yes: bool) -> None:
        self.yes = yes

    def __call__(self, question: str, given: T | None, default: T) -> T:
        if given is not None:
            return given
        if self.yes:
            return default
        answer: T = typer.prompt(question, default=default, type=type(default))
        return answer


def _facts(name_or_path: str) -> dict[str, Any]:
    """Return what there is to say about a valid file."""
    path = find_recipe(name_or_path)
    checked, accelerate = read_recipe(path)
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    processes = accelerate.get("num_processes")
    facts: dict[str, Any] = {"name": path.stem, "path": str(path), "num_processes": processes}
    facts |= {"tp_size": checked.tp_size, "pp_size": checked.pp_size, "dp_size": None}
    if isinstance(processes, int) and processes > 0:
        facts["dp_size"] = checked.dp_size(processes)
    copies = facts["dp_size"] or "(processes / tp / pp)"
    facts["layout"] = f"tp {checked.tp_size} x pp {checked.pp_size} x dp {copies}"
    facts["assumes"] = first_line.removeprefix("# Assumes:").strip() if first_line.startswith("# Assumes:") else ""
    facts["fingerprint"] = checked.fingerprint()
    facts["config"] = checked.model_dump(mode="json")
    return facts


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
