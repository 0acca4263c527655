"""Put bugs of known kinds into a layout and see whether `verify` finds each: `python benchmarks/mutations.py`.

Writes build/reports/mutations.json and, for a full run, the table of docs/verify.md; exits with 1 if a bug was not found, or if
a layout without a bug was said to differ.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
os.environ.update(HF_HUB_OFFLINE="1")

from rich.console import Console  # noqa: E402
from tables import with_tables  # noqa: E402
from transformers import GPT2Config, LlamaConfig, MixtralConfig  # noqa: E402
from zoo_jobs import write_report  # noqa: E402

from hf_parallel import ParallelError, verify  # noqa: E402


PAGE = ROOT / "docs" / "verify.md"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
}
LLAMA = LlamaConfig(**SIZES, num_hidden_layers=4, tie_word_embeddings=True)
MIXTRAL = MixtralConfig(**SIZES, num_hidden_layers=2, num_local_experts=4)
GPT2 = GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=101, n_positions=64, bos_token_id=0, eos_token_id=0)
MODELS = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL}
PP2 = {"pp_size": 2, "num_microbatches": 4}
TP2 = {"tp_size": 2}
DP2: dict[str, Any] = {}


@dataclass(frozen=True)
class Bug:
    """A bug, and where it is tried.

    Args:
        kind: What it is, for the table.
        name: Function of `mutation_bugs`.
        settings: The layout.
        module: What the name of the module that `verify` names contains; empty: any.
        model: Of `MODELS`.
        more: Arguments of `verify`.
    """

    kind: str
    name: str
    settings: dict[str, Any]
    module: str = ""
    model: str = "llama"
    more: dict[str, Any] | None = None


BUGS = (
    Bug("all-reduce of a row left out", "forward_sum_missing", TP2, "layers.0.self_attn"),
    Bug("all-reduce of a row done twice", "forward_sum_doubled", TP2, "layers.0.self_attn"),
    Bug("gradient of a column's input not summed", "input_gradient_not_summed", TP2, "layers.3"),
    Bug("gradients summed over replicas, not averaged", "gradient_sum_instead_of_mean", DP2),
    Bug("gradient not summed over holders of a tied matrix", "tied_gradient_not_summed", PP2, "embed_tokens"),
    Bug("norm counts a gradient twice", "norm_counts_twice", PP2),
    Bug("mean of the microbatches' means", "mean_of_means", PP2),
    Bug(
        "recomputation from other values",
        "stale_recomputation",
        {**PP2, "activation_checkpointing": {"every": 1}},
        "layers",
    ),
    Bug("wrong loss scale", "loss_scale_wrong", PP2),
    Bug("a microbatch dropped", "microbatch_dropped", PP2),
    Bug("order of shards swapped", "shards_swapped", TP2, "layers.1.mlp"),
    Bug("bias added on every rank", "bias_on_every_rank", TP2, "h.1.mlp", "gpt2"),
    Bug("key-value heads of another rank", "kv_heads_mixed", TP2, "layers.1.self_attn"),
    Bug("wrong positions in a stage", "positions_wrong", PP2, "layers.2.self_attn"),
    Bug("gradient of a router lost", "router_gradient_lost", PP2, "gate", "mixtral"),
    Bug("clipping before the reduction", "clipped_before_the_reduction", DP2),
    Bug("gradients through bf16 and back", "gradients_rounded_to_bf16", DP2),
    Bug("hidden states through bf16 and back", "hidden_states_rounded_to_bf16", PP2, "layers.2"),
    Bug("gradient between stages scaled", "gradient_between_stages_scaled", PP2, "layers"),
    Bug("a part of the optimizer is stale", "optimizer_shard_stale", {"zero": {"stage": 1}}),
    Bug("a replica with another learning rate", "replica_not_updated", DP2),
    Bug("attention mask dropped in a stage", "mask_dropped", PP2, "layers.2.self_attn"),
    Bug("labels shifted twice", "labels_shifted_twice", PP2),
    Bug("weight decay on norms and biases", "decay_on_norms", PP2),
    Bug("a buffer with other values in a stage", "buffer_of_another_mode", PP2, "layers.2.self_attn"),
    Bug("off by one in accumulation", "first_batch_lost", DP2, more={"accumulation": 2}),
    Bug("a weight of a replica differs", "one_weight_differs", DP2, "layers.1.mlp.up_proj"),
)
SOUND = [
    (model, settings)
    for model in (LLAMA, GPT2, MIXTRAL)
    for settings in (PP2, TP2, {**PP2, **TP2}, {"zero": {"stage": 1}})
]


def try_bug(bug: Bug) -> dict[str, Any]:
    """What `verify` says of a bug."""
    row = {"kind": bug.kind, "bug": bug.name, "layout": "", "found": False, "module": "", "part": ""}
    try:
        verdict = verify(MODELS[bug.model], bug.settings, tamper=f"mutation_bugs:{bug.name}", **(bug.more or {}))
    except ParallelError as error:
        return row | {"part": f"raised: {error}"}
    row["layout"] = verdict.layout
    if verdict.refused:
        return row | {"part": f"refused: {verdict.refused.splitlines()[0][:160]}"}
    place = verdict.first_divergence or {"module": "", "kind": ""}
    named = bug.module in place["module"]
    return row | {
        "found": not verdict.ok and named,
        "module": place["module"],
        "part": place["kind"],
        "ok": verdict.ok,
    }


def main() -> int:
    """Try every bug, and the same layouts without one; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs; all of them, and the page, if none is given")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "mutations.json")
    arguments = parser.parse_args()
    console = Console()
    rows = []
    for bug in BUGS:
        if not arguments.names or bug.name in arguments.names:
            rows.append(try_bug(bug))
            console.print(rows[-1], markup=False)
    alarms = []
    for model, settings in SOUND if not arguments.names else []:
        for dtype in ("fp32", "bf16"):
            verdict = verify(model, settings, dtype=dtype)
            console.print(verdict.model_type, verdict.layout, dtype, verdict.ok, verdict.grad_max_rel, markup=False)
            if not verdict.ok:
                alarms.append(
                    {"model": verdict.model_type, "layout": verdict.layout, "dtype": dtype, "worst": verdict.worst[:3]}
                )
    found = sum(row["found"] for row in rows)
    console.print(f"{found} of {len(rows)} bugs found, {len(alarms)} false alarms")
    write_report(arguments.report, [*rows, *alarms])
    if not arguments.names:
        lines = ["| bug | layout | found | at |", "|---|---|---|---|"]
        lines += [
            f"| {row['kind']} | {row['layout']} | {'yes' if row['found'] else 'no'} | {row['module']} ({row['part']}) |"
            for row in rows
        ]
        lines += [
            "",
            f"{found} of {len(rows)} found; {len(alarms)} false alarms in {2 * len(SOUND)} runs without a bug.",
        ]
        PAGE.write_text(with_tables(PAGE.read_text(), {"mutations": lines}))
    return 0 if found == len(rows) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
