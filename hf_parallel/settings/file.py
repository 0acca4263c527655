"""Files of settings, read with bounds: whatever stands in one, the answer is its content or a short error, soon.

YAML has anchors, which multiply, and types, whose constructors raise whatever they like; a name may be that of a device
or a pipe. None of it may cost more than a moment, or reach a user as anything but a `ConfigError`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

from hf_parallel.errors import ConfigError


MAX_BYTES: Final = 1 << 16  # of YAML; the shipped files have less than 4 kB
MAX_JSON_BYTES: Final = 1 << 20
MAX_BITS: Final = 128  # of an integer
MAX_LEVELS: Final = 50  # of brackets, or of indentation; PyYAML takes the square of their number
MAX_NODES: Final = 2_000  # keys and values once every alias is written out
# What to do about an error of PyYAML, by a part of its message.
FIXES: Final = {
    "\\t": "Indent with spaces: YAML has no tabs.",
    "expected ',' or '}'": "Close the brace with }, or put a comma between its entries.",
    "expected ',' or ']'": "Close the bracket with ], or put a comma between its entries.",
    "<block end>": "Indent all keys of a section alike.",
    "end of stream": "Close the quote.",
    "could not find expected ':'": "Write `key: value`, with a colon and a space.",
    "mapping values are not allowed": "Indent all keys of a section alike; quote a value that has a colon.",
    "undefined alias": "Put the value in quotes, or write &NAME before the value above that is meant.",
    "2002:merge": "Write the keys out: << is not read here.",
    "constructor for the tag": "Remove the word that begins with an exclamation mark.",
    "unhashable": "Put the value in quotes, and write what stands for a variable: YAML replaces none.",
    "cannot start any token": "Put the value in quotes.",
    "is written twice": "Remove one of the two.",
    "another document": "Remove the line with ---.",
}


def read_bounded(path: Path, limit: int = MAX_BYTES, what: str = "an accelerate config") -> str:
    """Return the text of a regular file of at most `limit` bytes.

    Args:
        path: The file.
        limit: Most bytes.
        what: Kind of file that it should be, for the fix.

    Raises:
        ConfigError: It is no such file, or cannot be read.
    """
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind) or not stat.S_ISREG(kind):
            raise ConfigError(f"{path}: is {_kind_of(kind)}, not a file. Give the path of {what}.")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read ({reason}). Give the path of {what}.") from None
    if len(content) > limit:
        raise ConfigError(f"{path}: has more than {limit} bytes, which settings never have. Give the path of {what}.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: not valid YAML: the byte {content[error.start]:#04x} is not UTF-8. Save the file as UTF-8 text."
        ) from None


def _kind_of(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def parse_yaml(text: str, path: Path) -> Any:
    """Return what a YAML text of bounded length means.

    Args:
        text: The text.
        path: File of the text, for the message.

    Raises:
        ConfigError: It is not valid, means more than settings can, or a value cannot be read; names the line.
    """
    loader = _Loader(text) if _is_printable(text, path) else None
    try:
        return None if loader is None else loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_error(error, path, text)) from None
    except RecursionError:
        line = loader.line + 1 if loader else 1
        raise ConfigError(
            f"{path}:{line}: not valid YAML: nested too deeply. Settings have at most four levels."
        ) from None
    except Exception as error:  # noqa: BLE001 - PyYAML lets through whatever its parts raise
        line = loader.line + 1 if loader else 1
        raise ConfigError(
            f"{path}:{line}: not valid YAML: {type(error).__name__}: {error}. Correct the line or the one above."
        ) from None


def _syntax_error(error: yaml.MarkedYAMLError, path: Path, text: str) -> str:
    """One line for an error of PyYAML: what is open to the end of the file is named by the line that opens it."""
    problem, context = error.problem_mark, error.context_mark
    at_end = problem is not None and not text[problem.index :].strip("\0\n ")
    mark = context if context is not None and (problem is None or at_end) else problem
    line = 1 if mark is None else mark.line + 1
    what = (error.problem or str(error)).rstrip(".")
    what = f"{error.context}, {what}" if what.startswith("but") else what
    fix = next((fix for part, fix in FIXES.items() if part in what), "Correct the line or the one above.")
    return f"{path}:{line}: not valid YAML: {what}. {fix}"


def _is_printable(text: str, path: Path) -> bool:
    """Whether YAML allows every character; its own error does not say the line."""
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad is not None:
        line = text.count("\n", 0, bad.start()) + 1
        raise ConfigError(
            f"{path}:{line}: not valid YAML: the character {ord(bad[0]):#06x}. Remove it, or save the file as text."
        )
    return True


def key_lines(text: str) -> dict[str, int]:
    """Dotted key path -> line, from 1, of a YAML or JSON text; empty if it is neither."""
    found: dict[str, int] = {}
    if len(text) > MAX_BYTES:
        return found
    try:
        root = _Loader(text).get_single_node()
        _walk(root, "", found)
    except (yaml.YAMLError, RecursionError, ValueError):
        return found
    return found


def _walk(node: yaml.Node | None, path: str, found: dict[str, int]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{path}{key.value}"
        if isinstance(key, yaml.ScalarNode) and len(name) < 1000:
            found.setdefault(name, key.start_mark.line + 1)
            _walk(value, f"{name}.", found)


def parse_json(text: str, path: Path) -> Any:
    """Return what a JSON text means.

    Raises:
        ConfigError: It is not valid.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}. Correct the file.") from None


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses what would have no effect (a key written twice) and what has no bound."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        self._refuse_levels(self.flow_level)
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        self._refuse_levels(len(self.indents))
        return bool(super().add_indent(column))

    def _refuse_levels(self, levels: int) -> None:
        """Refuse deep nesting before the scanner reads on, which it does a kilobyte ahead."""
        if levels > MAX_LEVELS:
            raise RecursionError

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise self._error(f"more than {MAX_NODES} keys and values", yaml.ScalarNode("", "", self.get_mark()))
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()
        if root is not None:
            self._expanded(root)
        return root

    def _expanded(self, node: yaml.Node) -> int:
        """Keys and values below a node once aliases are written out."""
        if id(node) in self._open:
            raise self._error("an anchor contains itself", node)
        if id(node) in self._sizes or isinstance(node, yaml.ScalarNode):
            return self._sizes.get(id(node), 1)
        self._open.add(id(node))
        pairs = isinstance(node, yaml.MappingNode)
        children = [child for pair in node.value for child in pair] if pairs else node.value
        size = 1
        for child in children:
            size += self._expanded(child)
            if size > MAX_NODES:
                raise self._error(f"aliases that stand for more than {MAX_NODES} keys and values", node)
        self._open.remove(id(node))
        self._sizes[id(node)] = size
        return size

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise ValueError(f"more than {MAX_BITS} bits")
            return value
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001 - constructors raise what they like
            shown = node.value if isinstance(node.value, str) else node.tag
            raise self._error(f"{shown[:60]!r} cannot be read ({type(error).__name__}: {error})", node) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, yaml.Node] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    first = seen[key].start_mark.line + 1
                    raise self._error(f"the key {str(key)[:60]!r} is written twice, first in line {first}", key_node)
                seen[key] = key_node
        return super().construct_mapping(node, deep)

    def _error(self, text: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
        return yaml.constructor.ConstructorError(None, None, text, node.start_mark)
