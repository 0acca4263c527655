"""A raw loop with user code at every place where users put some, run on one process and on meshes."""

from __future__ import annotations

import copy
import functools
import importlib
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tiny
import torch
from rank_runner import run_ranks
from torch import nn

from hf_parallel.errors import ParallelError, UnsupportedError


ENV = {"ACCELERATE_USE_CPU": "true"}
STEPS = 3
ROWS = 8
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "one": None,
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3}},
    "zero1_offload": {"zero": {"stage": 1, "offload_optimizer": "cpu"}},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2": {"tp_size": 2},
    "sp2": {"sp_size": 2},
    "sp2_zero1": {"sp_size": 2, "zero": {"stage": 1}},
    "pp2_dp2": {"pp_size": 2, "num_microbatches": 2},
    "pp2_thirds": {"pp_size": 2, "num_microbatches": 3},
    "pp2_zbv": {"pp_size": 2, "num_microbatches": 3, "schedule": "zbv_zero_bubble"},
    "pp2_tp2": {"pp_size": 2, "num_microbatches": 3, "tp_size": 2},
    "pp2_zero1": {"pp_size": 2, "num_microbatches": 2, "zero": {"stage": 1}},
    "tp2_zero1": {"tp_size": 2, "zero": {"stage": 1}},
    "tp2_zero3": {"tp_size": 2, "zero": {"stage": 3}},
}
# The name of user code, and a layout.
Case = tuple[str, str]


class Loop:
    """What user code sees of a loop."""

    def __init__(
        self, layout: str, dtype: torch.dtype = torch.float32, build: Callable[[], Any] | None = None
    ) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        from hf_parallel import HFParallelPlugin

        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        parallel = LAYOUTS[layout]
        options = {} if parallel is None else {"parallelism_config": HFParallelPlugin({}, **parallel)}
        self.accelerator: Any = Accelerator(cpu=True, **options)
        session = getattr(self.accelerator, "hf_parallel", None)
        self.replica, self.replicas = (0, 1) if session is None else (session.mesh.dp_rank, session.mesh.shape.dp_size)
        self.layout, self.history = layout, []  # type: tuple[str, list[Any]]
        self.model: Any = (build or (lambda: tiny.llama(tied=True, layers=2)))().to(dtype)
        self.optimizers: list[Any] = []

    def prepare(self, *optimizers: torch.optim.Optimizer) -> None:
        chosen = optimizers or (torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1),)
        self.model = self.accelerator.prepare(self.model)
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in chosen]

    def outputs(self, index: int) -> Any:
        """Of this replica's rows of a batch."""
        rows = tiny.collate(tiny.rows(64))
        mine = ROWS // self.replicas
        first = (index * ROWS) % 64 + self.replica * mine
        return self.model(**{k: v[first : first + mine] for k, v in rows.items()})

    def loss(self, index: int) -> torch.Tensor:
        """Of this replica's rows of a batch."""
        result: torch.Tensor = self.outputs(index).loss
        self.history.append(float(self.accelerator.reduce(result.detach(), "mean")))
        return result

    def backward(self, index: int) -> None:
        self.accelerator.backward(self.loss(index))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def named(self) -> dict[str, nn.Parameter]:
        """Name -> this rank's parameter, under the names of the whole model."""
        session = getattr(self.accelerator, "hf_parallel", None)
        return dict(self.model.named_parameters()) if session is None else session.engine.attachment.parameters

    def result(self) -> dict[str, Any]:
        state = self.accelerator.get_state_dict(self.model)
        session = getattr(self.accelerator, "hf_parallel", None)
        if session is not None:
            session.watchdog.stop()
        state.pop("lm_head.weight", None)  # tied
        return {"history": self.history, "state": {k: v.detach().float().numpy() for k, v in state.items()}}


def run(layout: str, body: Callable[[Loop], None], **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    loop = Loop(layout, **options)
    body(loop)
    return loop.result()


def tried(layout: str, body: Callable[[Loop], None], **options: Any) -> Any:
    """As `run`; the text of an error that all ranks raise alike, so that other loops can follow."""
    try:
        return run(layout, body, **options)
    except (ParallelError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}" + "".join(traceback.format_tb(error.__traceback__)[-3:])


def all_tried(bodies: dict[str, Callable[[Loop], None]], cases: list[Case]) -> dict[str, Any]:
    return {f"{name}-{layout}": tried(layout, bodies[name]) for name, layout in cases}


def main_of(module: str) -> Callable[..., dict[str, Any]]:
    """What ranks run for the cases of a test module: its `BODIES`, which ranks import, as no closure can be sent to them."""
    return functools.partial(_tried_of, module=module)


def _tried_of(rank: int, world_size: int, cases: list[Case], *, module: str) -> dict[str, Any]:
    return all_tried(importlib.import_module(module).BODIES, cases)


def launched(
    main: Callable[..., dict[str, Any]], alone: Iterable[str], cases: list[Case], folder: Path, world_size: int = 2
) -> list[dict[str, Any]]:
    """What `main(rank, world_size, cases)` finds on each rank, and what it finds in one process of those of `alone`."""
    ones = run_ranks(main, 1, [(name, "one") for name in alone], tmp_path=folder, init_group=False, env=ENV)
    ranks = run_ranks(main, world_size, cases, tmp_path=folder, env=ENV, timeout=300.0)
    return [ones[0] | found for found in ranks]


def cases_by_size(names: Iterable[str], few: Iterable[Callable[..., None]]) -> dict[int, list[Case]]:
    """Loops by number of ranks: all of `names` on two shards, and a few on four ranks of several axes."""
    return {
        2: [(name, "tp2") for name in names],
        4: [(loop.__name__, layout) for loop in few for layout in ("tp2_zero1", "pp2_tp2")],
    }


def launched_by_size(module: str, cases: dict[int, list[Case]], folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Number of ranks -> what each of them finds in the cases of a test module (see `main_of`)."""
    main = main_of(module)
    return {size: launched(main, {name for name, _ in some}, some, folder, size) for size, some in cases.items()}


def alone_and_together(
    main: Callable[..., dict[str, Any]], layouts: tuple[str, ...], folder: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What `main(rank, world_size, layouts)` finds on each of two ranks, and in one process with the layout "one"."""
    alone = run_ranks(main, 1, ("one",), tmp_path=folder, env=ENV, init_group=False)[0]
    return run_ranks(main, 2, layouts, tmp_path=folder, env=ENV, timeout=200.0), alone


def difference(mine: Any, other: dict[str, Any]) -> float:
    """The largest relative difference of a parameter, of the losses, or of what else was noted."""
    assert not isinstance(mine, str), mine
    assert mine["state"].keys() == other["state"].keys()
    found = [0.0]
    for name, value in other["state"].items():
        here, there = torch.from_numpy(mine["state"][name]), torch.from_numpy(value)
        found.append(float((here - there).norm() / there.norm().clamp(min=1e-12)))
    assert len(mine["history"]) == len(other["history"])
    for here, there in zip(mine["history"], other["history"], strict=True):
        found.append(abs(here - there) / max(abs(there), 1e-12))
    return max(found)


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: copy.deepcopy(tensor.detach()) for name, tensor in state.items()}


def check(found: list[dict[str, Any]], name: str, layout: str, expected: str) -> None:
    """A loop ended on all ranks with an error that says `expected`; without one it trained as one process does."""
    for ranks in found:
        mine = ranks[f"{name}-{layout}"]
        if expected:
            assert isinstance(mine, str), "it trained"
            assert expected in mine
        elif ranks is found[0]:
            assert difference(mine, ranks[f"{name}-one"]) < 1e-5


def losses_or_refusal(
    accelerator: Any, model: Any, optimizer: Any, batches: Iterable[dict[str, Any]]
) -> list[float] | str:
    """The loss of each step of a plain loop, or the text that refuses it; the watchdog of a mesh is stopped."""
    found = []
    try:
        for batch in batches:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
    except UnsupportedError as error:
        return str(error)
    finally:
        if hasattr(accelerator, "hf_parallel"):
            accelerator.hf_parallel.watchdog.stop()
    return found
