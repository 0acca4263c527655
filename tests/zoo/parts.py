"""docs/coverage.md in parts, each from its heading to the next: a sweep writes its own and leaves the others."""

from __future__ import annotations

import re

import transformers


def is_of_this_release(page: str) -> bool:
    """Whether all parts of `page` are of the transformers that is installed; each release has other types."""
    return set(re.findall(r", transformers ([\w.]+?)[.,]?(?=\s)", page)) == {transformers.__version__}


def _parts(page: str) -> dict[str, str]:
    """Text by heading, in order."""
    found = re.split(r"^(?=# )", page, flags=re.MULTILINE)
    return {text.partition("\n")[0]: text.strip() for text in found if text.strip()}


def part_of(page: str, heading: str) -> str:
    """The part of `page` under `heading` ("# Coverage"), empty if it has none."""
    return _parts(page).get(heading, "")


def with_part(page: str, part: str) -> str:
    """`page` with `part` in the place of the one that has its heading, or at the end."""
    return "\n\n".join((_parts(page) | _parts(part)).values()) + "\n"
