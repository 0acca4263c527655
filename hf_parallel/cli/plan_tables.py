"""Prints the answers of `hf-parallel plan`, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

from hf_parallel.planner.scaling import Scaled
from hf_parallel.planner.search import Plan


LONGEST_WORD: Final = len("overlap_gather=False,")
AXES: Final = ("tp", "pp", "dp", "zero", "micro_batch", "num_microbatches")


def _facts(plan: Plan) -> dict[str, Any]:
    """The answer for programs."""
    found = plan.estimate
    sizes = {"gpus": plan.cluster.num_gpus, "total_bytes": found.total_bytes, "limit_bytes": plan.limit_bytes}
    sent = {axis: {"gpu_bytes": own.gpu, "node_bytes": own.node} for axis, own in plan.links.items()}
    about = {"layout": dict(plan.layout), "why": plan.why, "fits": plan.fits, "links": sent}
    return about | found.as_dict() | sizes


def _table(*columns: str) -> Table:
    """A table in which the layout alone wraps, at words where 80 columns are there."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for column in columns:
        wraps = column in ("layout", "computation : messages")
        table.add_column(
            column, no_wrap=not wraps, overflow="fold", min_width=LONGEST_WORD if column == "layout" else None
        )
    return table


def _print_json(content: object) -> None:
    typer.echo(json.dumps(content, indent=2))


def show_one(plan: Plan, as_json: bool) -> None:
    """Print one layout, its memory term by term."""
    if as_json:
        _print_json(_facts(plan))
        return
    found, missing = plan.estimate, plan.estimate.total_bytes - plan.limit_bytes
    typer.echo(f"layout {_short(plan)}")
    typer.echo(
        f"step {_few(found.step_s)} s ({_few(found.low_s)} to {_few(found.high_s)}), {found.tokens_per_s:.0f} tokens/s"
    )
    typer.echo(
        f"mfu {found.mfu:.1%}, bubble {found.bubble:.1%}, exposed messages {_few(found.exposed_communication_s)} s"
    )
    for axis, own in plan.links.items():
        typer.echo(
            f"{axis} sends {_few(own.gpu / 1e9)} GB a step between GPUs of a node, {_few(own.node / 1e9)} GB from a node"
        )
    for name, size in found.memory_bytes.items():
        typer.echo(f"{name:12s} {size / 1e9:8.2f} GB")
    verdict = "fits" if missing <= 0 else f"does not fit by {missing / 1e9:.1f} GB"
    typer.echo(f"{'sum':12s} {found.total_bytes / 1e9:8.2f} GB of {plan.limit_bytes / 1e9:.1f} GB: {verdict}")


def show(plans: Sequence[Plan], as_json: bool) -> None:
    """Ranked plans."""
    if as_json:
        _print_json([_facts(one) for one in plans])
        return
    table = _table("", "layout", "step s", "tokens/s", "mfu", "bubble", "messages\ns", "GB")
    common = _common(plans)
    for place, one in enumerate(plans, 1):
        own = one.estimate
        table.add_row(
            str(place),
            _short(one, common),
            f"{_few(own.step_s)} ({_few(own.low_s)}-{_few(own.high_s)})",
            f"{own.tokens_per_s:.0f}",
            f"{own.mfu:.0%}",
            f"{own.bubble:.0%}",
            _few(own.exposed_communication_s, 2),
            f"{own.total_bytes / 1e9:.1f}",
        )
    Console().print(table)
    if common:
        typer.echo(f"all of them: {', '.join(f'{key}={value}' for key, value in common.items())}")
    cluster = plans[0].cluster
    typer.echo(f"{cluster.num_gpus} GPUs of {plans[0].limit_bytes / 1e9:.1f} GB; 1 GB = 1e9 bytes")
    for place, one in enumerate(plans, 1):
        sent = one.link_bytes
        links = f"a step sends {_few(sent.gpu / 1e9, 2)} GB between GPUs of a node, {_few(sent.node / 1e9, 2)} GB from a node"
        typer.echo(f"{place}: {one.why}; {links}")


def show_scaling(rows: Sequence[Scaled], as_json: bool) -> None:
    """Print the speed-up over ever more GPUs."""
    if as_json:
        _print_json([_facts(one.plan) | {"speed_up": one.speed_up, "ratio": one.ratio} for one in rows])
        return
    table = _table("GPUs", "layout", "tokens/s", "speed-up", "step s", "messages\ns", "computation : messages")
    for one in rows:
        own = one.plan.estimate
        table.add_row(
            str(one.plan.cluster.num_gpus),
            _short(one.plan),
            f"{own.tokens_per_s:.0f}",
            f"{one.speed_up:.1f} x",
            _few(own.step_s),
            _few(own.exposed_communication_s, 2),
            "-" if one.ratio is None else f"{one.ratio:.1f} : 1",
        )
    Console().print(table)


def _few(value: float, digits: int = 3) -> str:
    """A number with few digits, and no exponent if it is large."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _common(plans: Sequence[Plan]) -> dict[str, Any]:
    """Unusual settings that several plans have in common: most of them were asked for."""
    first, *others = plans
    same = {k: v for k, v in _unusual(first).items() if all(one.layout.get(k) == v for one in others)}
    return same if others else {}


def _short(plan: Plan, common: Mapping[str, Any] = MappingProxyType({})) -> str:
    """A layout in few words: the axes, the passes, and what is not usual, nor `common` to it and others."""
    spec = plan.spec
    text = (
        f"tp={spec.tp} pp={spec.pp} dp={spec.dp} zero={spec.zero}, {spec.num_microbatches} x {spec.micro_batch} rows"
    )
    return ", ".join([text, *(f"{key}={value}" for key, value in _unusual(plan).items() if key not in common)])


def _unusual(plan: Plan) -> dict[str, Any]:
    hidden = {"schedule": "1f1b" if plan.spec.pp == 1 else "", "recompute": "none"}
    return {key: value for key, value in plan.layout.items() if key not in AXES and value != hidden.get(key)}
