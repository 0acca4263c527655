"""Bytes and seconds of an optimizer step over a slow network, for every way gradients can travel.

    python benchmarks/bench_wire.py            # some five minutes; needs root and iproute2, or says why it is skipped
    python benchmarks/bench_wire.py --smoke    # seconds; checks that everything runs, its times mean nothing

The network is the kernel's: namespaces with shaped links (see slow_network.py), and the bytes are those that the cards of
the nodes counted, headers and acknowledgements included. The model has many parameters and little to compute, so that
the network decides. All ways take turns within one run, in changing order.

`formula` is what the collectives should send, without headers; `limit` is the counted bytes over the rate of the link, and
`bound` the limit + the step without communication + the time in codecs. Bytes mean the same under any load; times do
not, so each round records how much CPU other processes used (see timing.py). Exits with 1 if bytes miss their target.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from results_page import markdown_table, write_section
from rich.console import Console
from rich.table import Table
from slow_network import HEADER_BYTES, SlowNetwork, exit_on_signals, run_ranks_on, sent
from timing import Load, Rounds, Sample, parser_of, shuffled, wait_for_quiet, write_report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_parallel.data_parallel.compression.build_wire import make_wire
from hf_parallel.data_parallel.compression.compressed_wire import CompressedWire
from hf_parallel.data_parallel.compression.ddp_hook import compress_ddp
from hf_parallel.data_parallel.reducer import GradientReducer
from hf_parallel.data_parallel.wire import PlainWire, Traffic, Wire
from hf_parallel.settings.replica_sections import GradientCompressionConfig


NOTHING, PLAIN = "no exchange", "none"
HIERARCHICAL, HIERARCHICAL_INT8 = "none, hierarchical", "int8, hierarchical"
TOPK_ALL = "top-k 1 %, vectors too"
SETTINGS: dict[str, dict[str, Any]] = {
    "fp16": {"method": "fp16"},
    "int8": {"method": "int8"},
    "int4": {"method": "int4"},
    "top-k 1 %": {"method": "topk"},
    TOPK_ALL: {"method": "topk", "exclude": ()},
    "top-k 3 of 256, int8": {"method": "topk", "density": 3 / 256, "block_size": 256, "value_dtype": "int8"},
    "powersgd r4": {"method": "powersgd"},
    "onebit": {"method": "onebit"},
    "int8 under DDP": {"method": "int8"},
    HIERARCHICAL: {"method": "int8"},
    HIERARCHICAL_INT8: {"method": "int8"},
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "2x1": (NOTHING, PLAIN, *(name for name in SETTINGS if "hierarchical" not in name)),
    "2x2": (NOTHING, PLAIN, HIERARCHICAL, HIERARCHICAL_INT8),
}
NODES = 2
# Times fewer bytes than `none` of the same layout, at full size.
TARGETS = {
    ("2x1", "fp16"): 1.99,
    ("2x1", "int8"): 3.85,
    ("2x1", "int4"): 7.3,
    ("2x1", TOPK_ALL): 95.0,
    ("2x1", "powersgd r4"): 60.0,
    ("2x2", HIERARCHICAL_INT8): 5.8,
}
# What `none` may be off. With one rank a node, acknowledgements ride on the data that goes the other way; with two, data
# comes and goes on different connections, and each has frames of its own for them.
_PAYLOAD = ("payload_over_formula", "without headers to", 0.01)
FORMULA_LIMITS = {"2x1": (("over_formula", "with headers to", 0.06), _PAYLOAD), "2x2": (_PAYLOAD,)}
TIME_TARGET = 1.25


@dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    layouts: tuple[str, ...] = tuple(LAYOUTS)
    megabits: float = 100.0
    width: int = 640
    layers: int = 10
    rows: int = 4
    bucket_mb: float = 4.0
    rounds: int = 6
    steps: int = 2
    warmup: int = 2
    foreign: float = 0.15
    quiet_budget: float = 120.0
    seconds: float = 420.0


@dataclass
class NicSample(Sample):
    """Beside a step's seconds, bytes that the card of a node sent, with headers and without, what they should be, and the
    CPU seconds of compressing.
    """

    sent: float = 0.0
    payload: float = 0.0
    formula: float = 0.0
    codec: float = 0.0


class Net(nn.Module):
    """Many parameters, little to compute."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(settings.width, settings.width) for _ in range(settings.layers))

    def forward(self, x: Tensor) -> Tensor:
        """Residual layers: no gradient vanishes."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Way(Protocol):
    """One way to train."""

    model: nn.Module
    wire: Wire | None

    def backward(self, loss: Tensor) -> None:
        """Compute the mean gradients."""
        ...


class Reduced:
    """hf_parallel's own reducer."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, wire: Wire | None, bucket_mb: float) -> None:
        def kind(name: str, param: nn.Parameter) -> bool:
            return isinstance(wire, CompressedWire) and not wire.keeps_dense(name, param.shape)

        traffic = Traffic(round(bucket_mb * 2**20), kind=kind, overlaps=True, wire=wire)
        self.model, self.wire = model, wire
        self._factor = 1.0 if group is None else 1.0 / group.size()
        self._reducer = GradientReducer(list(model.named_parameters()), group, traffic)

    def backward(self, loss: Tensor) -> None:
        """Buckets leave as they fill up."""
        self._reducer.arm(self._factor)
        torch.autograd.backward(loss)
        self._reducer.reduce(self._factor)


class UnderDdp:
    """torch's DDP with the compressed wire as its hook."""

    def __init__(self, model: nn.Module, settings: GradientCompressionConfig, bucket_mb: float) -> None:
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        self.wire: Wire = compress_ddp(self.model, settings)

    def backward(self, loss: Tensor) -> None:
        """DDP does the rest."""
        torch.autograd.backward(loss)


def make_way(name: str, settings: Settings, nodes: tuple[dist.ProcessGroup, dist.ProcessGroup] | None) -> Way:
    """Build a model and what exchanges its gradients; collective."""
    torch.manual_seed(0)
    model = Net(settings)
    group = None if name == NOTHING else dist.new_group()
    if group is None or name == PLAIN:
        return Reduced(model, group, None if group is None else PlainWire(group), settings.bucket_mb)
    compression = GradientCompressionConfig(**SETTINGS[name])
    if "DDP" in name:
        return UnderDdp(model, compression.model_copy(update={"warmup_ratio": 0.0}), settings.bucket_mb)
    shapes = {key: param.shape for key, param in model.named_parameters()}
    wire = make_wire(compression, shapes, group, nodes if "hierarchical" in name else None, torch.device("cpu"))
    wire.warm = name != HIERARCHICAL
    return Reduced(model, group, wire, settings.bucket_mb)


def node_groups(ranks_per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the group of this rank's node, and that of its place in all nodes; collective."""
    ranks, rank = range(NODES * ranks_per_node), dist.get_rank()
    inside = {node: dist.new_group([r for r in ranks if r // ranks_per_node == node]) for node in range(NODES)}
    across = {
        place: dist.new_group([r for r in ranks if r % ranks_per_node == place]) for place in range(ranks_per_node)
    }
    return inside[rank // ranks_per_node], across[rank % ranks_per_node]


class Bench:
    """One rank's side: all ways of a layout."""

    def __init__(self, layout: str, settings: Settings) -> None:
        self.layout, self.settings = layout, settings
        self.per_node = int(layout.split("x")[1])
        nodes = node_groups(self.per_node) if self.per_node > 1 else None
        self.ways = {name: make_way(name, settings, nodes) for name in LAYOUTS[layout]}
        self.optimizers = {name: torch.optim.SGD(way.model.parameters(), lr=1e-3) for name, way in self.ways.items()}
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.parameters = sum(p.numel() for p in self.ways[PLAIN].model.parameters())
        self.patience = settings.quiet_budget

    def steps(self, name: str, count: int) -> None:
        """Take optimizer steps."""
        way, settings = self.ways[name], self.settings
        for _ in range(count):
            x = torch.randn(settings.rows, settings.width, generator=self.generator)
            way.backward(way.model(x).square().mean())
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()

    def formula(self, name: str) -> tuple[float, float]:
        """Bytes that this rank should have put on its node's card so far, and seconds in codecs."""
        wire = self.ways[name].wire
        if isinstance(wire, CompressedWire):
            return wire.meter.wire_bytes, wire.meter.codec_seconds
        ranks = NODES * self.per_node
        # Of the ranks of a node, the ring leaves through one.
        return 0.0 if wire is None else 2 * (ranks - 1) / ranks * wire.counters.bytes / self.per_node, 0.0

    def sample(self, name: str, number: int) -> NicSample:
        """Time some steps of one way, from barrier to barrier."""
        count = self.settings.steps
        if dist.get_rank() == 0:
            self.patience -= wait_for_quiet(self.patience, self.settings.foreign)
        dist.barrier()
        formula, codec = self.formula(name)
        (whole, frames), opened = sent(), Load()
        self.steps(name, count)
        seconds = time.perf_counter() - opened.start  # without the wait for the other ranks
        dist.barrier()
        whole, frames = (now - before for now, before in zip(sent(), (whole, frames), strict=True))
        _, own, busy = opened.spent()
        after, later = self.formula(name)
        per_step = {
            **{"sent": whole / count, "payload": (whole - HEADER_BYTES * frames) / count},
            **{"formula": (after - formula) / count, "codec": (later - codec) / count},
        }
        return NicSample(name, 0, number, seconds / count, busy / count, 0.0, cpu=own / count, **per_step)

    def check(self) -> None:
        """All ranks have the same parameters, bit for bit.

        Raises:
            RuntimeError: They do not.
        """
        for name, way in self.ways.items():
            mine = torch.nn.utils.parameters_to_vector(way.model.parameters()).detach()
            first = mine.clone()
            dist.broadcast(first, 0)
            if name != NOTHING and not torch.equal(mine, first):
                raise RuntimeError(f"{name}: rank {dist.get_rank()} has other parameters than rank 0.")


def worker(layout: str, settings: Settings, folder: Path) -> None:
    """Run one rank; leave its samples in the folder."""
    signal.alarm(math.ceil(settings.seconds) + 60)  # nobody is left behind, whatever happens to the parent
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(layout, settings)
    for name in bench.ways:
        bench.steps(name, settings.warmup)
    samples, end = [], time.monotonic() + settings.seconds / 2
    for number in range(settings.rounds):
        samples += [bench.sample(name, number) for name in shuffled(list(bench.ways), number)]
        late = torch.tensor(float(time.monotonic() > end))
        dist.all_reduce(late)
        if late:
            break
    bench.check()
    report = {"parameters": bench.parameters, "samples": [asdict(sample) for sample in samples]}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def merged(ranks: Sequence[Sequence[NicSample]], per_node: int) -> list[NicSample]:
    """One sample for those that all ranks took together: the slowest rank, the busiest card."""
    found = []
    together = list(zip(*ranks, strict=True))
    foreign = {
        number: foreign_of([g for g in together if g[0].round == number]) for number in {g[0].round for g in together}
    }
    for group in together:
        nodes = [group[first : first + per_node] for first in range(0, len(group), per_node)]
        found.append(
            NicSample(
                *(group[0].variant, 0, group[0].round, max(s.seconds for s in group)),
                foreign=foreign[group[0].round],
                loss=0.0,
                cpu=sum(s.cpu for s in group),
                sent=max(node[0].sent for node in nodes),
                payload=max(node[0].payload for node in nodes),
                formula=max(sum(s.formula for s in node) for node in nodes),
                codec=max(s.codec for s in group),
            )
        )
    return found


def foreign_of(round_of: Sequence[Sequence[NicSample]]) -> float:
    """Cores that others used in a round; a single sample is too short for the kernel's clock ticks."""
    used = sum(group[0].foreign - sum(sample.cpu for sample in group) for group in round_of)
    return max(0.0, used) / sum(group[0].seconds for group in round_of)


def measure(layout: str, settings: Settings) -> tuple[int, list[NicSample]]:
    """Build the network, run the ranks, take it down; return the number of parameters and the samples."""
    per_node = int(layout.split("x")[1])
    with tempfile.TemporaryDirectory() as name, SlowNetwork(NODES, settings.megabits) as network:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(asdict(settings)))
        command = [sys.executable, str(Path(__file__).resolve()), "--rank-of", layout, "--output", name]
        run_ranks_on(network, per_node, command, folder, settings.seconds)
        files = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NODES * per_node)]
    ranks = [[NicSample(**sample) for sample in file["samples"]] for file in files]
    return files[0]["parameters"], merged(ranks, per_node)


def rows_of(layout: str, samples: Sequence[NicSample], settings: Settings) -> list[dict[str, Any]]:
    """One row a way. Bytes are medians over all rounds, times over those that count."""
    rounds = Rounds.of(samples, 0, settings.foreign)
    idle = rounds.median(lambda group: group[NOTHING].seconds)

    def sent_of(name: str) -> float:
        return statistics.median(sample.sent for sample in samples if sample.variant == name)

    rows = []
    for name in LAYOUTS[layout]:
        own = [sample for sample in samples if sample.variant == name]
        sent = sent_of(name)
        payload, formula = (statistics.median(getattr(s, key) for s in own) for key in ("payload", "formula"))
        timed = [sample for sample in own if any(sample is group[name] for group in rounds.used)]
        seconds, codec = (statistics.median(getattr(s, key) for s in timed) for key in ("seconds", "codec"))
        limit = sent * 8 / (settings.megabits * 1e6)
        exchanges = name != NOTHING
        rows.append({
            "layout": layout,
            "way": name,
            "sent_mb": sent / 1e6,
            "ratio": sent_of(PLAIN) / sent if exchanges else None,
            "formula_mb": formula / 1e6,
            "over_formula": sent / formula - 1 if exchanges else None,
            "payload_over_formula": payload / formula - 1 if exchanges else None,
            "limit_seconds": limit,
            "seconds": seconds,
            "codec_seconds": codec,
            "bound_seconds": limit + idle + codec,
            "over_bound": seconds / (limit + idle + codec),
            "speedup": rounds.median(lambda group, name=name: group[PLAIN].seconds / group[name].seconds),
            "rounds": len(rounds.used),
            "clean": rounds.clean,
            "foreign_cores": rounds.foreign,
            "load_average": os.getloadavg()[0],
        })  # fmt: skip
    return rows


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool, bool]]:
    """What was asked, whether it was met, and whether load excuses it."""
    found = []
    for row in rows:
        label = f"{row['layout']} {row['way']}"
        target = TARGETS.get((row["layout"], row["way"]))
        if target is not None:
            found.append((f"{label}: {row['ratio']:.3f}x fewer bytes, asked {target}x", row["ratio"] >= target, False))
        if row["way"] == PLAIN:
            found += [
                (
                    f"{label}: {row[key]:+.1%} {words} the ring formula, asked {limit:.0%}",
                    abs(row[key]) <= limit,
                    False,
                )
                for key, words, limit in FORMULA_LIMITS[row["layout"]]
            ]
        if row["ratio"] is not None:
            text = f"{label}: step {row['over_bound']:.2f}x its bound, asked {TIME_TARGET}x"
            found.append((text, row["over_bound"] <= TIME_TARGET, not row["clean"]))
    return found


HEAD = (
    "gradients",
    "MB/NIC",
    "ratio",
    "formula",
    "diff",
    "no headers",
    "limit s",
    "step s",
    "codec ms",
    "/ bound",
    "speed-up",
)


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as text."""
    exchanges = row["ratio"] is not None
    return (
        *(row["way"], f"{row['sent_mb']:.3f}", f"{row['ratio']:.2f}" if exchanges else "-"),
        *(f"{row['formula_mb']:.3f}", f"{row['over_formula']:+.1%}" if exchanges else "-"),
        f"{row['payload_over_formula']:+.1%}" if exchanges else "-",
        *(f"{row['limit_seconds']:.3f}", f"{row['seconds']:.3f}", f"{1e3 * row['codec_seconds']:.1f}"),
        *(f"{row['over_bound']:.2f}" if exchanges else "-", f"{row['speedup']:.2f}"),
    )


def table_of(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Return the rows of one layout as a table."""
    table = Table(title=title)
    for name in HEAD:
        table.add_column(name, justify="left" if name == HEAD[0] else "right")
    for row in rows:
        table.add_row(*cells(row))
    return table


def section(tables: Mapping[str, Sequence[Mapping[str, Any]]], asked: Sequence[tuple[str, bool, bool]]) -> str:
    """The section of the page: a title and a table for each layout, and what was asked."""
    text = (
        "The ranks run in network namespaces whose links the kernel slows down. `MB/NIC` is what a network card counted in a "
        "step. `diff` is its relative difference to the formula of the collective, `no headers` the same without the headers "
        "of frames. `limit` is the time of these bytes at the rate of the link. `/ bound` is the time of a step divided by the "
        "sum of `limit`, a step without exchange and the CPU time of the codecs."
    )
    parts = [f"{title}:\n\n{markdown_table(HEAD, [cells(row) for row in rows])}" for title, rows in tables.items()]
    verdict = [
        f"- {'met' if met else 'not met under load' if excused else 'NOT MET'}: {line}" for line, met, excused in asked
    ]
    return "\n\n".join([text, *parts, "\n".join(verdict)])


def parse_arguments() -> tuple[argparse.Namespace, Settings]:
    """Return what was given, and the settings."""
    parser = parser_of(__doc__, "build/reports/bench-wire.json")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="nodes x ranks")
    parser.add_argument("--megabits", type=float, default=Settings.megabits, help="Mbit/s of each link and direction")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps in a sample")
    parser.add_argument("--page", type=Path, help="page of results whose section is rewritten")
    parser.add_argument("--rank-of", choices=list(LAYOUTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    shared: dict[str, Any] = {"layouts": tuple(given.layouts), "foreign": given.foreign}
    if given.smoke:
        tiny = {"width": 64, "layers": 2, "rounds": 2, "steps": 1, "quiet_budget": 0.0, "seconds": 120.0}
        return given, Settings(megabits=1000.0, **tiny, **shared)
    rounds, budget = given.rounds or Settings.rounds, given.quiet_budget
    timed = {"megabits": given.megabits, "steps": given.steps, "rounds": rounds, "quiet_budget": budget}
    return given, Settings(**timed, **shared)


def main() -> None:
    """Measure every layout, print the tables and what was asked, and write the report."""
    given, settings = parse_arguments()
    if given.rank_of is not None:
        stored = json.loads((given.output / "settings.json").read_text())
        worker(given.rank_of, Settings(**stored), given.output)
        return
    exit_on_signals()
    console = Console(width=140)
    obstacle = SlowNetwork.obstacle()
    if obstacle is not None:
        console.print(f"skipped: {obstacle}")
        write_report(given.output, {"skipped": obstacle})
        return
    rows: list[dict[str, Any]] = []
    samples, tables = {}, {}
    for layout in settings.layouts:
        parameters, found = measure(layout, settings)
        own = rows_of(layout, found, settings)
        rows, samples[layout] = rows + own, [asdict(sample) for sample in found]
        title = title_of(layout, parameters, settings, own[0])
        tables[title] = own
        console.print(table_of(own, title))
    asked = [] if given.smoke else verdicts(rows)
    for text, met, excused in asked:
        console.print(f"{'met' if met else 'UNDER LOAD' if excused else 'MISSED'}: {text}")
    report = {"rows": rows, "asked": asked, "samples": samples, "settings": asdict(settings)}
    write_report(given.output, report)
    if given.page is not None:
        write_section(given.page, "wire", section(tables, asked))
    if any("bytes" in text or "formula" in text for text, met, _ in asked if not met):
        sys.exit(1)


def title_of(layout: str, parameters: int, settings: Settings, row: Mapping[str, Any]) -> str:
    """What was measured, and under which load."""
    nodes, ranks = layout.split("x")
    return (
        f"{nodes} nodes x {ranks} ranks, {settings.megabits:g} Mbit/s, {parameters / 1e6:.2f}M parameters, {row['rounds']} "
        f"{'clean' if row['clean'] else 'UNCLEAN'} rounds of {settings.steps} steps, {row['foreign_cores']:.2f} cores of "
        "other load"
    )


if __name__ == "__main__":
    main()
