"""The pages of settings and commands are the code's, and the site has every page."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from typer.main import get_command

from hf_parallel.cli.main import COMMANDS, app


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import reference_pages  # noqa: E402


def test_the_page_of_settings_is_the_code_s() -> None:
    """`make reference-pages` writes it."""
    assert (ROOT / "docs" / "settings.md").read_text() == reference_pages.settings_page()


def test_the_page_of_commands_has_every_option() -> None:
    """What stands around them is the installed typer's."""
    text = (ROOT / "docs" / "cli.md").read_text()
    group = get_command(app)
    for name in COMMANDS:
        _, found, rest = text.partition(f"\n## {name}\n")
        assert found, name
        own = rest.partition("\n## ")[0]
        for parameter in group.get_command(None, name).params:
            assert all(option in own for option in parameter.opts if option.startswith("--")), (name, parameter.opts)


def test_the_site_has_every_page() -> None:
    def pages(entries: list[object]) -> set[str]:
        found: set[str] = set()
        for entry in entries:
            value = next(iter(entry.values())) if isinstance(entry, dict) else entry
            found |= pages(value) if isinstance(value, list) else {str(value)}
        return found

    nav = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    made = {"index.md", "goals.md", "python.md"}  # by benchmarks/site_hooks.py, goals.md of docs/README.md
    assert nav - made == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
