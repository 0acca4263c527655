"""What the pages name exists: files, make targets, commands, Python names, settings, links.

If these fail, a reader follows the documentation, or an error message, to something that is not there.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from hf_parallel.cli.main import COMMANDS
from hf_parallel.settings.config import HFParallelConfig


ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLDERS = ("benchmarks", "docs", "examples", "recipes", "tests")
# Folders and files of a user's own machine, and of other packages.
OTHERS = ("trl/", "runs/", "out/", "path/", "/models/")
MODULES = {str(path.relative_to(ROOT / "hf_parallel")) for path in (ROOT / "hf_parallel").rglob("*.py")}
SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in HFParallelConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def quoted(page: Path) -> Iterator[str]:
    """The words of inline code, and of the lines of code blocks."""
    text = page.read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield from block.split()
    for span in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        yield from span.split()


@each_page
def test_files_exist(page: Path) -> None:
    missing = []
    for word in map(str.strip, quoted(page)):
        path = re.split(r"[:,]", word.strip("\"'()"))[0].rstrip("/")
        if path.startswith(OTHERS) or not re.fullmatch(r"[\w./-]+", path):
            continue
        ours = path.split("/")[0] in (*FOLDERS, "hf_parallel") and "/" in path
        if path.endswith(".py") and not ours:  # a page may leave out the folders that its text has named
            found = any(module == path or module.endswith(f"/{path}") for module in MODULES)
            found = found or path in ("train.py", "SCRIPT.py", "script.py", "run_clm_no_trainer.py", "setup.py")
            found = found or any((ROOT / folder).rglob(path) for folder in FOLDERS)
        else:
            found = not ours or (ROOT / path).exists() or (ROOT / f"{path}.py").exists()
        if not found:
            missing.append(word)
    assert not missing


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:`|^)make\s+([a-z -]+)", page.read_text(), flags=re.MULTILINE)
        assert {target for words in named for target in words.split()} <= targets, page.name


def test_folders_on_the_page_of_the_house_exist() -> None:
    """`how_it_works.md` gives paths below `hf_parallel/`; its table lists every folder."""
    text = (ROOT / "docs" / "how_it_works.md").read_text()
    folders = {path.name for path in (ROOT / "hf_parallel").iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)/` \|", text, flags=re.MULTILINE)) == folders
    for module in MODULES - {"__init__.py"}:
        if "/" not in module:
            assert f"`{module}`" in text, f"{module} stands beside the folders and is not explained"


def test_commands_exist() -> None:
    for page in PAGES:
        named = re.findall(r"(?:`|^|\()hf-parallel ([a-z-]+)", page.read_text(), flags=re.MULTILINE)
        assert set(named) <= set(COMMANDS), page.name


@each_page
def test_python_names_exist(page: Path) -> None:
    for name in re.findall(r"\bhf_parallel(?:\.[A-Za-z]\w*)+", page.read_text()):
        parts = name.split(".")
        for size in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:size]))
            except ModuleNotFoundError:
                continue
            break
        for attribute in parts[size:]:
            assert hasattr(found, attribute), name
            found = getattr(found, attribute)


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "hf_parallel").rglob("*.py"))], ids=lambda path: path.name)
def test_settings_exist(path: Path) -> None:
    """Keys of our sections, in pages and in messages: `tensor_parallel.plan`, never one that was renamed."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        text = "\n".join(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    for section, key in re.findall(rf"(?<![\w./])({'|'.join(SECTIONS)})\.([a-z]\w*)", text):
        module = (ROOT / "hf_parallel" / section / key).exists() or f"{section}/{key}.py" in MODULES
        assert key in SECTIONS[section].model_fields or key in ("md", "py") or module, f"no such key: {section}.{key}"


def test_the_page_of_the_examples_has_each_of_them_and_a_test_launches_it() -> None:
    """A row of the table, and a test that names it."""
    scripts = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} - {"demo.py"}
    rows = re.findall(r"^\| \[([\w.]+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(scripts)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*example*.py"))
    assert not [name for name in scripts if f'"{name}"' not in tests and f'"{Path(name).stem}"' not in tests]


@each_page
def test_what_is_inside_of_a_list_is_so_on_the_site(page: Path) -> None:
    """Python-Markdown, which makes the site, wants four spaces where GitHub takes two, and a space after an item with several parts."""
    lines = page.read_text().splitlines()
    assert not [number for number, line in enumerate(lines, 1) if re.match(r" {1,3}([-*] |[0-9]+\. |```)", line)]
    assert not re.search(
        r"^ {4,}\S.*\n(?:[-*]|[0-9]+\.) ", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), flags=re.M
    )


def test_no_page_has_the_marks_of_a_merge() -> None:
    assert not [page.name for page in PAGES if re.search(r"^(?:<{7}|>{7}) ", page.read_text(), flags=re.MULTILINE)]


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http", "mailto")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link
