"""What DDP is told by `kwargs_handlers`, clipping by value, and autocast that is switched off by a handler."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs
from parts import make_loader, make_model, make_optimizer


kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[kwargs, AutocastKwargs(enabled=False)])
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, dataloader = accelerator.prepare(model, optimizer, make_loader())

history = []
for batch in dataloader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
