"""Tables in a page of the documentation, each between a comment with its name and an end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def with_tables(text: str, tables: Mapping[str, Sequence[str]]) -> str:
    """The page with the lines of each table, by name, written anew."""
    for name, lines in tables.items():
        block = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        text = block.sub(lambda found, rows=lines: found[1] + "\n" + "\n".join(rows) + "\n\n" + found[2], text)
    return text
