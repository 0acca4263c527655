"""The page of results: each benchmark writes its own section, and leaves those of the others as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


PAGE = Path(__file__).resolve().parents[1] / "docs" / "compression_results.md"


def write_section(page: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of a section.

    Raises:
        ValueError: The page has no such section.
    """
    begin, end = f"<!-- {name}: written by benchmarks/bench_{name.partition('-')[0]}.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    old = page.read_text()
    if len(pattern.findall(old)) != 1:
        raise ValueError(f"{page} does not have one section '{begin}' ... '{end}'.")
    page.write_text(pattern.sub(lambda _: f"{begin}\n\n{text.strip()}\n\n{end}", old))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is words and whose others are numbers."""
    ruler = [":--", *("--:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ruler, *rows))
