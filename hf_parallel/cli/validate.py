"""The `hf-parallel validate` command: every problem of a config file at once, and whether a model fits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_parallel.cli.adapters_option import Adapters
from hf_parallel.cli.answers import log_lines_on_stderr, working
from hf_parallel.dry_run.check_file import Checked, Finding, check_file
from hf_parallel.dry_run.fit import Verdict, accumulation_of, batch_errors, judge, layout_of_file
from hf_parallel.errors import ParallelError
from hf_parallel.machine.facts import this_machine
from hf_parallel.memory.optimizers import ADAMW, OPTIMIZERS
from hf_parallel.memory.report import GB, describe
from hf_parallel.memory.shape import shape_of
from hf_parallel.memory.terms import ModelShape, Precision, Work
from hf_parallel.planner.adapters import adapters_of
from hf_parallel.planner.checks import choose
from hf_parallel.settings.recipes import find_recipe


DTYPES = ("fp32", "half", "autocast")


@dataclasses.dataclass(frozen=True)
class _Request:
    """The options of the command."""

    model: str | None
    work: Work
    accumulation: int | None
    global_batch: int | None
    adapters: str
    bits: float
    gpu_gb: float | None
    host_gb: float | None
    dtype: Precision | None
    optim: str


def validate(  # noqa: PLR0913 - each is an option
    file: Annotated[str, typer.Argument(help="An accelerate config file, or the name of a recipe.")],
    model: Annotated[
        str | None, typer.Option(help="Count memory for this model: a config.json, its folder, or a name.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch on each replica.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 2048,
    accumulation: Annotated[
        int | None, typer.Option(min=1, help="Batches of an optimizer step.  [default: the file's, else 1]")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a step on all replicas, to be checked.")
    ] = None,
    adapters: Adapters = "0",
    bits: Annotated[
        float,
        typer.Option(
            min=0, help="Bits of a frozen parameter of a block, with its scales: 4.13 of NF4.  [default: of --dtype]"
        ),
    ] = 0.0,
    gpu_gb: Annotated[float | None, typer.Option(min=0, help="GB (1e9) of a GPU.  [default: this machine's]")] = None,
    host_gb: Annotated[
        float | None, typer.Option(min=0, help="GB (1e9) of RAM of a node.  [default: this machine's]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Parameters: fp32, half or autocast.  [default: as the file trains]")
    ] = None,
    optim: Annotated[
        str,
        typer.Option(help="Optimizer, as in TrainingArguments, or sgd_momentum; it decides how many bytes it keeps."),
    ] = ADAMW,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a config file; exit with 1 and every problem, with its line, if it cannot work."""
    if dtype not in (None, *DTYPES):
        raise typer.BadParameter(f"{dtype!r}: expected one of {', '.join(DTYPES)}.", param_hint="--dtype")
    if bits and adapters == "0":
        raise typer.BadParameter(
            f"{bits:g} without --adapters: quantised weights are not trained.", param_hint="--bits"
        )
    precision: Any = dtype
    request = _Request(
        model, Work(rows, length), accumulation, global_batch, adapters, bits, gpu_gb, host_gb, precision, optim
    )
    try:
        with working("checking"), log_lines_on_stderr():
            checked, verdict = _answer(find_recipe(file), request)
    except ParallelError as error:
        checked, verdict = Checked(Path(file), None, {}, findings=(Finding("error", str(error)),)), None
    _print(checked, verdict, as_json)
    if checked.errors:
        raise typer.Exit(1)


def _answer(path: Path, request: _Request) -> tuple[Checked, Verdict | None]:
    """All findings; memory only of a file that is right otherwise."""
    choose("optim", request.optim, OPTIMIZERS)
    machine = this_machine()
    checked = check_file(path, machine)
    if checked.errors:
        return checked, None
    work = dataclasses.replace(request.work, accumulation=accumulation_of(checked, request.accumulation))
    errors, warnings, verdict = batch_errors(checked, request.global_batch, work), [], None
    if request.model is not None:
        gpu_bytes = machine.gpu_bytes if request.gpu_gb is None else request.gpu_gb * GB
        host_bytes = machine.ram_bytes if request.host_gb is None else request.host_gb * GB
        layout = layout_of_file(checked, request.dtype)
        from hf_parallel.activation_checkpointing.recorded import variant_of  # brings torch

        count = adapters_of(request.adapters, request.model)

        def trained(shape: ModelShape) -> ModelShape:
            return dataclasses.replace(shape, adapters=count, block_bits=request.bits)

        adapted = trained(shape_of(request.model)) if count else None
        shape = trained(shape_of(request.model, layout.precision, variant_of(layout, adapted)))
        verdict = judge(checked, shape, work, gpu_bytes, host_bytes, request.dtype, request.optim)
        errors, warnings = [*errors, *verdict.errors], list(verdict.warnings)
    found = [Finding("error", text) for text in errors] + [Finding("warning", text) for text in warnings]
    return dataclasses.replace(checked, findings=(*found, *checked.findings)), verdict


def _print(checked: Checked, verdict: Verdict | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_facts(checked, verdict), indent=2))
        return
    if verdict is not None:
        typer.echo("\n".join(describe(verdict.memory)))
    for finding in checked.findings:
        typer.echo(str(finding), err=True)
    if not checked.errors:
        typer.echo(f"{checked.path}: valid, {layout_text(checked)}")


def layout_text(checked: Checked) -> str:
    """The sizes of a valid file."""
    facts = _sizes(checked)
    sequence = f" x sp {facts['sp_size']}" if facts.get("sp_size") else ""
    return (
        f"tp {facts['tp_size']} x pp {facts['pp_size']}{sequence} x dp {facts['dp_size'] or '(processes / tp / pp)'}"
    )


def _sizes(checked: Checked) -> dict[str, Any]:
    processes = checked.accelerate.get("num_processes")
    sizes: dict[str, Any] = {"num_processes": processes, "tp_size": None, "pp_size": None, "dp_size": None}
    if checked.config is not None:
        sizes |= {"tp_size": checked.config.tp_size, "pp_size": checked.config.pp_size}
        sizes |= {"sp_size": checked.config.sp_size} if checked.config.sp_size > 1 else {}
        if isinstance(processes, int) and processes > 0 and not checked.errors:
            sizes["dp_size"] = checked.config.dp_size(processes)
    return sizes


def _facts(checked: Checked, verdict: Verdict | None) -> dict[str, Any]:
    """The answer for programs."""
    facts: dict[str, Any] = {"valid": not checked.errors, "name": checked.path.stem, "path": str(checked.path)}
    facts |= _sizes(checked)
    if checked.config is not None and not checked.errors:
        facts |= {"fingerprint": checked.config.fingerprint(), "config": checked.config.model_dump(mode="json")}
    facts["findings"] = [
        {"severity": f.severity, "file": str(f.file) if f.file else None, "line": f.line, "message": f.message}
        for f in checked.findings
    ]
    if verdict is not None:
        facts["memory"] = dataclasses.asdict(verdict.memory)
    return facts
