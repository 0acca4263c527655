"""Models that users have changed: state that a forward or a loss keeps in buffers, with all layouts against stock DDP."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
from accelerate.utils import DistributedDataParallelKwargs
from rank_runner import RankError, run_ranks
from torch import nn
from user_loops import STEPS, Loop

from hf_parallel.guards.weights import buffers


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
user_loops.LAYOUTS["ddp"] = None
user_loops.LAYOUTS["pp2_whole"] = {"pp_size": 2, "num_microbatches": 1}


class Centre(nn.Module):
    """Subtracts a running mean, which each training forward pass updates."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean((0, 1)), alpha=0.5)
        return x - self.mean


def running() -> Any:
    model = tiny.llama(tied=True, layers=2)
    model.model.norm = Centre(model.model.norm)
    return model


def spectral() -> Any:
    model = tiny.llama(tied=True, layers=2)
    torch.manual_seed(1)
    for layer in model.model.layers:
        nn.utils.parametrizations.spectral_norm(layer.mlp.up_proj)
    return model


def body(loop: Loop) -> None:
    loop.replica, loop.replicas = loop.accelerator.process_index, loop.accelerator.num_processes
    loop.prepare()
    loop.model.train()
    for step in range(STEPS):
        with loop.accelerator.no_sync(loop.model):
            loop.backward(2 * step)
        loop.backward(2 * step + 1)
        loop.step()


def with_scale() -> Any:
    model = tiny.llama(tied=True, layers=2)
    model.register_buffer("scale", torch.ones(()))
    return model


def written_by_loss(
    loop: Loop,
    *,
    first: int = 0,
    replaced: bool = False,
    hidden: bool = False,
    alone: bool = False,
    sends: bool = True,
) -> None:
    """A running mean of the loss, which the loss is weighed with, from step `first` on."""
    loop.replica, loop.replicas = loop.accelerator.process_index, loop.accelerator.num_processes
    loop.accelerator.ddp_handler = DistributedDataParallelKwargs(broadcast_buffers=sends)
    loop.prepare()
    loop.model.train()
    own = loop.accelerator.unwrap_model(loop.model)
    for step in range(first + STEPS):
        for batch in range(2):
            with loop.accelerator.no_sync(loop.model) if batch == 0 else contextlib.nullcontext():
                loss = loop.loss(2 * step + batch)
                if step >= first and not (alone and loop.replica):
                    mean = 0.5 * own.scale + loss.detach()
                    if replaced:
                        own.scale = mean
                    else:
                        (own.scale.data if hidden else own.scale).copy_(mean)
                loop.accelerator.backward(loss / own.scale)
        loop.step()


MODELS: dict[str, Callable[[], Any]] = {"running": running, "spectral": spectral}
MODELS["anew"] = lambda: counting(calls, anew=True)
LOSSES: dict[str, Callable[[Loop], None]] = {
    "written": written_by_loss,
    "replaced": functools.partial(written_by_loss, replaced=True),
    "unsent": functools.partial(written_by_loss, sends=False),
    "late": functools.partial(written_by_loss, first=3),
    "hidden": functools.partial(written_by_loss, first=3, hidden=True),
    "late_replaced": functools.partial(written_by_loss, first=3, replaced=True),
}
MODELS |= dict.fromkeys(LOSSES, with_scale)
UNEQUAL = "the exchange of buffer scale, which user code changed between two forward passes, was called by rank 0"
WRITES = "the forward pass writes to"
# Model and layout -> what the error says, or the layout that it must equal.
EXPECTED = {
    ("running", "dp2"): "ddp",
    ("running", "zero1"): "ddp",
    ("running", "zero3"): "ddp",
    ("running", "pp2"): "one",  # its rows are not alone, so that a batch is one microbatch
    ("running", "pp2_whole"): "one",
    ("running", "tp2"): "one",
    ("spectral", "dp2"): "ddp",
    ("spectral", "zero1"): "ddp",
    ("spectral", "pp2"): WRITES,
    ("anew", "dp2"): "ddp",
    ("anew", "pp2"): WRITES,
    **{(name, "dp2"): "ddp" for name in ("written", "replaced", "unsent", "late", "hidden", "late_replaced")},
    ("written", "zero3"): "ddp",
    ("written", "tp2"): "one",
    ("replaced", "pp2"): "one",
}


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        f"{name}-{layout}": user_loops.tried(layout, LOSSES.get(name, body), build=MODELS[name])
        for name, layout in cases
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cases = [*((name, "ddp") for name in MODELS), *EXPECTED]
    return user_loops.launched(main, MODELS, cases, tmp_path_factory.mktemp("attacks"))


@pytest.mark.parametrize(("name", "layout"), EXPECTED)
def test_models_with_state(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    expected = EXPECTED[name, layout]
    for found in runs:
        mine = found[f"{name}-{layout}"]
        if expected == WRITES:
            assert isinstance(mine, str), "it trained"
            assert WRITES in mine
        elif found is runs[0]:
            assert user_loops.difference(mine, found[f"{name}-{expected}"]) < 1e-5


def alone(rank: int, world_size: int, hidden: bool) -> Any:
    buffers.PATIENCE_S = 2.0
    return user_loops.run(
        "dp2", functools.partial(written_by_loss, first=3, alone=True, hidden=hidden), build=with_scale
    )


@pytest.mark.parametrize("hidden", [False, True])
def test_a_buffer_that_one_replica_alone_changes_late_is_refused(hidden: bool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=UNEQUAL):
        run_ranks(alone, 2, hidden, tmp_path=tmp_path, env=ENV)


def counting(what: Callable[[torch.Tensor], torch.Tensor], anew: bool = False) -> Any:
    """A model that adds up, in a buffer or in a new one, what a hook on its last norm sees of the hidden states in training."""
    model = tiny.llama(tied=True, layers=2)
    model.register_buffer("seen", torch.zeros(()))

    def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if model.training:
            model.seen = model.seen + what(output) if anew else model.seen.add_(what(output))

    model.model.norm.register_forward_hook(count)
    return model


def tokens(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[..., 0].gt(0).sum().float()


def calls(hidden: torch.Tensor) -> torch.Tensor:
    return torch.ones(())


def watched(loop: Loop) -> None:
    loop.prepare()
    loop.model.train()
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


def counted(rank: int, world_size: int) -> dict[str, Any]:
    layout = "sp2" if world_size > 1 else "one"
    return {
        f"{what.__name__}{anew}": user_loops.tried(layout, watched, build=functools.partial(counting, what, anew))
        for what in (calls, tokens)
        for anew in (False, True)
    }


def test_a_buffer_that_parts_of_a_row_write_differently_is_refused(tmp_path: Path) -> None:
    alone = run_ranks(counted, 1, tmp_path=tmp_path, env=ENV, init_group=False)[0]
    for mine in run_ranks(counted, 2, tmp_path=tmp_path, env=ENV):
        for anew in (False, True):
            assert user_loops.difference(mine[f"calls{anew}"], alone[f"calls{anew}"]) < 1e-5
            assert (
                "writes to 1 buffers in training (first: seen) with sp_size=2: each rank writes what its part"
                in mine[f"tokens{anew}"]
            )
