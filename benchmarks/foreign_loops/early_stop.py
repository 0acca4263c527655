"""Stopping by `set_trigger` on one process, and `no_sync`-free accumulation over a short last window."""

from __future__ import annotations

from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer


accelerator = Accelerator(gradient_accumulation_steps=3)
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, dataloader = accelerator.prepare(model, optimizer, make_loader())

history = []
for epoch in range(3):
    for batch in dataloader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
    if epoch == 1 and accelerator.is_main_process:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
