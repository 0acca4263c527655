"""`hf-parallel plan`: the layouts of a cluster that fit, the fastest first, and what one layout costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from hf_parallel.errors import ConfigError


if TYPE_CHECKING:
    from hf_parallel.planner.predict import Estimate
    from hf_parallel.planner.search import Plan


def plan(  # noqa: PLR0913 - the options are the interface
    model: Annotated[str, typer.Option(help="A config.json, a folder with one, or a name.")],
    gpu: Annotated[str, typer.Option(help="A key of the hardware table, such as h100 or rtx3090.")],
    seq: Annotated[int, typer.Option(help="Tokens of a row.")],
    batch: Annotated[int, typer.Option(help="Rows of an optimizer step, of all replicas together.")],
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each.")] = 1,
    inter_gbit_s: Annotated[float | None, typer.Option(help="Gbit/s of all links of a node together.")] = None,
    objective: Annotated[str, typer.Option(help="tokens (the fastest) or memory (the smallest).")] = "tokens",
    layout: Annotated[str, typer.Option(help="What is given, such as kernels=compiled,attention=flash.")] = "",
    why: Annotated[str | None, typer.Option(help="Predict this layout alone, such as tp=2,pp=4,dp=1.")] = None,
    top: Annotated[int, typer.Option(help="Plans to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank the layouts of a cluster by predicted time, with their memory; starts nothing and needs no GPU."""
    from hf_parallel.planner.hardware import Cluster
    from hf_parallel.planner.predict import predict
    from hf_parallel.planner.search import plan as search

    try:
        cluster = Cluster(nodes, gpus_per_node, gpu, inter_gbit_s=inter_gbit_s)
        if why is not None:
            one = predict(model, cluster, _mapping(f"{layout},{why}"), seq_len=seq)
            _show_one(one, cluster.gpu_bytes, as_json)
            return
        plans = search(
            model,
            cluster,
            seq_len=seq,
            global_batch=batch,
            objective=objective,  # type: ignore[arg-type]  # the search refuses other words
            layout=_mapping(layout),
            most=top,
        )
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    _show(plans, as_json)


def _mapping(text: str) -> dict[str, Any]:
    """The layout that `tp=2,zero=1` means.

    Raises:
        ConfigError: A part is no `key=value`.
    """
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, sign, value = part.partition("=")
        if not sign:
            raise ConfigError(f"{part!r}: expected key=value. Write tp=2,pp=4.")
        found[key.strip()] = value.strip() if key.strip() == "schedule" else yaml.safe_load(value)
    return found


def _row(estimate: Estimate) -> dict[str, Any]:
    return estimate.as_dict() | {"total_bytes": estimate.total_bytes}


def _show_one(estimate: Estimate, limit_bytes: float, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_row(estimate) | {"limit_bytes": limit_bytes}, indent=2))
        return
    missing = estimate.total_bytes - limit_bytes
    typer.echo(
        f"step {estimate.step_s:.3g} s ({estimate.low_s:.3g} to {estimate.high_s:.3g}), {estimate.tokens_per_s:.0f} tokens/s"
    )
    typer.echo(
        f"mfu {estimate.mfu:.1%}, bubble {estimate.bubble:.1%}, exposed messages {estimate.exposed_communication_s:.3g} s"
    )
    for name, size in estimate.memory_bytes.items():
        typer.echo(f"{name:12s} {size / 1e9:8.2f} GB")
    verdict = "fits" if missing <= 0 else f"does not fit by {missing / 1e9:.1f} GB"
    typer.echo(f"{'sum':12s} {estimate.total_bytes / 1e9:8.2f} GB of {limit_bytes / 1e9:.1f} GB: {verdict}")


def _show(plans: Sequence[Plan], as_json: bool) -> None:
    if as_json:
        rows = [
            {"layout": dict(one.layout), "why": one.why, "limit_bytes": one.limit_bytes} | _row(one.estimate)
            for one in plans
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("layout", "step s", "tokens/s", "mfu", "bubble", "GB", "why")
    for one in plans:
        own = one.estimate
        table.add_row(
            _short(one.layout),
            f"{own.step_s:.3g} ({own.low_s:.3g}-{own.high_s:.3g})",
            f"{own.tokens_per_s:.0f}",
            f"{own.mfu:.0%}",
            f"{own.bubble:.0%}",
            f"{own.total_bytes / 1e9:.1f} of {one.limit_bytes / 1e9:.0f}",
            one.why,
        )
    Console().print(table)


def _short(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in layout.items())
