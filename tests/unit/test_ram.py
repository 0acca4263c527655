"""What a process may allocate is bounded by every control group above it, not only by the machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hf_parallel.machine import ram


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def found(tmp_path: Path, membership: str) -> list[tuple[int, int]]:
    (tmp_path / "self").write_text(membership)
    return list(ram.limits(tmp_path / "cgroup", tmp_path / "self"))


def test_version_2_counts_the_groups_above_and_not_the_page_cache(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root, {})
    group(root / "job", {"memory.max": 1000, "memory.current": 700, "memory.stat": "anon 1\ninactive_file 300"})
    group(root / "job" / "step", {"memory.max": "max", "memory.current": 400})
    assert found(tmp_path, "0::/job/step\n") == [(1000, 400)]


def test_version_1_knows_no_word_for_no_limit(tmp_path: Path) -> None:
    root = tmp_path / "cgroup" / "memory"
    unlimited = {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 5}
    group(root, unlimited)
    group(root / "job", {"memory.limit_in_bytes": 2000, "memory.usage_in_bytes": 1500, "memory.stat": ""})
    group(root / "job" / "step", unlimited)
    assert found(tmp_path, "4:cpuset,memory:/job/step\n3:cpu:/\n0::/\n") == [(2000, 1500)]


def test_in_a_container_the_path_is_the_host_s_and_the_root_its_own(tmp_path: Path) -> None:
    group(tmp_path / "cgroup" / "memory", {"memory.limit_in_bytes": 3000, "memory.usage_in_bytes": 1000})
    assert found(tmp_path, "4:memory:/docker/0123\n") == [(3000, 1000)]
    group(tmp_path / "cgroup", {"memory.max": 4000, "memory.current": 10})
    assert found(tmp_path, "0::/docker/0123\n") == [(4000, 10), (3000, 1000)]


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert list(ram.limits(tmp_path / "none", tmp_path / "nobody")) == []


def test_the_guards_take_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hf_parallel.engine.plan import self_check
    from hf_parallel.machine.facts import this_machine
    from hf_parallel.tensor_parallel.plan import plan_for

    monkeypatch.setattr(ram, "limits", lambda: iter([(5000, 4000), (900, 200)]))
    assert ram.free_ram() == 700
    assert self_check._free_bytes(torch.device("cpu")) == 700
    assert plan_for._free_bytes() == 700
    assert this_machine().ram_bytes == 900
    monkeypatch.setattr(ram, "limits", lambda: iter([(100, 200)]))
    assert ram.free_ram() == 0
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=42, total=50))
    monkeypatch.setattr(ram, "limits", lambda: iter([]))
    assert ram.free_ram() == 42
    assert ram.ram_limit() is None
