"""What is installed is what is in the tree, and the README says what there is."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_parallel
from hf_parallel.settings.recipes import list_recipes


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: a build leaves files behind."""
    pytest.importorskip("setuptools", minversion="77")
    copy, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    copy.mkdir()
    for folder in ("hf_parallel", "recipes"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    build = f"import setuptools.build_meta as b; b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_module_and_recipe(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_parallel").rglob("*.py")}
    recipes = {f"hf_parallel/recipes_data/{name}.yaml" for name in list_recipes()}
    assert recipes
    assert modules | recipes | {"hf_parallel/py.typed", "hf_parallel/recipes_data/train.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"hf_parallel"}


def test_an_installed_wheel_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import hf_parallel as h; "
        "from hf_parallel.settings.recipes import recipes_folder; "
        "print(recipes_folder(), h.load_recipe('budget_3090').zero.stage, *h.list_recipes())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    expected = [str(tmp_path / "site" / "hf_parallel" / "recipes_data"), "3", *list_recipes()]
    assert result.stdout.split() == expected


def test_the_page_of_recipes_says_what_each_is_for() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text().partition("## Which")[2].partition("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert sorted(rows) == list_recipes()


def test_every_public_name_is_typed_and_has_a_home() -> None:
    tree = ast.parse((ROOT / "hf_parallel" / "__init__.py").read_text())
    imports = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_parallel.")
        for alias in node.names
        if alias.name not in ("prepare_worker", "refuse_old_packages", "show_start_up_lines")
    }
    assert sorted(imports) == sorted(hf_parallel.__all__)
    for name, module in imports.items():
        if (ROOT / f"{module.replace('.', '/')}.py").exists():
            assert getattr(hf_parallel, name) is getattr(importlib.import_module(module), name)
    assert set(hf_parallel.__all__) <= set(dir(hf_parallel))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        hf_parallel.nothing  # noqa: B018


def test_versions_agree() -> None:
    assert f'version = "{hf_parallel.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_every_source_is_ascii_and_postpones_annotations() -> None:
    for path in [*(ROOT / "hf_parallel").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert text.isascii(), path
        tree = ast.parse(text)
        assert ast.get_docstring(tree), path
        assert len(tree.body) == 1 or "from __future__ import annotations" in text, path
