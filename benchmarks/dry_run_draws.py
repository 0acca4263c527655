"""How far predicted memory is from the peaks of dry runs, in set-ups that are drawn: types, sizes, layouts, precisions, batches, LoRA.

.venv/bin/python benchmarks/dry_run_draws.py --draws 64    # some seconds of a core for each set-up
.venv/bin/python benchmarks/dry_run_draws.py --only 17    # one of them, with the terms of its fullest rank
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import statistics
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from transformers import AutoConfig

from hf_parallel.activation_checkpointing.recorded import variant_of
from hf_parallel.dry_run.rank.model import build
from hf_parallel.dry_run.rank.report import DryRun
from hf_parallel.dry_run.rank.run import Job, run_dry
from hf_parallel.errors import ParallelError
from hf_parallel.memory.estimate import OVERHEAD, estimate
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import Memory, Precision, Work, layout_of
from hf_parallel.settings.config import HFParallelConfig


NARROW: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads")
OLD: Final = ("n_embd", "n_layer", "n_head")
GATED: Final = ("intermediate_size", "num_key_value_heads")
# Names of width, depth, heads; of the feed-forward part and the heads of keys and values; what else a type needs.
TYPES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]]] = {
    "llama": (NARROW, GATED, {}),
    "mistral": (NARROW, GATED, {"sliding_window": None}),
    "qwen2": (NARROW, GATED, {}),
    "qwen3": (NARROW, GATED, {"head_dim": 64}),
    "gemma2": (NARROW, GATED, {"head_dim": 64, "sliding_window": 128}),
    "glm": (NARROW, GATED, {"head_dim": 64, "pad_token_id": 0}),
    "olmo2": (NARROW, GATED, {}),
    "cohere": (NARROW, GATED, {}),
    "stablelm": (NARROW, GATED, {}),
    "starcoder2": (NARROW, GATED, {}),
    "phi": (NARROW, GATED, {}),
    "gpt_neox": (NARROW, ("intermediate_size",), {}),
    "gpt2": (OLD, (), {}),
    "gptj": (OLD, (), {"rotary_dim": 32}),
    "opt": (NARROW, ("ffn_dim",), {}),
    "bloom": (("hidden_size", "n_layer", "n_head"), (), {}),
    "mixtral": (NARROW, GATED, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": (NARROW, GATED, {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}),
    "mamba2": (("hidden_size", "num_hidden_layers"), (), {"head_dim": 64, "n_groups": 1}),
}
EVEN: Final = {"split": "even"}
# Settings and processes. What the balanced cut weighs is not all in the estimate.
LAYOUTS: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "one": ({}, 1),
    "pp2": ({"pp_size": 2, "pipeline": EVEN | {"num_microbatches": 4}}, 2),
    "pp4": ({"pp_size": 4, "pipeline": EVEN | {"num_microbatches": 8}}, 4),
    "gpipe": ({"pp_size": 2, "pipeline": EVEN | {"num_microbatches": 4, "schedule": "gpipe"}}, 2),
    "interleaved": ({"pp_size": 2, "pipeline": EVEN | {"num_microbatches": 4, "schedule": "interleaved_1f1b"}}, 2),
    "zbv": ({"pp_size": 2, "pipeline": EVEN | {"num_microbatches": 4, "schedule": "zbv"}}, 2),
    "tp2": ({"tp_size": 2}, 2),
    "tp3": ({"tp_size": 3}, 3),
    "tp2 shared": ({"tp_size": 2, "tensor_parallel": {"sequence_parallel": True}}, 2),
    "tp2 pp2": ({"tp_size": 2, "pp_size": 2, "pipeline": EVEN | {"num_microbatches": 4}}, 4),
    "tp3 pp2": ({"tp_size": 3, "pp_size": 2, "pipeline": EVEN | {"num_microbatches": 4}}, 6),
    "dp2": ({}, 2),
    "zero1": ({"zero": {"stage": 1}}, 2),
    "zero2": ({"zero": {"stage": 2}}, 2),
    "zero3": ({"zero": {"stage": 3}}, 2),
    "pp2 zero1": ({"pp_size": 2, "pipeline": EVEN | {"num_microbatches": 4}, "zero": {"stage": 1}}, 4),
    "tp2 zero1": ({"tp_size": 2, "zero": {"stage": 1}}, 4),
}
FURTHER: Final[dict[str, tuple[dict[str, Any], int]]] = {  # not drawn
    "zero2 of 8": ({"zero": {"stage": 2}}, 8),
    "sp4": ({"sp_size": 4}, 4),
    "ep2": ({"ep_size": 2}, 2),
    "ep2 zero1": ({"ep_size": 2, "zero": {"stage": 1}}, 4),
}
RECOMPUTED: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "every 1": {"every": 1},
    "every 2": {"every": 2},
    "alternate": {"every": 2, "mode": "alternate"},
    "selective": {"every": 2, "mode": "selective"},
}
LORA: Final = 8


@dataclass(frozen=True)
class Draw:
    """A set-up of a run.

    Attributes:
        name: Type of the model.
        sizes: What its config says beside the defaults of the type.
        layout: One of `LAYOUTS` or `FURTHER`.
        precision: Of its parameters, and of what it computes with.
        recompute: One of `RECOMPUTED`.
        work: Rows and tokens of a batch.
        lora: Rank of adapters; 0 trains the model.
        chunked_loss: Whether the loss is computed without logits where it can be.
    """

    name: str
    sizes: dict[str, Any]
    layout: str
    precision: Precision
    recompute: str
    work: Work
    lora: int
    chunked_loss: bool

    def __str__(self) -> str:
        changes = [self.recompute] * (self.recompute != "none") + [f"lora {self.lora}"] * (self.lora > 0)
        changes += ["chunked"] * self.chunked_loss
        width, depth, vocab = (self.sizes[key] for key in (*TYPES[self.name][0][:2], "vocab_size"))
        batch = f"{self.work.rows}x{self.work.length}"
        return " ".join([f"{self.name}:{depth}x{width}/{vocab}", self.layout, self.precision, batch, *changes])

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return (LAYOUTS | FURTHER)[self.layout][1]

    @property
    def settings(self) -> HFParallelConfig:
        """The settings of the run."""
        section = copy.deepcopy((LAYOUTS | FURTHER)[self.layout][0])
        if self.recompute != "none":
            section["activation_checkpointing"] = RECOMPUTED[self.recompute]
        section["chunked_loss"] = "auto" if self.chunked_loss else False
        return HFParallelConfig.from_mapping(section)


@dataclass(frozen=True)
class Found:
    """What a set-up was predicted to take, and what it takes.

    Attributes:
        memory: The estimate.
        peaks: Dry runs of all ranks of a pipeline.
    """

    memory: Memory
    peaks: list[DryRun]

    @property
    def predicted(self) -> float:
        """Bytes without what is not counted in a dry run."""
        return self.memory.gpu_bytes - self.memory.gpu[OVERHEAD]

    @property
    def difference(self) -> float:
        """Estimate over dry run, less 1."""
        return self.predicted / max(one.peak_bytes for one in self.peaks) - 1


def drawn(count: int, seed: int) -> list[Draw]:
    """Set-ups, the same for each seed."""
    chance = random.Random(seed)
    return [_draw(chance) for _ in range(count)]


def _draw(chance: random.Random) -> Draw:
    name = chance.choice(sorted(TYPES))
    layout = chance.choice(sorted(LAYOUTS))
    return Draw(
        name,
        _sizes(chance, name),
        layout,
        chance.choice(("fp32", "half", "autocast")),
        chance.choice(("none", "none", *sorted(RECOMPUTED))),
        Work(chance.choice((4, 8)), chance.choice((128, 257, 512, 1000)), accumulation=chance.choice((1, 2))),
        chance.choice((0, 0, 0, LORA)) if "tp" not in layout else 0,  # a dry run has no adapters on shards
        chance.choice((False, False, True)),
    )


def _sizes(chance: random.Random, name: str) -> dict[str, Any]:
    names, more, fixed = TYPES[name]
    width, heads = chance.choice(((256, 4), (384, 6), (448, 7), (512, 8)))
    found = dict(zip(names, (width, chance.choice((4, 6, 8)), heads), strict=False)) | fixed
    if "intermediate_size" in more or "ffn_dim" in more:
        found[more[0]] = chance.choice((2, 3, 4)) * width
    if "num_key_value_heads" in more:
        found["num_key_value_heads"] = heads if name == "phi" else chance.choice((heads, 1, heads // 2 or 1))
        if heads % found["num_key_value_heads"]:
            found["num_key_value_heads"] = 1
    if name == "opt":
        found["word_embed_proj_dim"] = width
    if name == "mamba2":
        found["num_heads"] = 2 * width // 64
    if name == "qwen2_moe":
        found |= {"moe_intermediate_size": 2 * width, "shared_expert_intermediate_size": width}
    return found | {"vocab_size": chance.choice((1000, 8192, 32000))}


def peaks(draw: Draw) -> list[DryRun]:
    """Dry runs of a rank of each pipeline rank.

    Raises:
        ParallelError: It is refused.
    """
    config, world = draw.settings, draw.world_size
    model = AutoConfig.for_model(draw.name, **draw.sizes)
    compute = None if draw.precision == "fp32" else torch.bfloat16
    # The first of the ranks that share layers has no fewer heads than the others.
    ranks = [rank * config.tp_size * config.sp_size for rank in range(config.pp_size)]
    jobs = [Job(config, model, draw.work, rank, world, world) for rank in ranks]
    return [run_dry(replace(job, precision=draw.precision, compute=compute, lora_rank=draw.lora)) for job in jobs]


def predicted(draw: Draw) -> Memory:
    """The estimate of a set-up."""
    world, model = draw.world_size, AutoConfig.for_model(draw.name, **draw.sizes)
    layout = layout_of(draw.settings, world, world, draw.precision)
    count, adapted = 0, None
    if draw.lora:
        parameters = build(model, torch.float32, draw.lora).parameters()
        count = sum(one.numel() for one in parameters if one.requires_grad)
        adapted = replace(shape_of_config(model), adapters=count)
    shape = shape_of_config(model, draw.precision, variant_of(layout, adapted))
    return estimate(replace(shape, adapters=count), layout, draw.work)


def told(found: Found) -> str:
    """The terms of both, and the largest tensors of the fullest dry run."""
    worst = max(found.peaks, key=lambda one: one.peak_bytes)
    lines = [f"ranks {[f'{one.peak_bytes / 1e6:.1f}' for one in found.peaks]}, predicted rank {found.memory.rank}"]
    lines += [f"  predicted {found.predicted / 1e6:9.1f}"]
    lines += [f"    {name:40} {size / 1e6:9.1f}" for name, size in found.memory.gpu.items() if name != OVERHEAD]
    lines += [f"  dry run   {worst.peak_bytes / 1e6:9.1f}"]
    lines += [f"    {name:40} {size / 1e6:9.1f}" for name, size in worst.peak.by_kind.items()]
    lines += [f"    {size / 1e6:9.2f} {about}" for size, *about in worst.peak.largest]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    differences = []
    for index, draw in enumerate(drawn(given.draws, given.seed)):
        if given.only is not None and index not in given.only:
            continue
        began = time.perf_counter()
        try:
            one = Found(predicted(draw), peaks(draw))
        except ParallelError as error:
            print(f"{index:3} refused  {draw}: {type(error).__name__} {str(error)[:160]}", flush=True)
            continue
        differences.append(one.difference)
        print(f"{index:3} {100 * one.difference:+6.1f} %  {draw}  ({time.perf_counter() - began:.0f} s)", flush=True)
        if given.only is not None:
            print(told(one))
    sizes = sorted(map(abs, differences))
    if sizes:
        within = sum(size <= 0.05 for size in sizes)
        print(
            f"{within} of {len(sizes)} within 5 %, mean {100 * statistics.mean(sizes):.1f} %, median {100 * statistics.median(sizes):.1f} %, "
            f"from {100 * min(differences):+.1f} % to {100 * max(differences):+.1f} %"
        )


if __name__ == "__main__":
    main()
