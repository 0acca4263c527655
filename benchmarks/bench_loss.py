"""A loss without logits against the model's own: seconds of a training step, and the peak of each pipeline stage.

    python benchmarks/bench_loss.py            # minutes
    python benchmarks/bench_loss.py --smoke    # tiny sizes; its numbers mean nothing

Seconds are of a block, the head and the loss, forward and backward, with and without logits by turns; a ratio is one of
neighbours. Peaks are counted by `hf-parallel dry-run`, rank by rank, for the real sizes of the models.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
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
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig

from hf_parallel.dry_run.rank.run import Job, run_dry
from hf_parallel.head.defer import defer_logits
from hf_parallel.memory.terms import Work
from hf_parallel.settings.config import HFParallelConfig


STAGES, LENGTH = 4, 2048


def llama(scale: int, layers: int) -> PretrainedConfig:
    """Llama-3-8B, its widths and vocabulary divided by `scale`."""
    return LlamaConfig(
        vocab_size=128256 // scale,
        hidden_size=4096 // scale,
        intermediate_size=14336 // scale,
        num_hidden_layers=layers,
        num_attention_heads=32 // min(scale, 8),
        num_key_value_heads=8 // min(scale, 8),
        max_position_embeddings=8192,
    )


def gemma(scale: int, layers: int) -> PretrainedConfig:
    """Gemma-2-9B, its widths and vocabulary divided by `scale`."""
    return Gemma2Config(
        vocab_size=256000 // scale,
        hidden_size=3584 // scale,
        intermediate_size=14336 // scale,
        num_hidden_layers=layers,
        num_attention_heads=16 // min(scale, 8),
        num_key_value_heads=8 // min(scale, 8),
        head_dim=256 // scale,
        query_pre_attn_scalar=256 // scale,
        attn_implementation="eager",
    )


MODELS: dict[str, tuple[Callable[[int, int], PretrainedConfig], int]] = {
    "Llama-3-8B": (llama, 32),
    "Gemma-2-9B": (gemma, 42),
}


def steps_of(
    make: Callable[[int, int], PretrainedConfig], scale: int, rows: int, length: int
) -> list[Callable[[], float]]:
    """A training step with logits and one without, of equal models of one block; each returns its loss."""
    found = []
    for defers in (False, True):
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(make(scale, 1)).train()
        if defers:
            defer_logits(model.get_output_embeddings())
        tokens = torch.randint(0, 128256 // scale, (rows, length), generator=torch.Generator().manual_seed(1))

        def step(model: nn.Module = model, tokens: torch.Tensor = tokens) -> float:
            model.zero_grad(set_to_none=True)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            return loss.item()

        found.append(step)
    return found


def timed(name: str, scale: int, rows: int, length: int, rounds: int) -> dict[str, Any]:
    """Paired ratios of seconds."""
    both = steps_of(MODELS[name][0], scale, rows, length)
    losses = [step() for step in both]
    if abs(losses[0] - losses[1]) > 1e-5 * losses[0]:
        raise RuntimeError(f"{name}: the losses are {losses}.")
    load = Load()
    times = paired_times(both, rounds)
    ratios = [without / ordinary for ordinary, without in times]
    return {
        "model": name,
        "scale": scale,
        "tokens": rows * length,
        "ratio": statistics.median(ratios),
        "quartiles": quartiles(ratios),
        "rounds": rounds,
        "foreign_cores": foreign_cores(*load.spent()),
        "seconds": [min(pair[which] for pair in times) for which in (0, 1)],
    }


def peaks(name: str, scale: int, layers: int, length: int, *, chunked: bool) -> dict[str, Any]:
    """Bytes of each stage at its peak, in 16 bit."""
    section: dict[str, Any] = {"pp_size": STAGES, "pipeline": {"num_microbatches": 2 * STAGES}}
    config = HFParallelConfig.from_mapping(section | {"chunked_loss": "auto" if chunked else False})
    model = MODELS[name][0](scale, layers)
    work = Work(rows=2 * STAGES, length=length)
    found = [
        run_dry(Job(config, model, work, rank, STAGES, STAGES, precision="half")).peak_bytes for rank in range(STAGES)
    ]
    return {"model": name, "chunked": chunked, "bytes": found, "last": found[-1] / max(found[:-1])}


def main() -> None:
    """Print the tables and write the report."""
    options = parser_of(__doc__, "build/reports/bench-loss.json").parse_args()
    torch.set_num_threads(1)
    rounds = options.rounds or (2 if options.smoke else 15)
    scale, rows, length = (64, 1, 64) if options.smoke else (16, 2, 512)
    speed = [timed(name, scale, rows, length, rounds) for name in MODELS]
    table = Table("model / scale", "tokens", "with logits (s)", "without (s)", "ratio (quartiles)", ROUNDS_HEAD)
    for row in speed:
        seconds = (f"{one:.3f}" for one in row["seconds"])
        table.add_row(
            *(f"{row['model']} / {row['scale']}", str(row["tokens"]), *seconds),
            *(spread(row["ratio"], row["quartiles"]), rounds_and_load(row)),
        )
    Console(width=120).print(table)
    sizes = [
        peaks(name, scale if options.smoke else 1, 4 if options.smoke else layers, LENGTH // 16 if options.smoke else LENGTH,
              chunked=chunked)
        for name, (_, layers) in MODELS.items()
        for chunked in (False, True)
    ]  # fmt: skip
    table = Table("model", "logits", "peak of each stage (GB)", "last / largest other")
    for row in sizes:
        bytes_ = ", ".join(f"{one / 1e9:.2f}" for one in row["bytes"])
        table.add_row(row["model"], "not made" if row["chunked"] else "made", bytes_, f"{row['last']:.2f}")
    Console(width=120).print(table)
    write_report(options.output, {"seconds": speed, "peaks": sizes})


if __name__ == "__main__":
    main()
