"""Tiny random models for the tensor-parallel tests: two layers, every parameter random, norms and biases too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from hf_parallel.compat import private_collectives
from hf_parallel.ledger import Ledger, build_ledger
from hf_parallel.tensor_parallel.layout import ShardSpec
from hf_parallel.tensor_parallel.plan import verify_model
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.shard_plan import TPPlan


VOCAB = 64
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_kv1": {"num_key_value_heads": 1},
    "llama_heads3": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
    "llama_odd": {"vocab_size": 61, "intermediate_size": 45, "attention_bias": True, "mlp_bias": True},
    "smollm2": {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "gpt2": {},
    "qwen3": {"head_dim": 8},
    "phi3": {},
    "llama_kv4": {"num_key_value_heads": 4},
}


def tiny_config(case: str) -> PretrainedConfig:
    options = CASES[case]
    if case == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
        )
    if case == "phi3":
        return Phi3Config(**{**LLAMA, **options})
    if case == "qwen3":
        return Qwen3Config(**{**LLAMA, **options})
    return LlamaConfig(**{**LLAMA, **options})


def tiny_model(case: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    """The same weights on every rank and in every call; eval mode, no dropout."""
    model = AutoModelForCausalLM.from_config(tiny_config(case), attn_implementation=attention).eval()
    spread(model)
    return model.to(dtype)


def spread(model: nn.Module) -> None:
    """Fixed random weights of a size that lets every layer matter; no bias or scale stays constant."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * 0.6 / parameter.shape[-1] ** 0.5)


def on_all_ranks(item: Any) -> list[Any]:
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def gathered(plan: TPPlan, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors by name; replicated ones must be bit-equal on all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensors)
    specs = plan.shard_specs()
    full = {}
    for name in tensors:
        parts = [each[name] for each in everyone]
        if name in specs:
            full[name] = specs[name].assemble(parts)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
            full[name] = parts[0]
    return full


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def tiny_batch(seed: int = 3, rows: int = 3, length: int = 7) -> dict[str, Tensor]:
    """Right-padded tokens with labels -100 on the padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plan_sample() -> dict[str, Tensor]:
    """What plans are made with: no labels."""
    batch = tiny_batch(seed=11, rows=3, length=5)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def roles(plan: TPPlan) -> dict[str, str]:
    return {name: linear.role for name, linear in plan.linears.items()}


def ledger_of(model: nn.Module, specs: dict[str, ShardSpec] | None = None) -> Ledger:
    """Of one stage that holds all."""
    return build_ledger(model, pp_size=1, holds=lambda stage, name: True, specs=specs or {})


def backward(model: nn.Module, num_batches: int = 1) -> list[float]:
    """Losses of accumulated backward passes."""
    losses = []
    for seed in range(num_batches):
        loss = model(**tiny_batch(seed), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def assert_equal_to_one_process(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        # A gradient that is zero in exact arithmetic (a key bias under softmax) is noise: judge it by the largest one.
        scale = max(float(tensor.abs().max()), 1e-3 * largest)
        assert got[name].shape == tensor.shape, name
        error = float((got[name] - tensor).abs().max()) / scale
        assert error <= tolerance, f"{name}: relative error {error:.2g}"


# Where a collective begins; on gloo two ranks sum small tensors, and all ranks parts of one, by messages to each other.
BEGINNINGS: dict[str, list[tuple[Any, str]]] = {
    "all_reduce": [(dist, "all_reduce"), (private_collectives, "_SumOfTwo")],
    "all_gather": [(private_collectives, "all_gather_flat")],
    "reduce_scatter": [(private_collectives, "_PartsToSum")],
}


class Counter:
    """Counts calls of a collective while it is installed."""

    def __init__(self, name: str) -> None:
        self.calls = 0
        self._patches = ExitStack()
        self._places = BEGINNINGS.get(name, [(dist, name)])

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return original(*args, **kwargs)

        return call

    def __enter__(self) -> Counter:
        for where, name in self._places:
            self._patches.enter_context(mock.patch.object(where, name, self._counted(getattr(where, name))))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._patches.close()


def check_on_ranks(model: nn.Module, plan: TPPlan, group: Any, tp_rank: int, sample: Mapping[str, Any]) -> None:
    """`verify_model` on the real ranks of `group`: each holds one plain and one sharded copy of `model`."""

    def all_ranks(item: Any) -> list[Any]:
        items: list[Any] = [None] * plan.tp_size
        dist.all_gather_object(items, item, group=group)
        return items

    for mode in verify_model._modes(model, plan, sample):
        reference = verify_model._outputs_and_grads(verify_model._copied(model), sample, mode)
        sharded = verify_model._copied(model)
        apply_tensor_parallel(sharded, plan, group, tp_rank, lambda name: True)
        values, grads = verify_model._outputs_and_grads(sharded, sample, mode)
        verify_model._compare(
            plan, mode, reference, all_ranks(values), lambda name, grads=grads: all_ranks(grads[name])
        )
