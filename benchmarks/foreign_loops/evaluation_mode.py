"""The shortest loop, on a model as `from_pretrained` gives it: in evaluation mode, so without dropout."""

from __future__ import annotations

from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer


accelerator = Accelerator()
model = make_model().eval()
optimizer = make_optimizer(model)
model, optimizer, dataloader = accelerator.prepare(model, optimizer, make_loader())

history = []
for batch in dataloader:
    optimizer.zero_grad()
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
