"""The Accelerator of a parallel run, and the plugin that puts it in place of a stock one.

`Accelerator(parallelism_config=HFParallelPlugin(...))` makes a raw training loop parallel; the Trainer gets the same
class by `attach_accelerator`. The class of the live object is swapped, so no global is patched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import nn

from hf_parallel.accumulation import agreed
from hf_parallel.compat import calling_trainer, loss_scale
from hf_parallel.config import HFParallelConfig
from hf_parallel.engine import Engine
from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.gradients import GradientSync
from hf_parallel.launch import resolve_config
from hf_parallel.preflight import check_schedule
from hf_parallel.session import Session
from hf_parallel.weights import gather_tensors


class HFParallelPlugin(ParallelismConfig):  # type: ignore[misc]
    """Settings of a parallel run as accelerate takes them.

    To accelerate, "tp" means the ranks that read the same batch: here pp_size x tp_size.

    Args:
        config: None (the launcher's YAML), a path, a recipe name, a mapping, or an `HFParallelConfig`.
        sample: A small batch of the kind you train on, as the collator makes it, for models that need more than text
            (images, cross-attention states) or other inputs than a language model's; None plans with made-up text.
        total_steps: Optimizer steps of the whole run, for what begins or ends after a share of them.
        **overrides: Settings that win over `config`, such as `pp_size=2`.

    Raises:
        ConfigError: The settings are wrong, or do not fit the processes that run.
    """

    def __init__(
        self,
        config: HFParallelConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        sample: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        **overrides: Any,
    ) -> None:
        self._total_steps = total_steps
        self.config, self.explanation = resolve_config(config, **overrides)
        check_schedule(self.config)
        if self.config.zero.engine == "deepspeed":
            raise UnsupportedError(
                "zero.engine=deepspeed in a loop of your own: DeepSpeed prepares model and optimizer itself. Use a Trainer, or "
                "Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=FILE)) with the FILE that `hf-parallel export --to "
                "deepspeed` writes."
            )
        self._sample = sample
        self._session: Session | None = None
        self._of_trainer = False
        self._present(dp_size=1)

    @classmethod
    def of(cls, session: Session) -> HFParallelPlugin:
        """The plugin of a session that a Trainer has started."""
        self = cls(session.config)
        self._session, self._of_trainer = session, True
        self._present(session.mesh.shape.dp_size)
        return self

    def _present(self, dp_size: int) -> None:
        """Fill in the sizes that accelerate and the Trainer read."""
        self.dp_replicate_size, self.dp_shard_size = dp_size, 1
        self.tp_size = self.config.model_parallel_size
        self.cp_size = self.sp_size = 1
        self.cp_backend, self.sp_backend = "torch", "deepspeed"
        self.tp_handler = self.cp_handler = self.sp_handler = None
        self._sizes = {"dp_replicate": dp_size, "dp_shard": 1, "tp": self.tp_size, "cp": 1, "sp": 1}

    def build_device_mesh(self, device_type: str) -> None:
        """hf_parallel has groups of its own; accelerate gets no mesh."""
        return

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Called by `Accelerator.__init__` with itself: the one place where a plugin meets its accelerator.

        Raises:
            UnsupportedError: The accelerator is a Trainer's.
        """
        if self._of_trainer:
            # Left in accelerate's shared state by an earlier Trainer with the same arguments; not meant for this one.
            accelerator.state.parallelism_config = None
            return
        if calling_trainer() is not None:
            raise UnsupportedError(
                "TrainingArguments(parallelism_config=HFParallelPlugin(...)) reaches the accelerator but not the "
                "Trainer's saving: checkpoints would hold one stage. Leave it out and pass "
                "Trainer(callbacks=[HFParallelCallback(...)]) with the same settings."
            )
        if self._session is None:
            self._session = Session.start(self.config, self.explanation, accelerator.device, accelerator.num_processes)
            self._session.sample = self._sample
            self._session.total_steps = self._total_steps
            self._session.raw_loop = True
            self._present(self._session.mesh.shape.dp_size)
        attach_accelerator(accelerator, self._session)


def attach_accelerator(accelerator: Accelerator, session: Session) -> None:
    """Make a live accelerator a parallel one."""
    kind = type(accelerator)
    if not issubclass(kind, HFParallelAccelerator):
        accelerator.__class__ = type(f"HFParallel{kind.__name__}", (HFParallelAccelerator, kind), {})
    accelerator.hf_parallel = session


class HFParallelAccelerator(Accelerator):  # type: ignore[misc]
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
        """As stock; models are parallelized first, so that arguments may come in any order."""
        for item in args:
            if isinstance(item, nn.Module):
                self.attach_model(item)
        return super().prepare(*args, device_placement=device_placement)

    def attach_model(self, model: nn.Module) -> Engine:
        """Parallelize `model` if it is not yet, on this accelerator's device."""
        known = self.hf_parallel.engine
        if known is None or known.model is not model:
            if self.device_placement:
                model.to(self.device)
            self._agree_on_skipped_steps()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.mixed_precision] if self.native_amp else None
        self.hf_parallel.compute_dtype = dtype
        engine = self.hf_parallel.attach(model, self.device)
        if dtype is not None:
            engine.autocast = functools.partial(torch.autocast, self.device.type, dtype=dtype)
        engine.scaler = self.scaler
        if engine.gradients.replicas.wire is not None and self.scaler is not None:
            engine.gradients.replicas.wire.loss_scale = functools.partial(loss_scale, self.scaler)
        if known is None and self.hf_parallel.raw_loop:
            state, wanted = self.gradient_state, self.hf_parallel.config.gradient_accumulation_steps
            state.plugin_kwargs["num_steps"] = agreed(wanted, state.num_steps, "Accelerator")
        if known is None and self.hf_parallel.total_steps is not None:
            engine.gradients.replicas.plan_steps(self.hf_parallel.total_steps, 0)
        return engine

    def _agree_on_skipped_steps(self) -> None:
        """fp16: one scale and one skip decision for all ranks. The stock scaler decides on local gradients alone."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        stock: torch.amp.GradScaler | None = self.scaler  # type: ignore[has-type]
        if stock is None or isinstance(stock, ShardedGradScaler) or not dist.is_initialized():
            return
        self.scaler = ShardedGradScaler(
            device=self.device.type,
            init_scale=stock.get_scale(),
            growth_factor=stock.get_growth_factor(),
            backoff_factor=stock.get_backoff_factor(),
            growth_interval=stock.get_growth_interval(),
            process_group=dist.group.WORLD,
        )

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        return args  # sharding happened in attach_model

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Parallelize instead of wrapping: the returned model is the same object."""
        self.attach_model(model)
        if model not in self._models:
            self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """As stock, on the parameters this rank holds."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            self.hf_parallel_engine.gradients.guard(optimizer, self.hf_parallel_engine.model)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = HFParallelOptimizer
            prepared.gradients = self.hf_parallel_engine.gradients
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """As stock, on the gradients that the optimizer will step on."""
        with (
            self.hf_parallel_engine.gradients.shown.withdrawn()
            if self.scaler is not None
            else contextlib.nullcontext()
        ):
            super().unscale_gradients(optimizer)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Shard over the replicas only: all ranks of a model copy read the same batches.

        Raises:
            ConfigError: `dispatch_batches=True`: the stock dispatcher would give every rank other rows.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader)
        if self.dispatch_batches:
            raise ConfigError(
                "dispatch_batches=True sends different rows to every rank, but the ranks of one model copy must read "
                "the same. Leave dispatch_batches unset."
            )
        mesh = self.hf_parallel.mesh
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=mesh.shape.dp_size,
            process_index=mesh.dp_rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            # Unset means True for an IterableDataset, and then every rank gets other rows.
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As stock, stepping once a replica instead of once a process."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.__class__ = HFParallelScheduler
        prepared.steps_per_update = self.hf_parallel.mesh.shape.dp_size
        return prepared

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Any:
        """As stock."""
        self._accumulates = True
        with super().accumulate(*models):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As stock; refuses when somebody replaced the parallelized forward.

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
        with self.hf_parallel.watchdog.engaged():
            super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Any:
        """Gradients are reduced once, on the last backward of a window, whatever this is told."""
        yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip by the norm of the full model's gradient over all ranks of a model copy.

        Raises:
            UnsupportedError: `parameters` is a part of the model.
        """
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
        with self.hf_parallel.watchdog.waiting("waits for the gradient norm of the other ranks"):
            return engine.gradients.clip(float(max_norm), float(norm_type))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over the replicas only (the ranks of a model copy have the same rows) and cut the duplicated tail.

        Raises:
            UnsupportedError: `use_gather_object`, or data that is not tensors.
        """
        if use_gather_object:
            raise UnsupportedError("gather_for_metrics(use_gather_object=True) is not available: gather tensors.")
        mesh = self.hf_parallel.mesh

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor[None] if tensor.ndim == 0 else tensor
            if mesh.dp_group is None:
                return rows
            parts = [torch.empty_like(rows) for _ in range(mesh.shape.dp_size)]
            dist.all_gather(parts, rows.contiguous(), group=mesh.dp_group)
            return torch.cat(parts)

        with self.hf_parallel.watchdog.waiting("waits for the metrics of the other replicas"):
            data = recursively_apply(gather, input_data, error_on_other_type=True)
        state = self.gradient_state
        if state.end_of_dataloader and state.remainder > 0:
            data = recursively_apply(lambda tensor: tensor[: state.remainder], data)
        return data

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The full model's weights on world rank 0, {} elsewhere; collective."""
        attachment = self.hf_parallel_engine.attachment
        attachment.gradients.replicas.synchronise()
        with self.hf_parallel.watchdog.waiting("waits for the weights of the other ranks"):
            state = gather_tensors(
                attachment.ledger, {**attachment.parameters, **attachment.buffers}, self.hf_parallel.mesh
            )
            if dist.is_initialized():
                dist.barrier()
        return state

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Not available: stock code would save the optimizer state of rank 0 only."""
        raise UnsupportedError(
            "accelerator.save_state() is not available: it would save one rank's optimizer state as if it were all. "
            "Use accelerator.get_state_dict(model) for the weights, or a Trainer for full checkpoints."
        )

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Not available, as `save_state`."""
        raise UnsupportedError("accelerator.load_state() is not available. Use a Trainer to resume from checkpoints.")


class HFParallelOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """A prepared optimizer that takes over what user code made of the gradients before a loss scaler looks at them."""

    gradients: GradientSync

    def step(self, closure: Any = None) -> None:
        """As stock."""
        if self.gradient_state.sync_gradients:
            self.gradients.before_update()
        super().step(closure)


class HFParallelScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A prepared scheduler that steps once a replica and update, where stock counts every process."""

    steps_per_update: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizer did."""
        if not self.step_with_optimizer or self.split_batches:
            super().step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.steps_per_update):
            if not hasattr(self.scheduler, "total_steps") or self.scheduler._step_count <= self.scheduler.total_steps:
                self.scheduler.step(*args, **kwargs)
