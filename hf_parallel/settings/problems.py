"""What is wrong with settings, in words: key path and value, rule, fix; one line a setting, all of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hf_parallel.errors import MAX_LINES, ConfigError
from hf_parallel.settings.sections import MAX_SHOWN, Section, spelled


def sections_of(root: type[Section]) -> dict[str, type[Section]]:
    """Name -> class of the sections of a config."""
    return {
        name: type(field.default) for name, field in root.model_fields.items() if isinstance(field.default, Section)
    }


def locate(root: type[Section], key: str) -> tuple[str, str]:
    """(section, leaf) of an override name; the section of a top-level name is ''.

    Raises:
        ConfigError: No setting, or several, have that name.
    """
    sections = sections_of(root)
    section, _, leaf = key.rpartition(".")
    if section in sections or (not section and leaf in root.model_fields):
        return section, leaf
    homes = [name for name, model in sections.items() if leaf in model.model_fields] if not section else []
    if len(homes) == 1:
        return homes[0], leaf
    if homes:
        raise ConfigError(f"{key}: found in {', '.join(homes)}. Write it with its section: {homes[0]}.{key}.")
    raise ConfigError(_unknown_key(root, key, ""))


def rewritten(error: ValidationError, root: type[Section], values: Mapping[str, Any]) -> list[str]:
    """Pydantic's errors, one line a setting (a union reports once for each of its members)."""
    lines: dict[str, str] = {}
    for detail in error.errors():
        path = _setting_path(root, detail["loc"])
        if path not in lines:
            lines[path] = _problem(root, path, detail, values)
        if len(lines) > MAX_LINES:
            break
    return list(lines.values())


def _setting_path(root: type[Section], loc: Iterable[int | str]) -> str:
    """The part of a pydantic location that names a setting, without union members and list positions."""
    path: list[str] = []
    model: type[Section] | None = root
    for part in map(str, loc):
        if model is None:
            break
        path.append(part)
        model = sections_of(model).get(part)
    return ".".join(path)


def _home(root: type[Section], section: str) -> type[Section]:
    """The class of a section, which may be inside another; '' is the config itself."""
    for part in filter(None, section.split(".")):
        root = sections_of(root)[part]
    return root


def _problem(root: type[Section], path: str, detail: ErrorDetails, values: Mapping[str, Any]) -> str:
    section, _, leaf = path.rpartition(".")
    if detail["type"] == "together":
        return detail["msg"]
    if detail["type"] == "problem":
        return f"{path}{detail['msg']}"
    if detail["type"] == "extra_forbidden":
        return _unknown_key(root, leaf, section)
    home = _home(root, section)
    field = home.model_fields.get(leaf)
    if field is None:  # a key that is no string
        return f"{section or 'the settings'}: {_cut(leaf)} is not a key. Keys are strings: quote or remove it."
    given: Any = values
    for part in path.split("."):
        given = given[part] if isinstance(given, Mapping) else getattr(given, part, None)
    if leaf in sections_of(home):
        return f"{path}={spelled(given)}: expected {field.description}. Write those keys on lines below it, or leave it out."
    return f"{path}={spelled(given)}: expected {field.description}. Set {path} to {spelled(field.default)}."


def _cut(key: str) -> str:
    return key if len(key) <= MAX_SHOWN else f"{key[: MAX_SHOWN - 3]}..."


def _unknown_key(root: type[Section], key: str, section: str) -> str:
    sections, home, key = sections_of(root), _home(root, section), _cut(key)
    path = f"{section}.{key}" if section else key
    if not home.model_fields:
        return f"{path} is not available yet: the {section} section has no options. Remove it."
    known = [*home.model_fields]
    elsewhere = [f"{name}.{key}" for name, model in sections.items() if key in model.model_fields]
    if key in root.model_fields:
        elsewhere.append(f"{key} at the top level")
    if elsewhere:
        return f"{path}: unknown key here. Move it to {' or '.join(elsewhere)}."
    leaves = {leaf: f"{name}.{leaf}" for name, model in sections.items() for leaf in model.model_fields}
    nearest = difflib.get_close_matches(key, [*known, *leaves], n=1, cutoff=0.6)
    hint = f"Did you mean {nearest[0] if nearest[0] in known else leaves[nearest[0]]}?" if nearest else "Remove it."
    return f"{path}: unknown key. {hint} Known keys{f' of {section}' if section else ''}: {', '.join(known)}."
