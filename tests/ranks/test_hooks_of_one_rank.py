"""Gradient hooks on one tensor-parallel rank only, as `wandb.watch` on the main process registers them, are refused: they waited for ever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from trainer_cases import ENV


pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


def passes_main(
    rank: int,
    world_size: int,
    parallel: dict[str, Any],
    with_hooks: Sequence[int],
    first: int = 0,
    passes: int = 4,
    window: int = 1,
    model: str = "llama",
) -> tuple[int, int, str]:
    """Backward passes made, in steps of `window`; gradients seen by the hooks of some ranks from a pass on; and the error."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import RankMismatchError

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=window, parallelism_config=HFParallelPlugin({}, **parallel)
    )
    built = tiny.MODELS[model]()
    built, optimizer = accelerator.prepare(built, torch.optim.SGD(built.parameters(), lr=0.01))
    seen: list[torch.Size] = []
    made, text = 0, ""
    try:
        while made < passes:
            if made == first and rank in with_hooks:
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


TP2 = {"tp_size": 2}


@pytest.mark.parametrize("first", [0, 2])
def test_hooks_of_one_rank_are_refused(first: int, tmp_path: Path) -> None:
    for made, seen, text in run_ranks(passes_main, 2, TP2, [0], first, tmp_path=tmp_path, timeout=60, env=ENV):
        assert (made, seen) == (first, 0)
        assert "has a gradient hook (register_hook) on rank 0 (tp 0 of 2) and none on rank 1" in text


def test_hooks_of_all_ranks_of_a_copy_run(tmp_path: Path) -> None:
    for made, seen, text in run_ranks(passes_main, 2, TP2, [0, 1], tmp_path=tmp_path, timeout=60, env=ENV):
        assert (made, text) == (4, "")
        assert seen > 0
    # Of two copies, one has them.
    found = run_ranks(passes_main, 4, TP2, [0, 1], tmp_path=tmp_path, timeout=60, env=ENV)
    assert [(made, text) for made, _, text in found] == [(4, "")] * 4
    assert [seen > 0 for _, seen, _ in found] == [True, True, False, False]


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
    more = (1, 2 * window, window, model)
    for made, seen, text in run_ranks(passes_main, 2, parallel, [0], *more, **options):
        assert (made, seen) == (1, 0)
        assert said in text
    for made, seen, text in run_ranks(passes_main, 2, parallel, [0, 1], *more, **options):
        assert (made, text) == (2 * window, "")
        assert seen > 0
