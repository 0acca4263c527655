"""Model, optimizer and data of the loops."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


ROWS = 8  # of a step, over all processes that get rows of their own


def make_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(os.environ["FOREIGN_MODEL"], attn_implementation="eager").train()


def make_optimizer(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5)


def make_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def make_loader(count: int = 32, shuffle: bool = True) -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 60, (count, 12), generator=generator)
    ignored = torch.rand(rows.shape, generator=generator) < 0.2
    data = [
        {"input_ids": ids, "labels": torch.where(mask, -100, ids), "attention_mask": torch.ones_like(ids)}
        for ids, mask in zip(rows, ignored, strict=True)
    ]
    batch = ROWS // int(os.environ.get("FOREIGN_COPIES", "1"))
    return DataLoader(data, batch_size=batch, shuffle=shuffle)
