"""Hooks of mkdocs: pages that are not in docs/, and links that lead out of it.

The README is the first page, with its links made relative to docs/; docs/README.md, which leads on from there, is the page
of goals; the Python reference is one entry for each public name. A link to a file outside of docs/, which a site does not have, becomes its name.
A picture leads to its file, where it can be made larger.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    readme = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .replace("](docs/README.md", "](goals.md")
        .replace("](docs/", "](")
    )
    goals = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    files.remove(files.get_file_from_path("README.md"))
    files.append(File.generated(config, "index.md", content=outside(readme, "")))
    files.append(File.generated(config, "goals.md", content=goals))
    files.append(File.generated(config, "python.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead to the first page instead of the README, and nowhere instead of out of the site."""
    inside = re.sub(r"\]\(\.\./README\.md(#[\w-]+)?\)", r"](index.md\1)", markdown)
    return outside(pictures_as_links(inside), "../")


def pictures_as_links(text: str) -> str:
    """Let a picture that stands alone in its line lead to its file."""
    return re.sub(r"^!\[([^\]]*)\]\(([^)]+)\)$", r"[![\1](\2)](\2)", text, flags=re.MULTILINE)


def outside(text: str, prefix: str) -> str:
    """Name the files that the site does not have."""
    names = "examples/|benchmarks/|recipes/|tests/|CONTRIBUTING|CHANGELOG|SECURITY|CITATION|LICENSE"
    link = rf"\[([^\]]+)\]\({re.escape(prefix)}((?:{names})[^)]*)\)"
    return re.sub(
        link, lambda found: found[1] if found[1].strip("`") == found[2] else f"{found[1]} (`{found[2]}`)", text
    )


def reference() -> str:
    """The page of the Python names."""
    tree = ast.parse((ROOT / "hf_parallel" / "__init__.py").read_text(encoding="utf-8"))
    assigned = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    names = ast.literal_eval(assigned["__all__"])
    entries = [f"::: hf_parallel.{name}" for name in names]
    return "\n\n".join(["# Python", "Every public name. They are imported on first use.", *entries]) + "\n"
