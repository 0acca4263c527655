"""What runs on ranks with soft CUDA devices."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from trainer_cases import Case, run_case


def trained(rank: int, world_size: int, cases: list[Case], folder: str) -> list[dict[str, Any] | str]:
    """What each case logged, or the error that ended it, which is the same on all ranks."""
    found: list[dict[str, Any] | str] = []
    for case in cases:
        try:
            found.append(json.loads(json.dumps(run_case(case, Path(folder) / case.name, world_size))))
        except Exception:
            found.append(traceback.format_exc())
    return found


def raced(rank: int, world_size: int, case: Case, folder: str, fault: str | None) -> list[str]:
    """Races of a training run, from which `fault` took one wait."""
    from softcuda.races import watching

    with FAULTS[fault]() if fault else contextlib.nullcontext(), watching() as found:
        run_case(case, Path(folder), world_size)
    return found[:20]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    stock = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def _deaf_down() -> Any:
    """Copies to the host start without waiting for what they copy."""
    from hf_parallel.activation_checkpointing.host_copies import CopyStreams

    stock = CopyStreams.of

    class Deaf(torch.cuda.Stream):
        def wait_stream(self, other: Any) -> None:
            pass

    def of(self: CopyStreams, device: torch.device, wanted: str) -> Any:
        if wanted == "down" and (device, wanted) not in self._made:
            self._made[device, wanted] = Deaf(device)
        return stock(self, device, wanted)

    return _replaced(CopyStreams, "of", of)


def _early_get() -> Any:
    """The values are used before the copy that brings them has ended."""
    from hf_parallel.activation_checkpointing.host_copies import HostCopy

    def get(self: HostCopy) -> torch.Tensor:
        self.fetch()
        assert self._back is not None
        if self._moved is not None:
            self._moved(self._back)
        return self._back

    return _replaced(HostCopy, "get", get)


def _deaf_lane() -> Any:
    """Compression starts without waiting for the gradients."""
    from hf_parallel.data_parallel.compression.lane import Lane

    class Deaf(torch.cuda.Stream):
        def wait_stream(self, other: Any) -> None:
            pass

    stock = Lane.__init__

    def init(self: Lane, device: torch.device) -> None:
        stock(self, device)
        self._stream = Deaf(device)

    return _replaced(Lane, "__init__", init)


def _no_host_wait() -> Any:
    """The optimizer on the host starts before the gradients are there."""
    from hf_parallel.data_parallel.host import HostMemory

    return _replaced(HostMemory, "wait", lambda self: None)


FAULTS: dict[str, Callable[[], Any]] = {
    "down starts early": _deaf_down,
    "used before it is up": _early_get,
    "lane starts early": _deaf_lane,
    "host does not wait": _no_host_wait,
}
