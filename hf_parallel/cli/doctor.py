"""The `hf-parallel doctor` command: whether this machine is fit for a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from hf_parallel.cli.answers import log_lines_on_stderr
from hf_parallel.cli.bug_report import of_this_process
from hf_parallel.dry_run.doctor import Check, examine


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print Markdown for an issue, with packages and variables.")
    ] = False,
) -> None:
    """Look at GPUs, cores, RAM, disk, networks, backends, compilers and versions; exit with 1 if something is wrong."""
    with log_lines_on_stderr():
        checks = examine()
    wrong = [check for check in checks if check.status == "error"]
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        typer.echo(json.dumps({"ok": not wrong, "checks": rows}, indent=2))
    elif report:
        typer.echo(of_this_process(list(_lines(checks))))
    else:
        typer.echo("\n".join(_lines(checks)))
    if wrong:
        raise typer.Exit(1)


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    width = max(len(check.topic) for check in checks)
    for check in checks:
        yield f"{check.status:<8}{check.topic:<{width}}  {check.text}"
        if check.fix:
            yield f"{'':<{8 + width}}  fix: {check.fix}"
