"""The table of foreign scripts says right only of what is right, and refused only of what never trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from foreign import LOOPS, PAGE, Ended, Row, Script, judge, scripts, table, write_page  # noqa: E402


GOOD = [{"loss": 2.0, "entropy": 1.0, "epoch": 1}]
REFUSED = (
    "Traceback\n[rank1]: hf_parallel.errors.RankFailure: rank 0 ended\nhf_parallel.errors.ConfigError: pp_size=2: no\n"
)


@pytest.mark.parametrize(
    ("ended", "verdict", "text"),
    [
        (Ended(0, GOOD, "", 1.0), "right", ""),
        (Ended(0, [{"loss": 2.0, "entropy": 1.0, "epoch": 2}], "", 1.0), "right", ""),
        (Ended(0, [{"loss": 2.1, "entropy": 1.0}], "", 1.0), "WRONG", "loss of entry 0: 2.1 instead of 2.0"),
        (Ended(0, [{"loss": 2.0, "entropy": 2.0}], "", 1.0), "WRONG", "entropy of entry 0"),
        (Ended(0, [{"loss": float("nan"), "entropy": 1.0}], "", 1.0), "WRONG", "loss of entry 0"),
        (Ended(0, [], "", 1.0), "WRONG", "0 entries were logged, not 1"),
        (Ended(1, [], REFUSED, 1.0), "refused", "ConfigError: pp_size=2: no"),
        (Ended(1, GOOD, REFUSED, 1.0), "crashed", "refused late: ConfigError: pp_size=2: no"),
        (Ended(1, [], "Traceback\nAttributeError: log_probs\n", 1.0), "crashed", "AttributeError: log_probs"),
        (Ended(None, [], "", 1.0), "hung", ""),
    ],
)
def test_a_verdict(ended: Ended, verdict: str, text: str) -> None:
    row = judge(Script("basic", LOOPS / "basic.py"), "tp2", ended, Ended(0, GOOD, "", 1.0))
    assert row.verdict == verdict
    assert text in row.text
    assert row.fine == (verdict in ("right", "refused"))


def test_every_loop_makes_an_accelerator_and_says_what_it_logged() -> None:
    loops = [script for script in scripts() if not script.data]
    assert len(loops) >= 8
    for script in loops:
        assert "Accelerator(" in script.path.read_text()
        assert "history" in script.path.read_text()


def test_the_page_gets_both_tables(tmp_path: Path) -> None:
    page = tmp_path / "foreign.md"
    page.write_text(PAGE.read_text())
    rows = [Row("sft", "pp2", "refused", 1, text="a | b\nc"), Row("basic", "dp2", "right", 0, 0.0, 1e-7)]
    write_page(rows, page)
    text = page.read_text()
    assert "| `sft` | pp2 | 1 |  |  | refused: a / b c |" in text
    assert "| `basic` | dp2 | 0 | 0e+00 | 1e-07 | right |" in text
    assert len(table(rows)) == 4
