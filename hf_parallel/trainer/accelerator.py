"""The Accelerator of a parallel run.

`attach_accelerator` puts it in place of a stock one, for a Trainer and for a loop of one's own (see `raw_loop`). Only the class
of that object is replaced by a subclass: other Accelerators of the process stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from hf_parallel.checkpoints.weights.gather import gather_tensors
from hf_parallel.compat.private_accelerate import is_prepared, mark_prepared, prepared_by
from hf_parallel.compat.private_optimizers import loss_scale, scaler_of_group
from hf_parallel.compat.private_torch import set_aside
from hf_parallel.engine.gradients.optimizer_guard import OptimizerGuard
from hf_parallel.engine.run.engine import Autocast, Engine
from hf_parallel.engine.session import Session
from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.guards.gradients.direct import through_stages
from hf_parallel.mesh.groups import backend_for
from hf_parallel.settings.accumulation import accumulation_steps
from hf_parallel.trainer.loaders import dispatch_to_replicas, shard_over_replicas, tell_epochs
from hf_parallel.trainer.loop_settings import refuse_in_loop
from hf_parallel.trainer.model_folder import Counts, counts_of, install_counts, install_saving, is_whole
from hf_parallel.trainer.prepared import HFParallelOptimizer, HFParallelScheduler
from hf_parallel.trainer.replica_view import ReplicaViewMixin
from hf_parallel.trainer.user_code import is_users_function


class HFParallelAccelerator(ReplicaViewMixin):
    """Swapped in as the class of a live Accelerator; has no constructor of its own."""

    hf_parallel: Session
    _accumulates: bool = False

    @property
    def hf_parallel_engine(self) -> Engine:
        """The engine of the prepared model.

        Raises:
            ConfigError: No model was prepared yet.
        """
        if self.hf_parallel.engine is None:
            raise ConfigError(
                "no model was prepared yet: pass the model to accelerator.prepare() before or together with the "
                "optimizer, and before clipping or saving."
            )
        return self.hf_parallel.engine

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare the arguments, in any order: models are parallelized before the rest is prepared."""
        models = [item for item in args if isinstance(item, nn.Module)]
        trained = [model for model in models if is_trained(model)]
        for model in models:
            beside = next((one for one in trained if one is not model), None)
            if not self._is_beside(model, beside=beside):
                self.attach_model(model)
            else:
                self._hold_beside(model, beside)
        return super().prepare(*args, device_placement=device_placement)

    def _is_beside(self, model: nn.Module, *, evaluation_mode: bool = False, beside: nn.Module | None = None) -> bool:
        """Whether a model is used for inference beside the one that is trained: a teacher, a reference model.

        Args:
            model: The model.
            evaluation_mode: Whether it is prepared for inference only.
            beside: Another model that is trained, if one is prepared together with it.
        """
        session = self.hf_parallel
        if session.holds(model) or (is_trained(model) and not evaluation_mode):
            return False
        alone = session.engine is None and beside is None and session.raw_loop
        return not (alone and is_trained(model) and session.config.splits_model)

    def _hold_beside(self, model: nn.Module, beside: nn.Module | None) -> bool:
        """Cut and shard a model for inference; False where it stays as it is.

        Args:
            model: The model.
            beside: Answer of `_is_beside`.

        Raises:
            UnsupportedError: It has parameters of the model that is cut or sharded.
        """
        session = self.hf_parallel
        first = beside if session.engine is None else session.engine.model
        # Whether one that is alone will be trained later is not known.
        alone = first is None and session.raw_loop and is_trained(model)
        if alone or not session.config.keeps_parts:
            return False
        if session.in_parts(model) is None:
            self._place(model)
            save, counts = getattr(model, "save_pretrained", None), counts_of(model)
            autocast = self._autocast_of_engines()
            engine = session.hold_beside(model, first, self.device)
            if engine is None:
                return False
            self._equip(engine, save, counts)
            engine.autocast = autocast
        return True

    def _place(self, model: nn.Module) -> None:
        """Bring a model to this accelerator's device. Quantised ones that are in place refuse even this."""
        if self.device_placement and not _is_on(model, self.device):
            model.to(self.device)

    def _autocast_of_engines(self) -> Autocast:
        """The context that engines run forward passes in; also tells the session its dtype, which it plans with."""
        options = {} if self.autocast_handler is None else self.autocast_handler.to_kwargs()
        casts = self.native_amp and options.pop("enabled", True)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.mixed_precision] if casts else None
        self.hf_parallel.compute_dtype = dtype
        if dtype is None:
            return contextlib.nullcontext
        return functools.partial(torch.autocast, self.device.type, dtype=dtype, **options)

    def _equip(self, engine: Engine, save: Any, counts: Counts) -> None:
        """Let a model that was just parallelized save and count the whole."""
        install_saving(engine, save, self.hf_parallel.meeting)
        install_counts(engine, counts)

    def attach_model(self, model: nn.Module) -> Engine:
        """Parallelize `model` if it is not yet, on this accelerator's device."""
        known = self.hf_parallel.engine
        save, is_new = getattr(model, "save_pretrained", None), not self.hf_parallel.holds(model)
        if known is None or known.model is not model:
            self._place(model)
            self._agree_on_skipped_steps()
            self.hf_parallel.refuse_shared(model)
        autocast = self._autocast_of_engines()
        counts = counts_of(model) if is_new else None
        engine = self.hf_parallel.attach(model, self.device)
        if counts is not None:
            self._equip(engine, save, counts)
        if self.hf_parallel.compute_dtype is not None:
            engine.autocast = autocast
        if self.ddp_handler is not None and not self.ddp_handler.broadcast_buffers:
            engine.keep_buffers()
        engine.scaler = self.scaler
        if engine.gradients.replicas.wire is not None and self.scaler is not None:
            engine.gradients.replicas.wire.loss_scale = functools.partial(loss_scale, self.scaler)
        if known is None and self.hf_parallel.raw_loop:
            refuse_in_loop(self.hf_parallel.config)
            state, wanted = self.gradient_state, self.hf_parallel.config.gradient_accumulation_steps
            state.plugin_kwargs["num_steps"] = accumulation_steps(wanted, state.num_steps, "Accelerator")
        if known is None and self.hf_parallel.total_steps is not None:
            engine.gradients.replicas.plan_steps(self.hf_parallel.total_steps, 0)
        return engine

    def _agree_on_skipped_steps(self) -> None:
        """fp16: one scale and one skip decision for all ranks. The stock scaler decides on local gradients alone."""
        stock: torch.amp.GradScaler | None = self.scaler  # type: ignore[has-type]
        if stock is not None and dist.is_initialized():
            self.scaler = scaler_of_group(stock, self.device.type, dist.group.WORLD)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Parallelize instead of wrapping: the returned model is the same object."""
        if not self._is_beside(model, evaluation_mode=evaluation_mode):
            self.attach_model(model)
        elif not self._hold_beside(model, None):
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[no-any-return]
        models = prepared_by(self).models
        if model not in models:
            models.append(model)
        mark_prepared(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer to update the parameters that this rank holds."""
        if is_prepared(optimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        self.hf_parallel.refuse_foreign(optimizer)
        engine = self.hf_parallel_engine
        guard = OptimizerGuard(optimizer, engine.gradients, engine.model)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = HFParallelOptimizer
            prepared.watchdog = self.hf_parallel.watchdog
            prepared.gradients, prepared.own_hooks = engine.gradients, guard.own_hooks
            config, shape = self.hf_parallel.config, self.hf_parallel.mesh.shape
            prepared.replicas = None if config.local_sgd.sync_every > 1 else self.hf_parallel.mesh.dp_group
            prepared.is_part = shape.mp_size * shape.ep_size > 1 or (shape.num_copies > 1 and config.zero.stage > 0)
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide by the loss scale the gradients that the optimizer will step on, not those shown to user code."""
        with (
            self.hf_parallel_engine.gradients.shown.withdrawn()
            if self.scaler is not None
            else contextlib.nullcontext()
        ):
            super().unscale_gradients(optimizer)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Shard over the replicas only: all ranks of a model copy get the same batches.

        Raises:
            ConfigError: `dispatch_batches=True` in a Trainer with tp or pp, or replicas would get unequal numbers of batches.
        """
        if is_prepared(data_loader):
            return super().prepare_data_loader(data_loader)
        prepared = shard_over_replicas(
            *(data_loader, self, self.hf_parallel),
            device_placement=self.device_placement if device_placement is None else device_placement,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
        )
        prepared_by(self).loaders.append(prepared)
        return tell_epochs(prepared, self.hf_parallel.watchdog)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Make a data loader that begins `num_batches` later."""
        skipping = dispatch_to_replicas(super().skip_first_batches(dataloader, num_batches), self.hf_parallel.mesh)
        return skipping if skipping is dataloader else tell_epochs(skipping, self.hf_parallel.watchdog)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that steps once a replica instead of once a process."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.__class__ = HFParallelScheduler
        prepared.steps_per_update = self.hf_parallel.mesh.shape.dp_size
        return prepared

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Any:
        """Accumulate gradients over batches, and note that the loop does so."""
        self._accumulates = True
        with super().accumulate(*models):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backpropagate a loss; refuse a model whose parallelized forward somebody replaced.

        Raises:
            ConfigError: The settings accumulate gradients and the loop does not.
        """
        self.hf_parallel_engine.check_installed()
        wanted = self.hf_parallel.config.gradient_accumulation_steps
        if self.hf_parallel.raw_loop and wanted not in ("auto", 1) and not self._accumulates:
            raise ConfigError(
                f"gradient_accumulation_steps={wanted}, but the loop steps after every batch. Put its body into `with "
                "accelerator.accumulate(model):`, or set gradient_accumulation_steps to 'auto'."
            )
        self.hf_parallel_engine.backpropagates(loss.detach())
        passing = self.hf_parallel.watchdog.engaged("runs the backward pass")
        stages = through_stages(self.hf_parallel.mesh.shape.pp_size)
        with set_aside(*self.hf_parallel_engine.watching), passing, stages:
            super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Any:
        """Let backward passes inside add up gradients and reduce nothing."""
        engine = self.hf_parallel.engine
        with contextlib.nullcontext() if engine is None else engine.no_sync():
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing: all ranks run the same number of batches, as `even_batches` sees to.

        Raises:
            UnsupportedError: `even_batches` is off, with several replicas: those that end first would leave the others waiting.
        """
        even = self.even_batches and even_batches is not False
        if self.hf_parallel.mesh.shape.dp_size > 1 and not even:
            raise UnsupportedError(
                "accelerator.join_uneven_inputs() with even_batches=False is not available: every rank must run the same number "
                "of batches. Leave it out and keep even_batches=True, which fills up the last batch."
            )
        yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip by the norm of the full model's gradient over all ranks of a model copy.

        Raises:
            UnsupportedError: `parameters` is a part of the model.
        """
        theirs = super().clip_grad_norm_
        if is_users_function(
            theirs
        ):  # of a subclass, or put on the class; it ends in torch's clipping, which knows the norm
            return theirs(parameters, max_norm, norm_type)  # type: ignore[no-any-return]
        self.unscale_gradients()
        engine = self.hf_parallel_engine
        if engine.gradients.replicas.sharded is not None:
            engine.gradients.replicas.sharded.reshard()
        given = {id(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        left_out = [n for n, p in engine.attachment.parameters.items() if p.grad is not None and id(p) not in given]
        if left_out:
            raise UnsupportedError(
                f"clip_grad_norm_ on a part of the model: {len(left_out)} parameters are left out (first: "
                f"{left_out[0]}). Pass model.parameters()."
            )
        waiting = self.hf_parallel.watchdog.waiting("waits for the gradient norm of the other ranks")
        with engine.recorder.span("norm"), waiting:
            return engine.gradients.clip(float(max_norm), float(norm_type))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The full model's weights; collective, and {} except on world rank 0, if they are not whole on every rank.

        Raises:
            UnsupportedError: They are not, and only some ranks called it.
        """
        session, engine = self.hf_parallel, self.hf_parallel.engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        attachment = engine.attachment
        if is_whole(engine):
            attachment.gradients.replicas.synchronise()
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        session.meeting.meet("accelerator.get_state_dict()")
        held = attachment.to_gather()
        # What is gathered is of all stages.
        with set_aside(*engine.watching), session.watchdog.waiting("waits for the weights of the other ranks"):
            state = gather_tensors(attachment.ledger, held, session.mesh)
            if dist.is_initialized():
                dist.barrier()
        return {
            name: state[entry.name] for entry in attachment.ledger for name in entry.state_names if entry.name in state
        }

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Refuse inside a Trainer: stock code would save one rank's optimizer state as the whole state.

        Raises:
            UnsupportedError: Always; loops of one's own have another method (see `raw_loop`).
        """
        raise UnsupportedError(
            "accelerator.save_state() inside a Trainer is not available: set save_strategy and save_steps of "
            "TrainingArguments, whose checkpoints any layout resumes."
        )

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Refuse inside a Trainer, as `save_state` does."""
        raise UnsupportedError(
            "accelerator.load_state() inside a Trainer is not available: call trainer.train(resume_from_checkpoint=folder)."
        )

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the model; every rank must call it where no rank holds the whole model."""
        engine = self.hf_parallel.engine_of(model)
        if self.is_main_process or engine is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        elif not is_whole(engine):
            self.get_state_dict(model)


def _is_on(model: nn.Module, device: torch.device) -> bool:
    """Whether all of it is there; a device without an index is any of its type."""
    tensors = (*model.parameters(), *model.buffers())
    kinds, places = {t.device.type for t in tensors}, {t.device.index for t in tensors} - {None}
    return kinds <= {device.type} and (device.index is None or places <= {device.index})


def is_trained(model: nn.Module) -> bool:
    """Whether any of its parameters is."""
    return any(parameter.requires_grad for parameter in model.parameters())


def attach_accelerator(
    accelerator: Accelerator, session: Session, made: type[HFParallelAccelerator] = HFParallelAccelerator
) -> None:
    """Make a live accelerator a parallel one, of the class `made`."""
    kind = type(accelerator)
    if not issubclass(kind, made):
        accelerator.__class__ = type(f"HFParallel{kind.__name__}", (made, kind), {})
    accelerator.hf_parallel = session
    # accelerate takes every group of GPU processes for one of NCCL, and pads and gathers in a way that gloo does not have.
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None and backend_for(world, accelerator.device.type) == "gloo":
        PartialState().backend = "gloo"
