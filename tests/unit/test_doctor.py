"""Every finding of the doctor has a fix, and what is in order is no finding."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

import hf_parallel
from hf_parallel.cli.bug_report import bug_report
from hf_parallel.cli.main import app
from hf_parallel.dry_run import doctor
from hf_parallel.dry_run.doctor import Check
from hf_parallel.errors import ConfigError
from hf_parallel.machine import facts
from hf_parallel.machine.facts import Gpu
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import Launch, check_fit


H100 = Gpu("H100", 85 * 10**9, (9, 0))
T4 = Gpu("T4", 16 * 10**9, (7, 5))


def bad(checks: Iterable[Check]) -> list[tuple[str, str, str]]:
    found = list(checks)
    assert all(bool(check.fix) == (check.status != "ok") for check in found), found
    return [(check.topic, check.status, f"{check.text} FIX {check.fix}") for check in found if check.status != "ok"]


def assert_one(checks: Iterable[Check], topic: str, status: str, pattern: str) -> None:
    [(found_topic, found_status, text)] = bad(checks)
    assert (found_topic, found_status) == (topic, status)
    assert re.search(pattern, text), text


def test_the_supported_versions_are_those_of_the_package() -> None:
    root = Path(__file__).resolve().parents[2]
    depends = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    found = doctor.supported_versions()
    assert {"torch", "transformers", "accelerate"} <= set(found)
    for name, wanted in found.items():
        assert Requirement(f"{name}{wanted}") in map(Requirement, depends)


def test_versions_outside_of_the_range_are_errors() -> None:
    wanted = {"torch": ">=2.11", "transformers": ">=5.23,<5.24", "accelerate": ">=1.15,<2"}
    supported = {name: SpecifierSet(text) for name, text in wanted.items()}
    right = {"torch": "2.13.0+cpu", "transformers": "5.23.1", "accelerate": "1.15.0"}
    assert bad(doctor.version_checks(supported, right.get)) == []
    assert bad(doctor.version_checks(supported, (right | {"torch": "2.14.0.dev20260101"}).get)) == []
    old = doctor.version_checks(supported, (right | {"transformers": "4.50.0"}).get)
    assert_one(
        old,
        "transformers",
        "error",
        r"4\.50\.0 is outside of <5\.24,>=5\.23 FIX pip install 'transformers<5\.24,>=5\.23'",
    )
    missing = doctor.version_checks(supported, (right | {"accelerate": None}).get)
    assert_one(missing, "accelerate", "error", r"not installed FIX pip install")


def test_gpus_that_torch_cannot_use_are_errors() -> None:
    assert bad(doctor.gpu_checks([], None, has_driver=False)) == []
    assert bad(doctor.gpu_checks([H100] * 2, "13.0", has_driver=True)) == []
    assert_one(doctor.gpu_checks([], None, has_driver=True), "GPU", "error", r"built for CPUs FIX Install a torch")
    assert_one(doctor.gpu_checks([], "13.0", has_driver=True), "GPU", "error", r"sees no GPU FIX .*CUDA 13\.0")
    assert_one(doctor.gpu_checks([T4], "13.0", has_driver=True), "GPU 0", "warning", r"no bf16 FIX .*fp16")
    mixed = bad(doctor.gpu_checks([H100, T4], "13.0", has_driver=True))
    assert [row[:2] for row in mixed] == [("GPU 1", "warning"), ("GPUs", "warning")]


def test_links_of_gpus() -> None:
    free = [84 * 10**9] * 2
    assert bad(doctor.link_checks([H100] * 2, free, ["18 NVLinks, PCIe 5 x16"] * 2, peers=True)) == []
    assert bad(doctor.link_checks([], [], None, peers=True)) == []
    assert_one(
        doctor.link_checks([H100] * 2, free, None, peers=True), "GPU links", "warning", r"pip install nvidia-ml-py"
    )
    assert_one(
        doctor.link_checks([H100] * 2, free, ["PCIe 4 x16"] * 2, peers=False),
        "GPU peers",
        "warning",
        r"through RAM FIX Prefer pp_size",
    )
    assert_one(
        doctor.link_checks([H100], [10**9], ["x"], peers=True),
        "GPU 0 memory",
        "warning",
        r"1\.0 of 85\.0 GB are free FIX End",
    )


def test_cores_and_memory() -> None:
    assert bad(doctor.core_checks(16, 8, "1")) == []
    assert_one(doctor.core_checks(4, 8, None), "cores", "warning", r"4 for 8 GPUs FIX Give .* 16 or more")
    assert_one(
        doctor.core_checks(16, 1, "many"), "threads", "error", r"OMP_NUM_THREADS='many' is no number FIX export"
    )
    assert bad(doctor.memory_checks(10**11, 10**11, 10**10)) == []
    assert_one(doctor.memory_checks(10**11, 10**9, None), "RAM", "warning", r"1\.0 GB available FIX End")
    assert_one(
        doctor.memory_checks(10**11, 10**11, 64 * 10**6), "shared memory", "warning", r"has 64 MB.*FIX .*--shm-size"
    )


def test_disks(tmp_path: Path) -> None:
    assert bad(doctor.disk_checks({"here": (tmp_path, 10**12)})) == []
    assert_one(doctor.disk_checks({"here": (tmp_path, 10**9)}), "disk (here)", "warning", r"1 GB free .*FIX Make room")


def test_networks() -> None:
    up = {"eth0": 10.0, "ib0": 0.0}
    assert bad(doctor.network_checks(up, "10.0.0.2", {})) == []
    assert_one(doctor.network_checks({}, "127.0.0.1", {}), "network", "warning", r"but loopback FIX")
    assert_one(doctor.network_checks(up, None, {}), "host name", "warning", r"does not resolve.*import hf_parallel")
    assert_one(
        doctor.network_checks(up, "127.0.1.1", {}), "host name", "warning", r"127\.0\.1\.1.*GLOO_SOCKET_IFNAME=eth0"
    )
    for value in ("eth0", "eth", "^docker", "=ib0", "ib0:1,eth"):
        assert bad(doctor.network_checks(up, "10.0.0.2", {"NCCL_SOCKET_IFNAME": value})) == []
    wrong = doctor.network_checks(up, "10.0.0.2", {"NCCL_SOCKET_IFNAME": "=eth"})
    assert_one(
        wrong,
        "network",
        "error",
        r"NCCL_SOCKET_IFNAME==eth: no interface eth is up FIX export NCCL_SOCKET_IFNAME=eth0",
    )
    wrong = doctor.network_checks(up, "10.0.0.2", {"GLOO_SOCKET_IFNAME": "eth"})
    assert_one(wrong, "network", "error", r"GLOO_SOCKET_IFNAME=eth: no interface")


def test_one_hardware_queue_is_an_error_for_doctor_and_for_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bad(doctor.queue_checks({})) == []
    assert bad(doctor.queue_checks({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})) == []
    wrong = doctor.queue_checks({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert_one(wrong, "hardware queues", "error", r"one hardware queue.*CUDA_DEVICE_MAX_CONNECTIONS=32")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    launch = Launch(None, "none", "torchrun", 0, 2)
    for has_gpu, on_cpu in ((False, ""), (True, "true")):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setenv("ACCELERATE_USE_CPU", on_cpu)
        check_fit(HFParallelConfig(pp_size=2), None, launch, "a test")
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    check_fit(HFParallelConfig(tp_size=2), None, launch, "a test")
    with pytest.raises(ConfigError, match=r"pp_size=2: CUDA_DEVICE_MAX_CONNECTIONS=1 .* Unset"):
        check_fit(HFParallelConfig(pp_size=2), None, launch, "a test")


def test_backends_and_compilers() -> None:
    assert bad(doctor.backend_checks({"gloo": True, "nccl": False}, 1)) == []
    assert_one(
        doctor.backend_checks({"gloo": True, "nccl": False}, 2), "nccl", "error", r"none for 2 GPUs FIX Install"
    )
    assert_one(
        doctor.backend_checks({"gloo": False, "nccl": True}, 2), "gloo", "error", r"FIX Install a torch with gloo"
    )
    assert bad(doctor.compiler_checks({"g++": "/g++", "ninja": "/ninja", "nvcc": None}, has_gpu=False)) == []
    found = bad(doctor.compiler_checks({"g++": None, "ninja": None, "nvcc": None}, has_gpu=True))
    assert [row[:2] for row in found] == [("g++", "warning"), ("ninja", "warning"), ("nvcc", "warning")]


def test_a_lock_that_a_killed_build_left_is_an_error_and_a_fresh_one_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    fresh = next(check for check in doctor.examine() if check.topic == "unfinished build")
    assert (fresh.status, fresh.fix) == ("warning", f"If no build is running: rm {lock}")
    os.utime(lock, (0, 0))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert f"fix: rm {lock}" in result.output
    lock.rename(lock.with_name("cpu_adam.so"))
    assert not any(check.topic == "unfinished build" for check in doctor.examine())


def test_the_command_runs_on_this_machine_and_every_finding_has_a_fix() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["ok"] else 1)
    topics = {row["topic"] for row in report["checks"]}
    assert {
        "torch",
        "transformers",
        "accelerate",
        "cores",
        "RAM",
        "disk (here)",
        "gloo",
        "nccl",
        "g++",
        "ninja",
    } <= topics
    assert all(row["fix"] for row in report["checks"] if row["status"] != "ok")


def test_the_report_for_an_issue_has_versions_and_variables_and_no_secret() -> None:
    lines = list(
        bug_report(["ok      torch"], {"NCCL_P2P_DISABLE": "1", "HF_TOKEN": "hf_secret", "WANDB_API_KEY": "key"})
    )
    assert lines[0].startswith(f"hf_parallel {hf_parallel.__version__}, Python 3.")
    text = "\n".join(lines)
    assert f"torch {version('torch')}, transformers {version('transformers')}" in text
    assert "NCCL_P2P_DISABLE=1" in text
    assert "ok      torch" in text
    assert "secret" not in text
    assert "key" not in text
    assert (lines.count("```text"), lines.count("```")) == (1, 1)


def test_a_container_s_limit_is_its_memory(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    assert facts.memory_limit(limit) is None
    limit.write_text("max\n")
    assert facts.memory_limit(limit) is None
    limit.write_text("1000\n")
    assert facts.memory_limit(limit) == 1000


class _NvmlError(Exception):
    pass


def fake_nvml(num_links: int, pcie: bool = True) -> Any:
    def link_state(handle: int, link: int) -> int:
        if link >= num_links:
            raise _NvmlError
        return 1

    def generation(handle: int) -> int:
        if not pcie:
            raise _NvmlError
        return 5

    return SimpleNamespace(
        NVMLError=_NvmlError, NVML_NVLINK_MAX_LINKS=18, nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetNvLinkState=link_state,
        nvmlDeviceGetMaxPcieLinkGeneration=generation, nvmlDeviceGetMaxPcieLinkWidth=lambda handle: 16,
    )  # fmt: skip


def test_links_are_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for nvml, expected in (
        (fake_nvml(0), ["PCIe 5 x16"] * 2),
        (fake_nvml(12), ["12 NVLinks, PCIe 5 x16"] * 2),
        (fake_nvml(0, pcie=False), ["PCIe of unknown speed"] * 2),
        (None, None),
    ):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert facts.nvml_links() == expected
