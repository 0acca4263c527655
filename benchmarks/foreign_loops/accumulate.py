"""Gradient accumulation with `accumulate()`, clipping where gradients are whole."""

from __future__ import annotations

from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer, make_scheduler


accelerator = Accelerator(gradient_accumulation_steps=2)
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, make_loader(), make_scheduler(optimizer)
)

history = []
for batch in training_dataloader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            history.append({"grad_norm": float(norm)})
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
