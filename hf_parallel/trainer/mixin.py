"""The methods of a stock `transformers.Trainer` that differ on one rank of a mesh: loss, data, clipping, counting.

`HFParallelCallback` puts `HFParallelTrainerMixin` under the class of a live Trainer; `HFParallelTrainer` has it from
the start. Everything that is not here or in `saving` or `checkpoints` is the stock Trainer.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import BatchRebalanceSampler, LabelSmoother
from transformers.trainer_utils import has_length

from hf_parallel.compat.private_peft import base_model
from hf_parallel.compat.private_torch import has_pre_hooks
from hf_parallel.compat.private_transformers import AFTER_DATA, cache_output
from hf_parallel.data_parallel.fsdp_parts import whole_of
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.calls.batches import Announced
from hf_parallel.tensor_parallel.run.reads import in_lockstep
from hf_parallel.trainer.accelerator import HFParallelAccelerator
from hf_parallel.trainer.checkpoints import CheckpointMixin
from hf_parallel.trainer.flags import logs_next
from hf_parallel.trainer.monitoring import Timed, monitor_of
from hf_parallel.trainer.multiplied import MultipliedLoss
from hf_parallel.trainer.own_loss import Judged, judge
from hf_parallel.trainer.user_code import UserCode, answers, is_users, is_users_function


logger = logging.getLogger(__name__)

NOT_IN_GRAPH = "appears to not have been used in the graph"  # torch, of tensors that a loss does not depend on


class HFParallelTrainerMixin(CheckpointMixin):
    """Loss, data, clipping and counting over a mesh. Inert until a session is attached to the accelerator."""

    accelerator: HFParallelAccelerator
    _hf_parallel_window: list[tuple[Any, Announced, dict[str, Any]]]
    _hf_parallel_following: deque[tuple[list[Any], Any, list[tuple[Any, Announced, dict[str, Any]]]]]
    _hf_parallel_watched: UserCode | None = None
    _hf_parallel_judged: Judged | None
    _hf_parallel_epoch_begins: bool = False
    _hf_parallel_accumulation: int | None = None  # what stock counted the batches of this epoch's steps by

    # -- attaching -----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Cut and shard the model first, so that the optimizer is made of this rank's parameters."""
        if self.hf_parallel_session is not None:
            self.accelerator.attach_model(self.model)
            self._watch_users()
            if self._pipeline is not None and self._pipeline.asynchronous is not None:
                # A run before this one has left older weights, maybe of another model: the best one was loaded since.
                self._pipeline.asynchronous.versions.restore([])
        watched, create = self._hf_parallel_watched, super().create_optimizer
        try:
            make: Callable[..., torch.optim.Optimizer] = (
                create if watched is None else watched.making_optimizer(create)
            )
            return make() if model is None else make(model)  # as stock: overrides with `self` alone are usual
        except ValueError as error:
            pipeline = self._pipeline
            if pipeline is None or any(param.requires_grad for param in self.model.parameters()):
                raise
            raise UnsupportedError(
                f"{pipeline.mesh.shape.describe(pipeline.mesh.rank)} has no parameter that is trained, and the optimizer that "
                f"{type(self).__name__}.create_optimizer makes wants one: {error}. Hand it a group without parameters there "
                "([{'params': []}]), or choose pipeline.split so that every stage trains some."
            ) from error

    def _watch_users(self) -> None:
        """Numbers that code of users takes of parameters are those of whole ones, or refused."""
        watched, engine = self._hf_parallel_watched, self._engine
        if engine is not None and (watched is None or watched.model is not self.model):
            if watched is not None:
                watched.stop()
            self._hf_parallel_watched = UserCode(self, self.model, engine)

    @property
    def _pipeline(self) -> PipelineEngine | None:
        engine = self._engine
        return engine if isinstance(engine, PipelineEngine) else None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the stock Trainer does, and beside the training loss what the monitor measured and gradient compression did."""
        wire = self._engine.gradients.replicas.wire if self._engine is not None else None
        if "loss" in logs:
            monitor = monitor_of(self)
            logs = {
                **logs,
                **(monitor.logged() if monitor is not None else {}),
                **(wire.report() if wire is not None else {}),
            }
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the stock Trainer does, after replicas that train by themselves have become equal."""
        with self._doing("evaluates"):
            self._synchronise()
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as the stock Trainer does, after replicas that train by themselves have become equal."""
        with self._doing("predicts"):
            self._synchronise()
            return super().predict(*args, **kwargs)

    # -- data ----------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Make the sampler as the stock Trainer does, except that `batch_rebalance` balances replicas instead of all ranks."""
        stock = super()._get_train_sampler(*args, **kwargs)
        if self.hf_parallel_session is None or type(stock) is not BatchRebalanceSampler:
            return stock
        return BatchRebalanceSampler(
            stock.lengths,
            self.get_total_train_batch_size(self.args),
            self.accelerator.num_processes,
            stock.grad_accum,
            seed=stock.seed,
            rank=self.accelerator.process_index,
            drop_last=stock.drop_last,
        )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch, and remember how many batches a step has, in case a callback changes that within the epoch."""
        self._hf_parallel_accumulation = self.args.gradient_accumulation_steps
        self._hf_parallel_epoch_begins = True  # workers start, data is shuffled
        self._hf_parallel_following = deque()
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._agree_on_flags("should_training_stop", "should_epoch_stop")
        if self.control.should_training_stop:
            self._refuse_drift()  # before `on_train_end`, where a callback may give rank 0 what is to be saved
        self._hf_parallel_following.clear()
        if self._pipeline is not None and self._pipeline.asynchronous is not None:
            self._pipeline.asynchronous.give_up()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Read the batches of a step, and announce them to the engine, which runs them as the microbatches of one schedule."""
        self._hf_parallel_window = []
        begins, self._hf_parallel_epoch_begins = self._hf_parallel_epoch_begins, False
        monitor, pipeline = monitor_of(self), self._pipeline
        asynchronous = None if pipeline is None else pipeline.asynchronous
        if asynchronous is not None:
            asynchronous.guard.watches_modules = any(map(is_users, self.callback_handler.callbacks))
        later = vars(self).setdefault("_hf_parallel_following", deque())
        with self._doing("is in the data loader", in_steps=not begins):
            read: Iterator[Any] = epoch_iterator
            if monitor is not None:
                monitor.begin_step(self.state.global_step + 1)
                read = Timed(epoch_iterator, monitor.recorder)
            steps_left = self.state.max_steps - self.state.global_step
            while not later or len(later) < min(steps_left, 1 + (0 if asynchronous is None else asynchronous.delay)):
                fetched = super().get_batch_samples(read, num_batches, device)
                if later and not fetched[0]:
                    break  # the epoch ends
                # Of a data set whose length is known the last window that is read ahead may be smaller than the one asked for.
                if asynchronous is not None and not self._reads_known_length():
                    asynchronous.guard.refuse_short(len(fetched[0]), num_batches)
                # Stock takes no step after a window that a stream's end cuts short: its gradients stay for the next one.
                is_short = len(fetched[0]) < num_batches
                adds = pipeline is not None and asynchronous is None and (is_short or pipeline.gradients.in_window)
                later.append((*fetched, [] if adds else self._announced(fetched[0])))
            samples, num_items, self._hf_parallel_window = later.popleft()
            if monitor is not None:
                monitor.read(samples)
        if pipeline is not None and len(samples) == len(self._hf_parallel_window):
            following = [([prepared for _, _, prepared in window], count) for _, count, window in later]
            pipeline.begin_window([prepared for _, _, prepared in self._hf_parallel_window], following)
        return samples, num_items

    def _reads_known_length(self) -> bool:
        loader = self.callback_handler.train_dataloader
        return loader is not None and has_length(loader)

    def _announced(self, samples: list[Any]) -> list[tuple[Any, Announced, dict[str, Any]]]:
        """Each batch with its tensors as they are now and on the device; nothing if others than stock code handle them."""
        if self._pipeline is None or not self._leaves_batches_alone() or not all(isinstance(s, dict) for s in samples):
            return []
        prepared = [super(HFParallelTrainerMixin, self)._prepare_inputs(sample) for sample in samples]
        return [(sample, Announced(sample), own) for sample, own in zip(samples, prepared, strict=True)]

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Prepare a batch; one that was announced keeps the tensors it was announced with, unless it was changed."""
        for sample, announced, prepared in getattr(self, "_hf_parallel_window", ()):
            if sample is inputs and announced.is_in(inputs, frozenset(k for k, v in inputs.items() if v is None)):
                return dict(prepared)
        return super()._prepare_inputs(inputs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the label tokens of a step as the stock Trainer does; the watchdog knows what this waits for."""
        session = self.hf_parallel_session
        if session is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        with session.watchdog.waiting("waits for the token counts of the other ranks"):
            return super()._get_num_items_in_batch(batch_samples, device)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Count the rows of a step: stock multiplies by `args.world_size`, which counts the ranks of a model copy too."""
        if self.hf_parallel_session is None:
            return int(super().get_total_train_batch_size(args))
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count one rank's share of a batch's FLOPs: stock sums over all ranks, and each counts the whole model."""
        total = int(super().floating_point_ops(inputs))
        return total if self.hf_parallel_session is None else total // self.hf_parallel_session.mesh.shape.mp_size

    # -- loss ----------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a batch; refuse a replaced forward of the model, and losses differentiated by `torch.autograd.grad`."""
        if self._engine is not None:
            self._engine.check_installed()
        try:
            return whole_of(super().training_step(model, *args, **kwargs))
        except RuntimeError as error:
            shape = self._hf_parallel_mesh.shape
            if max(shape.pp_size, shape.tp_size) > 1 and NOT_IN_GRAPH in str(error):
                raise UnsupportedError(by_hand(shape.pp_size, shape.tp_size)) from error
            raise

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss; label smoothing and `compute_loss_func` run on the last stage, inside the schedule."""
        told: AbstractContextManager[None] = nullcontext()
        if self.model.training and self._has_stock_loss():
            told = self._multiplied.told(self, self._engine, num_items_in_batch)
        with in_lockstep(self.model, is_loss=True), told:
            return self._loss_on_mesh(model, inputs, return_outputs, num_items_in_batch)

    @functools.cached_property
    def _multiplied(self) -> MultipliedLoss:
        session = self.hf_parallel_session
        return MultipliedLoss(compiles=session is not None and session.config.pipeline.compile_blocks != "none")

    def _loss_on_mesh(self, model: nn.Module, inputs: Any, return_outputs: bool, num_items_in_batch: Any) -> Any:
        pipeline = self._pipeline
        function = self._last_stage_loss() if pipeline is not None and pipeline.trains else None
        uncounted = num_items_in_batch is None and self.compute_loss_func is not None  # it may do anything then
        if pipeline is None or function is None or uncounted or "labels" not in inputs:
            # By name, as stock calls it: an override may take what follows return_outputs as **kwargs.
            more = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            return super().compute_loss(model, inputs, **more)
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        with pipeline.loss_function(function, shifted=self._smoother_shifts):
            outputs = model(**inputs, **counted)
        loss = outputs["loss"]
        normalised = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self.args.average_tokens_across_devices and normalised and num_items_in_batch is not None:
            loss *= self.accelerator.num_processes // self.get_tp_size()
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Predict a batch; full logits leave the last stage only if somebody needs them."""
        pipeline = self._pipeline
        if pipeline is None:
            loss, *others = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return (loss if loss is None else whole_of(loss)), *others
        default = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", [cache_output()])
        with pipeline.outputs.predicting(
            loss_only=prediction_loss_only,
            needs_logits=not prediction_loss_only or not self._has_stock_loss(),
            ignored=default if ignore_keys is None else ignore_keys,
        ):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the model is parallelized before the stock Trainer starts its clock."""
        if self.hf_parallel_session is not None:
            self.accelerator.attach_model(self.model)
            self._watch_users()
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
        """Whether stock code alone stands between a prepared batch and the model, so that it may run ahead of its call.

        Not after a change of `gradient_accumulation_steps` within an epoch: stock then steps amid the batches it has fetched.
        """
        if self._hf_parallel_accumulation not in (None, self.args.gradient_accumulation_steps):
            return False
        if has_pre_hooks(self.model) or any(map(looks_between_batches, self.callback_handler.callbacks)):
            return False
        return all(self._is_stock(name) for name in AFTER_DATA)

    def _last_stage_loss(self) -> Callable[..., torch.Tensor] | None:
        """The loss function to hand to the last stage, or None when the model's own or the user's code is the loss."""
        if not self._has_stock_loss():
            return None
        if self.compute_loss_func is None:
            stock = type(self.label_smoother) is LabelSmoother
            return functools.partial(self._smoothed, self.label_smoother) if stock else None  # type: ignore[arg-type]
        judged: Judged | None = getattr(self, "_hf_parallel_judged", None)
        pipeline, function = self._pipeline, self.compute_loss_func
        if pipeline is not None and (judged is None or not judged.holds_for(function)):
            facts: dict[str, Any] = {"config": self.model.config, "device": self.args.device}
            judged = self._hf_parallel_judged = judge(function, judged, pipeline=pipeline, **facts)
        return function if judged is not None and judged.adds_up else None

    def _smoothed(
        self, smoother: Callable[..., torch.Tensor], outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        return smoother(outputs, labels, shift_labels=self._smoother_shifts, num_items_in_batch=num_items_in_batch)

    @property
    def _smoother_shifts(self) -> bool:
        """Whether stock label smoothing predicts token i + 1 at position i: it goes by the name of the class inside of adapters."""
        return type(base_model(self.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    # -- clipping ------------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.hf_parallel_session is None or is_users_function(super()._clip_grad_norm):
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.hf_parallel_session is None:
            return super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        asynchronous = None if self._pipeline is None else self._pipeline.asynchronous
        # Stages that step at different times would wait for each other here, so they do where the norm is logged.
        has_norm = asynchronous is None or asynchronous.vertical_sync or logs_next(self.args, self.state)
        if grad_norm is None and has_norm:
            grad_norm = self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        engine = self._engine
        if engine is not None:
            others, looks = self._looked_at_by()
            engine.gradients.replicas.let_others_look(others)
            if looks:
                engine.gradients.shown.lay_open()
        return super()._get_grad_norm(model, grad_norm) if has_norm else None  # type: ignore[no-untyped-call]

    def _looked_at_by(self) -> tuple[bool, bool]:
        """Whether users have callbacks on any rank, and some that may look at gradients; asked once a run."""
        callbacks = self.callback_handler.callbacks
        known: tuple[bool, bool] | None = getattr(self, "_hf_parallel_looks", None)
        if known is None:
            others = [callback for callback in callbacks if is_users(callback)]
            known = len(others) > 0, any(map(looks_at_gradients, others))
            if self._hf_parallel_mesh.shape.world_size > 1:
                flags = torch.tensor(known, device=self.args.device).int()
                dist.all_reduce(flags, op=dist.ReduceOp.MAX)
                others_look, gradients_too = (bool(flag) for flag in flags.tolist())
                known = others_look, gradients_too
            self._hf_parallel_looks = known
        return known


def by_hand(pp_size: int, tp_size: int) -> str:
    """Word the error about gradients that torch does not find."""
    if pp_size > 1:
        setting = f"pp_size={pp_size}"
        reason = "the schedule has run the backward pass of all stages already, so there is no graph from the loss to"
    else:
        setting = f"tp_size={tp_size}"
        reason = "the loss is computed from this rank's parts, so there is no graph from it to the whole parameters of"
    return (
        f"torch.autograd.grad of a loss with {setting}: {reason} model.parameters(). Call accelerator.backward(loss), which leaves "
        f"the gradients in p.grad, or set {setting.partition('=')[0]} to 1."
    )


def looks_at_gradients(callback: TrainerCallback) -> bool:
    """Whether a callback is called while there are gradients, perhaps to look at them on one rank only."""
    events = ("on_pre_optimizer_step", "on_optimizer_step")
    return any(answers(callback, event) for event in events)


def looks_between_batches(callback: TrainerCallback) -> bool:
    """Whether a user's callback is called between the batches of one step, where it may change their gradients."""
    return is_users(callback) and answers(callback, "on_substep_end")
