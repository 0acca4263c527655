"""The `hf-parallel schedule` command: time and draw pipeline schedules before any process runs them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from hf_parallel.cli.answers import writing
from hf_parallel.errors import ConfigError, ParallelError
from hf_parallel.pipeline_parallel.schedule.actions import (
    Action,
    format_schedule,
    placement_of,
    read_schedule,
    required_send_window,
)
from hf_parallel.pipeline_parallel.schedule.asynchronous import several_steps
from hf_parallel.pipeline_parallel.schedule.schedules import SCHEDULES, build_schedule
from hf_parallel.pipeline_parallel.schedule.show import (
    columns_per_unit,
    figures_of,
    timeline_text,
    write_picture,
    write_trace,
)
from hf_parallel.pipeline_parallel.schedule.simulate import Simulation, peak_activations, peak_live, simulate
from hf_parallel.settings.asynchronous_rules import too_few
from hf_parallel.settings.schedule_names import ASYNCHRONOUS, SHORT_NAMES


MAX_PASSES: Final = 100_000
SHOWN_STEPS: Final = 4  # of a schedule that does not drain
DEFAULT_RANKS, DEFAULT_MICROBATCHES = 4, 8


@dataclass(frozen=True)
class _Times:
    """Costs of a rank's whole share of the model, and of a message between ranks."""

    forward: float
    backward: float
    weight: float
    latency: float


def schedule(  # noqa: PLR0913 - each is an option
    pp: Annotated[int | None, typer.Option("--pp", help="Ranks of the pipeline.  [default: 4, or the file's]")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches.  [default: 8, or the file's]")] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--schedule", help=f"May be repeated: {', '.join([*SCHEDULES, *ASYNCHRONOUS, *SHORT_NAMES])}."),
    ] = None,
    stages_per_rank: Annotated[
        int | None, typer.Option(help="Stages a rank, for the schedules that leave it open.")
    ] = None,
    times: Annotated[
        str, typer.Option(help="F,B,W: forward, full backward and its weight part, of a rank's whole share.")
    ] = "1,2,1",
    latency: Annotated[float, typer.Option(help="Time of a message between ranks.")] = 0.0,
    file: Annotated[Path | None, typer.Option(help="A schedule file to check and show.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a PNG picture; needs matplotlib.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write an SVG picture; needs matplotlib.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, for Perfetto.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the actions; for one schedule.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show when each rank of a pipeline works, how long a step takes and what it holds; compare schedules."""
    try:
        costs = _times(times, latency)
        found = _schedules(pp, microbatches, names or [], stages_per_rank, file)
        results = {name: _simulated(actions, costs) for name, actions in found.items()}
        if png is not None:
            with writing(png):
                write_picture(png, results, kind="png")
        if svg is not None:
            with writing(svg):
                write_picture(svg, results, kind="svg")
        if trace is not None:
            with writing(trace):
                write_trace(trace, results)
        if csv is not None:
            with writing(csv):
                _write_csv(csv, found)
    except ParallelError as error:
        typer.echo(json.dumps({"error": str(error)}, indent=2) if as_json else str(error), err=not as_json)
        raise typer.Exit(1) from None
    facts = [_facts(name, result) for name, result in results.items()]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _show(results, facts)


def _times(text: str, latency: float) -> _Times:
    """Return the checked costs."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ConfigError(f"times={text!r}: three numbers of at least 0, F,B,W. Write for example --times 1,2,1.")
    if values[2] > values[1]:
        raise ConfigError(
            f"times={text!r}: W={values[2]:g} is part of the full backward B={values[1]:g}. Lower W or raise B."
        )
    if not (math.isfinite(latency) and latency >= 0):
        raise ConfigError(f"latency={latency}: expected a finite number of at least 0. Write for example --latency 0.")
    forward, backward, weight = values
    return _Times(forward, backward, weight, latency)


def _schedules(
    pp: int | None, microbatches: int | None, names: list[str], stages_per_rank: int | None, file: Path | None
) -> dict[str, list[list[Action]]]:
    """Return the file's schedule and the named ones, all of one size."""
    found: dict[str, list[list[Action]]] = {}
    if file is not None:
        found[str(file)] = read_schedule(file)
        ranks = len(found[str(file)])
        count = 1 + max(action.microbatch for actions in found[str(file)] for action in actions)
        for option, given, has in (("--pp", pp, ranks), ("--microbatches", microbatches, count)):
            if given not in (None, has):
                raise ConfigError(f"{option}={given}: {file} has {has}. Set it to {has} or leave it out.")
        pp, microbatches = ranks, count
    pp = DEFAULT_RANKS if pp is None else pp
    microbatches = DEFAULT_MICROBATCHES if microbatches is None else microbatches
    passes = max(pp, 1) * max(microbatches, 1) * max(stages_per_rank or 1, 1)
    if passes > MAX_PASSES:
        raise ConfigError(
            f"pp={pp}, microbatches={microbatches}, stages_per_rank={stages_per_rank or 'the default'}: {passes} passes, and "
            f"at most {MAX_PASSES} are timed. Lower one of them."
        )
    full = [SHORT_NAMES.get(name, name) for name in names or ([] if found else ["1f1b"])]
    open_ones = [name for name in full if name in SCHEDULES and SCHEDULES[name].fixed_stages_per_rank is None]
    for name in full:
        if name in ASYNCHRONOUS:
            found |= _asynchronous(name, pp, microbatches)
            continue
        stages = stages_per_rank if name in open_ones or not open_ones else None
        found[name] = build_schedule(name, pp, microbatches, stages_per_rank=stages)
    return found


def _asynchronous(name: str, pp: int, microbatches: int) -> dict[str, list[list[Action]]]:
    """One optimizer step shows nothing of a pipeline that does not drain: several, under a title that says so."""
    steps, count = (microbatches, 1) if name == "pipedream" else (SHOWN_STEPS, microbatches)
    found = too_few(count, pp) if name == "pipedream_2bw" else []
    if found:
        raise ConfigError(found[0])
    return {f"{name}, {steps} steps of {count}": several_steps(name, pp, count, steps)}


def _simulated(actions: list[list[Action]], times: _Times) -> Simulation:
    """Time a schedule whose ranks have equal shares of the model, split evenly over their stages."""
    rank_of = placement_of(actions)
    parts = [rank_of.count(rank) for rank in rank_of]
    forward, backward, weight = (
        [cost / part for part in parts] for cost in (times.forward, times.backward, times.weight)
    )
    return simulate(actions, forward, backward, weight_costs=weight, latency=times.latency)


def _write_csv(path: Path, found: dict[str, list[list[Action]]]) -> None:
    if len(found) > 1:
        raise ConfigError(f"--csv {path}: one file holds one schedule, got {', '.join(found)}. Name one.")
    path.write_text("".join(map(format_schedule, found.values())), encoding="utf-8")


def _facts(name: str, result: Simulation) -> dict[str, Any]:
    rank_of = placement_of(result.schedule)
    count = 1 + max(action.microbatch for actions in result.schedule for action in actions)
    return {
        "schedule": name,
        "pp": len(result.schedule),
        "microbatches": count,
        "stages": len(rank_of),
        "step_time": result.makespan,
        "bubble_fraction": result.bubble_fraction,
        "peak_live": list(peak_live(result.schedule)),
        "peak_activations": list(peak_activations(result.schedule)),
        "send_window": required_send_window(result.schedule, len(rank_of), count),
    }


def _show(results: dict[str, Simulation], facts: list[dict[str, Any]]) -> None:
    console = Console()
    in_colour = console.color_system is not None
    scale = columns_per_unit(results.values(), max(20, console.width - 8), in_colour=in_colour)
    for name, result in results.items():
        console.print(f"{name}: {figures_of(result)}", style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(timeline_text(result, scale=scale), soft_wrap=True)
        console.print()
    table = Table("schedule", "stages", "step time", "bubble", "peak activations of each rank")
    for row in facts:
        peaks = " ".join(f"{peak:g}" if peak == int(peak) else f"{peak:.2f}" for peak in row["peak_activations"])
        cells = [str(row["stages"]), f"{row['step_time']:.2f}", f"{row['bubble_fraction']:.1%}", peaks]
        table.add_row(row["schedule"], *cells)
    console.print(table)
    console.print(
        "A number is that of a microbatch; f forward, b backward, i its inputs, w its weights, dots idle.",
        style="dim",
        soft_wrap=True,
    )
