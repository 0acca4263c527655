"""`hf-parallel plan`: the layouts of a cluster that fit, the fastest first, and what one layout costs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from hf_parallel.cli.adapters_option import Adapters
from hf_parallel.cli.answers import working, writing
from hf_parallel.errors import ConfigError
from hf_parallel.memory.optimizers import ADAMW


if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_parallel.planner.hardware import Cluster
    from hf_parallel.planner.layout import LayoutSpec
    from hf_parallel.planner.search import Plan


def plan(  # noqa: PLR0913 - the options are the interface
    model: Annotated[str, typer.Option(help="A config.json, a folder with one, or a name.")],
    gpu: Annotated[str, typer.Option(help="A key of the hardware table, such as h100 or rtx3090.")],
    seq: Annotated[int, typer.Option(help="Tokens of a row.")],
    batch: Annotated[int, typer.Option(help="Rows of an optimizer step, of all replicas together.")],
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each.")] = 1,
    intra: Annotated[str | None, typer.Option(help="Link inside a node: nvlink or pcie.")] = None,
    intra_gb_s: Annotated[float | None, typer.Option(help="GB/s of that link, of one GPU and one way.")] = None,
    inter_gbit_s: Annotated[
        float | None, typer.Option(help="Gbit/s of all links of a node together, one way.")
    ] = None,
    gpu_memory_gb: Annotated[float | None, typer.Option(help="GB (1e9) of one GPU.")] = None,
    ram_gb: Annotated[float | None, typer.Option(help="GB of a node.")] = None,
    objective: Annotated[
        str, typer.Option(help="tokens (the fastest), memory (the smallest) or min-gpus (the fewest that fit).")
    ] = "tokens",
    layout: Annotated[str, typer.Option(help="What is given, such as kernels=compiled,attention=flash.")] = "",
    adapters: Adapters = "0",
    bits: Annotated[
        float,
        typer.Option(
            help="Bits of a frozen parameter of a block, with its scales: 4.13 of NF4.  [default: of the dtype]"
        ),
    ] = 0.0,
    why: Annotated[str | None, typer.Option(help="Predict this layout alone, such as tp=2,pp=4,dp=1.")] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="Show the speed-up over 1, 2, 4 and more GPUs.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the speed-up, as .svg or .png; needs matplotlib.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Rates that `hf-parallel calibrate` measured on such a machine.")
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Write the first plan as a recipe.")] = None,
    top: Annotated[int, typer.Option(help="Plans to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Rank the layouts of a cluster by predicted time, with their memory; starts nothing and needs no GPU."""
    from hf_parallel.cli.plan_plot import refuse_plot
    from hf_parallel.planner.adapters import adapters_of
    from hf_parallel.planner.search import plan as search

    sizes: dict[str, Any] = {"nodes": nodes, "gpus_per_node": gpus_per_node, "gpu": gpu}
    sizes |= {"intra": intra, "intra_gb_s": intra_gb_s, "inter_gbit_s": inter_gbit_s}
    sizes |= {"gpu_memory_gb": gpu_memory_gb, "ram_gb": ram_gb}
    words: Any = objective  # the search refuses other words
    try:
        if plot is not None:
            refuse_plot(plot)
        beside = adapters_of(adapters, model)
        given = _mapping(layout) | ({"adapters": beside} if beside else {}) | ({"block_bits": bits} if bits else {})
        cluster = _cluster(sizes, calibrate, seq=seq, batch=batch, top=top)
        asked: dict[str, Any] = {"seq_len": seq, "global_batch": batch, "layout": given}
        if scaling or plot is not None:
            _show_scaling(model, cluster, asked, plot, as_json=as_json)
            return
        with working("planning"):
            plans = (
                [_alone(model, cluster, given | _mapping(why), seq, batch)]
                if why
                else search(model, cluster, objective=words, most=top, **asked)
            )
        _show(model, cluster, plans, is_alone=bool(why), as_json=as_json)
        if write is not None:
            _write(write, model, plans[0], seq)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _cluster(sizes: dict[str, Any], calibrate: Path | None, **counts: int) -> Cluster:
    """Make the cluster from the hardware table, or with the rates of a report.

    Raises:
        ConfigError: All problems of the cluster, and of `counts`, which are whole numbers from 1.
    """
    from hf_parallel.planner.calibrate import Calibration
    from hf_parallel.planner.checks import all_of, whole
    from hf_parallel.planner.hardware import Cluster
    from hf_parallel.planner.measured import MeasuredCluster

    made: Callable[[], Cluster] = partial(Cluster, **sizes)
    if calibrate is not None:
        made = partial(MeasuredCluster, calibration=Calibration.read(calibrate), **sizes)
    checks = {name: partial(whole, name, count) for name, count in counts.items()}
    cluster: Cluster = all_of({"cluster": made, **checks})["cluster"]
    return cluster


def _show(model: str, cluster: Cluster, plans: list[Plan], *, is_alone: bool, as_json: bool) -> None:
    from hf_parallel.cli import plan_tables as tables
    from hf_parallel.planner.guide import guide

    if is_alone:
        tables.show_one(plans[0], as_json)
        return
    tables.show(plans, as_json)
    if not as_json:
        typer.echo(guide(model, cluster, plans[0].spec))


def _show_scaling(model: str, cluster: Cluster, asked: dict[str, Any], plot: Path | None, *, as_json: bool) -> None:
    from hf_parallel.cli.plan_plot import draw_scaling
    from hf_parallel.cli.plan_tables import show_scaling
    from hf_parallel.planner.scaling import scaling

    rows = scaling(model, cluster, **asked)
    show_scaling(rows, as_json)
    if plot is not None:
        with writing(plot):
            draw_scaling(rows, plot)


def _mapping(text: str) -> dict[str, Any]:
    """The layout that `tp=2,zero=1` means.

    Raises:
        ConfigError: A part is no `key=value`; tells all of them.
    """
    found, odd = {}, []
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, sign, value = part.partition("=")
        if not sign:
            odd.append(f"{part!r}: expected key=value. Write tp=2,pp=4.")
        found[key.strip()] = value.strip() if key.strip() == "schedule" else yaml.safe_load(value)
    if odd:
        raise ConfigError("\n".join(odd))
    return found


def _alone(model: str, cluster: Any, layout: dict[str, Any], seq_len: int, global_batch: int) -> Plan:
    """One layout; micro-batches that are not given make up the global batch."""
    from hf_parallel.planner.links import traffic
    from hf_parallel.planner.predict import placed, predict
    from hf_parallel.planner.profile import profile_of
    from hf_parallel.planner.read_layout import layout_of
    from hf_parallel.planner.search import Plan

    spec = layout_of(layout, cluster)
    if "num_microbatches" not in layout:
        passes, odd = divmod(global_batch, spec.dp * spec.micro_batch)
        if odd or not passes:
            raise ConfigError(
                f"batch={global_batch} with dp={spec.dp} and micro_batch={spec.micro_batch}: it is a multiple of "
                f"{spec.dp * spec.micro_batch}. Change batch, or give num_microbatches."
            )
        layout = layout | {"num_microbatches": passes}
        spec = layout_of(layout, cluster)
    profile, found = profile_of(model), predict(model, cluster, layout, seq_len=seq_len)
    spec = placed(profile, cluster, spec, seq_len)
    layout = layout | ({"dp_inside": spec.dp_inside} if spec.dp_inside else {})
    return Plan(layout, found, cluster, spec, links=traffic(profile, cluster, spec, seq_len))


def _write(path: Path, model: str, plan: Plan, seq_len: int) -> None:
    from hf_parallel.cli.recipe_file import accelerate_settings, write_recipe
    from hf_parallel.planner.predict import blocks_of_stages
    from hf_parallel.planner.recipe import PRECISIONS, rows_of, settings_of

    spec, cluster, found = plan.spec, plan.cluster, plan.estimate
    config = settings_of(spec)
    accelerate = accelerate_settings(
        cluster.num_gpus, PRECISIONS[spec.dtype], cluster.gpu == "cpu", nodes=cluster.nodes
    )
    machines = " --machine_rank RANK --main_process_ip IP" if cluster.nodes > 1 else ""
    counts = list(blocks_of_stages(model, cluster, spec, seq_len))
    cut = f" Planned with pipeline.split: {counts}." if spec.pp > 1 else ""
    optim = "" if spec.optim == ADAMW else f" with optim={spec.optim}"
    head = (
        f"# Assumes: {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}; {Path(model).name}; "
        f"{spec.global_batch} rows of an optimizer step.\n"
        f"# Launch:  accelerate launch --config_file {path.name}{machines} SCRIPT.py\n"
        f"# Change:  TrainingArguments(per_device_train_batch_size={rows_of(spec)}) is what was planned{optim}.{cut}\n"
        f"# Loads:   {_loading(spec)}\n"
        f"# Planned: {found.step_s:.3g} s a step ({found.low_s:.3g} to {found.high_s:.3g}), "
        f"{found.total_bytes / 1e9:.1f} GB of {plan.limit_bytes / 1e9:.1f}; predicted, not measured. Counted again by\n"
        f"#          {_count(path, model, spec, seq_len)}\n"
    )
    write_recipe(path, config, accelerate, head)
    typer.echo(f"wrote {path}: per_device_train_batch_size={rows_of(spec)}; {_loading(spec)}", err=True)


def _loading(spec: LayoutSpec) -> str:
    """Say in which precision a script has to load the model, so that the plan holds."""
    if spec.dtype == "fp32" or spec.param_dtype == "fp32":
        return "the model is loaded in fp32."
    name = {"bf16": "bfloat16", "fp16": "float16"}[spec.dtype]
    others = ", its blocks quantised" if spec.block_bits else ""
    return f"load the model with dtype=torch.{name}{others}: in fp32 its states take more."


def _count(path: Path, model: str, spec: LayoutSpec, seq_len: int) -> str:
    """The command that counts the memory of what was written."""
    from hf_parallel.planner.recipe import rows_of

    adapters = f" --adapters {spec.adapters}" if spec.adapters else ""
    bits = f" --bits {spec.block_bits:g}" if spec.block_bits else ""
    optim = f" --optim {spec.optim}" if spec.optim != ADAMW else ""
    return (
        f"hf-parallel validate {path.name} --model {model} --rows {rows_of(spec)} --length {seq_len} "
        f"--dtype {spec.precision}{adapters}{bits}{optim}"
    )
