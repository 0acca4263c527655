"""Checkpoints of runs whose ranks share the sequence of each row, resumed with any `sp_size`."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_cases import Job, run_cells


CELLS = [("sp2", "1"), ("1", "sp2"), ("sp2", "sp2"), ("sp2", "dp2xsp2xzero1"), ("dp2xsp2xzero1", "pp2")]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_run_resumes_with_any_sp_size(tmp_path: Path) -> None:
    sources = {name: Job(name, str(tmp_path / name)) for name in dict.fromkeys(saved for saved, _ in CELLS)}
    for cell, (_, losses, straight) in run_cells(tmp_path, sources, CELLS).items():
        assert len(losses) == len(straight) > 0, cell
        assert losses == pytest.approx(straight, rel=1e-5), cell
