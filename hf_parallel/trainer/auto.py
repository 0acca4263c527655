"""`layout: auto`: the layout of a run is planned when its Trainer is made, for the machines, the model and the batches it has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_parallel.compat.private_peft import tuner_layers
from hf_parallel.compat.private_quantised import quantised_bits
from hf_parallel.compat.private_transformers import attention_of, set_train_batch_size
from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import this_machine
from hf_parallel.memory.optimizers import optimizer_of
from hf_parallel.mesh.links import Links
from hf_parallel.mesh.one_rank import on_rank_zero
from hf_parallel.mesh.ranks import links_here
from hf_parallel.planner.here import cluster_here, row_length
from hf_parallel.planner.recipe import rows_of, settings_of
from hf_parallel.planner.search import Plan, plan
from hf_parallel.settings.config import HFParallelConfig


logger = logging.getLogger(__name__)

LOOKED_AT = 8  # rows of the data set


@dataclass(frozen=True)
class Chosen:
    """A planned layout.

    Args:
        section: The settings that run it.
        rows: Rows of a batch on each replica.
        accumulation: Batches of an optimizer step.
        words: The plan in a paragraph.
    """

    section: dict[str, Any]
    rows: int
    accumulation: int
    words: str


def plan_layout(
    trainer: Trainer, config: HFParallelConfig, sample: Mapping[str, Any] | None
) -> tuple[HFParallelConfig, str]:
    """Plan on rank 0, the same on every rank, and give the Trainer the rows that keep its optimizer step; collective.

    Args:
        trainer: Trainer, whose step has per_device_train_batch_size * gradient_accumulation_steps * world size rows.
        config: Settings with `layout: auto`.
        sample: A small batch of the kind the model is trained on; None: rows of the data set are looked at.

    Returns:
        The settings, and the plan in words.

    Raises:
        ConfigError: No layout fits, or the GPU is unknown; the same on every rank.
    """
    links = links_here(config.topology.links)
    chosen = on_rank_zero(lambda: _choose(trainer, sample, links), "plans the layout", explain=_explained)
    trainer.args.gradient_accumulation_steps = chosen.accumulation
    set_train_batch_size(trainer, chosen.rows)
    beside = {
        key: value for key, value in config.to_yaml_section().items() if key in ("checkpoint", "monitor", "topology")
    }
    section = chosen.section | beside | {"topology": chosen.section.get("topology", {}) | beside.get("topology", {})}
    return HFParallelConfig.from_mapping(section, source="the plan of layout=auto"), chosen.words


def _explained(what: str) -> ConfigError:
    return ConfigError(f"layout=auto: {what}. Give tp_size, pp_size and zero yourself.")


def _choose(trainer: Trainer, sample: Mapping[str, Any] | None, links: Links) -> Chosen:
    model, args = trainer.model, trainer.args
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(
            "layout=auto: the Trainer has no model with a config when it is made (model_init makes it later). Pass model=, or "
            "give tp_size, pp_size and zero yourself."
        )
    on_gpu = trainer.accelerator.device.type == "cuda"
    cluster = cluster_here(this_machine(), links.nodes * links.ranks_per_node, links.ranks_per_node, on_gpu=on_gpu)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * cluster.num_gpus
    asked: dict[str, Any] = {"seq_len": row_length_of(trainer, sample), "global_batch": rows}
    # Whether experts can be shared is known when the model has been tried: a run that asked for nothing is not to be refused then.
    plans = plan(model.config, cluster, **asked, layout={"ep": 1} | given_by(trainer, model), most=2)
    spec = plans[0].spec
    section = settings_of(spec).to_yaml_section()
    if args.gradient_checkpointing:  # the Trainer's own
        section.pop("activation_checkpointing", None)
    accumulation = section.pop("gradient_accumulation_steps", 1)
    return Chosen(section, rows_of(spec), accumulation, _paragraph(plans, asked, accumulation))


def given_by(trainer: Trainer, model: Any) -> dict[str, Any]:
    """Keys of the layout that the Trainer and its model decide: precision, attention and so on."""
    args = trainer.args
    attention = attention_of(model.config)
    trained = [p.requires_grad for p in model.parameters()]
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    half = "bf16" if own == {torch.bfloat16} else "fp16" if own == {torch.float16} else "fp32"  # without autocast
    found: dict[str, Any] = {
        "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else half,
        "attention": attention if attention in ("eager", "sdpa") else "flash",
    }
    if trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None:  # else it is one of the user's
        found["optim"] = optimizer_of(str(getattr(args.optim, "value", args.optim)), args.optim_args)
    if found["dtype"] != "fp32" and any(p.dtype == torch.float32 for p in model.parameters()):
        found["param_dtype"] = "fp32"  # products cast it
    found |= {"recompute": "full"} if args.gradient_checkpointing else {}
    if not all(trained):
        found["adapters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        found["adapters_are"] = "beside" if tuner_layers(model) else "own"
        bits = quantised_bits(model)
        found |= {"block_bits": bits} if bits else {}
    return found


def row_length_of(trainer: Trainer, sample: Mapping[str, Any] | None) -> int:
    """Tokens of a row."""
    config: Any = trainer.model.config  # type: ignore[union-attr]
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    data: Any = trainer.train_dataset
    rows: list[Any] = [] if sample is None else [sample]
    if not rows and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        rows = [data[index] for index in range(min(LOOKED_AT, len(data)))]
    return row_length(rows, limit if isinstance(limit, int) else None)


def _paragraph(plans: list[Plan], asked: Mapping[str, Any], accumulation: int) -> str:
    first = plans[0]
    found, spec, cluster = first.estimate, first.spec, first.cluster
    place = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}"
    words = (
        f"layout=auto: {_named(first)} on {place}, predicted {found.step_s:.3g} s a step ({found.low_s:.3g} to {found.high_s:.3g}) "
        f"and {found.total_bytes / 1e9:.2f} GB of {first.limit_bytes / 1e9:.1f} for {asked['global_batch']} rows of "
        f"{asked['seq_len']} tokens: {first.why}. per_device_train_batch_size={rows_of(spec)} and "
        f"gradient_accumulation_steps={accumulation} keep these rows."
    )
    return words + (f" Runner-up: {_named(plans[1])}, {plans[1].why}." if len(plans) > 1 else "")


def _named(one: Plan) -> str:
    spec = one.spec
    more = [f"zero {spec.zero}"] if spec.zero else []
    more += [f"schedule {spec.schedule}, {spec.num_microbatches} microbatches"] if spec.pp > 1 else []
    more += [f"recompute {spec.recompute}"] if spec.recompute != "none" else []
    return ", ".join([f"tp {spec.tp} x pp {spec.pp} x dp {spec.dp}", *more])
