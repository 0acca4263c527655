"""The dry run of a rank of a recipe, for a model of which there is only a config."""

from __future__ import annotations

from os import PathLike
from typing import Any, Final

import torch

from hf_parallel.dry_run.check_file import Checked, check_file
from hf_parallel.dry_run.fit import accumulation_of, layout_of_file
from hf_parallel.dry_run.rank.report import DryRun
from hf_parallel.dry_run.rank.run import Job, run_dry
from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import this_machine
from hf_parallel.memory.shape import config_of
from hf_parallel.memory.terms import Precision, Work
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import find_recipe
from hf_parallel.settings.values import spelled


PRECISIONS: Final = ("fp32", "half", "autocast")
HALVES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


def dry_run_recipe(  # noqa: PLR0913 - the names are the interface
    recipe: str | PathLike[str],
    model: Any,
    *,
    rank: int = 0,
    rows: int = 1,
    length: int = 2048,
    accumulation: int | None = None,
    precision: Precision | None = None,
    mask: bool = False,
    lora_rank: int = 0,
) -> DryRun:
    """Run a step of one rank of a recipe on tensors without memory, in this process alone.

    Plan, cut, shards, schedule, backward pass, reduction and optimizer are those of a run. Nothing is computed, sent or
    downloaded. CUDA's context, NCCL's buffers and fragmentation are not counted.

    Args:
        recipe: An accelerate config file, or the name of a recipe.
        model: A transformers config, a `config.json`, a folder with one, or a name.
        rank: Rank in the world, 0 to num_processes - 1.
        rows: Rows of a batch on each replica, 1 or more.
        length: Tokens of a row, 1 or more.
        accumulation: Batches of an optimizer step; None: the file's number, else 1.
        precision: Precision of the parameters: fp32, half or autocast (fp32 parameters, products in 16 bit); None: as
            the file trains.
        mask: Whether batches come with an attention mask.
        lora_rank: Rank of LoRA on every linear layer, without tensor parallelism; 0 trains the model itself.

    Returns:
        Bytes, messages and waits of one optimizer step in the middle of a run.

    Raises:
        ConfigError: All problems of the file at once, as `hf-parallel validate` tells them; or there is no such rank or model.
        PlanError, UnsupportedError: The model cannot be parallelized so.
    """
    checked = check_file(find_recipe(str(recipe)), this_machine())
    if checked.errors:
        raise ConfigError("\n".join(map(str, checked.errors)))
    _refuse_batches(rows, length, precision)
    _refuse_other_engines(checked)
    layout = layout_of_file(checked, precision)
    _refuse_rank(rank, layout.num_processes)
    config = _config_of_model(model)
    _refuse_lora(lora_rank, layout.tp_size)
    accelerate = checked.accelerate
    return run_dry(
        Job(
            config=_settings_of(checked),
            model=config,
            work=Work(rows, length, accumulation=accumulation_of(checked, accumulation)),
            rank=rank,
            world_size=layout.num_processes,
            ranks_per_node=layout.ranks_per_node,
            on_gpu=accelerate.get("use_cpu") is not True,
            precision=layout.precision,
            compute=HALVES.get(str(accelerate.get("mixed_precision", "no")).lower()),
            mask=mask,
            lora_rank=lora_rank,
        )
    )


def _refuse_batches(rows: int, length: int, precision: str | None) -> None:
    for name, value in {"rows": rows, "length": length}.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: it is 1 or more. Give the batches you train on.")
    if precision not in (None, *PRECISIONS):
        raise ConfigError(
            f"precision={spelled(precision)}: expected one of {', '.join(PRECISIONS)}. Leave it out to take that of the file."
        )


def _refuse_rank(rank: int, num_processes: int) -> None:
    if not 0 <= rank < num_processes:
        raise ConfigError(
            f"rank={rank}: the file starts {num_processes} processes. Give a rank from 0 to {num_processes - 1}."
        )


def _refuse_lora(lora_rank: int, tp_size: int) -> None:
    if lora_rank < 0 or (lora_rank and tp_size > 1):
        raise ConfigError(
            f"lora_rank={lora_rank} with tp_size={tp_size}: it is 0 or more, and 0 with tensor parallelism, whose plan takes "
            "values. Leave it out, or run a file with tp_size 1."
        )


def _config_of_model(model: Any) -> Any:
    """The transformers config that `model` is or names."""
    config = config_of(str(model)) if isinstance(model, (str, PathLike)) else model
    if not hasattr(config, "to_dict"):
        raise ConfigError(
            f"model={spelled(model)}: expected a transformers config, or a path to one. Give AutoConfig.from_pretrained(...)."
        )
    return config


def _settings_of(checked: Checked) -> HFParallelConfig:
    """The settings of a file, if a dry run can follow them."""
    if checked.config is None or checked.config.layout == "auto":
        raise ConfigError(
            "layout=auto: there is no layout before training starts. Plan with `hf-parallel plan --write FILE` and give that file."
        )
    return checked.config


def _refuse_other_engines(checked: Checked) -> None:
    """Refuse what hf_parallel does not run itself.

    Raises:
        ConfigError: DeepSpeed or accelerate's FSDP drives the run.
    """
    kind = checked.accelerate.get("distributed_type")
    engine = checked.config.zero.engine if checked.config is not None else ""
    if engine == "deepspeed" or kind in ("DEEPSPEED", "FSDP"):
        named = f"zero.engine={engine}" if engine == "deepspeed" else f"distributed_type={kind}"
        raise ConfigError(
            f"{named}: it trains with code of its own, which a dry run does not follow. Count its memory with `hf-parallel "
            "validate FILE --model CONFIG`, or set zero.engine to native or fsdp2."
        )
