"""What is checked before a model is changed: that it can be parallelized, that all ranks mean the same, that plans are right.

Everything here leaves the model as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import nn

from hf_parallel.batches import num_rows, split_rows
from hf_parallel.config import HFParallelConfig
from hf_parallel.errors import ParallelError, PlanError, RankMismatchError, UnsupportedError
from hf_parallel.machine.ram import free_ram
from hf_parallel.one_rank import on_rank_zero
from hf_parallel.pipeline_parallel.costs import StageCosts, block_costs
from hf_parallel.pipeline_parallel.measure import measure_costs
from hf_parallel.pipeline_parallel.plan import PipelinePlan
from hf_parallel.pipeline_parallel.programs import ScheduleChoice
from hf_parallel.pipeline_parallel.samples import probe_samples, tiny_samples, typical_sample, typical_shape
from hf_parallel.pipeline_parallel.selfcheck import check_split
from hf_parallel.tensor_parallel.check import verify_model
from hf_parallel.tensor_parallel.plan import TPPlan
from hf_parallel.watchdog import Watchdog


logger = logging.getLogger(__name__)

Wish: TypeAlias = Literal["auto", "on", "off"]

# `self_check: auto` copies the model once a stage on one rank; above this share of free memory it is skipped, loudly.
SELF_CHECK_MEMORY_SHARE = 0.25


def check_schedule(config: HFParallelConfig) -> None:
    """Read a schedule file, if there is one, and prove the schedule of the first steps.

    Raises:
        ScheduleError: It cannot be read, breaks a rule, or contradicts another setting; names the action.
    """
    if config.pp_size > 1:
        ScheduleChoice(config.pipeline, config.pp_size)


def refuse_model(model: nn.Module, mp_size: int, *, shares_parameters: bool = False) -> None:
    """Refuse models that would train wrong or crash late.

    Args:
        model: The whole model.
        mp_size: Ranks that hold one copy of it.
        shares_parameters: Whether replicas share out its parameters (ZeRO 3).

    Raises:
        UnsupportedError: The model is dispatched, or quantised or wrapped in a way that cannot be cut or shared out.
    """
    name = type(model).__name__
    device_map = getattr(model, "hf_device_map", None)
    if device_map is not None and len(set(device_map.values())) > 1:
        raise UnsupportedError(
            f"{name} was loaded with device_map={sorted(set(map(str, device_map.values())))}: accelerate already "
            "spread it over devices. Load it without device_map; hf_parallel places the stages."
        )
    method = getattr(model, "quantization_method", None)
    quantised = method is not None or bool(getattr(model, "is_quantized", False))
    named = getattr(method, "value", method) or "unknown method"
    if quantised and mp_size > 1:
        raise UnsupportedError(
            f"{name} has quantised weights ({named}) with {mp_size} ranks a copy (pp_size x tp_size): they cannot be cut and "
            "sharded. Set pp_size and tp_size to 1 and train adapters on it, or load it without quantization_config."
        )
    if quantised and shares_parameters:
        raise UnsupportedError(
            f"{name} has quantised weights ({named}) with zero.stage=3, which shares out parameters of one floating-point "
            "dtype. Set zero.stage to 2 or less, or load it without quantization_config."
        )
    if mp_size > 1 and hasattr(model, "peft_config"):
        raise UnsupportedError(
            f"{name} is a PEFT model: adapters with pp_size or tp_size above 1 are not available yet. Use pp_size 1 "
            "and tp_size 1 (data parallel), or train the full model."
        )


class Probes:
    """The batches a model is tried with before it is changed; every rank makes them alike.

    Args:
        model: The whole model.
        device: Where it is.
        sample: A small batch of the kind it will be trained on, as the collator makes it; None for made-up text.

    Attributes:
        check: Batches of the self-check.
        discovery: Batches for `discover_stages`.
        typical: The batch that costs are measured with.
        cost_tokens: (B, S) that costs are counted for; None for those of the sample.

    Raises:
        PlanError: No sample, and the vocabulary is not known.
    """

    def __init__(self, model: nn.Module, device: torch.device, sample: Mapping[str, Any] | None = None) -> None:
        self._name = type(model).__name__
        self._given = sample is not None
        if sample is None:
            size = vocab_size(model)
            self.check = list(tiny_samples(size, device=device, use_cache=False))
            self.discovery = probe_samples(model, size, device)
            self.typical = typical_sample(model, size, device)
            self.cost_tokens: tuple[int, int] | None = typical_shape(model)
            return
        batch = {"use_cache": False, **send_to_device(dict(sample), device)}
        rows = num_rows(batch)
        labels = batch.get("labels")
        uniform = isinstance(labels, torch.Tensor) and len(labels) == rows > 1
        self.check = [batch, split_rows(batch, rows)[0]] if uniform else [batch]
        self.discovery = [batch, *self._text(model, device)]
        self.typical, self.cost_tokens = batch, None

    @property
    def batch(self) -> dict[str, Any]:
        """The batch that plans are made with."""
        return self.check[0]

    def _text(self, model: nn.Module, device: torch.device) -> list[dict[str, Any]]:
        """Text alone: covered as well if it takes the same path."""
        try:
            return probe_samples(model, vocab_size(model), device)
        except PlanError:
            return []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, an error of the model's own code says that the batch may be the cause.

        Raises:
            PlanError: From any error that is not ours.
        """
        try:
            yield
        except ParallelError:
            raise
        except Exception as error:
            raise PlanError(
                f"cannot plan {self._name}: its forward fails on "
                f"{'the given sample' if self._given else 'a made-up batch of text'} with {type(error).__name__}: {error}. "
                "Pass a small batch of the kind you train on, such as HFParallelCallback(sample=collator([data[0], "
                "data[1]]))."
            ) from error


def vocab_size(model: Any) -> int:
    """Size of the model's (text) vocabulary.

    Raises:
        PlanError: The config does not say.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise PlanError(f"{type(model).__name__}: config.vocab_size is {size!r}, so no probe batch can be made.")
    return size


def compare_over_ranks(what: str, value: str, describe: Callable[[int], str]) -> None:
    """Raise on every rank unless all ranks have the same `value`; collective over the default group.

    Raises:
        RankMismatchError: Names the ranks that differ from rank 0.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    values: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    odd = [describe(rank) for rank, other in enumerate(values) if other != values[0]]
    if odd:
        raise RankMismatchError(
            f"{', '.join(odd)} made another {what} than {describe(0)}: {sorted(set(values))}. All ranks must read the "
            "same YAML file, load the same model and run the same versions of torch and transformers."
        )


def cut_costs(
    model: nn.Module, plan: PipelinePlan, config: HFParallelConfig, probes: Probes, watchdog: Watchdog
) -> StageCosts:
    """What each part of the model costs, the same on every rank; collective with `pipeline.costs: measured`.

    Rank 0 measures while the others wait, so that all cut alike.

    Raises:
        PlanError: The model cannot run the batch that is measured.
    """
    if config.pipeline.costs == "analytic":
        recomputed = config.activation_checkpointing.every is not None
        return block_costs(model, plan, recomputed=recomputed or getattr(model, "is_gradient_checkpointing", False))

    def measure() -> StageCosts:
        watchdog.runs("measures the blocks")
        return measure_costs(model, plan, probes.typical)

    def explain(what: str) -> PlanError:
        return PlanError(
            f"pipeline.costs=measured: {what}. It could not train a small batch on the whole {type(model).__name__}: set "
            "pipeline.costs to analytic."
        )

    return on_rank_zero(measure, "measures the blocks", waiting=watchdog.waiting, explain=explain)


def check_plans(
    model: nn.Module,
    config: HFParallelConfig,
    stages: PipelinePlan | None,
    bounds: list[int],
    placement: Sequence[Sequence[int]],
    shards: TPPlan | None,
    *,
    probes: Probes,
    watchdog: Watchdog,
) -> None:
    """Compare loss and gradients of the cut and of the sharded model with the whole one, on rank 0; all hear the verdict.

    Args:
        model: The whole model; unchanged.
        config: For the `self_check` settings.
        stages: How it will be cut, or None.
        bounds: Block boundaries of the stages.
        placement: The stages of each rank.
        shards: How it will be sharded, or None.
        probes: The batches to compare on.
        watchdog: For the wait.

    Raises:
        PlanError: They differ; nothing was changed.
    """

    def check() -> None:
        watchdog.runs("compares the planned parts with the whole model")
        with probes.running():
            _check_stages(model, config.pipeline.self_check, stages, bounds, placement, probes.check)
            _check_shards(model, config.tensor_parallel.self_check, shards, probes.batch)

    on_rank_zero(check, "compares the planned parts with the whole model", waiting=watchdog.waiting)


def _check_stages(
    model: nn.Module,
    wish: Wish,
    stages: PipelinePlan | None,
    bounds: list[int],
    placement: Sequence[Sequence[int]],
    samples: Sequence[Mapping[str, Any]],
) -> None:
    copies = 2 * len(placement) + 3  # a reference and one model a rank, each with gradients, and one being cut
    if stages is None or not _affordable(model, copies, wish, "pipeline"):
        return
    try:
        check_split(model, stages, bounds, samples, lambda copied: copied.forward, placement)
    except PlanError:
        if "forward" not in vars(model):
            raise
        # A function that was put over model.forward may call the forward of this very model, not that of a copy.
        check_split(model, stages, bounds, samples, lambda copied: type(copied).forward.__get__(copied), placement)
        logger.warning("hf_parallel: model.forward is patched; the self-check compared the forward of its class.")


def _check_shards(model: nn.Module, wish: Wish, shards: TPPlan | None, sample: Mapping[str, Any]) -> None:
    if shards is None or not _affordable(model, 2 * (shards.tp_size + 1), wish, "tensor_parallel"):
        return
    verify_model(model, shards, sample)


def _affordable(model: nn.Module, copies: int, wish: Wish, section: str) -> bool:
    """Whether to run a self-check that needs `copies` times the parameters' memory."""
    if wish != "auto":
        return wish == "on"
    needed = copies * sum(p.nbytes for p in model.parameters())
    free = _free_bytes(next(model.parameters()).device)
    if needed <= SELF_CHECK_MEMORY_SHARE * free:
        return True
    logger.warning(
        "hf_parallel: %s.self_check=auto: skipped, it needs %.1f GiB for copies and %.1f GiB are free. The plan was not "
        "compared with the whole model; set %s.self_check: on to insist.",
        section,
        needed / 2**30,
        free / 2**30,
        section,
    )
    return False


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_ram()
