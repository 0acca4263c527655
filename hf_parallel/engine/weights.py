"""Gives the model its weights: all ranks begin with those of rank 0, or read them once the model is cut."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.checkpoints.weights.unread import Unread, unread_of
from hf_parallel.engine.plan.held import held_tensors, holding_of, whole_bytes
from hf_parallel.engine.plan.setup import Setup, StandIn
from hf_parallel.errors import PlanError
from hf_parallel.guards.weights.start import Start, begin_alike, refuse_unlike_parts
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.model.meta import off_meta
from hf_parallel.model.narrow import with_fewer_words
from hf_parallel.tensor_parallel.plan.plan_for import (
    Blueprint,
    blueprint_of,
    narrow_blueprint,
    plan_for,
    reduced_model,
    skeleton,
)
from hf_parallel.tensor_parallel.plan.widened import widened
from hf_parallel.tensor_parallel.shard_plan import TPPlan


logger = logging.getLogger(__name__)

WASTE_WORTH_A_WARNING = 2 * 10**9  # bytes


@dataclass(frozen=True)
class LateWeights:
    """The weights of a model that are read after it is cut, if it has such.

    Args:
        setup: The model.
        unread: Finds the weights; None for a model that has its values.
        stand_in: Answers what takes values; None if the model has them by now.
    """

    setup: Setup
    unread: Unread | None
    stand_in: StandIn | None

    @property
    def is_empty(self) -> bool:
        """Whether the model came with its values."""
        return self.unread is None

    @contextmanager
    def computable(self) -> Iterator[None]:
        """Inside, buffers and what is computed from them have values, whatever the parameters have."""
        if self.stand_in is None or self.unread is None:
            yield
            return
        with off_meta(self.setup.model, self.setup.device), self.unread.aside(self.setup.model):
            yield

    def read(self, ledger: Ledger) -> None:
        """Read what this rank holds; collective.

        Raises:
            RankMismatchError: The ranks read other values of what they share.
        """
        if self.unread is None or self.stand_in is None:
            return
        self.setup.watchdog.runs("reads its weights")
        self.unread.fill(self.setup.model, ledger, self.setup.mesh, self.setup.device)
        _refuse_unlike_files(self.setup, ledger)


def prepare_late_weights(setup: Setup) -> LateWeights:
    """Find out whether the weights can be read after the cut; where they cannot, they are read now."""
    unread = unread_of(setup.model)
    if unread is None:
        return LateWeights(setup, None, None)
    unread.check(setup.config)
    unread.begin(setup.model)
    blueprint = _blueprint(setup) if setup.mesh.sp_group is None else None  # rows are tried on the values
    if blueprint is None:
        unread.fill(setup.model, None, setup.mesh, setup.device)
    return LateWeights(setup, unread, None if blueprint is None else _stand_in(blueprint))


def begin_alike_on_all(setup: Setup) -> Start:
    """Give every rank the weights of rank 0, before a part of them is made this rank's; collective."""
    setup.watchdog.runs("compares its weights with those of rank 0")
    with setup.watchdog.waiting("waits for the other ranks to compare the weights they begin with"):
        start = begin_alike(setup.model)
    setup.watchdog.runs("plans the stages and shards")
    for line in start.describe() if setup.reports else ():
        logger.warning("hf_parallel: %s", line)
    return start


def warn_of_waste(setup: Setup, ledger: Ledger) -> None:
    """Say what this rank held of a model loaded whole."""
    held = whole_bytes(setup.model, ledger)
    spare = held - holding_of(setup.model, ledger, setup.mesh.pp_rank, setup.mesh.shape.parts_size).weights
    if setup.reports and spare > WASTE_WORTH_A_WARNING:
        logger.warning(
            "hf_parallel: each rank loaded the whole model (%.1f GB), this one %.1f GB for nothing. Load it with "
            "hf_parallel.from_pretrained(...), or inside `with hf_parallel.sharded_loading():`.",
            held / 1e9,
            spare / 1e9,
        )


def _blueprint(setup: Setup) -> Blueprint | None:
    """The blueprint of a model whose weights are read after the cut; None, with a warning, if they must be read before."""
    config = setup.config
    reason = None
    if config.pp_size > 1 and config.pipeline.costs == "measured":
        reason = "pipeline.costs is measured. Set it to analytic."
    checks = [("pipeline", config.pp_size, config.pipeline.self_check)]
    checks += [("tensor_parallel", config.tp_size, config.tensor_parallel.self_check)]
    for name, size, self_check in checks:
        if size > 1 and self_check in ("on", "full"):
            reason = f"{name}.self_check is {self_check}. Set it to auto or off."
    blueprint = None
    if reason is None:
        try:
            blueprint = blueprint_of(setup.model)
        except PlanError as error:
            reason = str(error)
    if setup.reports and reason is not None:
        logger.warning("hf_parallel: every rank reads the whole model before it is cut: %s", reason)
    return blueprint


def _stand_in(blueprint: Blueprint) -> StandIn:
    def plan(tp_size: int, sample: Mapping[str, Any], **settings: Any) -> TPPlan:
        here = _on_cpu(sample)
        narrow = narrow_blueprint(blueprint, here, tp_size)
        if narrow is not None:
            with suppress(PlanError):  # then it is for the real widths to say why
                made = plan_for(narrow, tp_size, sample=_batch_for(narrow, here), **settings)
                return widened(made, skeleton(narrow), skeleton(blueprint))
        return plan_for(blueprint, tp_size, sample=here, **settings)

    def model(sample: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
        here = _on_cpu(sample)
        narrow = narrow_blueprint(blueprint, here)
        return reduced_model(narrow or blueprint), here if narrow is None else _batch_for(narrow, here)

    return StandIn(plan, model)


def _on_cpu(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in sample.items()}


def _batch_for(narrow: Blueprint, sample: Mapping[str, Any]) -> dict[str, Any]:
    return with_fewer_words(sample, narrow.config.get_text_config().vocab_size)


def alike_on_replicas(
    mesh: Mesh, ledger: Ledger, names: Iterable[str]
) -> dict[str, tuple[dist.ProcessGroup | None, list[str]]]:
    """Name of a set of ranks -> its group (None: this rank alone), and the names of the tensors that all ranks of it hold alike."""
    names = list(names)
    spread = {name for name in names if mesh.shape.ep_size > 1 and ledger.entries[name].spec is not None}
    return {
        "the replicas": (mesh.copies_group, [name for name in names if name not in spread]),
        "the replicas with the same experts": (mesh.expert_group, list(filter(spread.__contains__, names))),
    }


def _refuse_unlike_files(setup: Setup, ledger: Ledger) -> None:
    """Refuse weights that ranks have read from files that differ; collective."""
    mesh = setup.mesh
    parameters, buffers = held_tensors(setup.model, ledger, mesh.pp_rank)
    held: dict[str, torch.Tensor] = {**parameters, **buffers}
    shared = alike_on_replicas(mesh, ledger, held) | {
        "the tensor-parallel ranks": (mesh.tp_group, [name for name in held if ledger.entries[name].spec is None]),
        "the stages that share it": (mesh.pp_group, [entry.name for entry in ledger if len(entry.holders) > 1]),
    }
    with setup.watchdog.waiting("waits for the other ranks to compare what they read"):
        refuse_unlike_parts(held, shared, "the checkpoint that the weights were read from")
