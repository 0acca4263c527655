"""Copies between GPU and host, their overlap with products, and codecs against the bandwidth of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from gpu_proof_parts.ranks import Setting, launch
from gpu_proof_parts.training import synchronize
from hf_parallel.activation_checkpointing.host_copies import CopyStreams, HostCopy
from hf_parallel.data_parallel.compression.build_wire import make_codec
from hf_parallel.data_parallel.host import HostMemory
from hf_parallel.settings.replica_sections import GradientCompressionConfig


GB = 1e9
ROUNDS = 7
METHODS = ("bf16", "fp16", "int8", "int4", "onebit", "topk")


def timed(action: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Seconds of each round, after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        synchronize()
        start = perf_counter()
        action()
        synchronize()
        found.append(perf_counter() - start)
    return found[1:]


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def rates(num_bytes: float, seconds: list[float]) -> dict[str, float]:
    """GB/s, as `spread`."""
    return spread([num_bytes / GB / one for one in seconds])


# -- offload -----------------------------------------------------------------------------------------------------------


def offloaded(rank: int, world_size: int, setting: Setting) -> dict[str, Any]:
    """What one process finds out about copies."""
    device, count = torch.device(setting.kind), 1 << (12 if setting.is_tiny else 28)
    source = torch.randn(count, device=device)  # 1 GiB
    host = HostMemory(_place(device), pinned=device.type == "cuda")
    target = host.empty(count, source.dtype)

    def down() -> None:
        host.copy_down(source, target)
        host.wait()

    streams = CopyStreams()

    def there_and_back() -> None:
        copy = HostCopy(source, streams)
        copy.settle()
        copy.get()

    found = {
        "bytes": source.nbytes,
        "down_gb_s": rates(source.nbytes, timed(down)),
        "up_gb_s": rates(source.nbytes, timed(lambda: source.copy_(target, non_blocking=True))),
        "there_and_back_gb_s": rates(2 * source.nbytes, timed(there_and_back, 3)),
        "pinned": target.is_pinned() if device.type == "cuda" else False,
    }
    return found | {"overlap": _overlap(setting, host, source, target)}


def _place(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def _overlap(setting: Setting, host: HostMemory, source: Tensor, target: Tensor) -> dict[str, Any]:
    """How much of the shorter of a copy down and as many products is hidden behind the other."""
    side = 64 if setting.is_tiny else 8192
    left = torch.randn(side, side, device=source.device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    one = statistics.median(timed(lambda: torch.mm(left, left, out=out)))
    copy = statistics.median(timed(lambda: (host.copy_down(source, target), host.wait())))
    count = max(1, round(copy / one))

    def products() -> None:
        for _ in range(count):
            torch.mm(left, left, out=out)

    def both() -> None:
        host.copy_down(source, target)
        products()
        host.wait()

    alone, together = timed(products), timed(both)
    shorter = min(statistics.median(alone), copy)
    hidden = [(statistics.median(alone) + copy - seconds) / shorter for seconds in together]
    tflops = [2 * side**3 * count / seconds / 1e12 for seconds in alone]
    return {"copy_s": copy, "products_s": spread(alone), "hidden": spread(hidden), "bf16_tflops": spread(tflops)}


def run_offload(setting: Setting) -> dict[str, Any]:
    """Bandwidth both ways and overlap."""
    return dict(launch(setting, offloaded, 1, setting)[0])


# -- codecs ------------------------------------------------------------------------------------------------------------


def coded(rank: int, world_size: int, setting: Setting) -> dict[str, Any]:
    """What one process finds out about codecs."""
    count = 1 << (12 if setting.is_tiny else 26)  # 256 MiB
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(setting.kind)
    target = torch.empty_like(values)
    copy = rates(2 * values.nbytes, timed(lambda: target.copy_(values)))
    rows: dict[str, Any] = {}
    for method in METHODS:
        codec = make_codec(GradientCompressionConfig(method=method))
        assert codec is not None
        code = codec.encode(values)
        moved = values.nbytes + code.nbytes
        encode = rates(moved, timed(lambda codec=codec: codec.encode(values)))  # type: ignore[misc]
        decode = rates(moved, timed(lambda codec=codec, code=code: codec.decode(code)))  # type: ignore[misc]
        rows[method] = {
            "encode_gb_s": encode,
            "decode_gb_s": decode,
            "of_copy": [encode["median"] / copy["median"], decode["median"] / copy["median"]],
            "differs_from_cpu": _differs(codec, values),
        }
    return {"bytes": values.nbytes, "copy_gb_s": copy, "codecs": rows}


def _differs(codec: Any, values: Tensor) -> float:
    """The share of values that are not those of the CPU, to a millionth of the largest."""
    part = values[: 1 << 12 if len(values) < 1 << 20 else 1 << 20]
    here, there = (codec.decode(codec.encode(one)).cpu() for one in (part, part.cpu()))
    return float(((here - there).abs() > 1e-6 * part.abs().max().cpu()).float().mean())


MOST_DIFFERENT = 1e-4  # a value between two codes may get the other one


def run_codecs(setting: Setting) -> dict[str, Any]:
    """Encoding and decoding on this GPU, and whether the values are the CPU's."""
    found = dict(launch(setting, coded, 1, setting)[0])
    rows = found["codecs"].items()
    wrong = [f"{name}: {row['differs_from_cpu']:.1e} of the values differ" for name, row in rows]
    wrong = [text for text, (_, row) in zip(wrong, rows, strict=True) if row["differs_from_cpu"] > MOST_DIFFERENT]
    return found | ({"failed": "from the CPU's: " + "; ".join(wrong)} if wrong else {})
