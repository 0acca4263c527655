"""What a deep model costs the host of one pipeline stage: the blocks that it skips are still called by the model's loop.

    python benchmarks/bench_host.py            # seconds
    python benchmarks/bench_host.py --smoke    # small models; its numbers mean nothing

The last stage of a deep Llama (forward, loss and backward, with the random streams of training) against a whole Llama that
has the stage's blocks alone. Kernels are tiny, so the time is the host's. The two alternate; a ratio is one of neighbours.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from counted_calls import counted_calls
from rich.console import Console
from rich.table import Table
from timing import (
    ROUNDS_HEAD,
    Load,
    foreign_cores,
    paired_times,
    parser_of,
    quartiles,
    rounds_and_load,
    spread,
    write_report,
)
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.model.probes import Probes
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.run.stage import cut_stages


DEPTHS = ((80, 8), (126, 16), (126, 18))  # blocks, stages


def llama(blocks: int) -> LlamaForCausalLM:
    """A Llama whose kernels take next to no time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).train()


def variants(blocks: int, stages: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """One forward and backward of the last stage, and of a whole model of as many blocks as the stage has."""
    bounds = [index * blocks // stages for index in range(stages + 1)]
    deep, own = llama(blocks), llama(blocks - bounds[-2])
    plan = discover_stages(deep, Probes(deep, torch.device("cpu")).discovery)
    stage = cut_stages(deep, plan, bounds, [stages - 1], deep.forward)[stages - 1]
    batch: dict[str, Any] = {"input_ids": torch.arange(1, 9)[None]}  # i[1 8]
    batch |= {"labels": batch["input_ids"], "use_cache": False}
    received = torch.randn(1, 8, 16, requires_grad=True)  # f[1 8 16], the hidden states

    def staged() -> None:
        stage.seed = 1
        stage((received,), **batch).loss.backward()

    def whole() -> None:
        own(**batch).loss.backward()

    return staged, whole


def measure(blocks: int, stages: int, rounds: int) -> dict[str, Any]:
    """Paired ratios of host time, and counted calls."""
    both = variants(blocks, stages)
    load = Load()
    times = paired_times(both, rounds, calls=5, warmup=2)
    ratios = [mine / whole for mine, whole in times]
    return {
        "blocks": blocks,
        "stages": stages,
        "ratio": statistics.median(ratios),
        "quartiles": quartiles(ratios),
        "rounds": rounds,
        "foreign_cores": foreign_cores(*load.spent()),
        "stage_ms": 1e3 * min(mine for mine, _ in times),
        "own_blocks_ms": 1e3 * min(whole for _, whole in times),
        "calls": [counted_calls(run) for run in both],
    }


def main() -> None:
    """Print the table and write the report."""
    options = parser_of(__doc__, "build/reports/bench-host.json").parse_args()
    torch.set_num_threads(1)
    rounds = options.rounds or (2 if options.smoke else 21)
    rows = [measure(*depth, rounds) for depth in ([(8, 2)] if options.smoke else DEPTHS)]
    head = ("blocks", "stages", "stage (ms)", "own blocks alone (ms)", "ratio (quartiles)", "calls", ROUNDS_HEAD)
    table = Table(*head)
    for row in rows:
        table.add_row(
            *(str(row["blocks"]), str(row["stages"]), f"{row['stage_ms']:.2f}", f"{row['own_blocks_ms']:.2f}"),
            *(spread(row["ratio"], row["quartiles"]), "{} / {}".format(*row["calls"])),
            rounds_and_load(row),
        )
    Console(width=120).print(table)
    write_report(options.output, {"rows": rows})


if __name__ == "__main__":
    main()
