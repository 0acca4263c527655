"""Writes our settings as a DeepSpeed config. Values that the Trainer owns are 'auto': it fills them in and nothing can differ.

Pure.
"""

from __future__ import annotations

from typing import Any, Final

from hf_parallel.settings.config import HFParallelConfig


# What DeepSpeed 0.19.8 does without the section (runtime/swap_tensor/constants.py), said so that it can be looked up.
AIO: Final = {"block_size": 2**20, "queue_depth": 8, "single_submit": False, "overlap_events": True}


def deepspeed_settings(config: HFParallelConfig, *, cpu_adam: bool = True) -> dict[str, Any]:
    """The DeepSpeed config of our `zero` and `data_parallel` sections.

    Args:
        config: The settings; others than those of the two sections are not looked at.
        cpu_adam: Whether an offloaded optimizer may be DeepSpeed's own, which has to be compiled; else it is torch's.
    """
    found: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": _zero_optimization(config),
    }
    if config.zero.offload_optimizer != "none" and not cpu_adam:
        found["zero_force_ds_cpu_optimizer"] = False
    if "nvme" in (config.zero.offload_optimizer, config.zero.offload_param):
        found["aio"] = dict(AIO)
    return found


def _zero_optimization(config: HFParallelConfig) -> dict[str, Any]:
    zero, messages = config.zero, config.data_parallel
    bucket = type(messages).model_fields["bucket_cap_mb"].default
    settings: dict[str, Any] = {
        "stage": zero.stage,
        "overlap_comm": messages.overlap,
        "reduce_bucket_size": "auto" if messages.bucket_cap_mb == bucket else int(messages.bucket_cap_mb * 2**19),
    }
    for part, device in (("optimizer", zero.offload_optimizer), ("param", zero.offload_param)):
        if device != "none":
            settings[f"offload_{part}"] = {"device": device, "pin_memory": zero.pin_memory is not False}
        if device == "nvme":
            settings[f"offload_{part}"]["nvme_path"] = zero.nvme_path
    if zero.stage == 3:
        settings |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return settings
