"""LoRA on any `AutoModelForCausalLM`: a sample of the zoo in every run, all of it when there is time.

If these fail, adapters on a kind of model train wrong or are refused without need, or docs/coverage.md claims what
nobody checked.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from zoo import shards
from zoo.lora import LAYOUTS, PP, TP, TP_LINEAR, LoraRow, Outcome, sweep_lora
from zoo.lora_page import HEADER, MARK, lora_lines, lora_table, lora_totals
from zoo.parts import is_of_this_release, part_of, with_part


PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
VERDICTS = {"exact", "refused", "not with PEFT", "unusable"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["gpt2", "llama@tied", "phi3"])
def test_adapters_on_all_linear_layers_are_exact_on_stages_and_on_ranks(name: str) -> None:
    row = sweep_lora(name)
    assert row.adapters == row.reached > 0
    assert {layout: outcome.verdict for layout, outcome in row.layouts.items()} == {PP: "exact", TP: "exact"}, row


def test_adapters_on_experts_are_refused_on_ranks_and_those_on_linear_layers_are_exact() -> None:
    row = sweep_lora("mixtral")
    assert {layout: row.layouts[layout].verdict for layout in LAYOUTS} == {
        PP: "exact",
        TP: "refused",
        TP_LINEAR: "exact",
    }
    assert "target_parameters" in row.layouts[TP].note


def test_what_cannot_train_in_one_process_is_told_from_what_is_refused() -> None:
    row = sweep_lora("mamba")
    assert (row.verdict, row.layouts) == ("not with PEFT", {})
    assert "Mamba" in row.note


def test_a_plan_that_loses_a_part_of_a_factors_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "plan_tensor_parallel", shards.plan_without_partial_gradients)
    row = sweep_lora("gpt2")
    assert row.failed
    assert "differs by" in row.layouts[TP].note


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", zoo.entries())
def test_every_entry_is_exact_or_says_why_not(name: str) -> None:
    row = sweep_lora(name)
    assert not row.failed, row
    assert all(outcome.verdict == "exact" or outcome.note for outcome in row.layouts.values())
    assert row.layouts or row.note


@pytest.mark.skipif(not is_of_this_release(PAGE.read_text()), reason="the page is of another release of transformers")
def test_the_rows_of_the_page_are_those_of_entries_and_its_totals_match_them() -> None:
    text = PAGE.read_text()
    part, lines = part_of(text, MARK), lora_lines(text)
    assert HEADER in part
    assert list(lines) == [name for name in zoo.entries() if name in lines]
    assert part.count("\n| ") == len(lines) + 1
    for line in lines.values():
        cells = line.removeprefix("| ").split(" | ")
        assert {cell.removesuffix(" (fp64)") for cell in cells[1 : 1 + len(LAYOUTS)]} <= VERDICTS | {""}, line
    for line in lora_totals(list(lines.values()), zoo.all_types()):
        assert line in part


def test_a_partial_run_renews_its_rows_and_leaves_the_others() -> None:
    exact = {PP: Outcome("exact"), TP: Outcome("exact", "fp64")}
    rows = [LoraRow(name, adapters=4, reached=4, layouts=exact) for name in ("gpt2", "llama")]
    names, types = ["bert", "gpt2", "llama"], ["bert", "gpt2", "llama"]
    page = "\n".join(["# Coverage", "", MARK, "", *lora_table("", rows, names, types)])
    assert "tp2: exact: 2 (2 in fp64)." in page
    assert "Types: 2 of 3. Not run yet: 1." in page
    again = lora_table(page, [LoraRow("gpt2", "failed", note="a | b")], names, types)
    assert [line for line in again if line.startswith("| ") and line != HEADER] == [
        "| gpt2 | failed | failed |  |  | a \\| b |",
        "| llama | exact | exact (fp64) |  | 4 |  |",
    ]


def test_a_part_of_the_page_replaces_the_one_with_its_heading_alone() -> None:
    page = "# A\n\none\n\n## Inner\n\n# B\n\ntwo\n"
    assert with_part(page, "# A\n\nthree\n") == "# A\n\nthree\n\n# B\n\ntwo\n"
    assert with_part(page, "# C\nfour") == page + "\n# C\nfour\n"
    assert part_of(page, "# B") == "# B\n\ntwo"
    assert part_of(page, "# D") == ""
