"""Write the tables of docs/memory.md from the arithmetic itself, and with `--dry-runs [TYPE ...]` that of its errors, row by row."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import dry_run_peaks
from tables import with_tables

from hf_parallel.memory.estimate import estimate
from hf_parallel.memory.report import GB, zero_table
from hf_parallel.memory.terms import Layout, ModelShape, Work
from hf_parallel.settings.config import HFParallelConfig


PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
LLAMA_7B = ModelShape(6_738_415_616, 32, 4096, 11008, 32000, 32, 32, 128, 131_072_000, 131_072_000)
TEN = ModelShape(10_000_000_000, 48, 4096, 11008, 32000, 32, 32, 128, 131_072_000, 131_072_000, largest=131_072_000)
LLAMA_70B = ModelShape(70_553_706_496, 80, 8192, 28672, 128256, 64, 8, 128, 1_050_673_152, 1_050_673_152)


def recipes_table() -> list[str]:
    checkpoints = {every: HFParallelConfig(activation_checkpointing={"every": every}) for every in (1, 2, 4)}
    recompute = {every: config.activation_checkpointing for every, config in checkpoints.items()}
    offloaded = Layout(
        2, 2, stage=3, engine="deepspeed", offload_optimizer="cpu", offload_param="cpu", recompute=recompute[2]
    )
    cases = {
        "10e9, 2 GPUs, ZeRO 3, all offloaded, checkpoint every 2, 1 row": (TEN, offloaded, Work(1, 2048)),
        "7B, 4 GPUs, ZeRO 2, checkpoint every 1, 4 rows": (
            LLAMA_7B,
            Layout(4, 4, stage=2, engine="deepspeed", recompute=recompute[1]),
            Work(4, 2048),
        ),
        "70B, 64 GPUs, tp 8, ZeRO 3, checkpoint every 4, 1 row of 4096": (
            LLAMA_70B,
            Layout(64, 8, tp_size=8, stage=3, engine="fsdp2", recompute=recompute[4]),
            Work(1, 4096),
        ),
    }
    rows = [
        "| run | states | activations | logits | buffers | overhead | GPU | RAM of a node |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (shape, layout, work) in cases.items():
        memory = estimate(shape, layout, work)
        terms = dict(memory.gpu)
        states = sum(terms.pop(key, 0.0) for key in ("weights", "gradients", "optimizer state"))
        kept = sum(terms.pop(key, 0.0) for key in ("activations", "recomputed blocks"))
        logits, overhead = terms.pop("logits and loss"), terms.pop("overhead (not measured)")
        sizes = (states, kept, logits, sum(terms.values()), overhead, memory.gpu_bytes, memory.host_bytes)
        rows.append(f"| {name} | {' | '.join(f'{size / GB:.1f}' for size in sizes)} |")
    return rows


def page(text: str) -> str:
    """The page with its tables written anew."""
    return with_tables(text, {"zero-table": zero_table(7e9, 8), "recipes-table": recipes_table()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--dry-runs", nargs="*", metavar="TYPE", choices=sorted(dry_run_peaks.TYPES))
    given = parser.parse_args()
    text = page(PAGE.read_text(encoding="utf-8"))
    given.output.write_text(text, encoding="utf-8")
    if given.dry_runs is None:
        return
    rows = {line.split("`")[1]: line for line in re.findall(r"^\| `\w+` \|.* %.*\|$", text, re.MULTILINE)}
    for name in given.dry_runs or sorted(dry_run_peaks.TYPES):  # each row is written at once: all take long
        rows[name] = dry_run_peaks.row(name)
        given.output.write_text(with_tables(text, {"dry-runs": dry_run_peaks.table(rows)}), encoding="utf-8")


if __name__ == "__main__":
    main()
