"""Parameters that user code exchanges between steps of ZeRO 3, whose gathered ones stand in the modules: named before an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from few_steps import ENV, ZERO3, logged, trainer_of
from rank_runner import run_ranks
from torch import nn
from transformers import TrainerCallback


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())


def replace(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().clone())


def values(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.mul_(0.5)


class Changes(TrainerCallback):
    """Calls a function of the model when a step begins."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.change(model)


CHANGES: dict[str, tuple[Callable[[Any], None], bool]] = {  # the change, and whether the model is tied
    "tie": (tie, False),
    "untie": (untie, True),
    "replace": (replace, False),
    "values": (values, False),
}


def changed_main(rank: int, world_size: int, names: list[str], parallel: Any, folder: str) -> list[Any]:
    from hf_parallel import ParallelError

    found: list[Any] = []
    for name in names:
        change, tied = CHANGES[name]
        trainer = trainer_of(parallel, Path(folder, name), model=tiny.llama(tie_word_embeddings=tied))
        trainer.add_callback(Changes(change))
        try:
            trainer.train()
            found.append([entry for entry in logged(trainer) if len(entry) > 1])
        except ParallelError as error:
            logged(trainer)
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize(
    "parallel", [ZERO3, pytest.param({"zero": {"stage": 3, "engine": "fsdp2"}}, marks=pytest.mark.long)]
)
def test_a_parameter_that_is_exchanged_between_steps_of_zero_3_is_named(parallel: Any, tmp_path: Path) -> None:
    names = list(CHANGES)
    one = run_ranks(
        changed_main, 1, names[3:], None, str(tmp_path / "one"), tmp_path=tmp_path, init_group=False, env=ENV
    )
    results = run_ranks(changed_main, 2, names, parallel, str(tmp_path / "more"), tmp_path=tmp_path, env=ENV)
    for tied, untied, replaced, _ in results:
        assert "parameter lm_head.weight was replaced by another object" in tied
        assert "was replaced by another object" in untied
        assert "parameter model.layers.1.input_layernorm.weight was replaced by another object" in replaced
    for here, there in zip(results[0][3], one[0][0], strict=True):
        assert here == pytest.approx(there, rel=1e-5)
