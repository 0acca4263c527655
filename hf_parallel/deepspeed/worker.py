"""Makes a launched process a DeepSpeed worker, before `TrainingArguments` or `Accelerator` exist.

accelerate builds its DeepSpeed plugin from environment variables. They are all set here, from our one section: what a
launcher exported of a `deepspeed_config` section is removed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from typing import Final

from hf_parallel.compat.private_accelerate import connect_deepspeed_by_gloo
from hf_parallel.deepspeed.emit import deepspeed_settings
from hf_parallel.deepspeed.ops import (
    CPU_ADAM,
    missing_compilers,
    needed_ops,
    refuse_locks,
    refuse_missing_aio,
    start_of_launch,
    unbuilt,
    without_shared_memory,
)
from hf_parallel.deepspeed.rules import folder_problems
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig


logger = logging.getLogger(__name__)

USE_DEEPSPEED: Final = "ACCELERATE_USE_DEEPSPEED"
SETTINGS: Final = "ACCELERATE_DEEPSPEED_CONFIG_FILE"  # takes JSON as well as a path
DEVICE: Final = "DS_ACCELERATOR"
# Of a launcher; accelerate would read them beside the settings.
OTHERS: Final = (
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_DEEPSPEED_",
    "ACCELERATE_GRADIENT_",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_USE_CPU",  # with it accelerate takes DDP, DeepSpeed or not
)


def is_cpu_worker() -> bool:
    """Whether an earlier call has told DeepSpeed to run on the CPU."""
    return os.environ.get(DEVICE) == "cpu"


def prepare_deepspeed(config: HFParallelConfig, *, on_cpu: bool) -> None:
    """Let accelerate hand this run to DeepSpeed with the settings that `config` stands for.

    Args:
        config: Settings with `zero.engine: deepspeed`.
        on_cpu: Whether the processes train on the CPU.

    Raises:
        ConfigError: DeepSpeed is not installed, cannot be built, or cannot write where it should.
    """
    refuse_machine(config, on_cpu=on_cpu)
    for name in [name for name in os.environ if name.startswith(OTHERS)]:
        del os.environ[name]
    settings = deepspeed_settings(config, cpu_adam=has_cpu_adam(config))
    os.environ |= {USE_DEEPSPEED: "true", SETTINGS: json.dumps(settings)}
    if os.environ.get("LOCAL_RANK") == "0" and not missing_compilers():
        _announce(unbuilt(needed_ops(config, on_cpu=on_cpu)))
    if on_cpu:
        os.environ |= {DEVICE: "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
        connect_deepspeed_by_gloo()
        if missing_compilers():
            without_shared_memory()


def _announce(names: list[str]) -> None:
    if names:
        logger.warning(
            "hf_parallel: %s will be compiled now, once, which takes minutes; `hf-parallel prebuild FILE` does so before a run.",
            ", ".join(names),
        )


def has_cpu_adam(config: HFParallelConfig) -> bool:
    """Whether an offloaded optimizer is DeepSpeed's own."""
    return CPU_ADAM in needed_ops(config, on_cpu=False) and not missing_compilers()


def refuse_missing_deepspeed() -> None:
    """Refuse to go on without the package.

    Raises:
        ConfigError: Says which extra to install.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "zero.engine=deepspeed: DeepSpeed is not installed. Run pip install 'hf_parallel[deepspeed]', or set zero.engine to "
            "auto."
        )


def refuse_machine(config: HFParallelConfig, *, on_cpu: bool) -> None:
    """Refuse what would fail late or wait for ever on this machine.

    Raises:
        ConfigError: With the fix.
    """
    refuse_missing_deepspeed()
    zero = config.zero
    refuse_locks(needed_ops(config, on_cpu=on_cpu), start_of_launch())
    if "nvme" in (zero.offload_optimizer, zero.offload_param):
        problems = list(folder_problems("zero.nvme_path", zero.nvme_path))
        if problems:
            raise ConfigError("\n".join(problems))
        refuse_missing_aio()
