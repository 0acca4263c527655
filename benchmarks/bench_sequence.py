"""What sequence parallelism saves: bytes that one training forward keeps for its backward, per tensor-parallel rank.

    python benchmarks/bench_sequence.py            # seconds
    python benchmarks/bench_sequence.py --smoke    # tiny sizes

Counted, not timed: distinct storages that autograd saves, parameters left out, on the rank that keeps most. The ranks are
threads of one process. "blocks" is one process with every block checkpointed, for comparison.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from saved_tensors import saved_bytes  # noqa: E402
from torch import nn  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM  # noqa: E402

from hf_parallel.tensor_parallel.plan.cost import traffic  # noqa: E402
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel  # noqa: E402
from hf_parallel.tensor_parallel.plan.sequence_plan import shard_sequence  # noqa: E402
from hf_parallel.tensor_parallel.plan.virtual_ranks import run_sharded  # noqa: E402
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary  # noqa: E402
from hf_parallel.tensor_parallel.shard_plan import TPPlan  # noqa: E402


Batch = dict[str, torch.Tensor]


def build(name: str, hidden: int, layers: int, length: int) -> nn.Module:
    """A random model with heads of 64 and a vocabulary of 1000, in training mode, sdpa attention, dropout off."""
    torch.manual_seed(0)
    heads = hidden // 64
    if name == "llama":
        sizes = {"intermediate_size": hidden * 8 // 3 // 64 * 64, "num_key_value_heads": heads}
        config = LlamaConfig(
            vocab_size=1000,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=length,
            **sizes,
        )
        return LlamaForCausalLM(config).train()
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=1000, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=length, **dropout)
    ).train()


def on_ranks(model: nn.Module, plan: TPPlan, batch: Batch) -> int:
    """Bytes on the rank that keeps most."""
    return max(run_sharded(lambda: copy.deepcopy(model), plan, 120.0, lambda sharded: saved_bytes(sharded, batch)))


def checkpointed(model: nn.Module, batch: Batch) -> int:
    copied = copy.deepcopy(model)
    copied.gradient_checkpointing_enable({"use_reentrant": False})
    return saved_bytes(copied, batch)


def main() -> int:
    """Measure and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the activations that sequence parallelism saves.")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--models", nargs="*", default=["llama", "gpt2"], choices=["llama", "gpt2"])
    parser.add_argument("--tp", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "reports" / "bench-sequence.json")
    for name, default in (("hidden", 512), ("layers", 4), ("length", 512), ("rows", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.hidden, arguments.layers, arguments.length = 256, 2, 64
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (arguments.rows, arguments.length))
    batch = {"input_ids": ids, "labels": ids}
    title = "MB kept for the backward pass per rank, {layers} layers of {hidden}, {rows} x {length} tokens, fp32"
    table = Table(title=title.format(**vars(arguments)))
    for heading in ("model", "tp", "one process", "blocks", "tensor parallel", "and sequence", "sent per token"):
        table.add_column(heading)
    rows = []
    for name in arguments.models:
        model = build(name, arguments.hidden, arguments.layers, arguments.length)
        sample = {"input_ids": ids[:, :13]}
        whole, recomputed = saved_bytes(copy.deepcopy(model), batch), checkpointed(model, batch)
        for tp_size in arguments.tp:
            plan = shard_vocabulary(model, plan_tensor_parallel(model, tp_size, sample), sample)
            shared = shard_sequence(model, plan, sample)
            kept = [whole, recomputed, on_ranks(model, plan, batch), on_ranks(model, shared, batch)]
            sent = [f"{traffic(p, 4).per_token / 1e3:.1f}" for p in (plan, shared)]
            rows.append({"model": name, "tp": tp_size, "bytes": kept})
            table.add_row(name, str(tp_size), *(f"{size / 1e6:.1f}" for size in kept), " -> ".join(sent) + " kB")
    Console().print(table)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
