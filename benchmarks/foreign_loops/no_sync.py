"""Gradient accumulation by hand with `no_sync()`, as in "Deferring gradient synchronizations"."""

from __future__ import annotations

from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer, make_scheduler


accelerator = Accelerator()
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, dataloader, scheduler = accelerator.prepare(
    model, optimizer, make_loader(), make_scheduler(optimizer)
)

history = []
for index, batch in enumerate(dataloader):
    if index == len(dataloader) - 1 or (index + 1) % 2 == 0:
        # Gradients synchronize on the last batch of two
        loss = model(**batch).loss / 2
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    else:
        with accelerator.no_sync(model):
            loss = model(**batch).loss / 2
            accelerator.backward(loss)
    history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
