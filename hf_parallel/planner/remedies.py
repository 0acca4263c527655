"""The message where no layout fits: how many GB are missing, and what would make one fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hf_parallel.planner.candidates import Request, smallest_layout


MOST_DOUBLINGS: Final = 8  # of GPUs
SHORTEST: Final = 128  # tokens of a row
NF4: Final = 4.13  # bits of a parameter with its scales, quantised twice
OFFLOADED: Final = {"zero": 3, "engine": "fsdp2", "offload_param": "cpu", "offload_optimizer": "cpu"}


def fits_nowhere(request: Request) -> str:
    """The words of the error."""
    found, cluster = smallest_layout(request), request.cluster
    if found is None:
        return (
            f"global_batch={request.global_batch}: no layout of {cluster.num_gpus} GPUs divides it. Choose a multiple of "
            f"{cluster.num_gpus}, or give tp and pp."
        )
    size, spec = found
    missing = size - cluster.gpu_bytes
    remedies = [f"GPUs of {size / 1e9:.0f} GB", *_more_gpus(request), *_quantised(request), *_offload(request)]
    remedies += _shorter(request)
    return (
        f"no layout fits: the smallest, tp={spec.tp} pp={spec.pp} dp={spec.dp} zero={spec.zero} "
        f"micro_batch={spec.micro_batch} recompute={spec.recompute}, needs {size / 1e9:.1f} GB and a GPU has "
        f"{cluster.gpu_bytes / 1e9:.1f} GB, {missing / 1e9:.1f} GB less. What would make it fit: {', or '.join(remedies)}."
    )


def _fitting_bytes(request: Request) -> float | None:
    found = smallest_layout(request)
    return found[0] if found is not None and found[0] <= request.cluster.gpu_bytes else None


def _more_gpus(request: Request) -> Iterator[str]:
    if request.given & {"tp", "pp", "dp"}:
        return
    for doubled in range(1, MOST_DOUBLINGS + 1):
        cluster = replace(request.cluster, nodes=request.cluster.nodes * 2**doubled)
        size = _fitting_bytes(replace(request, cluster=cluster))
        if size is not None:
            yield f"nodes={cluster.nodes} of gpus_per_node={cluster.gpus_per_node} ({size / 1e9:.1f} GB each GPU)"
            return


def _quantised(request: Request) -> Iterator[str]:
    if not request.fixed.adapters or request.fixed.block_bits:
        return
    size = _fitting_bytes(replace(request, fixed=replace(request.fixed, block_bits=NF4)))
    if size is not None:
        yield f"block_bits={NF4} in the layout, a base in 4 bit ({size / 1e9:.1f} GB)"


def _offload(request: Request) -> Iterator[str]:
    if request.given & OFFLOADED.keys() or request.fixed.pp > 1 or request.fixed.block_bits:
        return
    fixed = replace(request.fixed, pp=1, **OFFLOADED)  # type: ignore[arg-type]  # each value is of its key's type
    size = _fitting_bytes(replace(request, fixed=fixed, given=request.given | OFFLOADED.keys() | {"pp"}))
    if size is not None:
        ram = sum(fixed.states) * request.profile.parameters / request.cluster.nodes
        yield (
            "zero=3,offload_param=cpu,offload_optimizer=cpu in the layout "
            f"({size / 1e9:.1f} GB, and {ram / 1e9:.0f} GB of a node's RAM)"
        )


def _shorter(request: Request) -> Iterator[str]:
    length = request.seq_len // 2
    while length >= SHORTEST:
        size = _fitting_bytes(replace(request, seq_len=length))
        if size is not None:
            yield f"seq_len={length} ({size / 1e9:.1f} GB)"
            return
        length //= 2
