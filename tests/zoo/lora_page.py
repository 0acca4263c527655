"""The table of adapters in docs/coverage.md. The same rows give the same text: no timings, no rounding noise."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zoo.lora import LAYOUTS, PP, TP, TP_LINEAR, LoraRow
from zoo.parts import part_of


MARK = "# LoRA"
TABLE = "zoo-lora"
HEADER = f"| type | {' | '.join(LAYOUTS)} | adapters | note |"
LONGEST_NOTE = 220


def lora_lines(page: str) -> dict[str, str]:
    """Lines of the table on `page`, by entry."""
    lines = re.findall(r"^\| .*", part_of(page, MARK), flags=re.MULTILINE)
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line != HEADER}


def lora_table(page: str, rows: Sequence[LoraRow], names: Sequence[str], types: Sequence[str]) -> list[str]:
    """Counts and table: lines of `page`, of which `rows` replace their own, in the order of `names`."""
    known = lora_lines(page) | {row.name: _line(row) for row in rows}
    lines = [known[name] for name in names if name in known]
    table = [HEADER, "|" + "---|" * (HEADER.count(" | ") + 1), *lines]
    return [*(f"* {line}" for line in lora_totals(lines, types)), "", *table]


def lora_totals(lines: Sequence[str], types: Sequence[str]) -> list[str]:
    """Counts over the lines of types (variants apart), as they stand on the page."""
    cells = [line.removeprefix("| ").split(" | ") for line in lines]
    of_types = [row for row in cells if row[0] in types]

    def count(verdict: str, layout: str) -> int:
        return sum(row[1 + LAYOUTS.index(layout)].startswith(verdict) for row in of_types)

    failed = sum("failed" in row[1 : 1 + len(LAYOUTS)] for row in of_types)
    not_run = f" Not run yet: {len(types) - len(of_types)}." if len(of_types) < len(types) else ""
    return [
        f"Types: {len(of_types)} of {len(types)}.{not_run} Not with PEFT: {count('not with PEFT', PP)}. Not trainable from "
        f"their configuration: {count('unusable', PP)}. Failed: {failed}.",
        f"pp2: exact: {count('exact', PP)}. Refused with a reason: {count('refused', PP)}.",
        f"tp2: exact: {count('exact', TP)} ({count('exact (fp64)', TP)} in fp64). Refused with a reason: "
        f"{count('refused', TP)}; {count('exact', TP_LINEAR)} of these are exact without the adapters on experts.",
        f"Variants: {len(cells) - len(of_types)}.",
    ]


def _line(row: LoraRow) -> str:
    adapters = f"{row.reached} of {row.adapters}" if row.reached < row.adapters else str(row.adapters)
    cells = [row.name, *(_cell(row, layout) for layout in LAYOUTS), adapters if row.layouts else "", _note(row)]
    return f"| {' | '.join(cells)} |"


def _cell(row: LoraRow, layout: str) -> str:
    outcome = row.layouts.get(layout)
    if outcome is None:
        return "" if layout == TP_LINEAR else row.verdict
    return f"{outcome.verdict} (fp64)" if outcome.dtype == "fp64" else outcome.verdict


def _note(row: LoraRow) -> str:
    notes = [row.note] if row.note else []
    notes += [f"{layout}: {outcome.note}" for layout, outcome in row.layouts.items() if outcome.note]
    return "; ".join(map(_short, notes))


def _short(note: str) -> str:
    text = " ".join(note.split()).replace("|", "\\|")
    return text if len(text) <= LONGEST_NOTE else f"{text[:LONGEST_NOTE].rsplit(' ', 1)[0]} ..."
