"""`verify` without a new process for each job: what it imports is imported once, and runs in one process are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_parallel.proof import start
from hf_parallel.proof.verify import AS_ONE, Verdict, job_of, prove


ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ROOT / "build" / "reports" / "imported.json"  # by the ranks of the last jobs
PACKAGES = ("torch", "transformers", "accelerate", "hf_parallel", "numpy", "safetensors", "datasets", "peft", "sympy")


def note_imports() -> None:
    """For the next process that forks ranks: what they import it may import once. Called in a rank."""
    names = [name for name in sys.modules if name.split(".")[0] in PACKAGES]
    Path("imports").write_text(json.dumps(names))


class Prover:
    """Forks for each job. The process must not compute anything itself: forks of one with threads hang.

    Args:
        kept: Where references are kept for the next jobs on the same model.
    """

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        torch.set_num_threads(1)
        os.environ.update(AS_ONE)
        for name in json.loads(IMPORTED.read_text()) if IMPORTED.exists() else []:
            with contextlib.suppress(Exception):  # only for speed
                importlib.import_module(name)

    def verify(self, model: Any, settings: Mapping[str, Any], folder: Path | None = None, **more: Any) -> Verdict:
        """As `hf_parallel.verify`; the runs' files stay in `folder`, if one is given."""
        with tempfile.TemporaryDirectory(prefix="hf-parallel-verify-") as temporary:
            place = folder or Path(temporary)
            try:
                job = job_of(model, settings, place, **more)
                # Each rank in its own folder, not in the user's: bugs note there that they ran.
                return prove(dataclasses.replace(job, home=None), place, self._run)
            finally:
                for noted in place.glob("compared/rank*/imports"):
                    IMPORTED.parent.mkdir(parents=True, exist_ok=True)
                    IMPORTED.write_text(noted.read_text())

    def _run(self, folder: Path) -> str:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                start.main(folder, self._kept)
                code = 0
            finally:
                os._exit(code)
        os.waitpid(pid, 0)
        return ""
