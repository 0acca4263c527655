"""Every message that the code raises has an entry, so that a search for its words finds the page about it."""

from __future__ import annotations

import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import messages_page  # noqa: E402


def test_every_message_of_the_code_has_an_entry() -> None:
    """`make messages-page` writes them."""
    written = messages_page.PAGE.read_text().splitlines()
    missing = [line for line in messages_page.page().splitlines() if line not in written]
    assert not missing, "run `make messages-page`"
    assert messages_page.page() == messages_page.PAGE.read_text(), "run `make messages-page`"


def test_entries_name_the_error_the_words_and_a_page(tmp_path: Path) -> None:
    module = tmp_path / "some.py"
    module.write_text('def f(x):\n    raise PlanError(f"{x}: cannot be cut at {x.y}. " + "Give less.")\n')
    assert list(messages_page.raised(module)) == [("PlanError", "{x}: cannot be cut at {y}. Give less.")]
    found = messages_page.messages()
    assert sum(map(len, found.values())) > 300
    assert all((ROOT / "docs" / f"{where}.md").exists() for texts in found.values() for _, where in texts)


def test_the_longest_place_that_fits_says_the_page() -> None:
    assert messages_page.page_of("checkpoints/weights/read") == "loading"
    assert messages_page.page_of("checkpoints/reader") == "checkpoints"
    assert messages_page.page_of("watchdog") == "failures"
