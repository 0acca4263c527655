"""An unchanged accelerate loop trains on a mesh as it does on one process.

Only `Accelerator(parallelism_config=HFParallelPlugin(...))` differs. If a row fails, a loop that ran on one process
trains silently different on several: wrong clipping, too many scheduler steps, stages that disagree on a skipped step.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rank_runner import run_ranks
from torch.utils.data import DataLoader

from hf_parallel.data_parallel.fsdp_parts import local_of


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 3}
TP2 = {"tp_size": 2}
STAGE3: dict[str, Any] = {"zero": {"stage": 3}}
# name -> (processes, settings (None: stock), options of `loop`)
RUNS: dict[str, tuple[int, dict[str, Any] | None, dict[str, Any]]] = {
    "stock": (1, None, {}),
    "stock_half": (1, None, {"factor": 0.5}),
    "ddp2": (2, None, {"batch": 4}),
    "pp2": (2, PP2, {}),
    "pp2_reordered": (2, PP2, {"order": "reversed"}),
    "pp2_separate": (2, PP2, {"order": "separate"}),
    "pp2_plain_backward": (2, PP2, {"plain_backward": True}),
    "pp2_half": (2, PP2, {"factor": 0.5}),
    "pp2_patched": (2, PP2, {"patched": True}),
    "tp2_patched": (2, TP2, {"patched": True}),
    "tp2": (2, TP2, {}),
    "tp2_half": (2, TP2, {"factor": 0.5}),
    "dp2": (2, {}, {"batch": 4}),
    "dp2_stage3": (2, STAGE3, {"batch": 4}),
    "dp2_stage3_reversed": (2, STAGE3, {"batch": 4, "order": "reversed"}),
    "dp2_stage3_plain_backward": (2, STAGE3, {"batch": 4, "plain_backward": True}),
    "tp2_dp2_stage3": (4, TP2 | STAGE3, {"batch": 4, "order": "separate"}),
    "pp2_tp2": (4, PP2 | TP2, {}),
    "pp2_dp2": (4, PP2, {"batch": 4}),
    "tp2_dp2": (4, TP2, {"batch": 4, "order": "separate"}),
}
# Variations of what the other rows show.
LONG = (
    *("pp2_patched", "tp2_dp2", "tp2_dp2_stage3"),
    *("pp2_reordered", "pp2_separate", "pp2_half", "tp2_half", "tp2_patched", "pp2_tp2"),
    *("dp2_stage3_reversed", "dp2_stage3_plain_backward"),
)
REFERENCES = {name: "stock" for name in RUNS if not name.startswith(("stock", "ddp"))}
REFERENCES |= dict.fromkeys([name for name in RUNS if "stage3" in name], "ddp2")
REFERENCES |= {"pp2_half": "stock_half", "tp2_half": "stock_half", "dp2": "ddp2", "pp2_dp2": "ddp2", "tp2_dp2": "ddp2"}


def make_accelerator(parallel: dict[str, Any] | None) -> Any:
    from accelerate import Accelerator

    if parallel is None:
        return Accelerator(cpu=True, gradient_accumulation_steps=2)
    from hf_parallel import HFParallelPlugin

    plugin = HFParallelPlugin({}, **parallel)
    return Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=plugin)


def parts(batch: int, count: int = 29) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loader of `count` rows (a ragged tail), scheduler."""
    model = tiny.llama(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    loader = DataLoader(tiny.rows(count, True), batch_size=batch, shuffle=True, collate_fn=tiny.collate)
    return model, optimizer, loader, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def loop(
    parallel: dict[str, Any] | None,
    *,
    batch: int = 8,
    order: str = "together",
    factor: float = 1.0,
    plain_backward: bool = False,
    patched: bool = False,
) -> dict[str, Any]:
    """Two epochs of the usual loop; losses, norms, learning rates, gathered metrics, and the whole weights."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = make_accelerator(parallel)
    torch.manual_seed(7)
    model, optimizer, loader, scheduler = parts(batch)
    if patched:  # with a function that calls the forward of this very model, also where a copy of it is tried
        own = model.forward
        model.forward = functools.wraps(own)(lambda **inputs: own(**inputs))
    if order == "together":
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    elif order == "reversed":
        scheduler, loader, optimizer, model = accelerator.prepare(scheduler, loader, optimizer, model)
    else:
        loader = accelerator.prepare(loader)
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
        scheduler = accelerator.prepare(scheduler)
    history, gathered = [], []
    for _ in range(2):
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(**inputs).loss * factor
                if plain_backward:
                    (loss / accelerator.gradient_accumulation_steps).backward()
                else:
                    accelerator.backward(loss)
                norm = None
                if accelerator.sync_gradients:
                    norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.7))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = float(accelerator.reduce(loss.detach(), "mean"))
            history.append([mean, norm, scheduler.get_last_lr()[0]])
            gathered.append(accelerator.gather_for_metrics(inputs["labels"].ne(-100).sum(-1)).tolist())
    state = accelerator.get_state_dict(model)
    state = state if accelerator.is_main_process else {}
    session = getattr(accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    return {"history": history, "gathered": gathered, "state": {k: v.detach().numpy() for k, v in state.items()}}


def loops_main(rank: int, world_size: int, names: list[str]) -> list[dict[str, Any]]:
    return [loop(RUNS[name][1], **RUNS[name][2]) for name in names]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["name"] for item in items if "runs" in item.fixturenames}
    chosen |= {REFERENCES[name] for name in chosen}
    found: dict[str, dict[str, Any]] = {}
    for world_size in (1, 2, 4):
        names = [name for name, (size, *_) in RUNS.items() if size == world_size and name in chosen]
        results = run_ranks(
            loops_main,
            world_size,
            names,
            tmp_path=tmp_path_factory.mktemp("loops"),
            timeout=120,
            init_group=world_size > 1,
            env=ENV,
        )
        for rank, other in enumerate(results):
            for name, one, here in zip(names, results[0], other, strict=True):
                assert here["history"] == one["history"], f"{name}: rank {rank} differs from rank 0"
        found |= dict(zip(names, results[0], strict=True))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in REFERENCES]
)
def test_an_unchanged_loop_trains_as_without_a_mesh(name: str, runs: dict[str, dict[str, Any]]) -> None:
    mine, other = runs[name], runs[REFERENCES[name]]
    assert mine["gathered"] == other["gathered"]
    assert len(mine["history"]) == len(other["history"])
    for step, (here, there) in enumerate(zip(mine["history"], other["history"], strict=True)):
        assert here == pytest.approx(there, abs=1e-5), f"loss, norm, learning rate of forward {step}"
    assert mine["state"].keys() <= other["state"].keys()
    for key, tensor in mine["state"].items():
        expected = other["state"][key]
        assert np.linalg.norm(tensor - expected) <= 1e-5 * np.linalg.norm(expected), key


# -- fp16 scaling ----------------------------------------------------------------------------------------------------


def scaler_main(rank: int, world_size: int, parallel: dict[str, Any]) -> list[Any]:
    """A dynamic loss scale (accelerate has none on the CPU, so one is put in by hand) and an overflow on one rank."""
    accelerator = make_accelerator(parallel)
    accelerator.gradient_accumulation_steps = 1
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts(4 if parallel in ({}, STAGE3) else 8, 61))
    accelerator.unscale_gradients = lambda optimizer=None: accelerator.scaler.unscale_(
        accelerator._optimizers[0].optimizer
    )
    first = next(parameter for parameter in accelerator.hf_parallel_engine.attachment.parameters.values())
    history = []
    for step, inputs in enumerate(loader):
        loss = model(**inputs).loss
        accelerator.backward(loss)
        if step == 1 and rank == world_size - 1:
            local_of(first.grad).fill_(float("inf"))  # as a kernel would, not code that changes gradients on one rank
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.7))
        before = first.detach().clone()
        optimizer.step()
        scheduler.step()
        moved = not torch.equal(before, first.detach())
        rate = scheduler.get_last_lr()[0]
        skipped = accelerator.optimizer_step_was_skipped
        history.append([float(loss), norm, rate, skipped, moved, accelerator.scaler.get_scale()])
        optimizer.zero_grad()
        if step == 5:
            break
    return history


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(PP2, id="pp2"),
        pytest.param(TP2, id="tp2", marks=pytest.mark.long),
        pytest.param({}, id="dp2"),
        pytest.param(STAGE3, id="dp2_stage3", marks=pytest.mark.long),
    ],
)
def test_all_ranks_skip_a_step_that_overflowed_on_one(parallel: dict[str, Any], tmp_path: Path) -> None:
    results = run_ranks(scaler_main, 2, parallel, tmp_path=tmp_path, env=ENV)
    for history in results:
        _, norms, rates, skipped, moved, scales = zip(*history, strict=True)
        assert skipped == (False, True, False, False, False, False)
        assert moved == tuple(not skip for skip in skipped)
        assert scales == (1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0)
        assert rates[0] == rates[1] > rates[2]
        assert all(0 < norm < 10 for step, norm in enumerate(norms) if step != 1), norms


# -- refusals --------------------------------------------------------------------------------------------------------


def refusals_main(rank: int, world_size: int) -> dict[str, str]:
    from hf_parallel import ParallelError

    found: dict[str, str] = {}

    def refused(name: str, action: Any) -> None:
        try:
            action()
        except ParallelError as error:
            found[name] = str(error)

    accelerator = make_accelerator(PP2)
    model, optimizer, loader, _ = parts(8)
    refused("clip before prepare", lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    refused("save_state", lambda: accelerator.save_state())
    refused("load_state", lambda: accelerator.load_state("somewhere"))
    return found


def test_what_a_loop_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    for found in run_ranks(refusals_main, 2, tmp_path=tmp_path, env=ENV):
        assert "no model was prepared yet" in found["clip before prepare"]
        assert "Pass output_dir, or set automatic_checkpoint_naming" in found["save_state"]
        assert "is no state that accelerator.save_state() finished writing" in found["load_state"]
