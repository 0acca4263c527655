"""The table of experts in docs/coverage.md. The same rows give the same text: no timings, no rounding noise."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zoo.experts import ExpertRow
from zoo.parts import part_of


MARK = "# Experts"
TABLE = "zoo-ep"
HEADER = "| type | ep2 | modules | share | note |"
LONGEST_NOTE = 260
WITHOUT = "Without stacked experts: "


def expert_lines(page: str) -> list[str]:
    """Lines of the table on `page`."""
    return [line for line in re.findall(r"^\| .*", part_of(page, MARK), flags=re.MULTILINE) if line != HEADER]


def expert_table(rows: Sequence[ExpertRow], types: Sequence[str]) -> list[str]:
    """Counts and table."""
    shown = [row for row in rows if row.verdict not in ("no experts", "unusable")]
    table = [HEADER, "|" + "---|" * HEADER.count(" | ") + "---|", *map(_line, shown)]
    return [*(f"* {line}" for line in expert_totals(rows, types)), "", *table]


def expert_totals(rows: Sequence[ExpertRow], types: Sequence[str]) -> list[str]:
    """Counts over the types; variants apart."""
    of_types = [row for row in rows if row.name in types]

    def count(verdict: str) -> int:
        return sum(row.verdict == verdict for row in of_types)

    return [
        f"Types: {len(of_types)}. Exact: {count('exact')}. Refused with a reason: {count('refused')}. {WITHOUT}"
        f"{count('no experts')}. Not trainable from their configuration: {count('unusable')}. Failed: {count('failed')}."
    ]


def _line(row: ExpertRow) -> str:
    sizes = [str(row.modules), f"{row.share:.2f}"] if row.modules else ["", ""]
    note = " ".join(row.note.split()).replace("|", "\\|")
    note = note if len(note) <= LONGEST_NOTE else f"{note[:LONGEST_NOTE].rsplit(' ', 1)[0]} ..."
    return f"| {' | '.join([row.name, row.verdict, *sizes, note])} |"
