"""An optimizer whose step shares out work over all ranks, as Muon's first does, would mix the weights of stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import user_steps
from torch import nn
from transformers import Trainer


pytestmark = pytest.mark.long


class SharesOut(torch.optim.Optimizer):
    """Each rank updates every second parameter, and all exchange what they made."""

    def __init__(self, parameters: list[nn.Parameter], rate: float) -> None:
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        parameters = self.param_groups[0]["params"]
        rate = self.param_groups[0]["lr"]
        for first in range(0, len(parameters), ranks):
            these = parameters[first : first + ranks]
            mine = these[rank] if rank < len(these) else torch.empty_like(these[0])
            if rank < len(these):
                mine.sub_(mine.grad.sign(), alpha=rate)
            if ranks > 1:
                dist.all_gather([*these, *[torch.empty_like(these[0])] * (ranks - len(these))], mine)
        return None


class SharesBlocks(Trainer):
    """The matrices of one shape in all blocks, of which two stages have as many each."""

    def create_optimizer(self, model: Any = None) -> Any:
        named: Any = self.model.named_parameters()  # type: ignore[union-attr]
        self.optimizer = SharesOut([p for name, p in named if name.endswith("o_proj.weight")], 1e-2)
        return self.optimizer


user_steps.KINDS["shares_blocks"] = (SharesBlocks, {})
PP2 = {"pp_size": 2, "num_microbatches": 2}
SENDS = "its step sends messages to other ranks (torch.distributed), which it takes for replicas"
JOBS: user_steps.Jobs = {
    "dp2": ("shares_blocks", {}, "", 0),
    "pp2": ("shares_blocks", PP2, SENDS, 0),
}


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return user_steps.runs_of(JOBS, tmp_path_factory.mktemp("sending"), many)


@pytest.mark.parametrize("job", JOBS)
def test_replicas_share_it_out_and_stages_refuse_it(job: str, runs: user_steps.Runs) -> None:
    user_steps.check_job(JOBS, job, runs)
