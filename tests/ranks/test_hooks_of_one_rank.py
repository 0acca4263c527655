"""Gradient hooks on one tensor-parallel rank only, as `wandb.watch` on the main process registers them, are refused: they waited for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from trainer_cases import ENV


pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


def steps_main(
    rank: int, world_size: int, first: int, parallel: dict[str, Any], everywhere: bool
) -> tuple[int, int, str]:
    """Steps made, gradients seen by hooks, and the error."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import RankMismatchError

    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **parallel))
    model = tiny.llama(layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    seen: list[torch.Size] = []
    step, text = 0, ""
    try:
        while step < 4:
            if step == first and (everywhere or accelerator.is_main_process or rank == 1 < world_size - 2):
                for parameter in model.parameters():
                    parameter.register_hook(lambda gradient: seen.append(gradient.shape))
            accelerator.backward(model(**tiny.collate(tiny.rows(4))).loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    except RankMismatchError as error:
        text = str(error)
    accelerator.hf_parallel.watchdog.stop()
    return step, len(seen), text


@pytest.mark.parametrize("first", [0, 2])
def test_hooks_of_one_rank_are_refused(first: int, tmp_path: Path) -> None:
    for step, seen, text in run_ranks(
        steps_main, 2, first, {"tp_size": 2}, False, tmp_path=tmp_path, timeout=60, env=ENV
    ):
        assert (step, seen) == (first, 0)
        assert "has a gradient hook (register_hook) on rank 0 (tp 0 of 2) and none on rank 1" in text


def test_hooks_of_all_ranks_of_a_copy_run(tmp_path: Path) -> None:
    for step, seen, text in run_ranks(steps_main, 2, 0, {"tp_size": 2}, True, tmp_path=tmp_path, timeout=60, env=ENV):
        assert (step, text) == (4, "")
        assert seen > 0
    # Of two copies, one has them.
    found = run_ranks(steps_main, 4, 0, {"tp_size": 2}, False, tmp_path=tmp_path, timeout=60, env=ENV)
    assert [(step, text) for step, _, text in found] == [(4, "")] * 4
    assert [seen > 0 for _, seen, _ in found] == [True, True, False, False]


def passes_main(
    rank: int, world_size: int, model: str, parallel: dict[str, Any], window: int, everywhere: bool
) -> tuple[int, int, str]:
    """Backward passes made, of windows of some, gradients seen by hooks from the second pass on, and the error."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import RankMismatchError

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=window, parallelism_config=HFParallelPlugin({}, **parallel)
    )
    built = getattr(tiny, model)()
    built, optimizer = accelerator.prepare(built, torch.optim.SGD(built.parameters(), lr=0.01))
    seen: list[torch.Size] = []
    made, text = 0, ""
    try:
        while made < 2 * window:
            if made == 1 and (everywhere or rank == 0):
                for name, parameter in built.named_parameters():
                    if model == "llama" or "experts" in name:
                        parameter.register_hook(lambda gradient: seen.append(gradient.shape))
            with accelerator.accumulate(built):
                accelerator.backward(built(**tiny.collate(tiny.rows(4))).loss)
                optimizer.step()
                optimizer.zero_grad()
            made += 1
    except RankMismatchError as error:
        text = str(error)
    accelerator.hf_parallel.watchdog.stop()
    return made, len(seen), text


LATE: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "in_a_window": (
        "llama",
        {"tp_size": 2},
        3,
        "has a gradient hook (register_hook) on rank 0 (tp 0 of 2) and none on",
    ),
    "experts": (
        "mixtral",
        {"ep_size": 2},
        2,
        "parameters of experts have gradient hooks (register_hook) on some of the 2",
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_hooks_of_one_rank_that_come_late_or_are_of_experts_are_refused(case: str, tmp_path: Path) -> None:
    model, parallel, window, said = LATE[case]
    options: dict[str, Any] = {"tmp_path": tmp_path, "timeout": 60, "env": ENV}
    for made, seen, text in run_ranks(passes_main, 2, model, parallel, window, False, **options):
        assert (made, seen) == (1, 0)
        assert said in text
    for made, seen, text in run_ranks(passes_main, 2, model, parallel, window, True, **options):
        assert (made, text) == (2 * window, "")
        assert seen > 0
