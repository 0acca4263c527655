"""The `hf-parallel calibrate` command: what this machine does, measured for the planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_parallel.errors import ConfigError


def calibrate(
    output: Annotated[Path, typer.Argument(help="The JSON report to write.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes at once.  [default: one a GPU, or one a core]")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process on the host.")] = 1,
    model: Annotated[
        str | None,
        typer.Option(help="A config.json, its folder, or a name: measure its blocks.  [default: a Llama's]"),
    ] = None,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a row of these blocks.")] = 256,
    use_cpu: Annotated[bool, typer.Option("--use-cpu", help="Measure the CPU, also where there are GPUs.")] = False,
) -> None:
    """Measure products, memory and messages for half a minute, for `hf-parallel plan --calibrate`."""
    from hf_parallel.machine.facts import cores, gpus
    from hf_parallel.memory.shape import config_of
    from hf_parallel.planner.calibrate import calibrate as measure

    cards = () if use_cpu else gpus()
    try:
        blocks = {} if model is None else {"model": json.dumps(config_of(model).to_dict(), default=str)}
        found = measure(ranks or len(cards) or cores(), on_gpu=bool(cards), threads=threads, length=length, **blocks)
        found.write(output)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(
        f"wrote {output}: {found.ranks} x {found.name or found.device}, products {found.products / 1e9:.4g} GFLOP/s in fp32, memory "
        f"{found.moved / 1e9:.3g} GB/s, all-reduce {found.reduce_bytes_s / 1e9:.3g} GB/s after {found.reduce_s * 1e6:.0f} us"
    )
