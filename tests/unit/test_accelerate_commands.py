"""accelerate's own commands accept a file with a section of hf_parallel, and keep every setting of it."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from accelerate.commands.config.update import update_config
from accelerate.commands.env import env_command

from hf_parallel import load_recipe


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_an_updated_file_has_the_settings_it_had(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / recipe.name
    shutil.copy(recipe, file)
    assert update_config(Namespace(config_file=str(file))) == str(file)
    assert file.read_text() != recipe.read_text()  # accelerate writes its defaults and drops comments
    assert load_recipe(file) == load_recipe(recipe)


def test_env_shows_the_section(capsys: pytest.CaptureFixture[str]) -> None:
    env_command(Namespace(config_file=str(next(path for path in RECIPES if path.stem == "cpu_pp2"))))
    assert "'hf_parallel': {'pp_size': 2" in capsys.readouterr().out
