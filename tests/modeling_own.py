"""Modeling code as users bring it beside a config (`auto_map`): no class of transformers' models, and wiring of their own.

Styles: "values" adds the first block's values in every attention and the embedding before every block; "skips" adds what
early blocks made before late ones, as a U-net; "sequential" is an nn.Sequential of blocks of bare parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(
        self,
        style: str = "values",
        vocab_size: int = 96,
        hidden_size: int = 32,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        **kwargs: Any,
    ) -> None:
        self.style, self.vocab_size, self.hidden_size = style, vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**kwargs)


def rotated(x: Tensor) -> Tensor:
    """Pairs of neighbouring elements, turned by an angle that grows with the position."""
    length, width = x.shape[-2:]
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, width, 2) / width)).to(x)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads = config.num_attention_heads
        self.first, self.second = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.fused = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.3, 0.1]))

    def forward(self, x: Tensor, values: Tensor | None = None, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if start is not None:
            x = self.mix[0] * x + self.mix[2] * start
        shape = (*x.shape[:2], self.heads, -1)
        q, k, own = (part.view(shape).transpose(1, 2) for part in self.fused(self.first(x)).chunk(3, -1))
        v = own if values is None else own + self.mix[1] * values
        seen = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.second(x))).square()), own


class Bare(nn.Module):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Parameter(torch.randn(3, hidden, heads, hidden // heads) * 0.1)
        self.out = nn.Parameter(torch.randn(heads, hidden // heads, hidden) * 0.1)
        self.up = nn.Parameter(torch.randn(hidden, 4 * hidden) * 0.1)
        self.down = nn.Parameter(torch.randn(4 * hidden, hidden) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btc,pcnd->pbntd", self.norm(x), self.qkv)
        seen = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + torch.einsum("bntd,ndc->btc", seen, self.out)
        return x + F.silu(self.norm(x) @ self.up) @ self.down


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    _supports_sdpa = True

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.style = config.style
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        depth = range(config.num_hidden_layers)
        is_bare = self.style == "sequential"
        self.trunk = nn.Sequential(*(Bare(config) for _ in depth)) if is_bare else None
        self.blocks = None if is_bare else nn.ModuleList(Block(config) for _ in depth)
        self.share = nn.Parameter(torch.full((config.num_hidden_layers // 2,), 0.5))
        self.last = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def _trunk(self, x: Tensor) -> Tensor:
        if self.trunk is not None:
            return self.trunk(x) * self.share.mean()
        start, values, kept, half = x, None, [], len(self.share)
        for index, block in enumerate(self.blocks):
            if self.style == "values":
                x, own = block(x, values, start)
                values = own if values is None else values
            else:
                x = x + self.share[index - half] * kept.pop() if index >= half else x
                x, _ = block(x)
                kept += [x] if index < half else []
        return x if self.style == "skips" else x * self.share.mean()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutputWithPast:
        logits = 15 * torch.tanh(self.head(self.last(self._trunk(self.words(input_ids)))) / 15)
        loss = None
        if labels is not None:
            loss = nn.CrossEntropyLoss()(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss = loss + 1e-3 * torch.logsumexp(logits, -1).pow(2).mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits)
