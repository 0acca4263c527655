"""What must be replaced for a whole process is replaced for one thread's calls only."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from hf_parallel.checkpoints.state.note import add_note, overlooked


def in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_reads_a_state_as_stock_does_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    TrainerState().save_to_json(str(path))
    add_note(path)
    before = vars(TrainerState)["load_from_json"]
    with overlooked():
        assert TrainerState.load_from_json(str(path)).global_step == 0
        assert isinstance(in_thread(lambda: TrainerState.load_from_json(str(path))), TypeError)
    assert vars(TrainerState)["load_from_json"] is before
    with pytest.raises(TypeError, match="written by hf_parallel"):
        TrainerState.load_from_json(str(path))
    assert json.loads(path.read_text())["global_step"] == 0
