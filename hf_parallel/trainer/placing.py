"""Traffic of a Trainer's run along each axis, by the planner, before the mesh is laid on the machines' links."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer

from hf_parallel.mesh.links import Links
from hf_parallel.mesh.one_rank import on_rank_zero
from hf_parallel.mesh.placement import Sent
from hf_parallel.planner.hardware import Cluster
from hf_parallel.planner.links import sent_of_ranks
from hf_parallel.planner.profile import profile_of
from hf_parallel.planner.read_layout import layout_of
from hf_parallel.planner.recipe import mapping_of
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.schedule_names import ASYNCHRONOUS
from hf_parallel.trainer.auto import given_by, row_length_of


logger = logging.getLogger(__name__)


def sent_by(trainer: Trainer, config: HFParallelConfig, sample: Mapping[str, Any] | None, links: Links) -> Sent | None:
    """Bytes that a rank sends in an optimizer step, by axis; None, and a warning, where the planner does not know. Collective.

    Args:
        trainer: Its model, batches and data set.
        config: Settings with a layout.
        sample: A small batch; None: rows of the data set are looked at.
        links: Links that join the ranks.
    """
    return on_rank_zero(lambda: _sent(trainer, config, sample, links), "counts what each axis sends")


def _sent(trainer: Trainer, config: HFParallelConfig, sample: Mapping[str, Any] | None, links: Links) -> Sent | None:
    model, args = trainer.model, trainer.args
    try:
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise LookupError("the Trainer has no model with a config when it is made")
        given = given_by(trainer, model)
        mapping = mapping_of(config, dist.get_world_size(), args.per_device_train_batch_size, given["dtype"])
        mapping["num_microbatches"] *= (
            args.gradient_accumulation_steps if config.gradient_accumulation_steps == "auto" else 1
        )
        if mapping["schedule"] in ASYNCHRONOUS:
            mapping["schedule"] = "1f1b"  # the same messages
        cluster = Cluster(links.nodes, links.ranks_per_node, "cpu")
        spec = layout_of(mapping | given, cluster)
        with _same_draws():
            return sent_of_ranks(profile_of(model.config), cluster, spec, row_length_of(trainer, sample))
    except Exception as error:  # noqa: BLE001 - a config or a data set may be of any kind; a run does not need the numbers
        chooses = config.pp_size > 1 and config.topology.dp_inside == "auto"
        logger.log(
            logging.WARNING if chooses else logging.INFO,
            "hf_parallel: the planner cannot tell what each axis sends (%s)%s.",
            str(error).rstrip("."),
            ", so the stages of a replica are neighbours; set topology.dp_inside if another order is better"
            if chooses
            else "",
        )
        return None


@contextmanager
def _same_draws() -> Iterator[None]:
    """Rows of a data set may be drawn at random: the ranks of a model copy go on with the numbers that the others have."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
