"""A key-value store of its own for each start of a launched job's processes.

Since torch 2.5 a launcher's workers share its store (`TORCHELASTIC_USE_AGENT_STORE`), and torch 2.13 keeps it when the launcher
starts them again (pytorch#135712): they read the addresses that dead processes left there, and cannot connect. The number of
restarts is no remedy, because launchers of several machines count for themselves. So rank 0 names each start, and says so once
every other rank has answered it.
"""

from __future__ import annotations

import importlib
import json
import time
import uuid
from collections.abc import MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PAUSE_S = 0.05
NAMED = "hf_parallel/start"


def separate_starts(environment: MutableMapping[str, str]) -> None:
    """Give every start of these processes keys of its own, if their launcher may start them again; before a process group exists."""
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") in ("", "0") or "TORCHELASTIC_RUN_ID" not in environment:
        return
    from torch.distributed.distributed_c10d import PrefixStore

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
    make = getattr(rendezvous, "_create_c10d_store", None)
    if make is None or getattr(make, "hf_parallel", False):
        return

    def make_separate(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any) -> Store:
        store = make(hostname, port, rank, world_size, timeout, *more)
        return PrefixStore(f"{NAMED}/{agreed_name(store, rank, world_size, timeout)}", store)

    make_separate.hf_parallel = True  # type: ignore[attr-defined]
    vars(rendezvous)["_create_c10d_store"] = make_separate


def agreed_name(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that these processes, and no earlier ones, have agreed on; every rank calls it.

    Raises:
        TimeoutError: Rank 0 did not answer.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set(NAMED, mine)
        answers = {str(other): store.get(f"{NAMED}/{mine}/{other}").decode() for other in range(1, world_size)}
        store.set(f"{NAMED}/{mine}/all", json.dumps(answers))
        return mine
    deadline = time.monotonic() + timeout.total_seconds()
    answered = ""
    while time.monotonic() < deadline:
        name = store.get(NAMED).decode()
        if name != answered:
            store.set(f"{NAMED}/{name}/{rank}", mine)
            answered = name
        # What an earlier start has agreed on has the answer of an earlier process.
        if store.check([f"{NAMED}/{name}/all"]):
            answers = json.loads(store.get(f"{NAMED}/{name}/all"))
            if answers.get(str(rank)) == mine:
                return name
        time.sleep(PAUSE_S)
    raise TimeoutError(f"rank 0 has not begun within {timeout.total_seconds():g} s. Look at what it says.")
