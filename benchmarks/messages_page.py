"""Write docs/messages.md: every message that the code raises, by its first words, with the page about it.

`make messages-page` writes the page; a test compares it with the code. What stands in braces is filled in.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_parallel"
PAGE = ROOT / "docs" / "messages.md"
CLASSES = {
    "ConfigError": "Settings that cannot work. Nothing was started; the text is the same on every rank.",
    "PlanError": "A model that cannot be cut or sharded as asked. Nothing was changed.",
    "ScheduleError": "A pipeline schedule that cannot run.",
    "UnsupportedError": "What is asked for has no effect or no meaning here; the message names what has.",
    "RankMismatchError": "Ranks that should agree do not.",
    "RankFailure": "Another rank raised, died or hung.",
    "CheckpointError": "Files that cannot be written or read.",
}
# Folder or module below hf_parallel -> the page about it; the longest that fits counts.
PAGES = {
    "": "failures",
    "activation_checkpointing": "activation_checkpointing",
    "batches": "pipeline",
    "checkpoints": "checkpoints",
    "checkpoints/weights": "loading",
    "cli": "launching",
    "cli/plan": "planner",
    "cli/schedule": "schedules",
    "compat": "versions",
    "data_parallel": "data_parallel",
    "data_parallel/compression": "compression",
    "data_parallel/local_sgd": "compression",
    "deepspeed": "deepspeed",
    "dry_run": "launching",
    "dry_run/memory": "memory",
    "dry_run/rank": "dry_run",
    "engine": "trainer",
    "expert_parallel": "experts",
    "engine/plan/share_rows": "ulysses",
    "guards": "trainer",
    "mesh": "launching",
    "model": "pipeline",
    "pipeline_parallel": "pipeline",
    "pipeline_parallel/schedule": "schedules",
    "planner": "planner",
    "settings": "launching",
    "settings/topology": "topology",
    "tensor_parallel": "tensor_parallel",
    "trainer": "trainer",
    "trainer/checkpoints": "checkpoints",
    "trainer/resuming": "checkpoints",
    "trainer/saving": "checkpoints",
    "ulysses": "ulysses",
}
MOST = 150  # characters of a message


@functools.cache
def messages() -> dict[str, list[tuple[str, str]]]:
    """Class -> its messages with their pages, sorted, each once."""
    found: dict[str, dict[str, str]] = {name: {} for name in CLASSES}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).with_suffix("").as_posix()
        for name, text in raised(path):
            found[name].setdefault(text, page_of(place))
    return {name: sorted(texts.items(), key=lambda pair: pair[0].lower()) for name, texts in found.items()}


def raised(path: Path) -> Iterator[tuple[str, str]]:
    """Class and message of every error of ours that a module makes with words of its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = texts_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
            text = " ".join(spoken(node.args[0], constants).split())
            if re.search(r"[a-z]{3}", re.sub(r"\{.*?\}", "", text)):
                yield node.func.id, shortened(text)


def texts_of(tree: ast.Module) -> dict[str, str]:
    """The sentences that a module has as constants: several of its messages end with one."""
    found = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            text = node.value.value
            if isinstance(text, str) and " " in text:
                found[node.targets[0].id] = text
    return found


def spoken(node: ast.expr, constants: Mapping[str, str]) -> str:
    """The text of an expression; what is filled in is in braces.

    Args:
        node: The expression.
        constants: Texts that it may name.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(spoken(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        name = named(node.value)
        return constants.get(name, "{" + name + "}")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return spoken(node.left, constants) + spoken(node.right, constants)
    return "{...}"


def named(node: ast.expr) -> str:
    """A word for what is filled in."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return "..."


def shortened(text: str) -> str:
    """The beginning of a message, to the end of a word."""
    cut = text if len(text) <= MOST else text[:MOST].rsplit(" ", 1)[0] + " ..."
    return cut.replace("|", "\\|").replace("`", "'")


def page_of(place: str) -> str:
    """The page about a module."""
    fitting = [start for start in PAGES if place == start or place.startswith(f"{start}/") or not start]
    return PAGES[max(fitting, key=len)]


def page() -> str:
    """The whole page."""
    lines = [
        "# Messages",
        "",
        "Every message that hf_parallel raises, by its beginning, and the page about it. What stands in braces is filled in. Each",
        "message itself says the key or place, the rule, and what to do; [troubleshooting](troubleshooting.md) begins with what one",
        "sees. `make messages-page` writes this page from the code.",
    ]
    for name, texts in messages().items():
        lines += ["", f"## {name}", "", CLASSES[name], "", "| message | page |", "|---|---|"]
        lines += [f"| `{text}` | [{name_of(where)}]({where}.md) |" for text, where in texts]
    return "\n".join(lines) + "\n"


def name_of(where: str) -> str:
    return where.replace("_", " ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
