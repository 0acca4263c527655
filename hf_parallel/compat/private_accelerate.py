"""Private names of accelerate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.compat.overridden import changed_methods
from hf_parallel.compat.versions import wanted
from hf_parallel.errors import UnsupportedError


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accelerate import Accelerator, ParallelismConfig

# Methods of stock classes that a parallel run overrides, each with the names of its parameters. One that is renamed would
# never be called, one with other parameters would be handed the wrong ones.
OF_ACCELERATOR = {
    "accumulate": "models",
    "backward": "loss kwargs",
    "check_trigger": "",
    "clear": "objects",
    "clip_grad_norm_": "parameters max_norm norm_type",
    "free_memory": "objects",
    "gather": "tensor",
    "gather_for_metrics": "input_data use_gather_object",
    "get_state_dict": "model unwrap",
    "join_uneven_inputs": "joinables even_batches",
    "load_state": "input_dir load_kwargs load_model_func_kwargs",
    "no_sync": "model",
    "prepare": "args device_placement",
    "prepare_data_loader": "data_loader device_placement slice_fn_for_dispatch",
    "prepare_model": "model device_placement evaluation_mode",
    "prepare_optimizer": "optimizer device_placement",
    "prepare_scheduler": "scheduler",
    "reduce": "tensor reduction scale",
    "save_model": "model save_directory max_shard_size safe_serialization",
    "save_state": "output_dir safe_serialization save_model_func_kwargs",
    "skip_first_batches": "dataloader num_batches",
    "split_between_processes": "inputs apply_padding",
    "unscale_gradients": "optimizer",
    "wait_for_everyone": "",
}
OF_PARALLELISM_CONFIG = {"_validate_accelerator": "accelerator", "build_device_mesh": "device_type"}
OF_OPTIMIZER = {
    "add_param_group": "param_group",
    "load_state_dict": "state_dict",
    "state_dict": "",
    "step": "closure",
}
OF_SCHEDULER = {"step": "args kwargs"}


def accelerator_internals(stock: type[Accelerator] | None = None) -> None:
    """Refuse an accelerate whose classes lack a method that hf_parallel overrides, or give it other parameters.

    Args:
        stock: The stock class of accelerators; None for accelerate's own.

    Raises:
        UnsupportedError: Names the classes, the methods and the version range that has them.
    """
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    expected = {
        stock or accelerate.Accelerator: OF_ACCELERATOR,
        accelerate.ParallelismConfig: OF_PARALLELISM_CONFIG,
        AcceleratedOptimizer: OF_OPTIMIZER,
        AcceleratedScheduler: OF_SCHEDULER,
    }
    changed = [f"{kind.__name__} has {text}" for kind in expected for text in changed_methods(kind, expected[kind])]
    if changed:
        raise UnsupportedError(
            f"accelerate {accelerate.__version__}: {'; '.join(changed)}. Install {wanted('accelerate')}."
        )


def set_axis_sizes(config: ParallelismConfig, sizes: Mapping[str, int]) -> None:
    """Give a ParallelismConfig the sizes of its mesh axes, which its constructor derives from its fields."""
    config._sizes = dict(sizes)


PREPARED = "_is_accelerate_prepared"


def is_prepared(item: Any) -> bool:
    """Whether a model, optimizer or loader came out of `Accelerator.prepare`."""
    return bool(getattr(item, PREPARED, False))


def mark_prepared(item: Any) -> None:
    """Mark an object as prepared, so that accelerate leaves it as it is."""
    setattr(item, PREPARED, True)


@dataclass(frozen=True)
class Prepared:
    """The lists in which an Accelerator keeps the objects of a loop, in the order in which they were prepared.

    Args:
        models: The models.
        optimizers: Its wrappers of optimizers.
        schedulers: Its wrappers of schedulers.
        loaders: The data loaders.
        registered: Objects of `register_for_checkpointing`.
        before_save: Hooks of `register_save_state_pre_hook`.
        before_load: Hooks of `register_load_state_pre_hook`.
    """

    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any]
    loaders: list[Any]
    registered: list[Any]
    before_save: list[Callable[..., Any]]
    before_load: list[Callable[..., Any]]


def prepared_by(accelerator: Accelerator) -> Prepared:
    """Collect what was prepared by, and registered with, an Accelerator.

    Raises:
        UnsupportedError: This accelerate keeps it elsewhere.
    """
    names = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
    hooks = ("_save_model_state_pre_hook", "_load_model_state_pre_hook")
    missing = [name for name in (*names, *hooks) if name not in vars(accelerator)]
    if missing:
        import accelerate

        raise UnsupportedError(
            f"accelerate {accelerate.__version__} has no Accelerator.{missing[0]}: what was prepared cannot be told. Install "
            f"{wanted('accelerate')}."
        )
    own = vars(accelerator)
    return Prepared(*(own[name] for name in names), *(list(own[name].values()) for name in hooks))


def connect_deepspeed_by_gloo() -> None:
    """Let accelerate connect CPU processes for DeepSpeed; it has no backend for them and would count one process.

    The stock way is `TrainingArguments(ddp_backend="gloo")`, which every user would have to know. For the whole process: its
    one `PartialState` is made somewhere in the user's code after this, so there is no scope that begins and ends around it.

    Raises:
        UnsupportedError: This accelerate chooses its backend elsewhere.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    name = "_prepare_backend"
    stock = vars(PartialState).get(name)
    if stock is None:
        import accelerate

        raise UnsupportedError(
            f"accelerate {accelerate.__version__} does not choose a backend in PartialState.{name}: DeepSpeed cannot connect CPU "
            f"processes. Install {wanted('accelerate')}, or set zero.engine to auto."
        )
    if getattr(stock, "for_deepspeed", False):
        return

    def prepare(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        if cpu or sagemaker_dp:
            return stock(self, cpu, sagemaker_dp, backend)
        return backend or "gloo", DistributedType.NO

    prepare.for_deepspeed = True  # type: ignore[attr-defined]
    setattr(PartialState, name, prepare)
