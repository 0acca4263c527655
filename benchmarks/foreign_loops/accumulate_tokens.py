"""Gradient accumulation for autoregressive models: the loss of a step is a mean over its tokens, as documented."""

from __future__ import annotations

import contextlib

import torch
from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer, make_scheduler


gradient_accumulation_steps = 2
accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, make_loader(), make_scheduler(optimizer)
)
criterion = torch.nn.CrossEntropyLoss(reduction="sum")

history = []
training_iterator = iter(training_dataloader)
total_updates = len(training_dataloader) // gradient_accumulation_steps
for _ in range(total_updates):
    batch_samples = [next(training_iterator) for _ in range(gradient_accumulation_steps)]
    num_items_in_batch = sum([batch["labels"][:, 1:].ne(-100).sum() for batch in batch_samples])
    num_items_in_batch = accelerator.gather(num_items_in_batch).sum().item()
    losses = []
    for index, batch in enumerate(batch_samples):
        if index < len(batch_samples) - 1 and accelerator.num_processes > 1:
            context = model.no_sync
        else:
            context = contextlib.nullcontext
        with context():
            labels = batch.pop("labels")
            logits = model(**batch).logits
            loss = criterion(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            # Gradients are averaged over accumulation steps and processes: undo both.
            loss = (loss * gradient_accumulation_steps * accelerator.num_processes) / num_items_in_batch
            accelerator.backward(loss)
            losses.append(loss.detach())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses = accelerator.gather(sum(losses)) / (accelerator.num_processes * gradient_accumulation_steps)
    history.append({"loss": losses.sum().item()})
