"""`split_batches`: the loader's batch is the batch of all processes, and the scheduler steps once."""

from __future__ import annotations

import os

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from parts import ROWS, make_loader, make_model, make_optimizer, make_scheduler
from torch.utils.data import DataLoader


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
model = make_model()
optimizer = make_optimizer(model)
loader = DataLoader(make_loader(45).dataset, batch_size=ROWS, shuffle=True)
model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, loader, make_scheduler(optimizer))

history = []
for _ in range(2):
    for batch in dataloader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append(
            {"loss": accelerator.reduce(loss.detach(), "mean").item(), "learning_rate": scheduler.get_last_lr()[0]}
        )
assert os.environ["FOREIGN_COPIES"] == str(accelerator.num_processes)
