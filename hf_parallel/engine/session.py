"""The session of a run on this rank: settings, mesh, watchdog, and the engine once a model is attached."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

import hf_parallel
from hf_parallel.compat.private_collectives import private_store
from hf_parallel.compat.torch_tools import stored_bytes
from hf_parallel.engine.beside import parallelize_beside
from hf_parallel.engine.parallelize import parallelize
from hf_parallel.engine.run.engine import Engine
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.meeting import MEETING_S, Meeting, topic_of_its_own
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.links import Links
from hf_parallel.mesh.placement import Placement, Sent, map_of, place
from hf_parallel.mesh.ranks import compare_settings, links_here
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.launch import check_world
from hf_parallel.settings.together import other_sums


logger = logging.getLogger(__name__)


class Session:
    """A parallel run.

    Args:
        config: Validated settings, equal on every rank.
        schedule: The pipeline schedule that they ask for.
        explanation: Origin of the settings and the layout that follows, for the start-up line.
        mesh: This rank's mesh.
        watchdog: The watchdog, started.
        placement: Positions of the mesh's ranks on the links of the machines.

    Attributes:
        engine: Engine of the attached model, None before.
        announced: Gives the model that a Trainer will train, None without one; may be set until a model is attached.
        sample: A small batch to plan with, None for made-up text; may be set until a model is attached.
        total_steps: Optimizer steps of a run without a Trainer, None if nobody said; may be set as long.
        compute_dtype: Autocast dtype of forward passes, None without autocast; may be set as long.
        raw_loop: Whether a loop without a Trainer runs.
        meeting: Notices calls that only some ranks make.
        flags: Notices what a Trainer is told on some ranks only.
    """

    def __init__(
        self,
        config: HFParallelConfig,
        schedule: ScheduleChoice,
        explanation: str,
        mesh: Mesh,
        watchdog: Watchdog,
        placement: Placement,
    ) -> None:
        self.config = config
        self.schedule = schedule
        self.explanation = explanation
        self.mesh = mesh
        self.watchdog = watchdog
        self.placement = placement
        self.engine: Engine | None = None
        self.announced: Callable[[], nn.Module | None] = lambda: None
        self.sample: Mapping[str, Any] | None = None
        self.total_steps: int | None = None
        self.compute_dtype: torch.dtype | None = None
        self.raw_loop = False
        names = [mesh.shape.describe(rank) for rank in range(mesh.shape.world_size)]
        self.meeting = Meeting(
            names, min(MEETING_S, config.monitor.hang_timeout_s), topic=topic_of_its_own("all", None)
        )
        # Code of users may run on one rank as long as others may wait for it, but for what it takes to say so first.
        self.flags = Meeting(names, 0.9 * config.monitor.hang_timeout_s, topic=topic_of_its_own("flags", None))
        self._beside: WeakSet[nn.Module] = WeakSet()  # models for inference beside the attached one
        self._in_parts: WeakValueDictionary[int, Engine] = WeakValueDictionary()  # of those that are cut or sharded
        self._before: set[int] = set()  # parameters of attached models, as they were before
        self._released: WeakValueDictionary[int, Engine] = WeakValueDictionary()

    @classmethod
    def start(
        cls,
        config: HFParallelConfig,
        schedule: ScheduleChoice,
        explanation: str,
        num_processes: int | None = None,
        sent_by: Callable[[Links], Sent | None] = lambda links: None,
    ) -> Session:
        """Check the world, compare the settings over the ranks, make the groups; collective.

        Args:
            config: Validated settings.
            schedule: The pipeline schedule that they ask for.
            explanation: Origin of the settings and the layout that follows, for the start-up line.
            num_processes: Processes that accelerate counts, to be compared with those that run.
            sent_by: Where links differ: axis -> bytes that a rank sends in an optimizer step, the same on every rank; None if nobody
                knows.

        Raises:
            ConfigError: The processes that run do not fit the settings.
            RankMismatchError: Ranks read different settings.
        """
        check_world(config, num_processes)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        settings = json.dumps(config.to_yaml_section(), sort_keys=True)
        hosts = compare_settings(settings, explanation)
        sizes = config.dp_size(world_size), config.pp_size, config.tp_size, config.sp_size
        shape = MeshShape(*sizes, ep_size=config.ep_size if world_size > 1 else 1, hosts=hosts)
        placement = _placement(config, shape, sent_by)
        shape = placement.shape
        limit = config.monitor.hang_timeout_s
        # The watchdog reports first; the groups' own timeout is the net below it.
        timeout = timedelta(seconds=min(2 * limit + 30, 7 * 86400))
        shard_size = config.zero.dp_shard_size
        mesh = Mesh.build(
            shape,
            links=placement.links,
            timeout=timeout,
            dp_shard_size=None if shard_size == "auto" or world_size == 1 else shard_size,
            parts_alone=config.zero.offloads,
        )
        store = private_store() if dist.is_initialized() else None
        names = [shape.describe(rank) for rank in range(world_size)]
        source = explanation if hosts else ""
        watchdog = Watchdog(store, mesh.rank, names, limit, config.monitor.hang_floor_s, shape.axes_of, source)
        watchdog.start()
        if mesh.rank == 0:
            backend = f"; messages go by {dist.get_backend()}" if dist.is_initialized() else ""
            logger.info("hf_parallel %s: %s%s", hf_parallel.__version__, explanation, backend)
            for line in map_of(placement, _sums(config, placement)):
                logger.info("hf_parallel: %s", line)
        session = cls(config, schedule, explanation, mesh, watchdog, placement)
        weakref.finalize(session, watchdog.stop)  # whoever drops the run is not watched any more
        return session

    def attach(self, model: nn.Module, device: torch.device) -> Engine:
        """Parallelize `model`, once; collective. A model that was released before goes on as it was.

        Raises:
            UnsupportedError: A second model.
        """
        if self.engine is None:
            self.engine = self._known(model)
        if self.in_parts(model) is not None:
            raise UnsupportedError(
                f"{type(model).__name__} was prepared for inference and is cut or sharded without what training needs. Prepare it for "
                "training first, with its optimizer; it can be evaluated too then."
            )
        if self.engine is None:
            self._before = {id(parameter) for parameter in model.parameters()}
            self.engine = parallelize(
                model,
                self.config,
                self.mesh,
                schedule=self.schedule,
                device=device,
                watchdog=self.watchdog,
                sample=self.sample,
                compute_dtype=self.compute_dtype,
            )
        elif self.engine.model is not model:
            raise UnsupportedError(
                f"a second model ({type(model).__name__}) in one run: the stages and shards of this rank belong to the "
                f"first ({type(self.engine.model).__name__}). Train one model a run, and trials of a search as runs of their "
                "own; freeze a teacher or reference model (requires_grad_(False)) and prepare it together with the trained one or "
                "after it, or precompute its outputs; call accelerator.free_memory() before a model that takes the first one's place."
            )
        return self.engine

    def hold_beside(self, model: nn.Module, first: nn.Module | None, device: torch.device) -> Engine | None:
        """Cut and shard a model for inference beside the trained one, once; collective. None where it stays whole on every rank.

        Args:
            model: The model for inference.
            first: The model that is trained, if it is known already.
            device: Device of the model.

        Raises:
            UnsupportedError: They have parameters in common.
        """
        if model in self._beside:
            return self.in_parts(model)
        first = self.announced() if first is None else first
        if first is not None and first is not model:  # what a cut takes out of this model is not found later
            self._refuse_shared(first, [model])
        self._beside.add(model)
        found = parallelize_beside(
            model,
            self.config,
            self.mesh,
            device=device,
            watchdog=self.watchdog,
            compute_dtype=self.compute_dtype,
            watching=lambda: () if self.engine is None else self.engine.watching,
        )
        if not isinstance(found, str):
            self._in_parts[id(model)] = found
            return found
        if self.mesh.rank == 0:
            logger.info(
                "hf_parallel: %s, a model for inference, stays whole on every rank: %.2f GB of each (%s)",
                type(model).__name__,
                sum(map(stored_bytes, (*model.parameters(), *model.buffers()))) / 1e9,
                found,
            )
        return None

    def refuse_shared(self, model: nn.Module) -> None:
        """Refuse a model that will be cut or sharded while one for inference has parameters of it.

        Raises:
            UnsupportedError: Names the first parameter.
        """
        if self.in_parts(model) is None:
            self._beside.discard(model)  # it was prepared for inference before it is trained
        self._refuse_shared(model, [other for other in self._beside if other is not model])

    def _refuse_shared(self, model: nn.Module, for_inference: Sequence[nn.Module]) -> None:
        others = {id(parameter) for other in for_inference for parameter in other.parameters()}
        shared = [name for name, parameter in model.named_parameters() if id(parameter) in others]
        if shared:
            raise UnsupportedError(
                f"{shared[0]} ({len(shared)} parameters) belongs to the model that is trained and to one for inference, with "
                f"pp_size={self.config.pp_size}, tp_size={self.config.tp_size}, zero.stage={self.config.zero.stage}: cutting one would "
                "take it from the other. Load the second one apart (copy.deepcopy before both are prepared), or set pp_size and "
                "tp_size to 1 and zero.stage to 2 or less."
            )

    def in_parts(self, model: nn.Module) -> Engine | None:
        """The engine of a model for inference that is cut or sharded."""
        known = self._in_parts.get(id(model))
        return known if known is not None and known.model is model else None

    def engine_of(self, model: nn.Module) -> Engine | None:
        """The engine of the attached model, or of one for inference beside it that is cut or sharded."""
        return self.engine if self.engine is not None and self.engine.model is model else self.in_parts(model)

    def holds(self, model: nn.Module) -> bool:
        """Whether `model` is parallelized already."""
        return (self.engine is not None and self.engine.model is model) or self._known(model) is not None

    def refuse_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to train what is no parameter of the model: its gradients would never be reduced.

        Raises:
            UnsupportedError: Names the group and the shape of the first one.
        """
        if self.engine is None:
            return
        known = self._before | {id(parameter) for parameter in self.engine.model.parameters()}
        for index, group in enumerate(optimizer.param_groups):
            odd = [p for p in group["params"] if id(p) not in known and p.requires_grad]
            if odd:
                raise UnsupportedError(
                    f"{type(optimizer).__name__}: group {index} has {len(odd)} tensors (first of shape {tuple(odd[0].shape)}) "
                    f"that are no parameters of {type(self.engine.model).__name__}: each rank would train its own. Register "
                    "them in the model before it is prepared, and make the optimizer of model.parameters()."
                )

    def _known(self, model: nn.Module) -> Engine | None:
        """The engine of a model that was parallelized before."""
        known = self._released.get(id(model))
        return known if known is not None and known.model is model else None

    def release(self) -> None:
        """Let another model take the place of the attached one."""
        if self.engine is not None:
            self._released[id(self.engine.model)] = self.engine
        self.engine = None


def _placement(config: HFParallelConfig, shape: MeshShape, sent_by: Callable[[Links], Sent | None]) -> Placement:
    """The mesh on the links of this run; collective."""
    topology, links = config.topology, links_here(config.topology.links)
    sent = sent_by(links) if links.differ else None
    inside = None if topology.dp_inside == "auto" or shape.world_size == 1 else topology.dp_inside

    def sums(copies: int) -> bool:
        """An optimizer that the copies of each node share out reduces its parts there first."""
        if not other_sums(config):
            return topology.reduction != "flat"
        return config.zero.stage > 0 and config.zero.dp_shard_size == copies // shape.sp_size

    return place(shape, links, sent, sums=sums, inside=inside, in_nodes=bool(config.asks_sums_in_nodes))


def _sums(config: HFParallelConfig, placement: Placement) -> str:
    """Word how gradients that cross the network are summed; "" if they are summed whole."""
    if config.gradient_compression.method != "none":
        return f"as {config.gradient_compression.method}"
    if not config.zero.stage:
        return ""
    shape = placement.shape
    copies = shape.copies_in_nodes(placement.links.ranks_per_node) // shape.sp_size
    advice = f"; zero.dp_shard_size={copies} sums inside each node first, which then has the whole optimizer state"
    return f"in one ring with zero.stage={config.zero.stage}{advice if copies > 1 else ''}"
