"""Says once where the stock Trainer makes the loss of several replicas another one than that of one process.

Stock divides by the labels of all replicas and multiplies the loss by the number of replicas, as gradients are averaged. It takes
every loss for a sum over labels divided by their number; a router's auxiliary loss, a penalty, and a mean that ignores
that number count once a replica, in stock DDP as here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.guards.calls.additive import what_replicas_multiply
from hf_parallel.model.tensors import tensors_in


if TYPE_CHECKING:
    from transformers import Trainer

    from hf_parallel.engine.run.engine import Engine

logger = logging.getLogger(__name__)

# Compare batches, cut or move them.
OF_BATCHES: Final = tuple(
    ["accelerate."] + [f"hf_parallel.{one}" for one in ("batches", "guards.", "engine.", "pipeline_parallel.")]
)
IGNORES: Final = "it does not use num_items_in_batch"
OF_MODEL: Final = "Set accepts_loss_kwargs = False on the class of the model: the Trainer then gives it no number and multiplies nothing."
OF_FUNCTION: Final = (
    "Divide a sum over labels by num_items_in_batch, or set TrainingArguments.average_tokens_across_devices to False: each "
    "replica then divides by its own labels, and nothing is multiplied."
)


class MultipliedLoss:
    """Looks at the first loss of a model, and of a `compute_loss_func`, that stock multiplies.

    Args:
        compiles: Whether blocks are compiled: no mode may be around their calls.
    """

    def __init__(self, *, compiles: bool) -> None:
        self._compiles = compiles
        self._seen: tuple[Any, Any] | None = None

    @contextmanager
    def told(self, trainer: Trainer, engine: Engine | None, count: Any) -> Iterator[None]:
        """Around a training loss of stock code, with `count` as `num_items_in_batch`."""
        function, replicas = trainer.compute_loss_func, _replicas(trainer, count)
        seen = self._seen
        if engine is None or replicas == 1 or (seen and seen[0] is engine and seen[1] is function):
            yield
            return
        self._seen = engine, function
        if function is None:
            why, fix = _of_model(trainer, engine, replicas, compiles=self._compiles)
        else:
            why, fix = _of_function(trainer, function)
        if why is None:
            with _Touched(count) as touched:
                yield
            why = "" if touched.found else IGNORES
        else:
            yield
        if why and engine.mesh.dp_rank == 0:
            logger.warning(
                "hf_parallel: the loss of %s is not only a sum over labels divided by num_items_in_batch: %s. The stock Trainer "
                "multiplies every loss by the number of replicas (%d), so that part of loss and gradients is %d times that of one "
                "process, as in stock DDP. %s",
                type(trainer.model).__name__ if function is None else getattr(function, "__qualname__", function),
                *(why, replicas, replicas, fix),
            )


def _replicas(trainer: Trainer, count: Any) -> int:
    """The number by which the stock `compute_loss` multiplies a loss with `num_items_in_batch=count`."""
    normalised = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if not (trainer.args.average_tokens_across_devices and normalised) or count is None:
        return 1
    return int(trainer.accelerator.num_processes // trainer.get_tp_size())


def _of_function(trainer: Trainer, function: Callable[..., Tensor]) -> tuple[str | None, str]:
    config = getattr(trainer.model, "config", None)
    return what_replicas_multiply(function, config, trainer.args.device), OF_FUNCTION


def _of_model(trainer: Trainer, engine: Engine, replicas: int, *, compiles: bool) -> tuple[str | None, str]:
    """Words for what is multiplied, and a fix; None for the first if only a call can tell, which compiled blocks do not."""
    model: Any = trainer.model
    config: Any = getattr(model, "config", None)  # a module of the user's has none
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = getattr(text, "router_aux_loss_coef", 0.0) or 0.0
    if trainer.label_smoother is not None:
        return "", ""
    if getattr(text, "output_router_logits", False) and weight:
        told = f"it adds {weight:g} (config.router_aux_loss_coef) times the auxiliary loss of its routers"
        return told, f"Set config.router_aux_loss_coef to {weight / replicas:g} for the weight that one process has."
    if not isinstance(engine, PipelineEngine):
        return ("" if compiles else None), OF_MODEL
    if engine.loss_kind == "mean":
        return IGNORES, OF_MODEL
    looks = engine.loss_kind == "whole" and engine.runtime.has_last_stage and not compiles
    return (None if looks else ""), OF_MODEL


class _Touched(TorchFunctionMode):
    """Notes whether code other than ours and torch's gives a number to a function of torch.

    Args:
        count: The number, as a tensor; another one is taken to be used.

    Attributes:
        found: Whether one did.
    """

    def __init__(self, count: Any) -> None:
        super().__init__()
        self._count, self.found = count, not isinstance(count, Tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.found and any(one is self._count for one in tensors_in((args, kwargs))):
            self.found = not _is_of_batches()
        return func(*args, **kwargs)


def _is_of_batches() -> bool:
    """Whether code that compares batches or moves them called a function of torch under a mode, and not that of a loss."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (name := str(frame.f_globals.get("__name__"))).startswith("torch."):
        if name.startswith("torch.distributed."):  # fully_shard moves inputs
            return True
        frame = frame.f_back
    return frame is not None and name.startswith(OF_BATCHES)
