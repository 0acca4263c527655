"""`unwrap_model` and `save_pretrained` at the end, as the documentation saves Transformers models."""

from __future__ import annotations

import os

from accelerate import Accelerator
from parts import make_loader, make_model, make_optimizer
from safetensors.torch import load_file


accelerator = Accelerator()
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

folder = os.path.join(os.environ["FOREIGN_OUTPUT"], "model")
unwrapped_model = accelerator.unwrap_model(model)
unwrapped_model.save_pretrained(
    folder,
    is_main_process=accelerator.is_main_process,
    save_function=accelerator.save,
)
accelerator.wait_for_everyone()
saved = load_file(os.path.join(folder, "model.safetensors"))
history += [{f"norm of {name}": tensor.norm().item()} for name, tensor in sorted(saved.items())]
