"""The `hf-parallel doctor` command: whether this machine is fit for a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from hf_parallel.cli.answers import log_lines_on_stderr
from hf_parallel.cli.bug_report import of_this_process
from hf_parallel.dry_run.doctor import Check, examine
from hf_parallel.dry_run.peers import examine_peers, place_of
from hf_parallel.errors import ConfigError
from hf_parallel.settings.recipes import find_recipe, read_section


def doctor(
    peers: Annotated[
        str | None,
        typer.Option(
            help="Also meet the machines of this accelerate config file, and measure the links between them."
        ),
    ] = None,
    machine_rank: Annotated[
        int | None,
        typer.Option("--machine-rank", "--machine_rank", help="Number of this machine.  [default: the file's]"),
    ] = None,
    num_machines: Annotated[
        int | None, typer.Option("--num-machines", "--num_machines", help="Machines.  [default: the file's]")
    ] = None,
    main_process_ip: Annotated[
        str | None,
        typer.Option("--main-process-ip", "--main_process_ip", help="Of machine 0.  [default: the file's]"),
    ] = None,
    main_process_port: Annotated[
        int | None,
        typer.Option("--main-process-port", "--main_process_port", help="On machine 0.  [default: the file's]"),
    ] = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for the other machines.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print Markdown for an issue, with packages and variables.")
    ] = False,
) -> None:
    """Look at GPUs, cores, RAM, disk, networks, backends, compilers and versions; exit with 1 if something is wrong.

    With --peers each machine of a run runs it at the same time, and all find out who reaches whom.
    """
    given = {
        "machine_rank": machine_rank,
        "num_machines": num_machines,
        "main_process_ip": main_process_ip,
        "main_process_port": main_process_port,
    }
    with log_lines_on_stderr():
        checks = examine()
        if peers is not None:
            checks += _of_peers(peers, given, wait)
        elif any(value is not None for value in given.values()):
            checks.append(
                Check("machines", "error", "options for several machines without --peers", "Add --peers FILE.")
            )
    wrong = [check for check in checks if check.status == "error"]
    if as_json:
        rows = [dataclasses.asdict(check) for check in checks]
        typer.echo(json.dumps({"ok": not wrong, "checks": rows}, indent=2))
    elif report:
        typer.echo(of_this_process(list(_lines(checks))))
    else:
        typer.echo("\n".join(_lines(checks)))
        warnings = sum(check.status == "warning" for check in checks)
        typer.echo(
            f"\n{_count(len(wrong), 'error')}, {_count(warnings, 'warning')}: {_verdict(bool(wrong), bool(warnings))}"
        )
    if wrong:
        raise typer.Exit(1)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _verdict(wrong: bool, warned: bool) -> str:
    if wrong:
        return "a run would fail here; see the fixes"
    return "a run can start; each warning says when it matters" if warned else "a run can start"


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    width = max(len(check.topic) for check in checks)
    for check in checks:
        yield f"{check.status:<8}{check.topic:<{width}}  {check.text}"
        if check.fix:
            yield f"{'':<{8 + width}}  fix: {check.fix}"


def _of_peers(file: str, given: Mapping[str, Any], wait_s: float) -> list[Check]:
    """Run the checks that the machines of a file do together; a failure to meet is one of the checks."""
    try:
        _, accelerate = read_section(find_recipe(file))
        place = place_of(accelerate, given)
        return examine_peers(place, accelerate, wait_s, lambda text: typer.echo(f"{text} ...", err=True))
    except ConfigError as error:
        cause, _, fix = str(error).partition(". ")
        return [Check("machines", "error", cause, fix)]
