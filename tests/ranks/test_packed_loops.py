"""Packed sequences in a loop of the user's: whether they see each other depends on the key-value cache, which stages lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from user_loops import losses_or_refusal


pytestmark = pytest.mark.long

ENV = {"ACCELERATE_USE_CPU": "true"}
KINDS: dict[str, dict[str, Any]] = {
    "by_default": {},
    "cache": {"use_cache": True},
    "apart": {"use_cache": False},
    "together": {"attention_mask": torch.ones(2, 12, dtype=torch.long)},
}


def losses_of(rank: int, world_size: int, parallel: dict[str, Any] | None, kind: str) -> Any:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    more = {} if parallel is None else {"parallelism_config": HFParallelPlugin({}, **parallel)}
    accelerator = Accelerator(cpu=True, **more)
    model = tiny.llama().train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(1, tiny.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]).expand(2, -1)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, **KINDS[kind]}
    return losses_or_refusal(accelerator, model, optimizer, [batch] * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_see_what_they_see_in_one_process(kind: str, tmp_path: Path) -> None:
    alone = run_ranks(losses_of, 1, None, kind, tmp_path=tmp_path, env=ENV, init_group=False)[0]
    for found in run_ranks(losses_of, 2, {"pp_size": 2}, kind, tmp_path=tmp_path, env=ENV):
        if kind in ("by_default", "cache"):
            assert "position_ids without attention_mask and with use_cache on" in found
        else:
            assert found == pytest.approx(alone, abs=1e-5)
