"""What this machine does in a few seconds of work: rates of products, memory and messages, for the planner to use.

Ranks run at the same time, as in training, so that they share cores, memory and links as they will.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from hf_parallel.compat.private_collectives import all_reduce_flat, wait_for
from hf_parallel.errors import ConfigError
from hf_parallel.machine.facts import cores
from hf_parallel.memory.layers import with_layers
from hf_parallel.planner.processes import run_ranks, step_file
from hf_parallel.settings.file import parse_json, read_bounded
from hf_parallel.settings.values import spelled


VERSION: Final = 3
MAX_BYTES: Final = 1 << 20
REPORT: Final = "report.json"
FASTEST: Final = 1e12  # bytes per second that no link exceeds: what a message that costs nothing is taken to reach
TIMEOUT: Final = timedelta(seconds=120)  # of one message
LIMIT_S: Final = 240.0  # of all that is measured, which takes less than a minute on a machine with nothing else to do
REPEATS: Final = (4, 16)  # of each piece of work, the fewest and the most
REPEATS_S: Final = 0.8  # that more than the fewest may take
# A block that stands for the model's own if none is given; large enough that its ops are not launches alone.
BLOCK: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
BLOCK_LENGTH: Final = 256
BLOCK_ROWS: Final = (1, 2, 4, 8)  # what a small pass keeps in caches a large one does not
HALF_ROWS: Final = BLOCK_ROWS[1]  # of a pass while half of the ranks wait, as stages do: few
ROUNDS: Final = 16  # of computation and a message
BLOCKS: Final = (1, 4)  # of the models whose difference is timed: the more blocks, the less noise in one


@dataclass(frozen=True)
class Calibration:
    """Measurements of the slowest rank; FLOP/s, bytes per second, seconds.

    Attributes:
        device: "cpu" or "cuda".
        name: Name of the GPU; empty for a CPU.
        ranks: Number of ranks that ran at the same time.
        threads: Threads of each rank on the host.
        cores: Cores of the machine.
        products: FLOP/s of large products in fp32.
        half_products: The same in bf16; the rate of fp32 on a CPU.
        attention: FLOP/s of causal attention, of the pairs that are attended to.
        moved: Bytes per second that one operation on large tensors reads and writes.
        kernel_s: Seconds of a small operation, its call from Python included.
        blocks_s: Forward and backward of one block of `model`, for each number of `BLOCK_ROWS`.
        update_s: Seconds of clipping and AdamW, for each parameter.
        half_block_s: As `blocks_s` for `HALF_ROWS` while half of the ranks wait and leave the others what they share; 0 for one rank.
        reduce_s: Seconds of an all-reduce of next to nothing between two computations; 0 for one rank.
        reduce_bytes_s: Bytes per second of a large all-reduce, by the size of its tensor.
        hop_s: Seconds of a message of next to nothing to another rank.
        hop_bytes_s: Bytes per second of a large message, while both ranks compute.
        model: The transformers config of the block, as JSON.
        length: Tokens of its rows.
    """

    device: str
    name: str
    ranks: int
    threads: int
    products: float
    half_products: float
    attention: float
    moved: float
    kernel_s: float
    blocks_s: tuple[float, ...]
    update_s: float = 0.0
    cores: int = 0
    half_block_s: float = 0.0
    reduce_s: float = 0.0
    reduce_bytes_s: float = 0.0
    hop_s: float = 0.0
    hop_bytes_s: float = 0.0
    model: str = json.dumps(BLOCK)
    length: int = BLOCK_LENGTH

    def write(self, path: Path) -> None:
        """Write the calibration as a JSON report."""
        path.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration from a report that `hf-parallel calibrate` wrote.

        Raises:
            ConfigError: The file is not such a report.
        """
        file = Path(path)
        content = parse_json(read_bounded(file, MAX_BYTES, "a report of hf-parallel calibrate"), file)
        names = {one.name for one in fields(cls)}
        if not isinstance(content, dict) or content.get("version") != VERSION or names - content.keys():
            raise ConfigError(
                f"{file}: expected a report of version {VERSION}. Write one with `hf-parallel calibrate`."
            )
        blocks = content["blocks_s"]
        if not isinstance(blocks, list) or len(blocks) != len(BLOCK_ROWS) or not all(map(_is_number, blocks)):
            raise ConfigError(
                f"{file}: blocks_s={spelled(blocks)}: expected {len(BLOCK_ROWS)} numbers of 0 or more. Write the file again with "
                "`hf-parallel calibrate`."
            )
        found = cls(**{name: content[name] for name in names} | {"blocks_s": tuple(blocks)})
        numbers = names - {"device", "name", "blocks_s", "model"}
        odd = [name for name in numbers if not _is_number(getattr(found, name))]
        odd += [] if isinstance(found.model, str) and '"model_type"' in found.model else ["model"]
        if odd or found.device not in ("cpu", "cuda"):
            wanted = {"model": "a model's config as text", "device": "cpu or cuda"}
            told = [
                f"{name}={spelled(getattr(found, name))}: expected {wanted.get(name, 'a number of 0 or more')}"
                for name in sorted(odd) or ["device"]
            ]
            raise ConfigError(f"{file}: {'; '.join(told)}. Write the file again with `hf-parallel calibrate`.")
        return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def calibrate(
    ranks: int, *, on_gpu: bool, threads: int = 1, model: str = Calibration.model, length: int = BLOCK_LENGTH
) -> Calibration:
    """Measure with several processes of this machine at once; takes less than a minute.

    Args:
        ranks: Processes, each with a GPU of its own if `on_gpu`.
        on_gpu: Measure GPUs and NCCL; else the CPU and gloo.
        threads: Threads of each process on the host.
        model: A transformers config as JSON, whose blocks are measured: those of the model that is planned for.
        length: Tokens of its rows.

    Raises:
        ConfigError: A rank failed, or is not done after `LIMIT_S` seconds; names it and its step.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(ranks, _measure, (ranks, on_gpu, threads, folder, model, length), Path(folder), LIMIT_S)
        return Calibration.read(Path(folder, REPORT))


def _measure(rank: int, ranks: int, on_gpu: bool, threads: int, folder: str, model: str, length: int) -> None:
    """A process: measure, all ranks at once; the first writes the report, as all have the same numbers."""

    def begin(step: str) -> None:
        step_file(Path(folder), rank).write_text(step, encoding="utf-8")

    begin("imported torch")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        begin("waited for the other ranks")
        place = f"file://{Path(folder, 'store')}"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=place, rank=rank, world_size=ranks, timeout=TIMEOUT
        )
    clock = _Clock(device, ranks)
    begin("measured products, attention and memory")
    found = _computation(clock)
    if ranks > 1:
        begin("measured messages")
        found |= _messages(clock, rank)
    blocks = []
    for rows in BLOCK_ROWS:
        begin(f"measured a block with {rows} rows")
        blocks.append(_block_seconds(clock, model, rows, length))
    half = 0.0
    if ranks > 1:
        begin("measured a block while half of the ranks wait")
        half = _block_seconds(clock, model, HALF_ROWS, length, waits=rank >= ranks // 2)
    begin("wrote the report")
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    found |= {"blocks_s": tuple(blocks), "half_block_s": half, "cores": cores(), "model": model, "length": length}
    if rank == 0:
        Calibration(device.type, name, ranks, threads, **found).write(Path(folder, REPORT))
    if ranks > 1:
        dist.destroy_process_group()


class _Clock:
    """Seconds of a piece of work that all ranks begin together until the last of them is done, the least of some.

    Others disturb it, none hastens it. Where ranks share cores, one of them may be done early at the cost of the others.
    """

    def __init__(self, device: Any, ranks: int) -> None:
        self.device, self.ranks = device, ranks

    def __call__(self, work: Callable[[], object]) -> float:
        import torch
        import torch.distributed as dist

        work()
        times: list[float] = []
        repeats = REPEATS[0]
        while len(times) < repeats:
            if self.ranks > 1:
                dist.barrier()
            begun = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - begun)
            if len(times) == REPEATS[0]:
                fewest = min(self._slowest(times))
                repeats = min(REPEATS[1], max(REPEATS[0], int(REPEATS_S / max(fewest, 1e-9))))
        return min(self._slowest(times))

    def _slowest(self, times: list[float]) -> list[float]:
        """Longest of the ranks' times, entry by entry."""
        import torch
        import torch.distributed as dist

        slowest = torch.tensor(times, dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()


def _computation(clock: _Clock) -> dict[str, Any]:
    import torch
    from torch.nn import functional

    device = clock.device
    large = device.type == "cuda"
    size = 8192 if large else 768
    found = {}
    for name, dtype in (("products", torch.float32), ("half_products", torch.bfloat16 if large else torch.float32)):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        found[name] = 2 * size**3 / clock(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    wide, other = (torch.randn(2**28 if large else 2**23, device=device) for _ in range(2))
    # Gradients are summed in place: two are read, one is written.
    found["moved"] = 3 * wide.nbytes / clock(lambda: wide.add_(other))
    rows, length, heads, width = (8, 2048, 16, 128) if large else (2, 512, 8, 64)
    q = torch.randn(rows, heads, length, width, device=device, dtype=torch.bfloat16 if large else torch.float32)
    seconds = clock(lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    found["attention"] = 4 * rows * heads * width * length * (length + 1) / 2 / seconds
    small = torch.zeros(16, device=device, requires_grad=True)

    def launches() -> None:
        out = small
        for _ in range(100):
            out = out + 1
        out.sum().backward()

    found["kernel_s"] = clock(launches) / 200
    trained = [torch.zeros(size, size, device=device, requires_grad=True) for _ in range(4)]
    for one in trained:
        one.grad = torch.ones_like(one)
    optimizer = torch.optim.AdamW(trained)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    found["update_s"] = clock(update) / (4 * size**2)
    return found


def _block_seconds(clock: _Clock, model: str, rows: int, length: int, *, waits: bool = False) -> float:
    """Seconds of one block, forward and backward; a rank that waits computes nothing."""
    import torch
    from transformers import AutoModel

    times = []
    for layers in BLOCKS:
        made = AutoModel.from_config(with_layers(config_of_text(model), layers)).to(clock.device)
        ids = torch.zeros(rows, length, dtype=torch.long, device=clock.device)

        def train(model: Any = made, ids: Any = ids) -> None:
            model.zero_grad()  # sums of gradients are counted apart
            model(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()

        times.append(clock((lambda: None) if waits else train))
    return max((times[1] - times[0]) / (BLOCKS[1] - BLOCKS[0]), 1e-6)


def config_of_text(model: str) -> Any:
    """The transformers config that is written in JSON, its `model_type` beside its values."""
    from transformers import AutoConfig

    values = json.loads(model)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _messages(clock: _Clock, rank: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    small, large = (torch.zeros(n, device=clock.device) for n in (2, 2**24 if clock.device.type == "cuda" else 2**20))

    def hop(tensor: Any) -> None:
        if rank > 1:
            return
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        dist.recv(tensor, 1) if rank == 0 else dist.send(tensor, 0)

    square = torch.randn(512, 512, device=clock.device)

    def compute() -> None:
        for _ in range(8):
            square @ square

    def beside(tensor: Any) -> None:
        """Send while the rank computes, as stages do."""
        way = (dist.isend if rank == 0 else dist.irecv)(tensor, 1 - rank) if rank < 2 else None
        compute()
        if way is not None:
            way.wait()

    def between(tensor: Any = None) -> None:
        """Sum a tensor after each of some computations as long as parts of a block, as ranks of tp do.

        Ranks that compute alike are not done at one time: each sum waits for the one that others on the machine have disturbed.
        """
        for _ in range(ROUNDS):
            compute()
            if tensor is not None:
                wait_for(all_reduce_flat(tensor, world, async_op=False))

    computed = clock(between)
    latency, whole = ((clock(lambda t=t: between(t)) - computed) / ROUNDS for t in (small, large))  # type: ignore[misc]
    there = clock(lambda: hop(small)) / 2
    far = max(clock(lambda: beside(large)) - clock(compute), large.nbytes / FASTEST) + there
    return {
        "reduce_s": max(latency, 1e-6),
        "reduce_bytes_s": large.nbytes / max(whole - latency, 1e-9),
        "hop_s": there,
        "hop_bytes_s": large.nbytes / max(far - there, 1e-9),
    }
