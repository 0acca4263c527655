"""The first part of docs/coverage.md. The same rows give the same text: no timings, no rounding noise."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.models import type_of
from zoo.sweep import Row


HEADER = "| type | class | 2 stages | 4 stages | 2 ranks | crossing tensors | in the stack | on both | note |"
INTRO = """# Coverage

For every type of `AutoModelForCausalLM` a tiny model with random weights is cut into pipeline stages and compared with the
uncut model. `make zoo-pp` writes this part of the page; do not edit it.

* Models: `tests/zoo` makes them from the configuration class alone. They have 5 blocks or more, a vocabulary of 101, fp32 weights,
  eager attention and no dropout, and are in training mode. Auxiliary router losses are on with a weight of 0.5.
* Batches: 2 x 8 padded right and 3 x 11 padded left, with -100 labels; text only unless a type needs more.
* *exact*: loss and every gradient agree to 1e-5 relative on both batches (a gradient relative to its largest element), and
  hf_parallel's self-check accepts the cut; 3 stages are tested too. A difference in evaluation mode is a note.
* *2 ranks*: two optimizer steps of an accelerate loop on 2 gloo processes; loss, gradient norm and the gathered weights
  agree to 1e-5 relative.
* *crossing tensors*: the largest number at any cut, by where they are found: `r` in a block's return value, `a` stored in an
  argument, `h` output of a sub-module with a hook.
* *in the stack*: share of the parameters inside the blocks; in real models it is larger. *on both*: number of parameters that both
  of two stages hold; their gradients are summed.
"""


def split_cell(row: Row, count: int) -> str:
    return row.splits[count].verdict if count in row.splits else row.verdict


def ranks_cell(row: Row) -> str:
    return {"exact": "exact", "": "-"}.get(row.ranks, "no")


def totals(rows: Sequence[Row], types: Sequence[str]) -> list[str]:
    """Counts over the types (variants apart), as they stand on the page."""
    of_types = [row for row in rows if row.name in types]
    variants = [row for row in rows if row.name not in types]

    def count(verdict: str, among: Sequence[Row]) -> int:
        return sum(row.verdict == verdict for row in among)

    return [
        f"Types: {len(of_types)}. Exact: {count('exact', of_types)}. Refused with a reason: "
        f"{count('refused', of_types)}. Not trainable from their configuration: {count('unusable', of_types)}. "
        f"Failed: {count('failed', of_types)}.",
        f"Exact on 2 ranks: {sum(row.ranks == 'exact' for row in of_types)}.",
        f"Variants: {len(variants)}. Exact: {count('exact', variants)}.",
    ]


def page(rows: Sequence[Row], types: Sequence[str], versions: str) -> str:
    """The whole part, with the heading of the page."""
    lines = [INTRO, f"{versions}.", "", *(f"* {line}" for line in totals(rows, types)), "", "## Types", ""]
    lines += [HEADER, "|" + "---|" * HEADER.count(" | ") + "---|"]
    lines += [_line(row) for row in rows if row.name in types]
    lines += ["", "## Variants", "", HEADER, "|" + "---|" * HEADER.count(" | ") + "---|"]
    lines += [_line(row) for row in rows if row.name != type_of(row.name)]
    return "\n".join([*lines, ""])


def _line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.2f}"
    cells = [
        f"`{row.name}`",
        row.class_name,
        split_cell(row, 2),
        split_cell(row, 4),
        ranks_cell(row),
        _crossings(row),
        share,
        str(len(row.shared)) if row.share is not None else "",
        _note(row),
    ]
    return "| " + " | ".join(cells) + " |"


def _crossings(row: Row) -> str:
    kinds = ("return", "argument", "hook")
    most = max(row.crossings, key=lambda cut: sum(cut.values()), default={})
    return " ".join(f"{most[kind]}{kind[0]}" for kind in kinds if most.get(kind))


def _note(row: Row) -> str:
    """What is not exact, in one line."""
    notes = [row.note] if row.note else []
    if row.ranks not in ("exact", ""):
        notes.append(f"2 ranks: {row.ranks}")
    said = {split.evaluation for split in row.splits.values()} - {"exact", ""}
    notes += [f"evaluation: {text}" for text in sorted(said)]
    return " ".join("; ".join(notes).split()).replace("|", "\\|")
