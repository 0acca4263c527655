"""Settings of optimizers are compared where ranks hold the same groups, and left alone where stages have groups of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.optimizers.settings import OptimizerSettings


def made(stage: int, rates: list[float], *, by_block: bool) -> OptimizerSettings:
    """Of a stage of two blocks, each a weight and a bias."""
    shape = SimpleNamespace(stage_size=1, describe=lambda rank: f"rank {rank}")
    names = [f"layers.{2 * stage + block}.{kind}" for block in range(2) for kind in ("weight", "bias")]
    parameters = {name: nn.Parameter(torch.ones(1)) for name in names}
    found = OptimizerSettings(SimpleNamespace(shape=shape, mp_group=None, copy_ranks=[0, 1]), parameters)  # type: ignore[arg-type]
    groups = [names[:2], names[2:]] if by_block else [names[::2], names[1::2]]
    found.add(
        torch.optim.SGD(
            [{"params": [parameters[n] for n in group], "lr": lr} for group, lr in zip(groups, rates, strict=True)]
        )
    )
    return found


def compare(both: list[OptimizerSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    told = [one._told(*one.known()) for one in both]

    def gather(into: list[Any], mine: Any, group: Any) -> None:
        into[:] = told

    monkeypatch.setattr(dist, "all_gather_object", gather)
    both[0].refuse_unlike([one.word() for one in both])


def test_a_rate_of_one_stage_only_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [made(stage, rates, by_block=False) for stage, rates in enumerate([[0.1, 0.2], [0.1, 0.3]])]
    with pytest.raises(
        RankMismatchError, match=r"lr of parameter group 1 of the optimizer is 0.2 on rank 0 and 0.3 on"
    ):
        compare(both, monkeypatch)


def test_what_one_step_used_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [made(stage, [0.1, 0.2], by_block=False) for stage in range(2)]
    [optimizer] = both[1]._optimizers
    optimizer.param_groups[0]["lr"] = 0.7
    for one in both:
        one.use()
    optimizer.param_groups[0]["lr"] = 0.1  # by a scheduler
    with pytest.raises(
        RankMismatchError, match=r"lr of parameter group 0 of the optimizer is 0.1 on rank 0 and 0.7 on"
    ):
        compare(both, monkeypatch)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_that_is_gone_on_one_stage_only_is_named(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that trains nothing has none at any time."""
    both = [made(stage, [0.1, 0.2], by_block=False) for stage in range(2)]
    states = [one._optimizers[0].state for one in both]
    for state in states[:1] if frozen else states:
        state["a parameter"]["momentum_buffer"] = torch.ones(1)
    for one in both:
        one.use()
    compare(both, monkeypatch)
    assert both[0].word() == both[1].word()
    states[0].clear()
    for one in both:
        one.use()
    if frozen:
        compare(both, monkeypatch)
        return
    with pytest.raises(
        RankMismatchError, match=r"state of parameter group 0 of the optimizer is gone on rank 0 and kept"
    ):
        compare(both, monkeypatch)


def test_groups_of_blocks_have_rates_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    compare([made(stage, rates, by_block=True) for stage, rates in enumerate([[0.1, 0.2], [0.3, 0.4]])], monkeypatch)


def test_settings_are_spelled_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(0, [0.1, 0.2], by_block=False)
    [optimizer] = one._optimizers
    spell, spelled = OptimizerSettings._spell, []
    monkeypatch.setattr(OptimizerSettings, "_spell", lambda self: spelled.append(0) or spell(self))
    words = []
    for step in range(3):
        optimizer.param_groups[1]["lr"] = 0.2 / (step + 1)  # a scheduler
        words += [one.word() for _ in range(4)]  # of four batches
        one.use()
        words.append(one.word())
    assert len(spelled) == 3
    assert len(set(words)) == 6, "what the last step used, and what this one will"


def test_a_list_changed_in_place_is_another_setting() -> None:
    one = made(0, [0.1, 0.2], by_block=False)
    [optimizer] = one._optimizers
    optimizer.param_groups[0]["marks"] = [1, 2]
    before = one.word()
    optimizer.param_groups[0]["marks"][0] = 3
    assert one.word() != before
