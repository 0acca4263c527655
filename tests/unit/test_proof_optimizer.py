"""What an optimizer is set to is compared itself: a decay that is a little off shows in no weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_parallel.proof.optimizer_settings import file_of, settings_apart, settings_of


WEIGHTS = {name: torch.nn.Parameter(torch.ones(1)) for name in "abc"}


def write(folder: Path, decays: dict[str, float], rate: float = 0.1) -> Path:
    """As a run with these parameters leaves it."""
    optimizer = torch.optim.AdamW([{"params": [WEIGHTS[n]], "weight_decay": decays[n]} for n in decays], lr=rate)
    folder.mkdir()
    (folder / file_of(0)).write_text(json.dumps(settings_of(optimizer.param_groups, [[name] for name in decays])))
    return folder


def test_the_parameter_and_the_rank_of_a_setting_that_differs_are_told(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference", {"a": 0.1, "b": 0.1, "c": 0.0})
    one = write(tmp_path / "one", {"a": 0.1, "b": 0.1})
    (found,) = settings_apart(0, reference, [one, write(tmp_path / "other", {"b": 0.097, "c": 0.0})])
    assert found[:3] == ("weight_decay", "b", 1)
    assert found.relative == pytest.approx(0.03)
    assert settings_apart(0, reference, [one]) == []
    assert settings_apart(1, reference, [one]) == []  # nobody began that step


def test_no_parameter_is_named_if_all_are_meant(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference", {"a": 0.1, "b": 0.1})
    ranks = [write(tmp_path / str(rank), {name: 0.1}, rate=0.05) for rank, name in enumerate("ab")]
    found = settings_apart(0, reference, ranks)
    assert [(each.key, each.name, each.rank) for each in found] == [("lr", "", 0), ("lr", "", 1)]
    assert [each.name for each in settings_apart(0, reference, [ranks[0], write(tmp_path / "2", {"b": 0.1})])] == ["a"]
