"""DDP communication hooks, as documented; replicas send half as many bytes."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from parts import make_loader, make_model, make_optimizer


ddp_kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
accelerator = Accelerator(kwargs_handlers=[ddp_kwargs])
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, dataloader = accelerator.prepare(model, optimizer, make_loader())

history = []
for batch in dataloader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})
