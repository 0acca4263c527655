"""Any `AutoModelForSequenceClassification` on stages and shards: a sample in every run, all of them when there is time.

If these fail, classifiers train wrong or are refused without need, or docs/coverage.md claims what nobody checked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import shards
from zoo.classifiers import (
    HEADER,
    MARK,
    ClassifierRow,
    classifier,
    classifier_lines,
    classifier_types,
    sweep_classifier,
)
from zoo.lora import Outcome
from zoo.parts import is_of_this_release, part_of

from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.plan.loss_kind import judge_loss


PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["gemma3_text", "bert"])
def test_a_classifier_is_exact_on_stages_and_on_ranks(name: str) -> None:
    row = sweep_classifier(name)
    assert (row.pp.verdict, row.tp.verdict) == ("exact", "exact"), row


def test_planning_leaves_the_kind_of_problem_to_the_labels_of_training() -> None:
    model: Any = classifier("llama")
    probes = Probes(model, torch.device("cpu"))
    assert judge_loss(model, probes.batch).kind == "mean"
    assert model.config.problem_type is None


def test_a_plan_that_loses_a_part_of_a_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "plan_tensor_parallel", shards.plan_without_partial_gradients)
    row = sweep_classifier("gemma3_text")
    assert row.failed
    assert "differs by" in row.tp.note


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", classifier_types())
def test_every_type_is_exact_or_says_why_not(name: str) -> None:
    row = sweep_classifier(name)
    assert not row.failed, row
    assert all(outcome.verdict == "exact" or outcome.note for outcome in (row.pp, row.tp))


@pytest.mark.skipif(not is_of_this_release(PAGE.read_text()), reason="the page is of another release of transformers")
def test_the_page_counts_every_type_and_lists_those_that_are_not_exact() -> None:
    part = part_of(PAGE.read_text(), MARK)
    lines = [line for line in re.findall(r"^\| .*", part, flags=re.MULTILINE) if line != HEADER]
    cells = [line.removeprefix("| ").split(" | ") for line in lines]
    assert {row[0] for row in cells} <= set(classifier_types())
    for place, layout in enumerate(("pp", "tp"), 1):
        exact = len(classifier_types()) - sum(row[place] != "exact" for row in cells)
        assert f"* {layout}2: exact: {exact} of {len(classifier_types())} types." in part


def test_a_row_says_why_it_is_not_exact() -> None:
    exact = Outcome("exact")
    rows = [ClassifierRow("a", exact, exact), ClassifierRow("b", Outcome("refused", note="x | y"), exact)]
    assert classifier_lines(rows) == [
        "* pp2: exact: 1 of 2 types. Refused with a reason: 1. Unusable: 0. Failed: 0.",
        "* tp2: exact: 2 of 2 types. Refused with a reason: 0. Unusable: 0. Failed: 0.",
        "",
        HEADER,
        "|---|---|---|---|",
        "| b | refused | exact | x \\| y |",
    ]
