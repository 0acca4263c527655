"""NCCL: what we call of it with one rank, and training with several ranks on one GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_cases import Case, Snapshots, finished, make_trainer

from gpu_proof_parts.parity import PP2, SHORT, compared, judged
from gpu_proof_parts.ranks import Setting, launch
from hf_parallel import HFParallelCallback


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32, torch.int64)


def operations(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Every collective that training calls, by name; in a group of any size."""
    size = dist.get_world_size()

    def of(name: str, dtype: torch.dtype) -> Callable[[], Any]:
        def call() -> None:
            mine = torch.ones(8, dtype=dtype, device=device)
            whole = torch.ones(8 * size, dtype=dtype, device=device)
            if name == "all_reduce":
                dist.all_reduce(mine)
            elif name == "all_gather_into_tensor":
                dist.all_gather_into_tensor(whole, mine)
            elif name == "reduce_scatter_tensor":
                dist.reduce_scatter_tensor(mine, whole)
            else:
                dist.broadcast(mine, 0)

        return call

    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
    made = {f"{name} {dtype}".replace("torch.", ""): of(name, dtype) for name in names for dtype in DTYPES}
    gathered: list[Any] = [None] * size
    return made | {
        "all_gather_object": lambda: dist.all_gather_object(gathered, {"a": 1}),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1]),
        "barrier": lambda: dist.barrier(),
        "new_group": lambda: dist.new_group([dist.get_rank()]),
        "new_group, local synchronisation": lambda: dist.new_group([dist.get_rank()], use_local_synchronization=True),
        "gloo beside it": lambda: dist.barrier(group=dist.new_group(backend="gloo")),
    }


def called(rank: int, world_size: int) -> dict[str, str]:
    """What each operation said: "ok", or its error."""
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    found = {}
    for name, call in operations(device).items():
        try:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def reduced(rank: int, world_size: int, num_elements: int) -> float:
    """Seconds of an all_reduce with one rank, which is NCCL's start and a copy at most."""
    values = torch.ones(num_elements, device="cuda" if "nccl" in dist.get_backend() else "cpu")
    times = []
    for _ in range(10):
        start = time.perf_counter()
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def trained_alone(rank: int, world_size: int, cases: Sequence[Case], folder: str) -> list[dict[str, Any]]:
    """Training cases with the callback, which those of the tests add for several ranks only."""
    found = []
    for case in cases:
        place = Path(folder) / case.name
        snapshots = Snapshots(place)
        trainer = snapshots.trainer = make_trainer(case, place, 1, [snapshots, HFParallelCallback({})])
        trainer.train()
        found.append(json.loads(json.dumps(finished(trainer, place))))
    return found


def run_one(setting: Setting) -> dict[str, Any]:
    """One rank, lazy and eager initialisation; a training run with the group there."""
    backend = "nccl" if setting.device == "cuda" else "gloo"
    ways = {"lazy": False, "eager": True} if backend == "nccl" else {"lazy": False}
    calls = {way: launch(setting, called, 1, backend=backend, eager=eager)[0] for way, eager in ways.items()}
    errors = [f"{way}: {name}: {said}" for way, rows in calls.items() for name, said in rows.items() if said != "ok"]
    case = Case("one_rank", device=setting.kind, **SHORT)
    found = {
        "backend": backend,
        "calls": calls,
        "all_reduce_s": launch(setting, reduced, 1, 1 << (10 if setting.is_tiny else 26), backend=backend)[0],
        **judged(compared(setting, [(1, case)], backend, trained_alone)),
    }
    if errors and backend == "nccl":  # gloo lacks some
        found["failed"] = "\n".join([*errors, found.get("failed", "")]).strip()
    return found


def run_shared(setting: Setting) -> dict[str, Any]:
    """Two and four ranks on the first GPU, lazy and eager; NCCL for what else gloo would do."""
    short = {**SHORT, "device": setting.kind}
    pp4 = {"pp_size": 4, "num_microbatches": 8}
    cases = [
        (2, Case("pp2", parallel=PP2, **short)),
        (2, Case("tp2", parallel={"tp_size": 2}, **short)),
        (2, Case("dp2", **short)),
        (2, Case("zbv", parallel={**PP2, "schedule": "zbv_zero_bubble"}, **short)),
        (2, Case("zero1", parallel={"zero": {"stage": 1}}, **short)),
        (2, Case("zero3", parallel={"zero": {"stage": 3}}, **short)),
        (2, Case("sp2_ulysses", parallel={"sp_size": 2, "sp_attention": "ulysses"}, **short)),
        (2, Case("sp2_ring", parallel={"sp_size": 2, "sp_attention": "ring"}, **short)),
        (2, Case("ep2", model="mixtral_plain", parallel={"ep_size": 2}, **short)),
        (4, Case("pp2_tp2", parallel={**PP2, "tp_size": 2}, **short)),
        (4, Case("pp2_dp2", parallel=PP2, **short)),
        (4, Case("pp4", parallel=pp4, **short)),
        (4, Case("pp4_zbv", model="llama_8", parallel={**pp4, "schedule": "zbv_zero_bubble"}, **short)),
    ]
    backend = "nccl" if setting.device == "cuda" else "gloo"
    found: dict[str, Any] = {}
    for way in ("lazy", "eager") if backend == "nccl" else ("lazy",):
        rows = compared(setting, cases, backend, eager=way == "eager")
        found |= {f"{name}, {way}": row for name, row in rows.items()}
    return judged(found)
