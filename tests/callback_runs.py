"""Short runs of a stock Trainer with one callback of a user, on one process and on meshes: what they log, and the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tiny
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


ENV = {"ACCELERATE_USE_CPU": "true"}
BATCH = 4  # rows of a batch, over all replicas


def trained_with(
    callback: TrainerCallback,
    parallel: dict[str, Any] | None,
    *,
    rows: int = 24,
    model: Callable[[], Any] = lambda: tiny.llama(tied=True),
    resume: str | None = None,
    given: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train a tiny model; the losses and norms that were logged, and the weights.

    Args:
        callback: The user's; has the Trainer as its `trainer`.
        parallel: Settings of the mesh; None: one process, without hf_parallel.
        rows: Of the data.
        model: Makes it.
        resume: The checkpoint that the run goes on from.
        given: More of the Trainer; `trainer` is another class of it.
        arguments: More of TrainingArguments.
    """
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelCallback

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    own = [HFParallelCallback({}, **parallel)] if parallel is not None else []
    defaults: dict[str, Any] = {"output_dir": "unused", "save_strategy": "no", "learning_rate": 1e-2}
    settings = TrainingArguments(
        per_device_train_batch_size=BATCH // replicas_of(parallel),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **defaults | arguments,
    )
    made = model()
    options = dict(given or {})
    trainer = options.pop("trainer", Trainer)(
        *(made, settings),
        train_dataset=tiny.rows(rows),
        data_collator=tiny.collate,
        callbacks=[*own, callback],
        **options,
    )
    vars(callback)["trainer"] = trainer
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        session = getattr(trainer.accelerator, "hf_parallel", None)
        if session is not None:
            session.watchdog.stop()
    state = trainer.accelerator.get_state_dict(trainer.model)
    if made.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    history = [
        entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in entry
    ]
    return {"history": history, "state": {name: tensor.detach().float().numpy() for name, tensor in state.items()}}


def replicas_of(parallel: dict[str, Any] | None) -> int:
    """Replicas of the mesh that all processes form; 1 on one process."""
    if parallel is None:
        return 1
    axes = [parallel.get(axis, 1) for axis in ("tp_size", "pp_size", "sp_size")]
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return world // math.prod(axes)


def assert_same_state(mine: dict[str, Any], wanted: dict[str, Any], name: str = "") -> None:
    """Weights agree to 1e-5 relative."""
    for key, value in wanted.items():
        found, there = torch.from_numpy(mine[key]), torch.from_numpy(value)
        assert (found - there).norm() <= 1e-5 * there.norm(), (name, key)
