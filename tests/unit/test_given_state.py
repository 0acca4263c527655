"""Which state dicts `save_pretrained` takes from a script where no rank has the whole model."""

from __future__ import annotations

import pytest
import torch

from hf_parallel.errors import UnsupportedError
from hf_parallel.ledger import Entry, Ledger
from hf_parallel.trainer.given_state import refuse_part


def entry(name: str, *holders: int) -> Entry:
    return Entry(name, (name,), (4, 2), torch.float32, "param", holders, None, True)


ENTRIES = [entry("embed", 0), entry("layers.0.w", 0), entry("layers.1.w", 1), entry("head", 1)]
LEDGER = Ledger({each.name: each for each in ENTRIES})


def state(*names: str, rows: int = 4) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, 2) for name in names}


def test_tensors_of_this_stage_alone_are_no_model() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"all 2 tensors of the state_dict are of this rank's stages, and 1 more .*\(layers\.1\.w is the first\).*"
        r"Call model\.save_pretrained\(folder\), or trainer\.save_model\(folder\).*get_state_dict\(model\), called on every rank",
    ):
        refuse_part(state("embed", "layers.0.w"), LEDGER, 0)


def test_a_shard_is_no_tensor_of_the_model() -> None:
    with pytest.raises(
        UnsupportedError, match=r"embed of the model has the shape \(4, 2\), and the state_dict has the shape \(2, 2\)"
    ):
        refuse_part(state("embed", rows=2), LEDGER, 0)


@pytest.mark.parametrize(
    "names", [("embed", "layers.0.w", "layers.1.w", "head"), ("embed",), ("head",), ("other",), ()]
)
def test_the_whole_model_and_a_choice_of_it_are_taken(names: tuple[str, ...]) -> None:
    refuse_part(state(*names), LEDGER, 0)
