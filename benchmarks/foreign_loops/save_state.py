"""`save_state` and `load_state`: the steps after loading are the steps that followed."""

from __future__ import annotations

import os

from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer, make_scheduler


accelerator = Accelerator()
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, dataloader, scheduler = accelerator.prepare(
    model, optimizer, make_loader(), make_scheduler(optimizer)
)
folder = os.path.join(os.environ["FOREIGN_OUTPUT"], "state")


history = []


def train(batches: object) -> None:
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
        if len(history) == 2:
            accelerator.save_state(folder)


train(dataloader)
accelerator.load_state(folder)
train(accelerator.skip_first_batches(dataloader, 2))
