"""Dropout rates and epsilons that code changes on one rank only are refused; modes that make no difference are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import RankError, run_ranks
from trainer_cases import ENV


pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "tp2": {"tp_size": 2},
}
STEPS = 5


def rate(model: Any) -> None:
    """Of one module, where it draws as many numbers as before."""
    next(module for module in model.modules() if isinstance(module, torch.nn.Dropout)).p = 0.3


def epsilon(model: Any) -> None:
    next(module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)).eps = 1e-3


def mode(model: Any) -> None:
    next(module for module in model.modules() if isinstance(module, torch.nn.Dropout)).eval()


# What one rank does, and before which step; and the name in the error.
CHANGES = {
    "rate": (rate, 0, ".p of the"),
    "later": (rate, 3, ".p of the"),
    "epsilon": (epsilon, 0, ".eps of the"),
    "mode": (mode, 0, ".p of the"),
}


def steps_main(rank: int, world_size: int, parallel: dict[str, Any], names: list[str]) -> dict[str, tuple[int, str]]:
    """How many steps were made, and the error."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import RankMismatchError

    found = {}
    for name in names:
        AcceleratorState._reset_state()  # one process stands for many runs
        accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **parallel))
        model = (tiny.llama(layers=2) if name == "alike" else tiny.gpt2(dropout_rate=0.2)).train()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        step, text = 0, ""
        try:
            while step < STEPS:
                if name != "alike" and rank == world_size - 1 and step == CHANGES[name][1]:
                    CHANGES[name][0](model)
                if name == "alike" and not rank:  # nothing is dropped in either mode
                    model.model.layers[0].eval()
                accelerator.backward(model(**tiny.collate(tiny.rows(4))).loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
        except RankMismatchError as error:
            if "pp_size" in parallel:  # the other stage would wait
                raise
            text = str(error)
        accelerator.hf_parallel.watchdog.stop()
        found[name] = step, text
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rates_of_one_rank_are_refused(layout: str, tmp_path: Path) -> None:
    names = ["alike", *CHANGES]
    for name in names:
        of_ranks = run_ranks(steps_main, 2, LAYOUTS[layout], [name], tmp_path=tmp_path / name, env=ENV)
        steps, texts = zip(*(found[name] for found in of_ranks), strict=True)
        if name == "alike":
            assert steps == (STEPS, STEPS), texts
            continue
        first, attribute = CHANGES[name][1:]
        assert set(steps) == {max(first, 4) if first else 0}, (name, texts)
        # With tp a module that drops nothing draws fewer numbers, and later weights that all ranks hold differ before it is looked at.
        sooner = {("tp2", "mode"): "random state", ("tp2", "later"): "its values differ there"}
        assert all(sooner.get((layout, name), attribute) in text for text in texts), (name, texts)


def test_replicas_of_a_stage_compare_theirs(tmp_path: Path) -> None:
    settings = {"pp_size": 2, "num_microbatches": 2}
    with pytest.raises(RankError, match=r"\.p of the model is 0\.2 on"):
        run_ranks(steps_main, 4, settings, ["rate"], tmp_path=tmp_path, env=ENV)
