"""Under tp what differs over the ranks within an accumulated step is refused before the update, with one text.

If a row fails, the message that compares batches while the model computes is judged too late, or not by every rank.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import RankError, run_ranks
from user_steps import ENV

from hf_parallel.errors import RankMismatchError


pytestmark = pytest.mark.long

NUM_BATCHES = 3
NORM = "model.norm.weight"


def refused(rank: int, world_size: int) -> dict[str, tuple[str, bool]]:
    """What each case says, and whether the weights stayed as they were."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import ParallelError

    plugin = HFParallelPlugin({}, tp_size=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_BATCHES, parallelism_config=plugin)
    model = tiny.llama(layers=1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = tiny.collate(tiny.rows(4))
    norm, whole = model.get_parameter(NORM), model.model.layers[0].input_layernorm.weight

    def forward(index: int, odd: dict[int, Any]) -> Any:
        change = odd.get(index) if rank else None
        return model(**(change(batch) if change is not None else batch)).loss

    def window(odd: dict[int, Any]) -> None:
        for index in range(NUM_BATCHES):
            with accelerator.accumulate(model):
                accelerator.backward(forward(index, odd))
                optimizer.step()
                optimizer.zero_grad()

    def forwards_first(odd: dict[int, Any]) -> None:
        """No pass but the first can tell that it belongs to the last backward of the step."""
        accelerator.gradient_state._set_sync_gradients(False)
        loss = sum(forward(index, odd) for index in range(NUM_BATCHES))
        accelerator.gradient_state._set_sync_gradients(True)
        accelerator.backward(loss)
        optimizer.step()

    def nudged(given: Any) -> Any:
        norm.data.mul_(1.5)
        return given

    def edited(given: Any) -> Any:
        return {**given, "input_ids": given["input_ids"].roll(1, 1)}

    for _ in range(4):  # the first forward passes compare every byte
        window({})
    found = {}
    cases: dict[str, tuple[Any, dict[int, Any]]] = {
        "another batch": (window, {1: edited}),
        "another weight": (window, {1: nudged}),
        "another weight at the end": (window, {2: nudged}),
        "forwards first": (forwards_first, {1: nudged}),
    }
    for name, (loop, odd) in cases.items():
        kept, weight = whole.detach().clone(), norm.detach().clone()
        accelerator.step = 0
        try:
            loop(odd)
            said = "nothing"
        except ParallelError as error:
            said = f"{type(error).__name__}: {error}"
        found[name] = said, bool(torch.equal(kept, whole))
        norm.data.copy_(weight)
        optimizer.zero_grad()
    accelerator.hf_parallel.watchdog.stop()
    return found


def test_what_differs_within_a_step_is_refused_before_the_update_on_both_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(refused, 2, tmp_path=tmp_path, env=ENV)
    assert first == second
    for name, (said, kept) in first.items():
        assert kept, name
        assert said.startswith("RankMismatchError: "), name
        what = (
            f"parameter {NORM} is held by"
            if "weight" in name or "first" in name
            else "rank 1 (tp 1 of 2) read a different batch"
        )
        assert what in said, name


def other_shape(rank: int, world_size: int) -> None:
    """Rank 1 sees it before the layers; rank 0 has entered them, and finds that nobody is there."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, tp_size=2))
    model = accelerator.prepare(tiny.llama(layers=1))
    batch = tiny.collate(tiny.rows(4))
    for _ in range(9):
        model(**batch)
    model(**({name: value[:, :-1] for name, value in batch.items()} if rank else batch))


def test_another_shape_is_refused_with_one_text_though_one_rank_is_in_its_layers_by_then(tmp_path: Path) -> None:
    with pytest.raises(RankError) as failed:
        run_ranks(other_shape, 2, tmp_path=tmp_path, env=ENV, grace=30.0)
    said = [line for line in str(failed.value).splitlines() if "RankMismatchError: " in line]
    assert len(said) == 2
    assert len(set(said)) == 1
    assert "rank 1 (tp 1 of 2) read a different batch than rank 0 (tp 0 of 2)" in said[0]


def swallowed(rank: int, world_size: int) -> None:
    """User code goes on after the error of the rank with another shape; the other one is in its layers."""
    with contextlib.suppress(RankMismatchError):
        other_shape(rank, world_size)
    threading.Event().wait(60)


def test_a_job_ends_if_user_code_goes_on_after_another_shape(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"exited with code 86 and no report\nrank \d: exited with code 86"):
        run_ranks(swallowed, 2, tmp_path=tmp_path, env=ENV, grace=5.0, timeout=30)
