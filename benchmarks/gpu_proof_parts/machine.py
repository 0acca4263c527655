"""What the machine has, and what a step needs of it. Only `probe` imports torch, in a process of its own."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gpu_proof_parts.runner import Need


Device: TypeAlias = Literal["cuda", "soft", "cpu"]
GB = 1e9
MULTI_RANK_NCCL = (2, 30)  # the first that lets several ranks share a GPU
# Import name -> name of the wheel.
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "safetensors": "safetensors",
    "packaging": "packaging",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "typer": "typer",
    "rich": "rich",
    "yaml": "pyyaml",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
}


@dataclass(frozen=True)
class Machine:
    """What steps and the card look at.

    Args:
        device: "cuda": GPUs; "soft" and "cpu" run the same code at tiny sizes without one, and prove nothing about a GPU.
        gpus: Names.
        gpu_bytes: Memory of the smallest.
        free_bytes: Free on it.
        versions: Of Python and the packages.
        nccl: Version that torch uses.
        driver: Of the GPUs.
        compiles: Whether Triton, which `torch.compile` needs on a GPU, is there.
        cores: Of the CPU.
        ram_bytes: Of the machine.
    """

    device: Device
    gpus: tuple[str, ...] = ()
    gpu_bytes: int = 0
    free_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    nccl: tuple[int, ...] = ()
    driver: str = ""
    compiles: bool = False
    cores: int = 0
    ram_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("gpus", "nccl"):  # from JSON they are lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def label(self) -> str:
        """One line that tells machines and their software apart."""
        gpus = f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else "no GPU"
        kind = {"cuda": "", "soft": "dry run on soft CUDA devices, ", "cpu": "dry run on the CPU, "}[self.device]
        versions = " ".join(f"{name} {self.versions.get(name, '?')}" for name in ("torch", "transformers"))
        return f"{kind}{gpus}, driver {self.driver or '?'}, {versions}"


def missing_packages() -> list[str]:
    """Names of the wheels of what cannot be imported."""
    return [wheel for name, wheel in PACKAGES.items() if importlib.util.find_spec(name) is None]


def probe(device: Device) -> dict[str, Any]:
    """What torch says of this machine; imports it."""
    if device == "soft":
        import softcuda.devices  # noqa: F401 - before torch
    from importlib.metadata import version

    import torch

    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    free = [torch.cuda.mem_get_info(index)[0] for index in range(count)] if device == "cuda" else [0]
    names = ("transformers", "accelerate", "pydantic")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: version(name) for name in names} | {"cuda": torch.version.cuda or "none"}
    return {
        "gpus": tuple(one.name for one in found),
        "gpu_bytes": min((one.total_memory for one in found), default=0),
        "free_bytes": min(free, default=0),
        "versions": versions,
        "nccl": _nccl() if device == "cuda" else (),
        "driver": _driver() if device == "cuda" else "none",
        "compiles": importlib.util.find_spec("triton") is not None,
        "cores": os.cpu_count() or 0,
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _nccl() -> tuple[int, ...]:
    """Of the library that is loaded, such as one of LD_PRELOAD: torch names the one that it was built with."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return ()
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", os.RTLD_NOW | os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # linked into torch
        return tuple(torch.cuda.nccl.version()[:3])
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def machine_of(device: Device, script: str) -> Machine | str:
    """This machine, or the sentence that says why nothing can be shown on it."""
    python = sys.executable
    missing = missing_packages()
    if missing:
        return (
            f"{python} lacks {', '.join(missing)}. Fill a folder wheels/ where there is a network (make gpu-wheels) and "
            "put it beside the Makefile, or set PYTHON to one that has them."
        )
    answer = subprocess.run([python, script, "--probe", "--device", device], capture_output=True, text=True)
    if answer.returncode:
        return f"{python} cannot import what is needed: {(answer.stderr.strip().splitlines() or ['no message'])[-1]}"
    found = Machine(device, **json.loads(answer.stdout.splitlines()[-1]))
    if device == "cuda" and not found.gpus:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" with CUDA_VISIBLE_DEVICES={seen}" if seen is not None else ""
        return (
            f"torch {found.versions['torch']} of {python} sees no GPU{hidden}, so nothing was run. The steps run at tiny "
            "sizes without one, which proves nothing about GPUs, with --device soft (tensors of device cuda) or --device cpu."
        )
    return found


# -- needs -------------------------------------------------------------------------------------------------------------


def cuda_tensors(machine: Machine) -> str | None:
    """Tensors of device cuda."""
    return "needs tensors of device cuda, this run is on the CPU" if machine.device == "cpu" else None


def a_gpu(machine: Machine) -> str | None:
    """A real GPU."""
    return None if machine.device == "cuda" else f"needs a GPU, this is a {machine.label.split(',')[0]}"


def several_gpus(machine: Machine) -> str | None:
    """Two GPUs or more."""
    return None if len(machine.gpus) > 1 else f"needs two GPUs or more, this machine has {len(machine.gpus)}"


def nccl(machine: Machine) -> str | None:
    """A torch that was built with NCCL."""
    return None if machine.nccl else "needs NCCL, which this torch was built without"


def nccl_for_shared_gpus(machine: Machine) -> str | None:
    """An NCCL that lets several ranks share a GPU."""
    if not machine.nccl or machine.nccl >= MULTI_RANK_NCCL:
        return nccl(machine)
    return (
        f"needs NCCL {_dotted(MULTI_RANK_NCCL)} or newer, which lets several ranks share a GPU "
        f"(NCCL_MULTI_RANK_GPU_ENABLE=1); this torch has {_dotted(machine.nccl)}"
    )


def free_memory(wanted_bytes: float) -> Need:
    """So much free memory on every GPU."""

    def need(machine: Machine) -> str | None:
        if machine.device != "cuda" or machine.free_bytes >= wanted_bytes:
            return None
        return f"needs {wanted_bytes / GB:.0f} GB of free GPU memory, {machine.free_bytes / GB:.1f} GB are free"

    return need


def first_gpu() -> str:
    """The first GPU that this process may use, as `CUDA_VISIBLE_DEVICES` has it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
