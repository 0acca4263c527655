"""Shard a tiny model of every AutoModelForCausalLM type over ranks and compare: `python benchmarks/zoo_tp.py`.

Every entry of tests/zoo at 2 ranks, structurally different ones at 3 and 4, in training mode: loss and every gradient
of every rank against the plain model. Two processes work on entries, one entry each at a time. With --sequence the
ranks share the sequence too; a type for which that is impossible has to be refused with the reason.

Writes build/reports/zoo-tp.json and, for a full run, the second part of docs/coverage.md; exits with 1 if an entry
failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from zoo import all_types, entries  # noqa: E402
from zoo.shards import ShardRow, sweep_shards  # noqa: E402
from zoo.shards_page import shard_page, shard_totals, with_shards  # noqa: E402


WORKERS = 2
# Fused, grouped, interleaved and shared projections; latents, norms over all heads; ALiBi, sinks, soft caps; experts of
# every layout; state-space, recurrent and hybrid mixers; encoders with a decoder mask; tied blocks.
DIFFERENT = [
    "llama",
    "gpt2",
    "bloom",
    "falcon",
    "mpt",
    "opt",
    "gpt_neox",
    "gpt_bigcode",
    "phi3",
    "qwen3",
    "olmo2",
    "gemma2",
    "gpt_oss",
    "mixtral",
    "dbrx",
    "jetmoe",
    "llama4",
    "deepseek_v2",
    "deepseek_v3",
    "minicpm3",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "bamba",
    "jamba",
    "qwen3_next",
    "recurrent_gemma",
    "xlstm",
    "zamba2",
    "minimax",
    "bert",
    "bart",
    "cpmant",
    "stablelm",
]


def sweep_entry(arguments: tuple[str, int, int, bool]) -> ShardRow:
    torch.set_num_threads(1)
    name, tp_size, seconds, sequence = arguments
    return sweep_shards(name, tp_size, seconds, sequence=sequence)


def sweep_all(jobs: Sequence[tuple[str, int]], seconds: int, sequence: bool) -> Iterator[ShardRow]:
    """Rows in the order of `jobs`."""
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        yield from pool.imap(sweep_entry, [(name, tp_size, seconds, sequence) for name, tp_size in jobs])


def build_table(rows: Sequence[ShardRow]) -> Table:
    table = Table(title="tensor-parallel ranks of every type, compared with the plain model")
    for heading in ("entry", "ranks", "verdict", "paired", "gathered", "replicated", "work", "full", "note"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        shares = [f"{value:.2f}" for value in (row.paired, row.gathered, row.replicated, row.work)]
        full = "yes" if row.fully_paired else ""
        table.add_row(row.name, str(row.tp_size), f"{row.verdict} {row.dtype}", *shares, full, row.note[:60])
    return table


def sequence_totals(rows: Sequence[ShardRow]) -> Iterator[str]:
    """One line a number of ranks, and one for each entry that is refused."""
    for size in sorted({row.tp_size for row in rows}):
        mine = [row for row in rows if row.tp_size == size and row.verdict != "unusable"]
        exact = [row for row in mine if row.verdict == "exact"]
        whole = [row.name for row in exact if row.on_parts[0] < row.on_parts[1]]
        refused = [row for row in mine if row.verdict == "refused"]
        yield (
            f"sequence parallelism on {size} ranks: {len(exact)} of {len(mine)} entries exact, {len(whole)} of them with "
            f"blocks on the whole sequence ({', '.join(whole)}); {len(refused)} refused"
        )
        yield from (f"  {row.name}: {row.note}" for row in refused)


def main() -> int:
    """Sweep, print the table, write the report and the page; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare tensor-parallel ranks of every model type with one process.")
    parser.add_argument("names", nargs="*", help="entries; all of them, and the page, if none is given")
    parser.add_argument(
        "--tp", type=int, nargs="*", help="numbers of ranks; 2, and 3 and 4 for a selection, if not given"
    )
    parser.add_argument("--sequence", action="store_true", help="with sequence parallelism; writes no page")
    parser.add_argument("--timeout", type=int, default=240, help="seconds an entry may take")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "zoo-tp.json")
    arguments = parser.parse_args()
    console = Console()
    jobs = [(name, size) for size in arguments.tp or [2] for name in arguments.names or entries()]
    if not arguments.tp and not arguments.names:
        jobs += [(name, size) for size in (3, 4) for name in DIFFERENT]
    rows = []
    for row in sweep_all(jobs, arguments.timeout, arguments.sequence):
        rows.append(row)
        console.print(
            f"[{len(rows)}/{len(jobs)}] {row.name} tp {row.tp_size}: {row.verdict} {row.dtype} {row.note[:80]}",
            markup=False,
        )
    console.print(build_table(rows))
    for size in sorted({row.tp_size for row in rows}):
        for line in shard_totals(rows, all_types(), size):
            console.print(line)
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if arguments.sequence:
        for line in sequence_totals(rows):
            console.print(line)
    elif not arguments.names and not arguments.tp:
        path = ROOT / "docs" / "coverage.md"
        path.write_text(with_shards(path.read_text() if path.exists() else "", shard_page(rows, all_types())))
    return 1 if any(row.verdict == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
