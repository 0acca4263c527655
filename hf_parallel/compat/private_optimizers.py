"""Private names of torch's optimizers, their schedulers and loss scalers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from hf_parallel.errors import UnsupportedError


if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer


def loss_scale(scaler: Any) -> Tensor:
    """Factor by which an fp16 loss scaler multiplies losses now; does not wait for the device.

    Raises:
        UnsupportedError: This torch keeps it elsewhere.
    """
    scale: Tensor | None = getattr(scaler, "_scale", None)
    if scale is None:
        raise UnsupportedError(
            f"the scale of {type(scaler).__name__} cannot be read, so what gradient compression feeds back would be in "
            "the wrong units. Train in bf16, or set gradient_compression.method to int8."
        )
    return scale


def own_step(optimizer: Optimizer) -> Any:
    """The `step` that was put on an optimizer itself; None if it is its class's, which schedulers wrap to see that it is called."""
    step: Any = vars(optimizer).get("step")
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    return None if getattr(step, "__func__", step) is type(optimizer).step else step  # a loss scaler leaves it bound


def is_of_loss_scaler(step: Any) -> bool:
    """Whether accelerate has put a step on an optimizer, for as long as its loss scaler calls it."""
    return getattr(step, "__module__", None) == "accelerate.optimizer"


def steps_counted(scheduler: Any) -> int:
    """Number of steps of a learning rate scheduler, the one of its constructor included."""
    return int(scheduler._step_count)


def count_step(scheduler: Any) -> None:
    """Count a step that is not taken, as accelerate does between two updates."""
    scheduler._step_count += 1


def allow_foreach(kind: type[Tensor]) -> None:
    """Let torch's optimizers choose their kernels for lists of tensors for a subclass too, as torch does for DTensor."""
    from torch.optim.optimizer import _foreach_supported_types

    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def scaler_of_group(stock: torch.amp.GradScaler, device: str, group: ProcessGroup | None) -> torch.amp.GradScaler:
    """A loss scaler with the settings of `stock` that skips a step on all ranks of a group or on none.

    Args:
        stock: Makes the decision from its own rank's gradients.
        device: Type of the device that the scale is on.
        group: The ranks that decide together.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class GroupGradScaler(ShardedGradScaler):
        def unscale_(self, optimizer: Optimizer) -> None:
            super().unscale_(optimizer)
            # Its flags have shape (1,); fused optimizers subtract them from step counts of shape ().
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                flag.squeeze_()

    if isinstance(stock, ShardedGradScaler):
        return stock
    return GroupGradScaler(
        device=device,
        init_scale=stock.get_scale(),
        growth_factor=stock.get_growth_factor(),
        backoff_factor=stock.get_backoff_factor(),
        growth_interval=stock.get_growth_interval(),
        enabled=stock.is_enabled(),
        process_group=group,
    )


def is_hook_table(name: str) -> bool:
    """Whether an attribute of an optimizer holds hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def step_hooks(optimizer: Optimizer) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """The hooks before and after a step, by the ids of their handles, in the order in which they run."""
    tables = (
        getattr(optimizer, "_optimizer_step_pre_hooks", None),
        getattr(optimizer, "_optimizer_step_post_hooks", None),
    )
    if not all(isinstance(table, OrderedDict) for table in tables):
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} does not keep hooks of its steps as torch.optim.Optimizer does. Derive it "
            "from that class, and call its __init__."
        )
    return tables  # type: ignore[return-value]
