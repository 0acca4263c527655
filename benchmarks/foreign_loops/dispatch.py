"""A stream that only the first process reads (`IterableDataset`): it is shuffled differently on every process."""

from __future__ import annotations

import os
import random
from typing import Any

from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        order = random.Random(int(os.environ.get("RANK", "0"))).sample(self.rows, len(self.rows))
        return iter(order)


accelerator = Accelerator()
model = make_model()
optimizer = make_optimizer(model)
rows = make_loader(45)
model, optimizer, dataloader = accelerator.prepare(
    model, optimizer, DataLoader(Stream(rows.dataset), batch_size=rows.batch_size)
)

history = []
for batch in dataloader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    counts = accelerator.gather_for_metrics(batch["labels"].ne(-100).sum(-1))
    history.append(
        {"loss": accelerator.reduce(loss.detach(), "mean").item(), "rows": len(counts), "tokens": counts.sum().item()}
    )
