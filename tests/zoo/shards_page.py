"""The tensor-parallel part of docs/coverage.md. The same rows give the same text: no timings, no rounding noise."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.shards import ShardRow


MARK = "# Tensor parallelism"
INTRO = f"""{MARK}

The same models and batches run as all ranks of a tensor-parallel group and are compared with the plain model. The ranks are threads
of one process and run the same code as processes. `make zoo-tp` writes this part of the page; do not edit it.

* *exact*: in training mode the loss and every gradient (whole, or the rank's shard) agree on every rank, to 1e-5 relative in fp32.
  Where the model itself is too badly conditioned for that, they agree to 1e-9 in fp64 (without the model's own casts to fp32).
* *paired / gathered / replicated*: shares of the parameters without embedding and head. *paired* needs no more than two
  all-reduces per pair, *gathered* is a column layer with an all-gather. In these tiny models latent projections, norms and
  position tables are a larger share than in real ones. *work*: share of the matrix products with weights that the ranks split.
* *vocabulary*: head and loss are sharded over the vocabulary, and exact in fp32; the others keep whole logits.
* *full*: in the numbered blocks that the batch reaches no layer is gathered, no experts are whole, and no linear layer is whole
  because other code reads its weight. Routers, latent projections and layers without a gradient are replicated on purpose and
  do not count. Encoders for images and sound, which a text batch does not reach, do not count either.
"""
HEADER = "| type | ranks | verdict | paired | gathered | replicated | work | full | vocabulary | not in a pair |"


def shard_totals(rows: Sequence[ShardRow], types: Sequence[str], tp_size: int = 2) -> list[str]:
    """Counts over the types at `tp_size` ranks."""
    of_types = [row for row in rows if row.name in types and row.tp_size == tp_size]
    ran = [row for row in of_types if row.verdict == "exact"]
    usable = [row for row in of_types if row.verdict != "unusable"]
    mean = sum(1.0 - row.replicated for row in usable) / max(1, len(usable))
    whole = sum(row.with_vocabulary for row in usable) / max(1, len(usable))
    full = sum(row.fully_paired for row in usable)
    return [
        f"{tp_size} ranks: types: {len(of_types)}. Exact: {len(ran)} ({sum(row.dtype == 'fp32' for row in ran)} in "
        f"fp32). Refused: {sum(row.verdict == 'refused' for row in of_types)}. Failed: "
        f"{sum(row.verdict == 'failed' for row in of_types)}. Not trainable from their configuration: "
        f"{len(of_types) - len(usable)}.",
        f"{tp_size} ranks: sharded on average: {mean:.1%} of the parameters without embedding and head, {whole:.1%} with "
        f"both if those were sharded. Fully paired: {full} of {len(usable)} ({full / max(1, len(usable)):.0%}). Head and "
        f"loss sharded over the vocabulary: {sum(row.vocabulary for row in usable)}.",
    ]


def shard_page(rows: Sequence[ShardRow], types: Sequence[str]) -> str:
    """The whole part, from its mark on."""
    sizes = sorted({row.tp_size for row in rows})
    lines = [INTRO, *(f"* {line}" for size in sizes for line in shard_totals(rows, types, size)), "", HEADER]
    lines.append("|" + "---|" * HEADER.count(" | ") + "---|")
    ordered = sorted(rows, key=lambda row: (row.tp_size, row.name not in types))
    return "\n".join([*lines, *(_line(row) for row in ordered), ""])


def _line(row: ShardRow) -> str:
    verdict = f"{row.verdict} ({row.dtype})" if row.dtype == "fp64" else row.verdict
    shares = [f"{value:.2f}" for value in (row.paired, row.gathered, row.replicated, row.work)]
    if row.verdict == "unusable":
        shares = [""] * 4
    why = row.note if row.verdict != "exact" else _left(row)
    flags = ("yes" if flag else "" for flag in (row.fully_paired, row.vocabulary))
    return f"| {row.name} | {row.tp_size} | {verdict} | {' | '.join(shares)} | {' | '.join(flags)} | {why} |"


def _left(row: ShardRow) -> str:
    """Names of what is gathered, or replicated without being wanted so, shortened."""
    names = [name for name, why in row.left.items() if why.startswith("gathered") or "acts as a row" in why]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return shown.replace("|", "\\|")
