"""Put bugs of known kinds into a layout and see whether `verify` finds each: `python benchmarks/mutations.py`.

Keeps what was tried in build/reports/mutations.json, goes on from there, and writes the tables of docs/verify.md from it. Exits
with 1 if a bug was not found, was placed wrongly or never ran, or if a layout without a bug was said to differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
os.environ.update(HF_HUB_OFFLINE="1")

from forked_proofs import Prover  # noqa: E402
from mutation_bugs import FIRED  # noqa: E402
from rich.console import Console  # noqa: E402
from tables import with_tables  # noqa: E402
from transformers import (  # noqa: E402
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
)

from hf_parallel import ParallelError  # noqa: E402


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
GEMMA2 = Gemma2Config(**SIZES, num_hidden_layers=4, head_dim=8, query_pre_attn_scalar=8, sliding_window=8)
OPT = OPTConfig(
    hidden_size=64,
    ffn_dim=96,
    num_attention_heads=4,
    num_hidden_layers=4,
    vocab_size=101,
    max_position_embeddings=64,
    word_embed_proj_dim=64,
    pad_token_id=1,
    bos_token_id=2,
    eos_token_id=2,
)
BLOOM = BloomConfig(hidden_size=64, n_layer=4, n_head=4, vocab_size=101, bos_token_id=1, eos_token_id=2)
MODELS = {"llama": LLAMA, "gpt2": GPT2, "mixtral": MIXTRAL, "gemma2": GEMMA2, "opt": OPT, "bloom": BLOOM}
PP2 = {"pp_size": 2, "num_microbatches": 4}
TP2 = {"tp_size": 2}
DP2: dict[str, Any] = {}
ZERO1 = {"zero": {"stage": 1}}
SOUND = [
    (model, layout, dtype) for model in MODELS for layout in (PP2, TP2, {**PP2, **TP2}) for dtype in ("fp32", "bf16")
]
SOUND += [(model, ZERO1, dtype) for model in ("llama", "gpt2", "mixtral") for dtype in ("fp32", "bf16")]
FORWARD, INPUT, WEIGHT, REDUCTION, CLIPPING, OPTIMIZER = (
    "forward",
    "input gradient",
    "weight gradient",
    "reduction",
    "clipping",
    "optimizer",
)


@dataclass(frozen=True)
class Bug:
    """A bug, and where it is tried.

    Args:
        kind: What it is, for the table.
        name: Function of `mutation_bugs`.
        settings: The layout.
        module: What the name of the module that `verify` names contains; empty: it is in no module, and none is named; `*`: any.
        parts: The directions that are right.
        model: Of `MODELS`.
        more: Arguments of `verify`.
    """

    kind: str
    name: str
    settings: dict[str, Any]
    module: str
    parts: tuple[str, ...]
    model: str = "llama"
    more: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """In the report."""
        return f"{self.name} {name_of(self.settings)}"

    def is_placed(self, place: dict[str, Any]) -> bool:
        """Whether what `verify` named is where the bug is."""
        named = place["module"]
        right = bool(named) if self.module == "*" else self.module in named if self.module else not named
        return right and place["kind"] in self.parts


BUGS = (
    Bug("all-reduce of a row left out", "forward_sum_missing", TP2, "layers.0.self_attn", (FORWARD,)),
    Bug("all-reduce of a row done twice", "forward_sum_doubled", TP2, "layers.0.self_attn", (FORWARD,)),
    Bug("all-reduce of an embedding left out", "embedding_sum_missing", TP2, "embed_tokens", (FORWARD,)),
    Bug("gradient of a column's input not summed", "input_gradient_not_summed", TP2, "lm_head", (INPUT,)),
    Bug("gradients summed over replicas, not averaged", "gradient_sum_instead_of_mean", DP2, "", (REDUCTION,)),
    Bug(
        "gradient not summed over holders of a tied matrix",
        "tied_gradient_not_summed",
        PP2,
        "embed_tokens",
        (REDUCTION,),
    ),
    Bug("norm counts a gradient twice", "norm_counts_twice", PP2, "", (CLIPPING,)),
    Bug("mean of the microbatches' means", "mean_of_means", PP2, "loss", (INPUT,)),
    Bug(
        "recomputation from other values",
        "stale_recomputation",
        {**PP2, "activation_checkpointing": {"every": 1}},
        "layers.2",
        (INPUT,),
    ),
    Bug("wrong loss scale", "loss_scale_wrong", PP2, "loss", (INPUT,)),
    Bug("a microbatch dropped", "microbatch_dropped", PP2, "loss", (INPUT,)),
    Bug("order of shards swapped", "shards_swapped", TP2, "layers.1.mlp.down_proj", (FORWARD,)),
    Bug("bias added on every rank", "bias_on_every_rank", TP2, "h.1.mlp", (FORWARD,), "gpt2"),
    Bug("key-value heads of another rank", "kv_heads_mixed", TP2, "layers.1.self_attn", (FORWARD,)),
    Bug("wrong positions in a stage", "positions_wrong", PP2, "layers.2.self_attn", (FORWARD,)),
    Bug("gradient of a router lost", "router_gradient_lost", PP2, "gate", (WEIGHT,), "mixtral"),
    Bug("clipping before the reduction", "clipped_before_the_reduction", DP2, "", (REDUCTION,)),
    Bug("gradients through bf16 and back", "gradients_rounded_to_bf16", DP2, "*", (REDUCTION,)),
    Bug("hidden states through bf16 and back", "hidden_states_rounded_to_bf16", PP2, "layers.2", (FORWARD,)),
    Bug("gradient between stages scaled", "gradient_between_stages_scaled", PP2, "layers.2", (INPUT,)),
    Bug("a part of the optimizer is stale", "optimizer_shard_stale", ZERO1, "*", (OPTIMIZER,)),
    Bug("a replica with another learning rate", "replica_not_updated", DP2, "*", (OPTIMIZER,)),
    Bug("attention mask dropped in a stage", "mask_dropped", PP2, "layers.2.self_attn", (FORWARD,)),
    Bug("labels shifted twice", "labels_shifted_twice", PP2, "loss", (INPUT,)),
    Bug("weight decay on norms and biases", "decay_on_norms", PP2, "norm", (OPTIMIZER,)),
    Bug("a buffer with other values in a stage", "buffer_of_another_mode", PP2, "rotary_emb", (FORWARD,)),
    Bug("off by one in accumulation", "first_batch_lost", DP2, "*", (REDUCTION,), more={"accumulation": 2}),
    Bug("rotary base of one shard", "rotary_base_of_one_shard", TP2, "rotary_emb", (FORWARD,)),
    Bug(
        "weight gradient of a microbatch lost",
        "weight_gradient_of_a_microbatch_lost",
        PP2,
        "layers.2.mlp.down_proj",
        (WEIGHT,),
    ),
    Bug("gradient of a tied matrix doubled", "tied_gradient_doubled", TP2, "embed_tokens", (WEIGHT,)),
    Bug("epsilon of a norm", "norm_epsilon_of_a_stage", PP2, "layers.2.input_layernorm", (FORWARD,)),
    Bug("each stage clips by its own norm", "clipped_by_each_stage", PP2, "", (CLIPPING,)),
    Bug("beta of one replica's optimizer", "beta_of_one_rank", DP2, "*", (OPTIMIZER,)),
    Bug("beta of one stage's optimizer", "beta_of_one_rank", PP2, "*", (OPTIMIZER,)),
    Bug("weights of the last step", "stale_weights_at_a_boundary", PP2, "layers.2.mlp.down_proj", (FORWARD,)),
    Bug("loss divided by all tokens", "loss_divided_by_all_tokens", PP2, "loss", (INPUT,)),
    Bug(
        "key heads of another rank, backward only",
        "kv_heads_mixed_in_backward",
        TP2,
        "layers.1.self_attn",
        (INPUT,),
    ),
    Bug("rows in another order than their labels", "replica_with_rows_of_another", DP2, "embed_tokens", (FORWARD,)),
    Bug("gradient of the last step kept", "gradients_kept_on_a_stage", PP2, "layers.2.mlp.down_proj", (WEIGHT,)),
    Bug("copy of a tied matrix not updated", "tied_copy_not_updated", PP2, "embed_tokens", (OPTIMIZER,)),
    Bug(
        "a parameter left out of the reduction",
        "parameter_left_out_of_the_reduction",
        DP2,
        "layers.2.self_attn.q_proj",
        (REDUCTION,),
    ),
    Bug(
        "gradient of a norm halved on a shard, activations sharded too",
        "norm_gradient_of_one_shard",
        {**TP2, "tensor_parallel": {"sequence_parallel": True}},
        "layers.1.input_layernorm",
        (WEIGHT,),
    ),
    Bug("all-reduce of a row in bf16", "forward_sum_in_bf16", TP2, "layers.0.self_attn", (FORWARD,)),
    Bug("learning rate scheduler stepped twice", "scheduler_stepped_twice", DP2, "", (OPTIMIZER,)),
    Bug("a weight of a replica differs", "one_weight_differs", DP2, "layers.1.mlp.up_proj", (FORWARD,)),
)


def try_bug(bug: Bug, prover: Prover) -> dict[str, Any]:
    """What `verify` says of a bug."""
    row: dict[str, Any] = {"kind": bug.kind, "found": False, "layout": "", "module": "", "part": "", "ran": False}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arguments = {"tamper": f"mutation_bugs:{bug.name}", **(bug.more or {})}
        try:
            verdict = prover.verify(MODELS[bug.model], bug.settings, folder, **arguments)
        except ParallelError as error:
            return row | {"told": f"raised: {error}"}
        row["ran"] = any(folder.glob(f"compared/rank*/{FIRED}"))
    row |= {"layout": verdict.layout, "ok": verdict.ok, "told": verdict.refused or verdict.stopped}
    place = verdict.first_divergence
    if place is None:
        return row | {"worst": verdict.worst[:3]}
    row |= {"module": place["module"], "part": place["kind"], "microbatch": place["microbatch"]}
    return row | {"found": row["ran"] and not verdict.ok and bug.is_placed(place)}


def try_sound(model: str, settings: dict[str, Any], dtype: str, prover: Prover) -> dict[str, Any]:
    """What `verify` says of a layout without a bug."""
    try:
        verdict = prover.verify(MODELS[model], settings, dtype=dtype)
    except ParallelError as error:
        return {"model": model, "layout": name_of(settings), "dtype": dtype, "ok": False, "told": str(error)}
    sizes = {"loss": verdict.loss_max_rel, "gradient": verdict.grad_max_rel, "parameter": verdict.param_max_rel}
    used = max((each["relative"] / each["allowed"] for each in verdict.worst), default=0.0)
    row = {"model": model, "layout": name_of(settings), "dtype": dtype, "ok": verdict.ok, "used": used, **sizes}
    return row | ({} if verdict.ok else {"told": verdict.refused, "worst": verdict.worst[:3]})


def name_of(settings: dict[str, Any]) -> str:
    """Of a layout."""
    axes = [f"{axis}{settings[key]}" for axis, key in (("pp", "pp_size"), ("tp", "tp_size")) if key in settings]
    return "x".join(axes) or ("dp2 zero1" if "zero" in settings else "dp2")


def tables(report: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Of the page."""
    tried = [report[bug.key] for bug in BUGS if bug.key in report]
    lines = ["| bug | layout | found | named | as |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['kind']} | {row['layout']} | {'yes' if row['found'] else 'no'} | {row['module'] or 'no module'} | {row['part']} |"
        for row in tried
    ]
    found = sum(row["found"] for row in tried)
    lines += ["", f"{found} of {len(tried)} found and named; {len(tried)} of {len(BUGS)} bugs tried."]
    sound = [row for case in SOUND if (row := report.get(key_of(*case))) is not None]
    runs = [
        "| model | layout | dtype | agrees | gradients differ by | of what is allowed |",
        "|---|---|---|---|---|---|",
    ]
    runs += [
        f"| {row['model']} | {row['layout']} | {row['dtype']} | {'yes' if row['ok'] else 'no'} "
        f"| {row.get('gradient') or 0:.1e} | {row.get('used', 0):.0%} |"
        for row in sound
    ]
    alarms = sum(not row["ok"] for row in sound)
    runs += ["", f"{alarms} false alarms in {len(sound)} runs, of {len(SOUND)}."]
    return {"mutations": lines, "sound": runs}


def key_of(model: str, settings: dict[str, Any], dtype: str) -> str:
    """Of a run without a bug."""
    return f"{model} {name_of(settings)} {dtype}"


def main() -> int:
    """Try what was not tried yet; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs, or keys of runs without one, that are tried anew")
    parser.add_argument("--fresh", action="store_true", help="forget what was tried before")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after them")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "mutations.json")
    arguments = parser.parse_args()
    console, begun = Console(), time.monotonic()
    report = json.loads(arguments.report.read_text()) if arguments.report.exists() and not arguments.fresh else {}
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as kept:
        prover = Prover(Path(kept))
        work: dict[str, Callable[[], dict[str, Any]]] = {bug.key: lambda bug=bug: try_bug(bug, prover) for bug in BUGS}
        work |= {key_of(*case): lambda case=case: try_sound(*case, prover) for case in SOUND}
        chosen = [key for key in work if key.split()[0] in arguments.names or key in arguments.names]
        for key in chosen or [key for key in work if key not in report]:
            if time.monotonic() - begun > arguments.seconds:
                break
            report[key] = work[key]()
            arguments.report.write_text(json.dumps(report, indent=1) + "\n")
            PAGE.write_text(with_tables(PAGE.read_text(), tables(report)))
            console.print(key, report[key], markup=False)
    bad = [key for key, row in report.items() if not row.get("found", row.get("ok"))]
    left = len([key for key in work if key not in report])
    console.print(f"{len(report)} tried, {left} left; wrong: {bad}", markup=False)
    return 1 if bad or left else 0


if __name__ == "__main__":
    sys.exit(main())
