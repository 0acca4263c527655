"""Whether this machine is fit for a run: each check looks at facts, says what it found, and how to put it right."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_parallel.machine.facts import (
    Gpu,
    cores,
    extensions_folder,
    free_gpu_bytes,
    gpus,
    host_address,
    networks,
    nvml_links,
    peer_access,
    stale_locks,
)
from hf_parallel.machine.queues import ONE_QUEUE, ONE_QUEUE_FIX, has_one_queue
from hf_parallel.machine.ram import free_ram, ram_limit


Status = Literal["ok", "warning", "error"]

GB: Final = 1e9
OPTIONAL: Final = ("deepspeed", "peft")
LOW_DISK: Final = 20 * GB  # a checkpoint of a small model with its optimizer state
LOW_SHARED: Final = 1 * GB  # data loader workers and NCCL talk through it
FRESH_BUILD_S: Final = 1800.0  # the longest build of a DeepSpeed op seen took a quarter of an hour


@dataclass(frozen=True)
class Check:
    """The result of looking at one thing.

    Args:
        topic: Subject, such as "disk".
        status: Whether it is in order.
        text: Finding, in words.
        fix: Thing to do; empty if it is in order.
    """

    topic: str
    status: Status
    text: str
    fix: str = ""


def examine() -> list[Check]:
    """Look at everything; takes seconds, changes nothing, needs no GPU."""
    import psutil
    import torch
    import torch.distributed as dist

    found, memory = gpus(), psutil.virtual_memory()
    limit = ram_limit()
    total = memory.total if limit is None else min(memory.total, limit)
    shared = Path("/dev/shm")
    tools = {name: shutil.which(name) for name in ("g++", "ninja", "nvcc")}
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    folders = {"here": Path.cwd(), "model cache": _cache_folder()}
    return [
        *version_checks(supported_versions(), package_version),
        *gpu_checks(found, torch.version.cuda, has_driver=shutil.which("nvidia-smi") is not None),
        *link_checks(found, free_gpu_bytes(len(found)), nvml_links(), peers=peer_access(len(found))),
        *core_checks(cores(), len(found), os.environ.get("OMP_NUM_THREADS")),
        *memory_checks(total, min(free_ram(), total), shutil.disk_usage(shared).total if shared.exists() else None),
        *disk_checks({name: (path, _free(path)) for name, path in folders.items()}),
        *network_checks(networks(), host_address(), os.environ),
        *queue_checks(os.environ),
        *backend_checks(backends, len(found)),
        *compiler_checks(tools, has_gpu=bool(found)),
        *lock_checks({lock: time.time() - lock.stat().st_mtime for lock in stale_locks(extensions_folder())}),
    ]


def supported_versions() -> dict[str, SpecifierSet]:
    """The packages that this one depends on, with their ranges, where it names one."""
    needed = [Requirement(line) for line in requires("hf_parallel") or ()]
    return {one.name: one.specifier for one in needed if one.marker is None and one.specifier}


def package_version(name: str) -> str | None:
    """The installed version of a package, None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cache_folder() -> Path:
    given = os.environ.get("HF_HOME")
    return Path(given) if given else Path.home() / ".cache" / "huggingface"


def _free(path: Path) -> int:
    """Free bytes of the disk that a folder is, or would be, on."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def version_checks(supported: Mapping[str, SpecifierSet], version_of: Callable[[str], str | None]) -> Iterator[Check]:
    """Packages against the range that is tested."""
    yield Check("python", "ok", platform.python_version())
    for name, wanted in supported.items():
        found = version_of(name)
        if found is not None and wanted.contains(found, prereleases=True):
            yield Check(name, "ok", f"{found} (supported: {wanted})")
        else:
            text = "not installed" if found is None else f"{found} is outside of {wanted}"
            yield Check(name, "error", text, f"pip install '{name}{wanted}'")
    for name in OPTIONAL:
        yield Check(name, "ok", version_of(name) or "not installed (optional)")


def gpu_checks(found: Sequence[Gpu], cuda: str | None, *, has_driver: bool) -> Iterator[Check]:
    """GPUs that torch can use, and those that it cannot."""
    if not found and has_driver:
        if cuda is None:
            fix = "Install a torch that is built for CUDA, as pytorch.org says."
            yield Check("GPU", "error", "there is an NVIDIA driver, but this torch is built for CPUs", fix)
        else:
            fix = f"Look at nvidia-smi and CUDA_VISIBLE_DEVICES; torch needs a driver for CUDA {cuda}."
            yield Check("GPU", "error", "there is an NVIDIA driver, but torch sees no GPU", fix)
    elif not found:
        yield Check("GPU", "ok", "none; processes train on the CPU (use_cpu: true)")
    for index, gpu in enumerate(found):
        major, minor = gpu.capability
        text = f"{gpu.name}, {gpu.num_bytes / GB:.1f} GB, compute capability {major}.{minor}"
        if gpu.capability < (8, 0):
            yield Check(f"GPU {index}", "warning", f"{text}: no bf16", "Set mixed_precision to fp16.")
        else:
            yield Check(f"GPU {index}", "ok", text)
    if len({(gpu.name, gpu.num_bytes) for gpu in found}) > 1:
        fix = "Choose equal ones with gpu_ids in the accelerate file, or give the small one a short stage with pipeline.split."
        yield Check("GPUs", "warning", "they differ: the smallest sets the limit for all", fix)


def link_checks(
    found: Sequence[Gpu], free: Sequence[int], links: Sequence[str] | None, *, peers: bool
) -> Iterator[Check]:
    """Check the links between GPUs, and whether other processes use the GPUs."""
    for index, (gpu, rest) in enumerate(zip(found, free, strict=True)):
        if rest < 0.9 * gpu.num_bytes:
            text = f"{rest / GB:.1f} of {gpu.num_bytes / GB:.1f} GB are free"
            yield Check(
                f"GPU {index} memory",
                "warning",
                text,
                "End the processes that nvidia-smi lists, or choose other GPUs with gpu_ids.",
            )
    if links is not None and found:
        yield Check("GPU links", "ok", "; ".join(sorted(set(links))))
    elif found:
        yield Check(
            "GPU links", "warning", "speeds are not known: pynvml is not installed", "pip install nvidia-ml-py"
        )
    if len(found) > 1 and not peers:
        fix = "Prefer pp_size or replicas to tp_size on this machine."
        yield Check("GPU peers", "warning", "GPUs cannot read each other: messages go through RAM", fix)
    elif len(found) > 1:
        yield Check("GPU peers", "ok", "GPUs read each other's memory directly")


def core_checks(count: int, num_gpus: int, threads: str | None) -> Iterator[Check]:
    """Cores for the ranks and their data loaders."""
    if num_gpus and count < 2 * num_gpus:
        yield Check(
            "cores",
            "warning",
            f"{count} for {num_gpus} GPUs",
            f"Give this machine or container {2 * num_gpus} or more.",
        )
    else:
        yield Check("cores", "ok", f"{count}, OMP_NUM_THREADS {threads or 'not set (accelerate sets 1)'}")
    if threads is not None and not (threads.isdigit() and int(threads) >= 1):
        yield Check("threads", "error", f"OMP_NUM_THREADS={threads!r} is no number", "export OMP_NUM_THREADS=1")


def memory_checks(total: int, available: int, shared: int | None) -> Iterator[Check]:
    """RAM and the memory that processes share."""
    text = f"{total / GB:.1f} GB, {available / GB:.1f} GB available"
    if available < 0.2 * total:
        yield Check("RAM", "warning", text, "End other processes: every rank loads the whole model first.")
    else:
        yield Check("RAM", "ok", text)
    if shared is not None and shared < LOW_SHARED:
        text = f"/dev/shm has {shared / 1e6:.0f} MB: data loader workers and NCCL fail when it is full"
        yield Check("shared memory", "warning", text, "Start the container with --ipc=host or --shm-size=8g.")


def disk_checks(folders: Mapping[str, tuple[Path, int]]) -> Iterator[Check]:
    """Room for checkpoints and models."""
    for name, (path, free) in folders.items():
        low = free < LOW_DISK
        fix = "Make room, or set output_dir or HF_HOME to another disk." if low else ""
        yield Check(f"disk ({name})", "warning" if low else "ok", f"{free / GB:.0f} GB free for {path}", fix)


def network_checks(
    speeds: Mapping[str, float], address: str | None, environment: Mapping[str, str]
) -> Iterator[Check]:
    """Interfaces, and the names by which the backends look for them."""
    if speeds:
        shown = ", ".join(
            f"{name} ({f'{speed:g} Gbit/s' if speed else 'speed not known'})" for name, speed in speeds.items()
        )
        yield Check("network", "ok", shown)
    else:
        fix = "Train on this machine only, or bring an interface up."
        yield Check("network", "warning", "no interface is up but loopback", fix)
    if address is None or (address.startswith("127.") and speeds):
        place = "does not resolve" if address is None else f"resolves to {address}"
        fix = (
            "For runs on several machines import hf_parallel first in the script, which tells gloo the interface that leads to "
            f"machine 0; or export GLOO_SOCKET_IFNAME={next(iter(speeds), 'lo')}, or add this machine's address to /etc/hosts."
        )
        yield Check("host name", "warning", f"it {place}, which other machines cannot reach", fix)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        yield from _interface_checks(variable, environment.get(variable, ""), [*speeds, "lo"])


def _interface_checks(variable: str, value: str, known: Sequence[str]) -> Iterator[Check]:
    """NCCL takes prefixes, `=` for whole names and `^` for what not to take; gloo whole names."""
    if not value or value.startswith("^"):
        return
    for interface in value.removeprefix("=").split(","):
        exact = variable.startswith("GLOO") or value.startswith("=")
        name = interface.split(":")[0]
        if not any(other == name if exact else other.startswith(name) for other in known):
            text = f"{variable}={value}: no interface {name} is up"
            yield Check("network", "error", text, f"export {variable}={known[0]}")


def queue_checks(environment: Mapping[str, str]) -> Iterator[Check]:
    """Whether one stream of a GPU can block another."""
    if has_one_queue(environment):
        yield Check("hardware queues", "error", ONE_QUEUE, ONE_QUEUE_FIX)


def backend_checks(backends: Mapping[str, bool], num_gpus: int) -> Iterator[Check]:
    """Check the backends that connect the processes."""
    if not backends["gloo"]:
        fix = "Install a torch with gloo: control messages and CPU runs need it."
        yield Check("gloo", "error", "this torch has none", fix)
    else:
        yield Check("gloo", "ok", "available")
    if backends["nccl"]:
        yield Check("nccl", "ok", "available")
    elif num_gpus > 1:
        yield Check(
            "nccl",
            "error",
            f"this torch has none for {num_gpus} GPUs",
            "Install a torch that is built for CUDA on Linux.",
        )
    else:
        yield Check("nccl", "ok", "not available, not needed here")


def compiler_checks(tools: Mapping[str, str | None], *, has_gpu: bool) -> Iterator[Check]:
    """Compilers for ops that are built when they are first used."""
    use = "pipeline.compile_blocks: inductor and DeepSpeed's ops need it"
    packages = {
        "g++": "apt-get install g++",
        "ninja": "pip install ninja",
        "nvcc": "Install the CUDA toolkit of torch.version.cuda.",
    }
    for name, fix in packages.items():
        path = tools.get(name)
        if path is not None:
            yield Check(name, "ok", path)
        elif name == "nvcc":
            text = (
                "not found: DeepSpeed's CUDA ops cannot be built" if has_gpu else "not found, not needed without a GPU"
            )
            yield Check(name, "warning" if has_gpu else "ok", text, fix if has_gpu else "")
        else:
            yield Check(name, "warning", f"not found: {use}", fix)


def lock_checks(locks: Mapping[Path, float]) -> Iterator[Check]:
    """Builds that were killed: every later run waits for them without a word."""
    for lock, age in locks.items():
        fresh = age < FRESH_BUILD_S
        text = f"{lock} is {age / 60:.0f} minutes old and has no library beside it"
        fix = f"{'If no build is running: ' if fresh else ''}rm {lock}"
        yield Check("unfinished build", "warning" if fresh else "error", text, fix)
    if not locks:
        yield Check("compiled ops", "ok", f"no unfinished build in {extensions_folder()}")
