"""The ways to keep a model: `save_model`, `get_state_dict`, and the state dict of the unwrapped model given to `save`."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer
from safetensors.torch import load_file


accelerator = Accelerator()
model = make_model()
optimizer = make_optimizer(model)
model, optimizer, dataloader = accelerator.prepare(model, optimizer, make_loader())

history = []
folder = os.environ["FOREIGN_OUTPUT"]
for batch in dataloader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    history.append({"loss": accelerator.reduce(loss.detach(), "mean").item()})

accelerator.wait_for_everyone()
accelerator.save_model(model, os.path.join(folder, "model"))
state = accelerator.get_state_dict(model)
accelerator.save(state, os.path.join(folder, "state.bin"))
accelerator.wait_for_everyone()
unwrapped_model = accelerator.unwrap_model(model)
whole = torch.load(os.path.join(folder, "state.bin"), weights_only=True)
unwrapped_model.load_state_dict(whole)
saved = load_file(os.path.join(folder, "model", "model.safetensors"))
history += [
    {f"norm of {name}": saved[name].norm().item(), "loaded": torch.equal(whole[name], saved[name])}
    for name in sorted(saved)
]
