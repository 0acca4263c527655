"""Weights that all ranks of a stage hold: each message has digests of some, and no one is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_parallel.guards.weights.alike import COPIES, CommonWeights
from hf_parallel.guards.weights.scaled_shards import ScaledShards


def made(parameters: dict[str, nn.Parameter]) -> CommonWeights:
    entries = [SimpleNamespace(name=name, kind="param", holders=(0,), spec=None) for name in parameters]
    ledger: Any = type("Ledger", (list,), {"entries": {entry.name: entry for entry in entries}})(entries)
    mesh: Any = SimpleNamespace(shape=SimpleNamespace(stage_size=2), parts=SimpleNamespace(group=None))
    at_rest = (ledger, parameters, mesh, lambda: False)
    return CommonWeights(*at_rest, ScaledShards(*at_rest))


@pytest.mark.parametrize("changed", range(2 * COPIES + 1))
def test_each_copy_is_looked_at_within_a_few_messages(changed: int) -> None:
    alike, other = ({f"norms.{n}": nn.Parameter(torch.ones(4)) for n in range(2 * COPIES + 1)} for _ in range(2))
    with torch.no_grad():
        other[f"norms.{changed}"][0] = 2.0
    messages = [(one.digests(), two.digests()) for one, two in [(made(alike), made(other))] for _ in range(3)]
    assert sum(one != two for one, two in messages) == 1
