"""Tiny random models of several families, odd batches for them, and the unsplit truth that stages must reproduce."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.verify_stages import loss_of
from hf_parallel.pipeline_parallel.run.stage import Stage, cut_stages
from hf_parallel.pipeline_parallel.stage_plan import PipelinePlan


VOCAB = 97
BLOCKS = 5
WIDTHS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": BLOCKS,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
GEMMA3N = {
    **WIDTHS,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**WIDTHS),
    "llama_tied": lambda: transformers.LlamaConfig(**WIDTHS, tie_word_embeddings=True),
    "gpt2_tied": lambda: transformers.GPT2Config(**GPT2),
    "qwen3": lambda: transformers.Qwen3Config(**WIDTHS),
    "mixtral": lambda: transformers.MixtralConfig(
        **WIDTHS, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1
    ),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(**GEMMA3N),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=BLOCKS, state_size=4, pad_token_id=0
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=BLOCKS, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=24,
        dropout=0.0,
        pad_token_id=1,
    ),
}


def build(name: str, **changes: Any) -> nn.Module:
    """A model in training mode with fixed weights."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager" if name == "mixtral" else None
    )
    return model.train()  # type: ignore[no-any-return]


def batch(rows: int = 2, length: int = 8, seed: int = 0, *, left: bool = False) -> dict[str, Any]:
    """Token ids with padding on one side and masked labels; i64[rows length]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, (slice(0, 3) if left else slice(-3, None))] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 1:3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


def cut(
    model: nn.Module,
    bounds: Sequence[int],
    plan: PipelinePlan | None = None,
    placement: Sequence[Sequence[int]] | None = None,
) -> list[Stage]:
    """All stages in order, those of each rank (default: one each) made from one copy of the model."""
    plan = discover_stages(model, batch()) if plan is None else plan
    stages: dict[int, Stage] = {}
    for indices in placement or [(index,) for index in range(len(bounds) - 1)]:
        copied = copy.deepcopy(model)
        stages |= cut_stages(copied, plan, bounds, indices, copied.forward)
    return [stages[index] for index in sorted(stages)]


def unsplit(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of the whole model."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def models_of(stages: Sequence[Stage]) -> list[nn.Module]:
    """The models behind stages, each once."""
    return list({id(stage.model): stage.model for stage in stages}.values())


def zero_grad(stages: Sequence[Stage]) -> None:
    for model in models_of(stages):
        model.zero_grad(set_to_none=True)


def summed(stages: Sequence[Stage], names: Sequence[str]) -> dict[str, Tensor | None]:
    """Gradients by name, added over the models that hold a parameter."""
    total: dict[str, Tensor | None] = dict.fromkeys(names)
    for model in models_of(stages):
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            if grad is not None:
                before = total[name]
                total[name] = grad.clone() if before is None else before + grad
    return total


def assert_same_gradients(expected: dict[str, Tensor | None], got: dict[str, Tensor | None]) -> None:
    """Every gradient to 1e-5 of its largest element; none may be missing or extra."""
    assert expected.keys() == got.keys()
    for name, grad in expected.items():
        other = got[name]
        if grad is None or other is None:
            some = other if grad is None else grad
            assert some is None or not some.abs().max(), f"{name}: a gradient on one side only"
            continue
        scale = max(float(grad.abs().max()), 1e-3)
        torch.testing.assert_close(other, grad, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
