"""The public Python names and their parameters change on purpose only; the settings' snapshot is docs/settings.schema.json.

Run this file to write the snapshot anew, and say in CHANGELOG.md what changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import hf_parallel


SNAPSHOT = Path(__file__).with_name("public_api.txt")


def parameters(function: Any) -> str:
    """Names, kinds and defaults: annotations are mypy's."""
    found = inspect.signature(function)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def lines() -> Iterator[str]:
    for name in sorted(hf_parallel.__all__):
        found = getattr(hf_parallel, name)
        if not inspect.isclass(found):
            yield f"{name}{parameters(found) if callable(found) else ''}"
            continue
        bases = ", ".join(base.__name__ for base in found.__bases__)
        takes = "" if issubclass(found, (Enum, BaseException)) or hasattr(found, "model_fields") else parameters(found)
        yield f"class {name} of {bases}: {takes or '()'}"
        for attribute, value in sorted(vars(found).items()):
            if attribute.startswith("_") or attribute.startswith("model_"):
                continue
            if isinstance(value, (classmethod, staticmethod)):
                yield f"  {attribute}{parameters(value.__func__)}"
            elif inspect.isfunction(value):
                yield f"  {attribute}{parameters(value)}"
            elif isinstance(value, property):
                yield f"  {attribute}"


def test_the_public_names_and_their_parameters_are_those_of_the_snapshot() -> None:
    assert SNAPSHOT.read_text().splitlines() == list(lines())


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n")
