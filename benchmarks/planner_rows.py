"""Published runs as rows with a model, a cluster and a layout, for `bench_planner`."""

from __future__ import annotations

import csv
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from hf_parallel.planner.constants import Constants
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.predict import Estimate, estimate, step_of
from hf_parallel.planner.profile import ModelProfile, profile_of
from hf_parallel.planner.read_layout import layout_of


TABLES: Final = Path(__file__).parent / "planner_tables.csv"
MODEL: Final = ("model", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
COUNTS: Final = ("tp", "pp", "dp", "sp", "zero", "micro_batch", "num_microbatches", "stages_per_rank")
SWITCHES: Final = ("sequence_parallel", "overlap_dp", "overlap_tp", "overlap_pp")
WORDS: Final = ("schedule", "recompute", "dtype", "kernels", "attention", "engine")
FEWEST: Final = 5  # layouts of a job, from which a best one is told


class Row:
    """A published run.

    Attributes:
        table: Its table.
        name: Its name there.
        ran: Whether it did; else it ran out of memory.
        step_s: Seconds of a step, 0 if it did not run.
        memory: Bytes of the fullest GPU, None if not said.
        cluster: The machines.
        spec: The layout.
        seq_len: Tokens of a row.
    """

    def __init__(self, entry: Mapping[str, str]) -> None:
        self.entry, self.table, self.name = entry, entry["table"], entry["row"]
        self.ran, self.step_s = bool(entry["step_s"]), float(entry["step_s"] or 0)
        self.seq_len = int(entry["seq_len"])
        self.memory = float(entry["memory_gb"]) * 1e9 if entry["memory_gb"] else None
        inter = float(entry["inter_gbit_s"]) if entry["inter_gbit_s"] else None
        self.cluster = Cluster(int(entry["nodes"]), int(entry["gpus_per_node"]), entry["gpu"], inter_gbit_s=inter)
        layout: dict[str, object] = {key: int(entry[key]) for key in COUNTS}
        layout |= {key: entry[key] == "1" for key in SWITCHES} | {key: entry[key] for key in WORDS}
        layout["state_bytes"] = tuple(float(one) for one in entry["state_bytes"].split(";"))
        layout["loss"] = entry.get("loss") or "auto"
        layout["recompute_share"] = float(entry.get("recompute_share") or 1)
        layout["zero_owners"] = entry.get("owner") == "1"
        layout["adapters"] = int(entry.get("adapters") or 0)
        layout["block_bits"] = float(entry.get("block_bits") or 0)
        layout["blocking_launches"] = entry.get("blocking_launches") == "1"
        if entry.get("split"):
            layout["split"] = [int(one) for one in entry["split"].split(";")]
        self.spec: LayoutSpec = layout_of(layout, self.cluster)

    @functools.cached_property
    def profile(self) -> ModelProfile:
        return profile_for(*(self.entry[key] for key in MODEL))

    @property
    def alternatives(self) -> tuple[object, ...]:
        """What rows have in common that are choices for one and the same job."""
        spec = self.spec
        shape = self.profile.hidden, len(self.profile.layers), self.seq_len, spec.global_batch
        return self.cluster.num_gpus, *shape, spec.kernels, spec.attention

    def seconds(self, c: Constants, *, exact: bool = False) -> float:
        return step_of(self.profile, self.cluster, self.spec, self.seq_len, c, exact=exact).total

    def estimate(self, c: Constants | None = None) -> Estimate:
        return estimate(self.profile, self.cluster, self.spec, self.seq_len, c)


@functools.cache
def profile_for(model: str, hidden: str, layers: str, heads: str, kv_heads: str, ffn: str, vocab: str) -> ModelProfile:
    """The profile of a published model; its blocks are alike, so that two are built."""
    from transformers import GPT2Config, LlamaConfig, MptConfig, Starcoder2Config

    wide, many = int(hidden), int(heads)
    sizes = {"n_embd": wide, "n_layer": 2, "n_head": many, "n_inner": int(ffn), "vocab_size": int(vocab)}
    config: Any = GPT2Config(**sizes, tie_word_embeddings=model != "gpt_untied")
    if model.startswith("llama") or model == "starcoder2":  # that has layer norms and no gate, as GPT
        config = (Starcoder2Config if model == "starcoder2" else LlamaConfig)(
            hidden_size=wide,
            num_hidden_layers=2,
            num_attention_heads=many,
            num_key_value_heads=int(kv_heads),
            intermediate_size=int(ffn),
            vocab_size=int(vocab),
            tie_word_embeddings=model == "llama_tied",
        )
    elif model == "mpt":
        ratio = int(ffn) // wide
        config = MptConfig(d_model=wide, n_layers=2, n_heads=many, expansion_ratio=ratio, vocab_size=int(vocab))
    return replace(profile_of(config), layers=(0,) * int(layers))


def load(path: Path = TABLES) -> dict[str, list[Row]]:
    """The rows of each table."""
    found: dict[str, list[Row]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for entry in csv.DictReader(line for line in file if not line.startswith("#")):
            found[entry["table"]].append(Row(entry))
    return dict(found)


def errors(rows: Iterable[Row], c: Constants, *, exact: bool = False) -> list[float]:
    """Logarithms of predicted over measured."""
    return [math.log(row.seconds(c, exact=exact) / row.step_s) for row in rows]


def mape(logs: Sequence[float]) -> float:
    return sum(abs(math.exp(one) - 1) for one in logs) / len(logs)


def bias(logs: Sequence[float]) -> float:
    return math.exp(sum(logs) / len(logs)) - 1


def coverage(rows: Sequence[Row], c: Constants) -> float:
    """Share of the measured steps that lie in their bands."""
    found = [(row.estimate(c), row.step_s) for row in rows]
    return sum(one.low_s <= step <= one.high_s for one, step in found) / len(found)


def regrets(rows: Iterable[Row], c: Constants) -> dict[tuple[object, ...], tuple[Row, Row]]:
    """The best measured layout and the chosen one, for every job of which at least `FEWEST` layouts ran."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.ran:
            groups[row.alternatives].append(row)
    return {
        key: (min(own, key=lambda row: row.step_s), min(own, key=lambda row: row.seconds(c, exact=True)))
        for key, own in groups.items()
        if len(own) >= FEWEST
    }


def regret(rows: Iterable[Row], c: Constants) -> float | None:
    """How much slower chosen layouts are than the best ones, the mean; None without alternatives."""
    found = [chosen.step_s / best.step_s - 1 for best, chosen in regrets(rows, c).values()]
    return sum(found) / len(found) if found else None
