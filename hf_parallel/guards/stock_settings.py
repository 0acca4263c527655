"""Settings of a stock Accelerator that speak to what hf_parallel takes the place of: refused by name, never dropped.

DDP's own promises (`find_unused_parameters`, `static_graph`, `gradient_as_bucket_view`) hold here always: every gradient
is looked at. `broadcast_buffers=False` is honoured where buffers are sent. What would change bytes, kernels or owners is an error.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType

from hf_parallel.errors import ConfigError


WITHOUT_EFFECT = {
    "bucket_cap_mb": "set data_parallel.bucket_cap_mb of the hf_parallel settings",
    "comm_hook": "set gradient_compression.method (fp16, bf16, powersgd, ...) of the hf_parallel settings",
    "comm_wrapper": "set gradient_compression.method of the hf_parallel settings",
    "comm_state_option": "set gradient_compression.matrix_approximation_rank and its neighbours of the hf_parallel settings",
    "dim": "leave it 0: batches are split over the replicas by rows",
}
DRIVERS = {
    DistributedType.FSDP: "fsdp_plugin (set zero.stage: 3 of the hf_parallel settings instead)",
    DistributedType.DEEPSPEED: "deepspeed_plugin (set zero.stage of the hf_parallel settings instead)",
    DistributedType.MEGATRON_LM: "megatron_lm_plugin (set tp_size and pp_size of the hf_parallel settings instead)",
}


def refuse_settings(accelerator: Accelerator) -> None:
    """Refuse what the constructor of `Accelerator` was given and nothing would read; every problem at once.

    Raises:
        ConfigError: Each setting with its value and what to set instead, one a line.
    """
    problems = [*_of_ddp(accelerator.ddp_handler)]
    if accelerator.mixed_precision == "fp8":
        problems.append("mixed_precision=fp8 is not available. Set it to bf16.")
    driver = DRIVERS.get(accelerator.distributed_type)
    if driver is not None:
        problems.append(
            f"{driver} beside HFParallelPlugin: both would own the model. Take one of the two out, also of the file that "
            "accelerate launch was given."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _of_ddp(handler: DistributedDataParallelKwargs | None) -> list[str]:
    if handler is None:
        return []
    stock, found = DistributedDataParallelKwargs(), []
    for name, instead in WITHOUT_EFFECT.items():
        value: Any = getattr(handler, name)
        if value != getattr(stock, name):
            found.append(
                f"DistributedDataParallelKwargs({name}={getattr(value, 'value', value)}) has no effect: there is no DDP to read it. "
                f"Take it out and {instead}."
            )
    return found
