"""Shard a tiny model of every AutoModelForCausalLM type over ranks and compare: `python benchmarks/zoo_tp.py`.

Every entry of tests/zoo at 2 ranks, structurally different ones at 3 and 4, in training mode: loss and every gradient
of every rank against the plain model. Two processes work on entries, one entry each at a time. With --sequence the
ranks share the sequence too; a type for which that is impossible has to be refused with the reason.

Writes build/reports/zoo-tp.json and, for a full run, the second part of docs/coverage.md; exits with 1 if an entry
failed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from zoo import all_types, entries  # noqa: E402
from zoo.parts import with_part  # noqa: E402
from zoo.shards import ShardRow, sweep_shards  # noqa: E402
from zoo.shards_page import shard_page, shard_totals  # noqa: E402
from zoo_jobs import PAGE, in_workers, options, write_report  # noqa: E402


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


def sweep_entry(job: tuple[str, int], seconds: int, sequence: bool) -> ShardRow:
    return sweep_shards(*job, seconds, sequence=sequence)


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
    parser = options("Compare tensor-parallel ranks of every model type with one process.", "zoo-tp.json", 240)
    parser.add_argument("names", nargs="*", help="entries; all of them, and the page, if none is given")
    parser.add_argument(
        "--tp", type=int, nargs="*", help="numbers of ranks; 2, and 3 and 4 for a selection, if not given"
    )
    parser.add_argument("--sequence", action="store_true", help="with sequence parallelism; writes no page")
    arguments = parser.parse_args()
    console = Console()
    jobs = [(name, size) for size in arguments.tp or [2] for name in arguments.names or entries()]
    if not arguments.tp and not arguments.names:
        jobs += [(name, size) for size in (3, 4) for name in DIFFERENT]
    rows = []
    sweep = functools.partial(sweep_entry, seconds=arguments.timeout, sequence=arguments.sequence)
    for row in in_workers(sweep, jobs):
        rows.append(row)
        console.print(
            f"[{len(rows)}/{len(jobs)}] {row.name} tp {row.tp_size}: {row.verdict} {row.dtype} {row.note[:80]}",
            markup=False,
        )
    console.print(build_table(rows))
    for size in sorted({row.tp_size for row in rows}):
        for line in shard_totals(rows, all_types(), size):
            console.print(line)
    write_report(arguments.report, [asdict(row) for row in rows])
    if arguments.sequence:
        for line in sequence_totals(rows):
            console.print(line)
    elif not arguments.names and not arguments.tp:
        PAGE.write_text(with_part(PAGE.read_text(), shard_page(rows, all_types())))
    return 1 if any(row.verdict == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
