"""The loop of accelerate's quick tour."""

from __future__ import annotations

from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer, make_scheduler


accelerator = Accelerator()
model = make_model()
optimizer = make_optimizer(model)
scheduler = make_scheduler(optimizer)
training_dataloader = make_loader()

model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)

history = []
model.train()
for batch in training_dataloader:
    optimizer.zero_grad()
    outputs = model(**batch)
    loss = outputs.loss
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
