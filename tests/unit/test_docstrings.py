"""Docstrings say what they are about: none begins with a word that refers to something in the reader's mind."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "hf_parallel").rglob("*.py"))
# "Of the ranks.", "Which are.", "From now on it is." have neither subject nor verb, wherever they stand.
RIDDLE = re.compile(
    r"(?:Of|That|Those|Which|Nothing|Until|As of|From (?:now|here|where)"
    r"|(?:After|At|By|For|From|In|On|Over|To|With) (?:which|whom))\b"
)
QUESTION = re.compile(r"(?:As|How|What|When|Where)\b")  # a summary begins with a verb or a noun
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
ENTRY = re.compile(r"\*{0,2}\w[\w.]*(?:, \*{0,2}\w+)*: +(.+)")


def openings(docstring: str) -> Iterator[tuple[int, str]]:
    """Offset of the line and first words of a docstring, and of each entry of its sections."""
    lines = docstring.splitlines()
    yield 0, lines[0].strip()
    indent: int | None = None
    for offset, line in enumerate(lines[1:], 1):
        text, width = line.strip(), len(line) - len(line.lstrip())
        if text in SECTIONS:
            indent = width + 4
        elif text and indent is not None and width < indent:
            indent = None
        elif width == indent:
            entry = ENTRY.fullmatch(text)
            yield offset, entry[1] if entry else text


def riddles(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of the openings that make no sentence."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None:
            continue
        first = node.body[0].lineno
        for offset, text in openings(docstring):
            asks = offset == 0 and not isinstance(node, ast.Module) and QUESTION.match(text)
            if asks or RIDDLE.match(text):
                yield first + offset, text


@pytest.mark.parametrize("opening", ["Of all ranks.", "Which are.", "From here on they are.", "In which it waits."])
def test_a_riddle_is_found_in_summaries_and_in_entries(opening: str) -> None:
    source = f'def f(a):\n    """{opening}\n\n    Args:\n        a: {opening}\n    """\n'
    assert list(riddles(source)) == [(2, opening), (5, opening)]


def test_a_summary_that_asks_is_found_and_an_entry_may() -> None:
    source = 'def f(a):\n    """What it is.\n\n    Args:\n        a: How often.\n    """\n'
    assert list(riddles(source)) == [(2, "What it is.")]


@pytest.mark.parametrize(
    "opening", ["Offset of a row.", "Whichever ends first.", "Names of ranks, of which one is 0."]
)
def test_a_sentence_is_no_riddle(opening: str) -> None:
    assert not list(riddles(f'"""{opening}"""\n'))


def test_no_docstring_is_a_riddle() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        for line, text in riddles(path.read_text(encoding="utf-8"))
    ]
    assert not found, "begin with a noun or a verb:\n" + "\n".join(found)
