"""Evaluation with `gather_for_metrics` after each epoch, on a set that does not divide."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer


accelerator = Accelerator()
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, dataloader, eval_dataloader = accelerator.prepare(
    model, optimizer, make_loader(), make_loader(13, shuffle=False)
)

history = []
for _ in range(2):
    model.train()
    for batch in dataloader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    right, total = 0, 0
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        right += (predictions[:, :-1] == references[:, 1:]).sum().item()
        total += references.shape[0]
    history.append({"right": right, "rows": total})
