"""The training run that is verified: a stock Trainer, AdamW and clipping, on batches that show what layouts get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_parallel.errors import UnsupportedError
from hf_parallel.memory.layers import number_of_blocks, with_layers
from hf_parallel.memory.shape import config_of
from hf_parallel.proof.compare import PERTURBED
from hf_parallel.proof.in_parts import compute_in_parts, sees_parts
from hf_parallel.proof.job import Job
from hf_parallel.proof.watch import EPS, Watch, perturb


CLIP = 0.1  # below the norms of a model that has not converged, so that clipping is in effect
RATE = 1e-3
WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "attention_chunk_size")
# Adam divides a gradient by its own size, and so steps by the sign of what is rounding noise, unless epsilon is larger than that.
ADAM_EPSILON = {"fp32": 1e-6, "bf16": 1e-4, "fp16": 1e-4}


def train(job: Job, folder: Path, *, layout: bool, perturbed: int = 0) -> None:
    """Train, and leave in `folder` what is compared.

    Args:
        job: The job.
        folder: Folder of this rank.
        layout: Whether this process is a rank of the layout; else it is the reference.
        perturbed: 0, or which perturbation at rounding level the weights get.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(job)
    if perturbed:
        perturb(model, EPS[job.dtype], perturbed)
    # In half precision what the rows of a microbatch give is rounded, and the sum is another than that of all rows.
    sums_parts = perturbed > PERTURBED and job.dtype != "fp32"
    parts = compute_in_parts(model, job) if not layout and (sums_parts or sees_parts(model)) else 1
    watch = Watch(job, folder, model, layout=layout, parts=parts)
    trainer = Trainer(
        model=model,
        args=_arguments(job, folder, layout=layout),
        train_dataset=batches_of(job, model),
        data_collator=default_data_collator,
        callbacks=watch.callbacks,
    )
    watch.run(trainer, trainer.train)


def build_model(job: Job) -> nn.Module:
    """The model in fp32, without dropout: masks are drawn otherwise in a layout, as they are in data parallelism."""
    config: Any = config_of(job.model, trains=True)
    _without_dropout(config)
    _with_short_windows(config, job.length)
    if job.layers is not None:
        config = _cut(config, job.layers)
    torch.manual_seed(job.seed)
    folder = Path(job.model).expanduser()
    if job.random_weights or folder.suffix == ".json" or not any(folder.glob("*.safetensors*")):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _enliven(model)
    else:
        model = AutoModelForCausalLM.from_pretrained(job.model, config=config, dtype=torch.float32)
    return model.train()


def _without_dropout(config: Any) -> None:
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)


def _with_short_windows(config: Any, length: int) -> None:
    """A window that is longer than the rows hides nothing, and so neither does one that a layout loses."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name in WINDOWS:
            value = vars(part).get(name)
            if type(value) is int and value >= length:
                setattr(part, name, length // 2)


def _cut(config: Any, layers: int) -> Any:
    before = number_of_blocks(config)
    if before is None:
        raise UnsupportedError(
            f"layers={layers}: a config of type {config.model_type} has no number of blocks that could be made smaller. Leave it out."
        )
    return with_layers(config, min(layers, before))


@torch.no_grad()
def _enliven(model: nn.Module) -> None:
    """Biases and norms, which begin at 0 or 1, get values: else one that is left out or added twice changes nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        noise = 0.05 * torch.randn(parameter.shape, generator=generator)
        if not bool(parameter.isfinite().all()):  # never initialised
            parameter.copy_(noise)
        elif parameter.ndim < 2 or bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(noise)


def batches_of(job: Job, model: nn.Module) -> list[dict[str, Tensor]]:
    """Rows of all steps: random tokens, unequal numbers of labels, and in every other row padding on the left.

    One of the tokens at the ends of the vocabulary, and that of padding, is read in each row and a label too: what is wrong in one row
    of an embedding or a head shows if that row is used, and few of a large vocabulary are.
    """
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    padder = getattr(config.get_text_config(), "pad_token_id", None)
    edges = [vocabulary - 1, 0, *([padder] if isinstance(padder, int) and 0 < padder < vocabulary - 1 else [])]
    generator = torch.Generator().manual_seed(job.seed + 1)
    rows = []
    for row in range(job.replicas * job.rows * job.accumulation * job.steps):
        ids = torch.randint(0, vocabulary, (job.length,), generator=generator)
        ids[-2] = edges[row % len(edges)]  # the last one is a label and never read
        padding = (row % 2) * (1 + row % max(1, job.length // 4))
        mask = (torch.arange(job.length) >= padding).long()
        prompt = padding + int(torch.randint(0, job.length // 2, (), generator=generator))
        labels = ids.masked_fill(torch.arange(job.length) < prompt, -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def _arguments(job: Job, folder: Path, *, layout: bool) -> TrainingArguments:
    return TrainingArguments(
        str(folder / "output"),
        per_device_train_batch_size=job.rows if layout else job.rows * job.replicas,
        gradient_accumulation_steps=job.accumulation,
        max_steps=job.steps,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        weight_decay=0.1,
        adam_epsilon=ADAM_EPSILON[job.dtype],
        max_grad_norm=CLIP,
        optim="adamw_torch",
        bf16=job.dtype == "bf16",
        fp16=job.dtype == "fp16",
        train_sampling_strategy="sequential",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
