"""What a shared sequence saves: bytes that one training forward keeps for its backward, on each rank.

    python benchmarks/bench_ulysses.py            # seconds
    python benchmarks/bench_ulysses.py --smoke    # tiny sizes

Counted, not timed: distinct storages that autograd saves, parameters left out. The ranks are gloo processes. Rows come without a
mask; the mask of padded rows, which SDPA is given, is whole on every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", ACCELERATE_USE_CPU="true")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_sequence import build  # noqa: E402
from rank_runner import run_ranks  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from saved_tensors import saved_bytes  # noqa: E402

from hf_parallel.ulysses.attention import Shared, share_attention  # noqa: E402
from hf_parallel.ulysses.exchange import SequenceGroup  # noqa: E402
from hf_parallel.ulysses.forward import share_forward  # noqa: E402
from hf_parallel.ulysses.ring import Ring  # noqa: E402


Sizes = tuple[str, int, int, int, int]


def kept(
    rank: int, world_size: int, name: str, hidden: int, layers: int, length: int, rows: int, method: str = "ulysses"
) -> int:
    """Bytes that this rank keeps of one forward; `method` as `sp_attention`."""
    torch.set_num_threads(1)
    model = build(name, hidden, layers, length)
    ids = torch.randint(1000, (rows, length), generator=torch.Generator().manual_seed(0))
    if world_size > 1:
        group = SequenceGroup(dist.group.WORLD)
        shared = Shared(group, Ring(group) if method == "ring" else None)
        forward: Any = share_forward(model, model.forward, shared)
        share_attention(model, shared)
        model.forward = forward
    return saved_bytes(model, {"input_ids": ids, "labels": ids})


def main() -> int:
    """Count, print the table, write the report."""
    parser = argparse.ArgumentParser(description="Count what a shared sequence saves.")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "reports" / "bench-ulysses.json")
    arguments = parser.parse_args()
    hidden, layers, length, rows = (128, 2, 64, 2) if arguments.smoke else (512, 4, 1024, 2)
    table = Table(
        title=f"bytes kept for the backward: hidden {hidden}, {layers} blocks, {rows} rows of {length} tokens"
    )
    for heading in ("model", "sp", "attention", "MB on the fullest rank", "share of one process"):
        table.add_column(heading)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("llama", "gpt2"):
            whole = 0
            ways = product((2, 4) if hidden // 64 >= 4 else (2,), ("ulysses", "ring"))
            for size, method in ((1, ""), *ways):
                sizes: Sizes = (name, hidden, layers, length, rows)
                most = max(run_ranks(kept, size, *sizes, method, tmp_path=Path(folder), init_group=size > 1))
                whole = whole or most
                found.append({"model": name, "sp": size, "attention": method, "bytes": most, "share": most / whole})
                table.add_row(name, str(size), method, f"{most / 1e6:.2f}", f"{most / whole:.3f}")
    Console().print(table)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
