"""The `hf-parallel` command: one table of commands, each imported when it is called."""

from __future__ import annotations

import difflib
import importlib
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import hf_parallel
from hf_parallel.cli.adapters_option import class_of_command


# Name -> its module, its function, and the first sentence of its help: `--help` imports none of them.
COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "init": ("init", "init", "Copy a recipe and a script into a folder, ready to be launched."),
    "config": ("config", "config", "Write an accelerate config file; asks for what is not given as an option."),
    "recipes": ("recipes", "recipes", "List the recipes that come with the package, or say where one is."),
    "validate": ("validate", "validate", "Check a config file and print every problem with its line."),
    "test": ("try_file", "try_file", "Train ten steps with a file on the real launcher and compare them with one process."),
    "doctor": ("doctor", "doctor", "Look at the GPUs, RAM, disks, networks and versions of this machine."),
    "plan": ("plan", "plan", "Rank the layouts of a cluster by predicted time, with their memory."),
    "calibrate": ("calibrate", "calibrate", "Measure this machine for half a minute, for `plan --calibrate`."),
    "verify": ("verify", "verify", "Train steps in one process and in a layout, and compare every tensor."),
    "dry-run": ("dry_run", "dry_run", "Count memory, messages and waits of one rank's step on fake tensors."),
    "schedule": ("schedule", "schedule", "Draw and compare pipeline schedules."),
    "export": ("export", "export", "Print a file's ZeRO settings for DeepSpeed, FSDP 2 or stock accelerate."),
    "import": ("import_settings", "import_settings", "Write a file from a DeepSpeed JSON or an accelerate FSDP file."),
    "schema": ("schema", "schema", "Print the JSON schema of a settings file, for editors."),
    "prebuild": ("prebuild", "prebuild", "Compile the ops that a DeepSpeed run needs, before it starts."),
    "merge": ("merge", "merge", "Write the model of a checkpoint as a plain Hugging Face folder."),
}  # fmt: skip


class _Commands(TyperGroup):
    """A group that imports a command when it is called, and nothing to list them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, name, _ = COMMANDS[cmd_name]
        function = getattr(importlib.import_module(f"hf_parallel.cli.{module}"), name)
        alone = typer.Typer(rich_markup_mode=None, add_completion=False)
        alone.command(name=cmd_name, cls=class_of_command(function))(function)
        return typer.main.get_command(alone)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        near = [] if args[0] in COMMANDS else difflib.get_close_matches(args[0], COMMANDS, n=1)
        if near:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf_parallel {hf_parallel.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """3D parallel training inside a stock transformers.Trainer."""


def main() -> None:
    """Run the command line."""
    app(prog_name="hf-parallel")


if __name__ == "__main__":
    main()
