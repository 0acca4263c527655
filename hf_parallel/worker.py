"""Prepares a launched process before `TrainingArguments` or `Accelerator` exist."""

from __future__ import annotations

import os

from hf_parallel.compat.private_collectives import record_collectives
from hf_parallel.compat.private_rendezvous import separate_starts
from hf_parallel.deepspeed.worker import DEVICE, is_cpu_worker, prepare_deepspeed
from hf_parallel.logs import quiet_other_ranks, quiet_without_device
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.interfaces import GLOO, chosen_interface, is_on_several_machines, this_network
from hf_parallel.settings.launch import USE_CPU_VARIABLE, check_fit, find_launch, has_accelerator, settings_of


def prepare_worker() -> None:
    """Make a launched process ready; must run before `TrainingArguments` or `Accelerator` exist.

    On a machine without an accelerator, or if the config file says `use_cpu: true`, accelerate is told to use the CPU.
    The config file is validated, so that a bad one ends the run before any process group exists. With several machines gloo
    is told which interface leads to the others.

    Raises:
        ConfigError: If the config file that applies is not valid for this launch, or several interfaces could be meant.
    """
    if "LOCAL_RANK" not in os.environ:
        return
    separate_starts(os.environ)
    choose_interface()
    quiet_other_ranks(int(os.environ.get("RANK", "0") or 0))
    launch = find_launch()
    config, accelerate = settings_of(launch)
    if config is not None:
        check_fit(config, accelerate, launch, f"{launch.path} ({launch.source})")
    if accelerate.get("use_cpu") is True or not has_accelerator():
        os.environ.setdefault(USE_CPU_VARIABLE, "true")
        quiet_without_device()
    if not has_accelerator():
        os.environ.setdefault(DEVICE, "cpu")  # what DeepSpeed finds out itself, and logs on every rank
    else:
        record_collectives(os.environ)
    if config is not None:
        prepare_engine(config)


def choose_interface() -> None:
    """Tell gloo which interface leads to the other machines, if there are any and the host name does not say it.

    Raises:
        ConfigError: Several could be meant.
    """
    if is_on_several_machines(os.environ) and "MASTER_ADDR" in os.environ:
        interface = chosen_interface(os.environ, this_network(os.environ["MASTER_ADDR"]))
        if interface is not None:
            os.environ[GLOO] = interface


def prepare_engine(config: HFParallelConfig) -> None:
    """Hand a launched process to DeepSpeed if the settings say so; must run before the Trainer's accelerator exists.

    Raises:
        ConfigError: DeepSpeed cannot run here.
    """
    if config.zero.engine != "deepspeed" or "LOCAL_RANK" not in os.environ:
        return
    chosen = os.environ.get(USE_CPU_VARIABLE, "").lower() == "true"
    prepare_deepspeed(config, on_cpu=chosen or is_cpu_worker() or not has_accelerator())
