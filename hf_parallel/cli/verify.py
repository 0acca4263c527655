"""The `hf-parallel verify` command: the proof that a layout trains a model as one process does."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from hf_parallel.errors import ConfigError, ParallelError


if TYPE_CHECKING:
    from hf_parallel.proof.verify import Verdict


DIFFERS, REFUSED = 1, 3  # exit codes


def verify(  # noqa: PLR0913 - each is an option
    model: Annotated[
        str | None, typer.Argument(help="A config.json, a folder with one and perhaps weights, or a name.")
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="A training script with a Trainer, run as it is for its first steps.")
    ] = None,
    script_args: Annotated[str, typer.Option("--script-args", help="What the script gets, in one string.")] = "",
    config_file: Annotated[
        str | None, typer.Option("--config_file", "--config-file", help="A recipe, or an accelerate config file.")
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="tp_size.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="pp_size.")] = None,
    sp: Annotated[int | None, typer.Option(min=1, help="sp_size.")] = None,
    sp_attention: Annotated[str | None, typer.Option(help="sp_attention: auto, ulysses or ring.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="ep_size.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Replicas.")] = None,
    schedule: Annotated[str | None, typer.Option(help="pipeline.schedule.")] = None,
    zero_stage: Annotated[int | None, typer.Option(min=0, max=3, help="zero.stage.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="pipeline.num_microbatches.")] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Batches of an optimizer step.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the products: fp32, or bf16 or fp16 (mixed precision).")] = "fp32",
    seq: Annotated[int, typer.Option(min=4, help="Tokens of a row.")] = 16,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch of each replica.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 3,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks of the model.  [default: all]")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Draw weights instead of reading them.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the verdict to this file; - prints it.")
    ] = None,
) -> None:
    """Train a few steps in one process and in a layout, and compare every loss, gradient and parameter.

    Starts processes of its own, on the CPU. Exit codes: 0 they agree, 1 they differ, 3 the layout is refused.
    """
    from hf_parallel.proof.verify import Verdict
    from hf_parallel.proof.verify import verify as prove

    sizes = {"tp_size": tp, "pp_size": pp, "sp_size": sp, "ep_size": ep}
    given = {
        **sizes,
        "sp_attention": sp_attention,
        "schedule": schedule,
        "num_microbatches": microbatches,
        "zero": zero_stage,
    }
    try:
        if json_file is not None:  # before minutes of work
            _refuse_place(json_file)
        settings, processes = _layout(config_file, {k: v for k, v in given.items() if v is not None}, dp)
        verdict = prove(
            model,
            settings,
            processes=processes,
            steps=steps,
            rows=batch,
            length=seq,
            accumulation=accumulation,
            dtype=dtype,
            layers=layers,
            random_weights=random_weights,
            script=script,
            script_arguments=_words(script_args),
        )
    except ParallelError as error:
        refused, stopped = (str(error), None) if isinstance(error, ConfigError) else (None, str(error))
        typer.echo(str(error), err=True)
        _write(json_file, Verdict("", "", refused=refused, stopped=stopped))
        raise typer.Exit(2 if refused is None else REFUSED) from None
    _write(json_file, verdict)
    if str(json_file) != "-":
        _show(verdict)
    raise typer.Exit(REFUSED if verdict.refused else 0 if verdict.ok else DIFFERS)


def _refuse_place(file: Path) -> None:
    if file.is_dir():
        raise ConfigError(f"--json {file}: cannot be written (it is a folder). Name a file in it.")
    if not file.parent.is_dir():
        raise ConfigError(
            f"--json {file}: cannot be written ({file.parent} is no folder). Name a file in a folder that exists."
        )


def _words(script_args: str) -> list[str]:
    """The arguments of a script.

    Raises:
        ConfigError: A quotation mark without another one.
    """
    try:
        return shlex.split(script_args)
    except ValueError as error:
        raise ConfigError(f"--script-args {script_args}: {error}. Quote it as a shell would need it.") from error


def _write(json_file: Path | None, verdict: Verdict) -> None:
    text = json.dumps(verdict.to_json(), indent=2, allow_nan=False)
    if str(json_file) == "-":
        typer.echo(text)
    elif json_file is not None and json_file.parent.is_dir() and not json_file.is_dir():
        json_file.write_text(text + "\n")


def _layout(config_file: str | None, given: dict[str, Any], dp: int | None) -> tuple[dict[str, Any], int | None]:
    """Settings of hf_parallel, and the number of processes.

    Raises:
        ConfigError: A file and options at once, or a file that is not valid.
    """
    from hf_parallel.settings.config import HFParallelConfig
    from hf_parallel.settings.recipes import read_recipe

    if config_file is not None:
        if given or dp is not None:
            named = ", ".join(
                f"--{name.replace('_size', '').replace('_', '-')}" for name in (*given, *(["dp"] if dp else []))
            )
            raise ConfigError(f"--config_file beside {named}: the layout is the file's. Leave one of the two out.")
        config, accelerate = read_recipe(config_file)
        return config.to_yaml_section(), int(accelerate["num_processes"])
    zero = given.pop("zero", None)
    config = HFParallelConfig.from_mapping({}, source="options").with_overrides(**given)
    settings = config.to_yaml_section() | ({"zero": {"stage": zero}} if zero else {})
    return settings, None if dp is None else dp * config.model_parallel_size


def _show(verdict: Verdict) -> None:
    console = Console()
    if verdict.refused:
        console.print(f"{verdict.model_type}, {verdict.layout}: refused\n{verdict.refused}", markup=False)
        return
    table = Table(
        "",
        "step",
        Column("tensor", overflow="fold"),  # a name is never shortened
        "rank",
        "relative",
        "allowed",
        title=f"{verdict.model_type}, {verdict.layout}: largest differences",
    )
    for each in verdict.worst:
        numbers = f"{each['relative']:.1e}", f"{each['allowed']:.1e}"
        table.add_row(each["what"], str(each["step"]), each["name"], str(each["rank"]), *numbers)
    console.print(table)
    largest = {"loss": verdict.loss_max_rel, "gradients": verdict.grad_max_rel, "parameters": verdict.param_max_rel}
    told = ", ".join(f"{name} {'not compared' if size is None else f'{size:.1e}'}" for name, size in largest.items())
    console.print(f"largest relative difference: {told}", markup=False)
    if verdict.stopped:
        console.print(f"the run was stopped: {verdict.stopped}", markup=False)
    for name in verdict.missing_gradients:
        console.print(f"no gradient: {name}", markup=False)
    if verdict.first_divergence is not None:
        place = verdict.first_divergence
        microbatch = "" if place["microbatch"] is None else f", microbatch {place['microbatch']}"
        console.print(
            f"they part first at: {place['module'] or 'all modules'}{microbatch} ({place['kind']})", markup=False
        )
    console.print("they agree" if verdict.ok else "THEY DIFFER", markup=False)
