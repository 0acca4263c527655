"""A part imports only from lower layers; parts of one layer never import each other."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn


PACKAGE = Path(__file__).resolve().parents[2] / "hf_parallel"

# Lowest first. A part is a module of hf_parallel, or the modules of one of its folders; one that exists must be listed.
LAYERS = [
    {"errors", "logs", "machine"},
    {"mesh"},
    {"compat", "monitor", "settings", "tensor_parallel"},
    {
        "batches",
        "checkpoints",
        "data_parallel.compression",
        "deepspeed",
        "hangs",
        "head",
        "ledger",
        "pipeline_parallel.schedule",
    },
    {"data_parallel", "model", "worker"},
    {"guards", "memory", "pipeline_parallel", "tensor_parallel.run", "ulysses"},
    {"guards.optimizers"},
    {"guards.gradients", "guards.weights"},
    {"guards.calls"},
    {"dry_run", "pipeline_parallel.run", "tensor_parallel.plan"},
    {"activation_checkpointing", "checkpoints.weights", "expert_parallel", "pipeline_parallel.plan"},
    {"checkpoints.state", "engine.gradients", "engine.plan", "planner"},
    {"engine.run"},
    {"engine"},
    {"dry_run.rank", "monitor.report"},
    {"trainer"},
    {"proof"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
# Techniques meet in `engine` alone. The ledger names the shards of a parameter; replicas read it.
TECHNIQUES = ("tensor_parallel", "pipeline_parallel", "data_parallel", "ulysses")
SHARED = {
    "batches",
    "errors",
    "machine",
    "settings",
    "compat",
    "mesh",
    "monitor",
    "model",
    "head",
    "ledger",
}


def part_of(name: str) -> str:
    """The part of a dotted name below hf_parallel; its first word if none is listed."""
    words = name.split(".")
    known = (".".join(words[:n]) for n in range(len(words), 0, -1))
    return next((part for part in known if part in LAYER_OF), words[0])


def part_of_file(path: Path, package: Path) -> str:
    folder = path.relative_to(package).parent.parts
    return ".".join(folder) if folder else path.stem


def sources(package: Path) -> list[Path]:
    return [path for path in sorted(package.rglob("*.py")) if path.name != "__init__.py"]


def imported_names(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and name below the package of every import of our own, inside functions and `TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                parents = path.parent.relative_to(package.parent).parts
                base = [*parents[: len(parents) - node.level + 1], *(node.module or "").split(".")]
            else:
                base = (node.module or "").split(".")
            names = [".".join([*filter(None, base), alias.name]) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == package.name and rest:
                yield node.lineno, rest


def violations(package: Path) -> list[str]:
    found = []
    for path in sources(package):
        part = part_of_file(path, package)
        technique = part.split(".")[0]
        for line, name in imported_names(path, package):
            other = part_of(name)
            legal = LAYER_OF.get(other, len(LAYERS)) < LAYER_OF.get(part, -1)
            if technique in TECHNIQUES and other.split(".")[0] not in {technique, *SHARED}:
                legal = False
            if other != part and not legal:
                found.append(f"{path.relative_to(package.parent)}:{line}: {part} imports {other}")
    return found


def test_every_part_is_in_one_layer() -> None:
    listed = [part for parts in LAYERS for part in parts]
    assert len(listed) == len(set(listed))
    missing = {part_of_file(path, PACKAGE) for path in sources(PACKAGE)} - set(listed)
    assert not missing, f"add {sorted(missing)} to LAYERS in {Path(__file__).name}"


def test_parts_import_only_from_lower_layers() -> None:
    assert violations(PACKAGE) == []


def circles(package: Path) -> list[str]:
    """Files that import each other, directly or by others, inside of functions too; imports for types alone tie nothing."""
    files = {".".join(path.relative_to(package).with_suffix("").parts): path for path in sources(package)}
    for_types = {path: lines_for_types(path) for path in files.values()}
    graph = {
        module: {
            known
            for line, name in imported_names(path, package)
            if line not in for_types[path]
            for known in (name, name.rpartition(".")[0])
            if known in files and known != module
        }
        for module, path in files.items()
    }
    while True:  # take away what imports nothing that is left
        free = {module for module, needed in graph.items() if not needed & graph.keys()}
        if not free:
            break
        graph = {module: needed for module, needed in graph.items() if module not in free}
    return [f"{module} needs {', '.join(sorted(needed & graph.keys()))}" for module, needed in sorted(graph.items())]


def lines_for_types(path: Path) -> set[int]:
    """Lines below `if TYPE_CHECKING:`."""
    tests = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.If)]
    under = [node.body for node in tests if ast.unparse(node.test) == "TYPE_CHECKING"]
    return {line for body in under for one in body for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}


def test_no_file_needs_one_that_needs_it() -> None:
    assert circles(PACKAGE) == []


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / PACKAGE.name
    (package / "model").mkdir(parents=True)
    (package / "model" / "one.py").write_text("from hf_parallel.model import two\n")
    (package / "model" / "two.py").write_text("def f():\n    from hf_parallel.model.three import g\n")
    (package / "model" / "three.py").write_text("import hf_parallel.model.one\n")
    assert [line.split()[0] for line in circles(package)] == ["model.one", "model.three", "model.two"]
    (package / "model" / "three.py").write_text("if TYPE_CHECKING:\n    import hf_parallel.model.one\n")
    assert circles(package) == []


def private_imports(path: Path) -> list[str]:
    """Names of other packages that begin with an underscore, or are below one, and modules that are private."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [
            f"{path.name}:{node.lineno}: {name}" for name in names if any(p.startswith("_") for p in name.split("."))
        ]
    return found


# Documented although they begin with an underscore: of the standard library, and of named tuples.
DOCUMENTED = {"sys._getframe", "os._exit", "_fields", "_make", "_replace", "_asdict"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def own_private_names(package: Path) -> set[str]:
    """Private names of the package's own functions, classes, fields and attributes that modules and tensors do not have."""
    found: set[str] = set()
    for node in (node for path in sources(package) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own_object(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)} - {*dir(nn.Module()), *dir(Tensor)}


def is_own_object(node: ast.expr) -> bool:
    """`self`, `cls` or `super()`: which methods of stock classes may be overridden is checked elsewhere."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_attributes(path: Path, own: set[str]) -> list[str]:
    """Private attributes of others that are used, by a dot or by `getattr` and its like; names of torch's ops are not."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name, text = "", ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Attribute) and not is_own_object(node.value) and not text.startswith("aten."):
            name = node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            name = next((str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)), "")
        if is_private(name) and name not in own and not {name, text} & DOCUMENTED:
            found.append(f"{path.name}:{node.lineno}: {text or name}")
    return found


def test_private_names_are_used_in_compat_alone() -> None:
    own = own_private_names(PACKAGE)
    rest = [path for path in sources(PACKAGE) if part_of_file(path, PACKAGE) != "compat"]
    assert [line for path in rest for line in [*private_imports(path), *private_attributes(path, own)]] == []
    compat = PACKAGE / "compat" / "torch_tools.py"
    assert private_imports(compat) != []
    assert private_attributes(compat, own) != []


@pytest.mark.parametrize(
    "line",
    [
        "torch._foreach_mul_(tensors, 2.0)",
        "module._parameters['weight']",
        "type(model)._apply(model, fn)",
        "torch.nn.modules.conv._ConvNd",
        "getattr(model, '_no_split_modules', None)",
    ],
)
def test_a_planted_private_attribute_is_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(line)
    assert len(private_attributes(path, own_private_names(PACKAGE))) == 1


def test_packages_start_with_a_docstring_only() -> None:
    for path in PACKAGE.glob("*/**/__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        kinds = [node for node in body if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
        assert len(kinds) == 1, path
        assert isinstance(kinds[0], ast.Expr), path


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("settings/config.py", "from hf_parallel.engine.plan.plans import Plans"),
        ("settings/config.py", "from hf_parallel import engine"),
        ("settings/config.py", "def f():\n    import hf_parallel.engine.plan.plans"),
        ("mesh/groups.py", "from hf_parallel.settings.recipes import KEY"),
        ("tensor_parallel/run/apply.py", "from hf_parallel.pipeline_parallel.schedule.actions import Action"),
        ("tensor_parallel/run/apply.py", "from ...pipeline_parallel.schedule import actions"),
        ("tensor_parallel/run/apply.py", "from hf_parallel.tensor_parallel.plan.derive import Plan"),
        ("tensor_parallel/layout.py", "from .run.apply import x"),
        ("errors.py", "from .settings.config import x"),
        ("unlisted.py", "from hf_parallel import errors"),
    ],
)
def test_a_planted_import_is_found(file: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "hf_parallel" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    assert len(violations(tmp_path / "hf_parallel")) == 1
