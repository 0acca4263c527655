"""A note to the stock Trainer in the state of a checkpoint that it cannot resume.

A stock Trainer silently starts with an empty optimizer if it finds no `optimizer.pt`. But it reads `trainer_state.json` and
refuses a key that it does not know, with the key in its error. So the text of the key says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerState

from hf_parallel.compat.overridden import in_this_thread


NOTE = (
    "This checkpoint was written by hf_parallel: its optimizer state is in training_state, where the stock Trainer does not "
    "look. Resume with HFParallelCallback; or run `hf-parallel merge CHECKPOINT FOLDER --trainer-state` and resume from FOLDER."
)


def add_note(path: Path) -> None:
    """Put the note into a state that was just written."""
    path.write_text(json.dumps({**json.loads(path.read_text()), NOTE: True}, indent=2) + "\n")


def without_note(path: Path) -> dict[str, Any]:
    """The content of a state, as the stock Trainer writes it."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in found.items() if key != NOTE}


@contextmanager
def overlooked() -> Iterator[None]:
    """Inside, in this thread, the Trainer's own code reads a state with the note as one without."""
    stock = vars(TrainerState)["load_from_json"]

    def load(cls: type[TrainerState], json_path: str) -> TrainerState:
        return cls(**without_note(Path(json_path)))

    setattr(TrainerState, "load_from_json", classmethod(in_this_thread(load, stock.__func__)))  # noqa: B010
    try:
        yield
    finally:
        setattr(TrainerState, "load_from_json", stock)  # noqa: B010
