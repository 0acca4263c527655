"""The soft devices themselves: what they show that a CPU hides."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from rank_runner import run_ranks
from torch import nn


pytestmark = pytest.mark.softcuda


def test_new_memory_is_not_a_number() -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    assert torch.empty(3, pin_memory=True).isnan().all()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.empty(3).is_pinned()


def test_tensors_of_two_devices_do_not_mix() -> None:
    tensor = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="on the same device"):
        tensor + torch.ones(3)
    with pytest.raises(TypeError, match="host memory"):
        tensor.numpy()
    assert (tensor + torch.tensor(1.0)).tolist() == [2.0] * 3  # one number may be of the CPU


def test_the_generator_is_not_that_of_the_cpu() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    before = torch.cuda.get_rng_state()
    drawn = nn.functional.dropout(torch.ones(100, device="cuda"), 0.5)
    assert torch.equal(torch.rand(4), expected)
    torch.cuda.set_rng_state(before)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device="cuda"), 0.5), drawn)


def test_backward_runs_on_a_thread_of_the_device() -> None:
    layer, seen = nn.Linear(3, 2, device="cuda"), set[int]()
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.add(threading.get_ident()))
    layer(torch.ones(1, 3, device="cuda")).sum().backward()
    assert seen
    assert threading.get_ident() not in seen


def unordered(rank: int, world_size: int, waits: bool) -> list[str]:
    from softcuda.races import watching

    side = torch.cuda.Stream()
    with watching() as found:
        tensor = torch.ones(8, device="cuda")
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.mul_(2)
        torch.cuda.current_stream().wait_stream(side)
    return found


def read_by_the_host(rank: int, world_size: int, waits: bool) -> list[str]:
    from softcuda.races import watching

    with watching() as found:
        here = torch.ones(8, device="cuda").to("cpu", non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        here.sum()
    return found


def freed_early(rank: int, world_size: int, waits: bool) -> list[str]:
    from softcuda.races import watching

    side = torch.cuda.Stream()
    with watching() as found:
        tensor = torch.ones(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.sum()
        if waits:
            tensor.record_stream(side)
        del tensor
    return found


@pytest.mark.parametrize("function", [unordered, read_by_the_host, freed_early])
def test_a_missing_wait_is_seen(function: object, tmp_path: Path) -> None:
    assert run_ranks(function, 1, True, tmp_path=tmp_path, init_group=False) == [[]]
    found = run_ranks(function, 1, False, tmp_path=tmp_path, init_group=False)[0]
    assert len(found) >= 1
    assert "record_stream" in found[0] if function is freed_early else "stream" in found[0]


def waits_of_the_host(rank: int, world_size: int) -> list[str]:
    from softcuda.syncs import HostSyncs

    syncs, tensor = HostSyncs(), torch.ones(3, device="cuda")
    with syncs.counting() as places:
        torch.full((3,), 2.0, device="cuda") * tensor
        tensor.to("cpu", non_blocking=True)
        tensor.sum().item()
        tensor.cpu()
        torch.tensor([1.0], device="cuda")
        tensor.nonzero()
        torch.cuda.current_stream().record_event().synchronize()
    return places


def test_the_places_where_the_host_waits_are_counted(tmp_path: Path) -> None:
    places = run_ranks(waits_of_the_host, 1, tmp_path=tmp_path, init_group=False)[0]
    assert ["item" in places[0], "cpu" in places[1], "tensor" in places[2], "nonzero" in places[3]] == [True] * 4
    assert len(places) == 5
