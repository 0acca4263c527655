"""Trainers of TRL, which bring losses, models and batches of their own: what stages and shards can do with them."""

from __future__ import annotations

from typing import Any, Final

from transformers import Trainer

from hf_parallel.settings.config import HFParallelConfig


REWARD: Final = "trl.trainer.reward_trainer"
# Modules of trainers that call the model on batches of a data set and compute a loss of what it returns. Others generate text
# with it, hand its weights to a server, train on what another model says to its own text, or average weights.
ON_STAGES: Final = (
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.kto_trainer",
    REWARD,
    "trl.experimental.cpo",
    "trl.experimental.orpo",
    "trl.experimental.kto",
)


def problems_of(trainer: Trainer, config: HFParallelConfig) -> list[str]:
    """Why a trainer cannot run with these settings, one reason each; none of other libraries than TRL."""
    found, kind = [], _of_trl(trainer)
    if kind is None:
        return []
    if config.sp_size > 1:
        found.append(
            f"{kind.__name__} with sp_size={config.sp_size}: TRL's losses read single tokens of the whole row from a forward of its own, "
            "which is not known to be exact on parts of a row. Set sp_size to 1, or train with transformers' Trainer."
        )
    sizes = f"pp_size={config.pp_size}, tp_size={config.tp_size}{f', ep_size={config.ep_size}' if config.ep_size > 1 else ''}"
    axes = "pp_size, tp_size and ep_size" if config.ep_size > 1 else "pp_size and tp_size"
    if config.splits_model and not kind.__module__.startswith(ON_STAGES):
        found.append(
            f"{kind.__name__} with {sizes}: it is not known to be exact (many of TRL's trainers generate text while they train, or ask "
            "other models, for which a process needs the whole model); of TRL's trainers SFT, DPO, KTO, CPO, ORPO and Reward train on stages and shards. Set "
            f"{axes} to 1 (replicas, ZeRO), or generate the data first and train on it with one of these."
        )
    shared = config.keeps_parts
    if shared and getattr(trainer.args, "sync_ref_model", False):
        found.append(
            f"sync_ref_model=True with {sizes}, zero.stage={config.zero.stage}: the reference model would be averaged with the "
            f"parameters that a rank has, which are a part of the model. Set sync_ref_model to False, or {axes} to 1 "
            "and zero.stage to 2 or less."
        )
    return found


def sample_of(trainer: Trainer, config: HFParallelConfig) -> dict[str, Any] | None:
    """A batch to plan stages with, where TRL's collator gives the model more than made-up text has; else None.

    Packed rows come with their ends beside their positions, pairs of rows that are judged with their margins.
    """
    collator: Any = trainer.data_collator
    module = type(collator).__module__
    if config.pp_size == 1 or module.partition(".")[0] != "trl":
        return None
    texts = [list(range(1, 1 + length)) for length in (7, 5)]
    rows: list[dict[str, Any]] = []
    if getattr(collator, "padding_free", False):
        rows = [{"input_ids": text} for text in texts]
    elif module == REWARD and "margin" in (getattr(trainer.train_dataset, "column_names", None) or ()):
        rows = [{"chosen_ids": text, "rejected_ids": text[1:], "margin": 0.0} for text in texts]
    return collator(rows) if rows else None


def _of_trl(trainer: Trainer) -> type | None:
    """The trainer's class, or the first one that it comes from, in TRL."""
    return next((kind for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"), None)
