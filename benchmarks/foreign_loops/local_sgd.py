"""Local SGD as documented: replicas meet every two steps."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from parts import make_loader, make_model, make_optimizer, make_scheduler


accelerator = Accelerator(gradient_accumulation_steps=2)
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, make_loader(), make_scheduler(optimizer)
)

history = []
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
    for batch in training_dataloader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            local_sgd.step()
        history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
