"""What a stock `transformers.Trainer` must do differently on one rank of a mesh: loss, data, clipping, counting.

`HFParallelCallback` puts `HFParallelTrainerMixin` under the class of a live Trainer; `HFParallelTrainer` has it from
the start. Everything that is not here or in `saving` or `checkpoints` is the stock Trainer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_parallel.accelerator import HFParallelAccelerator
from hf_parallel.compat import has_pre_hooks
from hf_parallel.pipeline_engine import PipelineEngine
from hf_parallel.training.checkpoints import CheckpointMixin


logger = logging.getLogger(__name__)

# What a batch passes on its way from `get_batch_samples` to the model, and its loss on the way to the gradients.
AFTER_DATA = (
    "training_step",
    "compute_loss",
    "compute_loss_context_manager",
    "_prepare_inputs",
    "_prepare_input",
    "_prepare_context_parallel_inputs",
)


class HFParallelTrainerMixin(CheckpointMixin):
    """Loss, data, clipping and counting over a mesh. Inert until a session is attached to the accelerator."""

    accelerator: HFParallelAccelerator
    _hf_parallel_window: list[tuple[Any, dict[str, Any]]]
    _hf_parallel_additive: bool | None

    # -- attaching -----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Cut and shard the model first, so that the optimizer is made of this rank's parameters."""
        if self.hf_parallel_session is not None:
            self.accelerator.attach_model(self.model)
        return super().create_optimizer(model)

    @property
    def _pipeline(self) -> PipelineEngine | None:
        engine = self._engine
        return engine if isinstance(engine, PipelineEngine) else None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As stock, with what gradient compression did since the last time beside the training loss."""
        wire = self._engine.gradients.replicas.wire if self._engine is not None else None
        super().log({**logs, **wire.report()} if wire is not None and "loss" in logs else logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, on equal replicas."""
        self._synchronise()
        return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, on equal replicas."""
        self._synchronise()
        return super().predict(*args, **kwargs)

    # -- data ----------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """As stock; announces the window, so that its batches run as the microbatches of one schedule."""
        self._hf_parallel_window = []
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        pipeline = self._pipeline
        if pipeline is not None and self._leaves_batches_alone() and all(isinstance(s, dict) for s in samples):
            prepared = [super(HFParallelTrainerMixin, self)._prepare_inputs(sample) for sample in samples]
            self._hf_parallel_window = list(zip(samples, prepared, strict=True))
            pipeline.begin_window(prepared)
        return samples, num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As stock; a batch of the announced window keeps the tensors it was announced with."""
        for sample, prepared in getattr(self, "_hf_parallel_window", ()):
            if sample is inputs:
                return dict(prepared)
        return super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """As stock. Without averaging over devices, stock divides a local count by the ranks that share the batch."""
        session = self.hf_parallel_session
        if session is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        with session.watchdog.waiting("waits for the token counts of the other ranks"):
            count = super()._get_num_items_in_batch(batch_samples, device)
        if torch.is_tensor(count) and not self.args.average_tokens_across_devices:
            count = count * self.get_tp_size()
        return count

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """As stock, counting each batch once, not once for every rank of a model copy."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
        if self.hf_parallel_session is not None:
            seen = self.state.num_input_tokens_seen - before
            self.state.num_input_tokens_seen = before + seen // self.get_tp_size()

    # -- loss ----------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As stock; refuses when somebody replaced the parallelized forward."""
        if self._engine is not None:
            self._engine.check_installed()
        return super().training_step(model, *args, **kwargs)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As stock; label smoothing and `compute_loss_func` are computed on the last stage, inside the schedule."""
        pipeline = self._pipeline
        function = self._last_stage_loss()
        if pipeline is None or function is None or not pipeline.trains or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        with pipeline.loss_function(function):
            outputs = model(**inputs, **counted)
        loss = outputs["loss"]
        normalised = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self.args.average_tokens_across_devices and normalised and num_items_in_batch is not None:
            loss *= self.accelerator.num_processes // self.get_tp_size()
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """As stock; full logits leave the last stage only if somebody needs them."""
        pipeline = self._pipeline
        if pipeline is None or not prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with pipeline.without_logits():
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As stock; the model is parallelized before stock starts its clock."""
        if self.hf_parallel_session is not None:
            self.accelerator.attach_model(self.model)
        return super().evaluation_loop(*args, **kwargs)

    def _has_stock_loss(self) -> bool:
        """Whether `compute_loss` is the Trainer's own, so that what it does to a batch is known."""
        return self._is_stock("compute_loss")

    def _is_stock(self, name: str) -> bool:
        """Whether a method is the one that transformers ships: not overridden, replaced on the object or patched."""
        others = [kind for kind in type(self).__mro__ if kind.__module__.split(".")[0] != __name__.split(".")[0]]
        kind = next(kind for kind in others if name in vars(kind))
        return name not in vars(self) and kind is Trainer and vars(kind)[name].__module__ == Trainer.__module__

    def _leaves_batches_alone(self) -> bool:
        """Whether stock code alone stands between a prepared batch and the model, so that it may run ahead of its call."""
        return all(self._is_stock(name) for name in AFTER_DATA) and not has_pre_hooks(self.model)

    def _last_stage_loss(self) -> Callable[..., torch.Tensor] | None:
        """The loss function to hand to the last stage, or None when the model's own or the user's code is the loss."""
        if not self._has_stock_loss():
            return None
        if self.compute_loss_func is None:
            return None if self.label_smoother is None else functools.partial(self._smoothed, self.label_smoother)
        if getattr(self, "_hf_parallel_additive", None) is None:
            self._hf_parallel_additive = is_additive(self.compute_loss_func, self.model)
            if not self._hf_parallel_additive:
                warn_not_additive(self.compute_loss_func)
        return self.compute_loss_func if self._hf_parallel_additive else None

    def _smoothed(
        self, smoother: Callable[..., torch.Tensor], outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        shifted = type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return smoother(outputs, labels, shift_labels=shifted, num_items_in_batch=num_items_in_batch)

    # -- clipping ------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.hf_parallel_session is None:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.hf_parallel_session is None or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))


def is_additive(function: Callable[..., Any], model: Any) -> bool:
    """Whether a `compute_loss_func` divides by `num_items_in_batch`, so that microbatch losses add up.

    Asked on made-up logits: doubling the count must halve the loss. A function that needs more than logits and labels
    counts as not additive.
    """
    vocab_size = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, vocab_size, generator=generator)
    labels = torch.randint(0, vocab_size, (2, 6), generator=generator)
    try:
        with torch.no_grad():
            once, twice = (
                float(function(CausalLMOutputWithPast(logits=logits), labels.clone(), num_items_in_batch=count))
                for count in (torch.tensor(10), torch.tensor(20))
            )
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, IndexError):
        return False
    return abs(2 * twice - once) <= 1e-5 * abs(once)


def warn_not_additive(function: Callable[..., Any]) -> None:
    """Say that the loss costs GPipe memory because it cannot be split."""
    logger.warning(
        "compute_loss_func %s is not a sum divided by num_items_in_batch, so it cannot be computed microbatch by "
        "microbatch: it gets the logits of the whole batch on every stage, and all activations stay in memory until "
        "its backward. Divide a summed loss by num_items_in_batch to train with 1F1B memory.",
        getattr(function, "__qualname__", function),
    )
