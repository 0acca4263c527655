"""transformers' `run_clm_no_trainer.py` without its command line: decay groups, a schedule, perplexity, states, the model."""

from __future__ import annotations

import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from parts import ROWS, make_loader, make_model
from transformers import get_scheduler


accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(3)
per_device_eval_batch_size = ROWS // int(os.environ["FOREIGN_COPIES"])
model = make_model()
train_dataloader, eval_dataloader = make_loader(), make_loader(13, shuffle=False)

no_decay = ["bias", "layer_norm.weight"]
optimizer_grouped_parameters = [
    {
        "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
        "weight_decay": 0.1,
    },
    {
        "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
        "weight_decay": 0.0,
    },
]
optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=2e-3, eps=1e-5)
num_update_steps_per_epoch = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
max_train_steps = 2 * num_update_steps_per_epoch
lr_scheduler = get_scheduler(
    name="linear",
    optimizer=optimizer,
    num_warmup_steps=1 * accelerator.num_processes,
    num_training_steps=max_train_steps,
)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
num_update_steps_per_epoch = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
num_train_epochs = math.ceil(max_train_steps / num_update_steps_per_epoch)

history = []
completed_steps = 0
for _ in range(num_train_epochs):
    model.train()
    total_loss = 0
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
            if completed_steps % 2 == 0:
                accelerator.save_state(os.path.join(os.environ["FOREIGN_OUTPUT"], f"step_{completed_steps}"))
        if completed_steps >= max_train_steps:
            break

    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        loss = outputs.loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(per_device_eval_batch_size)))
    losses = torch.cat(losses)
    eval_loss = torch.mean(losses)
    history.append(
        {
            "perplexity": math.exp(eval_loss),
            "eval_loss": eval_loss.item(),
            "rows": len(losses),
            "train_loss": accelerator.reduce(total_loss, "mean").item() / len(train_dataloader),
            "learning_rate": lr_scheduler.get_last_lr()[0],
        }
    )

accelerator.wait_for_everyone()
unwrapped_model = accelerator.unwrap_model(model)
unwrapped_model.save_pretrained(
    os.environ["FOREIGN_OUTPUT"], is_main_process=accelerator.is_main_process, save_function=accelerator.save
)
