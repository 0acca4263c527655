"""How far predicted memory is from the peaks of dry runs, by type of model and layout.

make memory-page ARGS=--dry-runs    # half a minute of a core for each type; writes the table of docs/memory.md
make memory-page ARGS="--dry-runs llama opt"    # the rows of two types, the others stay
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import AutoConfig

from hf_parallel.activation_checkpointing.recorded import variant_of
from hf_parallel.dry_run.rank.run import Job, run_dry
from hf_parallel.memory.estimate import OVERHEAD, estimate
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import Work, layout_of
from hf_parallel.settings.config import HFParallelConfig


WIDE: Final = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 8192}
GATED: Final = WIDE | {"intermediate_size": 1408, "num_key_value_heads": 8}
OLD: Final = {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 8192}
TYPES: Final[dict[str, dict[str, Any]]] = {
    "llama": GATED,
    "mistral": GATED | {"num_key_value_heads": 2, "sliding_window": None},
    "qwen2": GATED,
    "qwen3": GATED | {"head_dim": 64},
    "gemma2": GATED | {"head_dim": 64, "sliding_window": 128},
    "gpt2": OLD,
    "gptj": OLD | {"rotary_dim": 32},
    "gpt_neox": WIDE | {"intermediate_size": 2048},
    "opt": WIDE | {"ffn_dim": 2048, "word_embed_proj_dim": 512},
    "bloom": {"hidden_size": 512, "n_layer": 8, "n_head": 8, "vocab_size": 8192},
    "phi": GATED,
    "stablelm": GATED,
    "starcoder2": GATED,
    "olmo2": GATED,
    "cohere": GATED,
}
# Settings and processes. The balanced cut depends on costs that the estimate does not know.
SECTIONS: Final[dict[str, tuple[dict[str, Any], int]]] = {
    "one GPU": ({}, 1),
    "pp2": ({"pp_size": 2, "pipeline": {"num_microbatches": 4, "split": "even"}}, 2),
    "tp2": ({"tp_size": 2}, 2),
    "zero1": ({"zero": {"stage": 1}}, 2),
    "zero3": ({"zero": {"stage": 3}}, 2),
    "recompute": ({"activation_checkpointing": {"every": 1}}, 1),
    "selective": ({"activation_checkpointing": {"every": 2, "mode": "selective"}}, 1),
}
WORK: Final = Work(rows=4, length=512)


def difference(name: str, section: str, precision: Any) -> float:
    """Estimate over dry run, less 1, of the rank of a pipeline that has most."""
    settings, world = SECTIONS[section]
    config = HFParallelConfig.from_mapping(settings)
    model = AutoConfig.for_model(name, **TYPES[name])
    compute = None if precision == "fp32" else torch.bfloat16
    peaks = [
        run_dry(Job(config, model, WORK, rank, world, world, precision=precision, compute=compute)).peak_bytes
        for rank in range(config.pp_size)
    ]
    layout = layout_of(config, world, world, precision)
    memory = estimate(shape_of_config(model, precision, variant_of(layout)), layout, WORK)
    return (memory.gpu_bytes - memory.gpu[OVERHEAD]) / max(peaks) - 1


def row(name: str) -> str:
    """A type under mixed precision in bf16."""
    found = (f"{100 * difference(name, section, 'autocast'):+.1f} %" for section in SECTIONS)
    return f"| `{name}` | {' | '.join(found)} |"


def table(rows: Mapping[str, str]) -> list[str]:
    """The rows of types, by name, under their heads."""
    return [
        f"| type | {' | '.join(SECTIONS)} |",
        "|---" * (len(SECTIONS) + 1) + "|",
        *map(rows.__getitem__, sorted(rows)),
    ]
