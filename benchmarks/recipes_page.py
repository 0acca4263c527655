"""Count the memory of every recipe: writes docs/recipes.md and the memory lines at the head of each GPU recipe."""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from tables import with_tables
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from hf_parallel.activation_checkpointing.recorded import variant_of
from hf_parallel.dry_run.check_file import Checked, check_file
from hf_parallel.dry_run.fit import Verdict, accumulation_of, judge, layout_of_file
from hf_parallel.machine.facts import Gpu, Machine
from hf_parallel.memory.report import GB, zero_table
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import Memory, ModelShape, Precision, Work
from hf_parallel.settings.recipes import list_recipes, recipes_folder


PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
ANYWHERE = Machine((), 0)  # what a recipe needs does not depend on where this runs
WITH_T4 = Machine(
    (Gpu("T4", 16 * 10**9, (7, 5)),) * 2, 0
)  # fp16 needs a GPU, and on one that has bf16 it is warned of
LLAMA: dict[str, dict[str, Any]] = {
    "Llama 2 7B": {},
    "Llama 2 13B": {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
    "LLaMA 33B": {
        "hidden_size": 6656, "intermediate_size": 17920, "num_hidden_layers": 60, "num_attention_heads": 52,
    },
    "Llama of 48 blocks": {"num_hidden_layers": 48},
    "Llama 3 70B": {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "Llama 3.2 1B": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "SmolLM2 135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip
EXPERTS = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True, "experts_implementation": "eager",
}  # fmt: skip
GPT3 = {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a recipe is counted for.

    Args:
        model: A key of `LLAMA`, "GPT-3 175B", or the one of experts.
        work: Rows and tokens of one batch of a model copy.
        precision: How the model is loaded and trained.
        gpu_gb: Of a GPU (of RAM for each process on a CPU), in 1e9 bytes.
        host_gb: RAM of a machine.
        adapters: Parameters that are trained on top of the model instead of it.
        bits: Of a frozen parameter of a block, if it is quantised.
    """

    model: str
    work: Work
    precision: Precision
    gpu_gb: float
    host_gb: float
    adapters: int = 0
    bits: float = 0.0


# NF4 with double quantisation: 8 bits a group of 64, and 32 a group of 256 of these. Source: QLoRA (arXiv:2305.14314), 3.
NF4 = 4 + 8 / 64 + 32 / (64 * 256)
# LoRA of rank 16 on the seven matrices of each block: rank * (inputs + outputs).
LORA_7B = 32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
LORA_13B = 40 * 16 * (4 * (5120 + 5120) + 3 * (5120 + 13824))
LORA_33B = 60 * 16 * (4 * (6656 + 6656) + 3 * (6656 + 17920))
ON_A_CPU = Run("SmolLM2 135M", Work(4, 256), "fp32", 16, 32)
EXPERTS_ON_A_CPU = dataclasses.replace(ON_A_CPU, model="Mixtral of 12 blocks")
RUNS: dict[str, Run] = {
    "budget_3090": Run("Llama of 48 blocks", Work(1, 2048), "half", 24, 256),
    "budget_3090_7b": Run("Llama 2 7B", Work(1, 2048), "half", 24, 192),
    "budget_3090_lora": Run("Llama 2 7B", Work(1, 2048), "half", 24, 64, adapters=LORA_7B),
    "qlora_2x24gb": Run("LLaMA 33B", Work(8, 2048), "half", 24, 64, adapters=LORA_33B, bits=NF4),
    "qlora_2xt4": Run("Llama 2 13B", Work(8, 1024), "half", 15, 30, adapters=LORA_13B, bits=NF4),
    "llama2_7b_4xa100": Run("Llama 2 7B", Work(4, 2048), "half", 80, 256),
    "llama_70b_64xh100": Run("Llama 3 70B", Work(1, 4096), "half", 80, 2048),
    "gpt3_175b_1024gpu": Run("GPT-3 175B", Work(16, 2048), "half", 80, 4096),
    "ddp": Run("Llama 3.2 1B", Work(1, 2048), "autocast", 40, 256),
    "ethernet_pp_powersgd": Run("Llama 3.2 1B", Work(8, 2048), "autocast", 24, 128),
}
LOADED = {"half": "loaded in 16 bit", "autocast": "loaded in fp32", "fp32": "in fp32"}
COLUMNS = ("weights", "gradients", "optimizer state", "activations", "recomputed blocks", "logits and loss")
OVERHEAD = "overhead (not measured)"


def run_of(name: str) -> Run:
    return RUNS.get(name, EXPERTS_ON_A_CPU if name == "cpu_ep2" else ON_A_CPU)


def config_of(run: Run) -> Any:
    if run.model == EXPERTS_ON_A_CPU.model:
        return MixtralConfig(**EXPERTS)
    return GPT2Config(**GPT3) if run.model == "GPT-3 175B" else LlamaConfig(**LLAMA[run.model])


@cache
def shape_of_run(name: str) -> ModelShape:
    """The model that a recipe is counted for, with a step as its layout runs it."""
    run = run_of(name)
    layout = layout_of_file(checked_recipe(name), run.precision)

    def trained(shape: ModelShape) -> ModelShape:
        return dataclasses.replace(shape, adapters=run.adapters, block_bits=run.bits)

    adapted = trained(shape_of_config(config_of(run))) if run.adapters else None
    return trained(shape_of_config(config_of(run), run.precision, variant_of(layout, adapted)))


def machine_of(name: str) -> Machine:
    """One whose GPUs have the precision of the recipe."""
    return WITH_T4 if name.endswith("t4") else ANYWHERE


@cache
def checked_recipe(name: str) -> Checked:
    checked = check_file(recipes_folder() / f"{name}.yaml", machine_of(name))
    if checked.errors:
        raise ValueError("\n".join(map(str, checked.errors)))
    return checked


@cache
def verdict(name: str) -> Verdict:
    """What the recipe needs, against the hardware that it assumes."""
    run, checked = run_of(name), checked_recipe(name)
    work = dataclasses.replace(run.work, accumulation=accumulation_of(checked))
    return judge(checked, shape_of_run(name), work, run.gpu_gb * GB, run.host_gb * GB, run.precision)


def counted_for(name: str) -> str:
    run = run_of(name)
    shape, work = shape_of_run(name), run.work
    adapters = f" and {run.adapters / 1e6:.0f}e6 of adapters" if run.adapters else ""
    rows = f"{work.rows} row{'s' * (work.rows > 1)} of {work.length} tokens a batch of a model copy"
    loaded = (
        f"blocks in NF4 ({run.bits:.3g} bits with scales), all else in 16 bit" if run.bits else LOADED[run.precision]
    )
    return f"{run.model} ({shape.parameters / 1e9:.4g}e9 parameters{adapters}), {rows}, {loaded}."


def gpu_line(name: str, memory: Memory) -> str:
    terms = " + ".join(f"{term} {size / GB:.1f}" for term, size in memory.gpu.items())
    return f"GPU: {terms} = {memory.gpu_bytes / GB:.1f} GB of {run_of(name).gpu_gb:g}."


def ram_line(name: str, memory: Memory) -> str:
    """RAM of a machine by formula."""
    run = run_of(name)
    layout, parameters = layout_of_file(checked_recipe(name), run.precision), shape_of_run(name).parameters
    on_node = min(layout.ranks_per_node, layout.num_processes)
    loading = memory.loading / GB
    count = f"{parameters / 1e9:.4g}e9"
    each = loading * GB / parameters / on_node
    load = f"{each:g} bytes * {count} * {on_node} ranks = {loading:.4g} GB while every rank loads the whole model"
    parts = layout.tp_size * layout.pp_size
    if run.bits:  # each rank quantises what it reads, on its GPU
        whole = loading / on_node
        return f"Before the cut: each GPU holds the whole quantised model, {whole:.1f} GB of {run.gpu_gb:g}; nothing is in RAM."
    if parts > 1:
        load += f", {loading / parts:.4g} GB where it reads its own part (hf_parallel.sharded_loading)"
    if not memory.host:
        return f"RAM of a machine: nothing is offloaded; {load}."
    bytes_each = memory.host_bytes / parameters / on_node * layout.num_shards * layout.tp_size * layout.pp_size
    need = f"{bytes_each:g} bytes * {count} / {layout.num_shards} parts * {on_node} ranks = {memory.host_bytes / GB:.1f} GB"
    pinned = f"pinned blocks are rounded up to powers of two, up to {memory.host_pinned / GB:.1f} GB more"
    return f"RAM of a machine: {need} of {run.host_gb:g}; {pinned}; before training {load}."


def header(name: str) -> list[str]:
    """The memory lines of a recipe's file."""
    memory = verdict(name).memory
    texts = [f"Counted for {counted_for(name)}", gpu_line(name, memory), ram_line(name, memory)]
    lines = [line for text in texts for line in textwrap.wrap(text, 112, subsequent_indent="  ")]
    return [f"#   {line}" for line in lines]


def with_header(name: str, text: str) -> str:
    """The text of a recipe with its memory lines written anew; those on a CPU have none."""
    lines = "".join(f"{line}\n" for line in header(name)) if name in RUNS else ""
    return re.sub(r"(# Memory, written by `make recipes-page`:\n)(?:#   .*\n)*", lambda found: found[1] + lines, text)


def table(names: list[str], column: str) -> list[str]:
    rows = [
        f"| recipe | {' | '.join(COLUMNS)} | buffers | overhead | {column} | RAM of a machine | while loading |",
        "|" + "---|" * (len(COLUMNS) + 6),
    ]
    for name in names:
        memory = verdict(name).memory
        terms = dict(memory.gpu)
        kept = [terms.pop(key, 0.0) for key in COLUMNS]
        overhead = terms.pop(OVERHEAD)
        sizes = [*kept, sum(terms.values()), overhead, memory.gpu_bytes, memory.host_bytes, memory.loading]
        rows.append(f"| `{name}` | {' | '.join(f'{size / GB:.1f}' for size in sizes)} |")
    return rows


def runs_list() -> list[str]:
    return [f"- `{name}`: {counted_for(name)}" for name in RUNS]


def page(text: str) -> str:
    """The page with its tables written anew."""
    on_cpu = [name for name in list_recipes() if name not in RUNS]
    parts = {
        "gpu": table(list(RUNS), "a GPU"),
        "runs": runs_list(),
        "cpu": table(on_cpu, "a process"),
        "zero": zero_table(7e9, 8),
    }
    return with_tables(text, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--recipes", type=Path, default=recipes_folder(), help="Folder whose files are rewritten.")
    arguments = parser.parse_args()
    arguments.output.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name in RUNS:
        path = arguments.recipes / f"{name}.yaml"
        path.write_text(with_header(name, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
