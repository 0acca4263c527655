"""Write docs/settings.md and docs/cli.md from the code: every setting and every command; a test compares them.

`make reference-pages` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from hf_parallel.cli.main import COMMANDS, app
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.problems import sections_of
from hf_parallel.settings.values import Section, spelled


DOCS = Path(__file__).resolve().parents[1] / "docs"
# Section -> the page that explains it.
ABOUT = {
    "pipeline": "pipeline",
    "tensor_parallel": "tensor_parallel",
    "data_parallel": "data_parallel",
    "zero": "data_parallel",
    "activation_checkpointing": "activation_checkpointing",
    "gradient_compression": "compression",
    "local_sgd": "compression",
    "topology": "topology",
    "checkpoint": "checkpoints",
    "monitor": "failures",
}


def settings_page() -> str:
    """Every key of the hf_parallel section, with its default and its rule."""
    sections = sections_of(HFParallelConfig)
    lines = [
        "# Settings",
        "",
        "Every key of `parallelism_config.hf_parallel` in a settings file. [Launching](launching.md) says where the file is found,",
        "`hf-parallel validate FILE` checks one, and [the schema](settings.schema.json) is for editors. `make reference-pages`",
        "writes this page.",
        "",
        "| key | default | |",
        "|---|---|---|",
        *rows({name: field for name, field in HFParallelConfig.model_fields.items() if name not in sections}),
    ]
    for name, model in sections.items():
        lines += [
            "",
            f"## {name}",
            "",
            f"{first_line(model)} See [{ABOUT[name].replace('_', ' ')}]({ABOUT[name]}.md).",
            "",
        ]
        lines += ["| key | default | |", "|---|---|---|", *rows(model.model_fields)]
    return "\n".join(lines) + "\n"


def first_line(model: type[Section]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def rows(fields: dict[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        inner = isinstance(field.default, Section)
        default = "all defaults" if inner else f"`{spelled(field.default)}`"
        yield f"| `{name}` | {default} | {(field.description or '').replace('|', chr(92) + '|')} |"


def cli_page() -> str:
    """What each command prints as its help."""
    lines = [
        "# Command line",
        "",
        "What `hf-parallel COMMAND --help` prints, for every command. `python -m hf_parallel` is the same, `--install-completion` completes",
        "commands and options in the shell. JSON goes to stdout, everything else to stderr; the exit code is 1 if something is",
        "wrong and 2 for wrong options. `make reference-pages` writes this page.",
    ]
    for name in COMMANDS:
        shown = (
            CliRunner()
            .invoke(app, [name, "--help"], prog_name="hf-parallel", env={"COLUMNS": "100"}, terminal_width=100)
            .output
        )
        lines += [
            "",
            f"## {name}",
            "",
            "```text",
            re.sub(r"[ \t]+$", "", shown, flags=re.MULTILINE).strip("\n"),
            "```",
        ]
    return "\n".join(lines) + "\n"


PAGES = {"settings.md": settings_page, "cli.md": cli_page}


if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write(), encoding="utf-8")
