"""Carries the settings into a worker process, with what a worker must know before anything else is imported.

`accelerate launch` passes neither the path of its config file nor `use_cpu` on to the workers. The path is read from
the launcher's command line with accelerate's own parser; `use_cpu` is put back into the environment. Without the
latter every worker of a CPU launch trains alone, silently.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_parallel.errors import ConfigError
from hf_parallel.machine.queues import ONE_QUEUE, ONE_QUEUE_FIX, has_one_queue
from hf_parallel.machine.tasks import unconnected_task
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import AUTO, FOREIGN_ENGINES, check_accelerate, find_recipe, load_file
from hf_parallel.settings.values import spelled


CONFIG_VARIABLE = "HF_PARALLEL_CONFIG"
USE_CPU_VARIABLE = "ACCELERATE_USE_CPU"
THREE_WAYS = (
    "Give the settings in one of three ways: "
    f"`accelerate launch --config_file FILE script.py`, the environment variable {CONFIG_VARIABLE}=FILE, "
    "or in the script HFParallelCallback(FILE) or HFParallelCallback(pp_size=2)."
)

Source = Literal["argument", "env HF_PARALLEL_CONFIG", "accelerate launch", "none"]
Launcher = Literal["accelerate", "torchrun", "none"]


@dataclass(frozen=True)
class Launch:
    """Facts about the start of this process.

    Args:
        path: The config file that applies, or None.
        source: Giver of that file's name.
        launched_by: Launcher that started the process.
        rank: Global rank, from 0.
        world_size: Processes of the run, 1 or more.
    """

    path: Path | None
    source: Source
    launched_by: Launcher
    rank: int
    world_size: int


def find_launch(argument: str | Path | None = None) -> Launch:
    """Return how this process was started and which config file applies: argument, environment, launcher, none.

    Args:
        argument: A file or recipe name given in code.

    Raises:
        ConfigError: If the argument or the environment variable names no file and no recipe.
    """
    launched_by, launcher_path = _launcher_of(os.getpid())
    path: Path | None
    source: Source
    if argument is not None:
        path, source = find_recipe(argument), "argument"
    elif os.environ.get(CONFIG_VARIABLE):
        path, source = _recipe_of_environment(), "env HF_PARALLEL_CONFIG"
    elif launcher_path is not None:
        path, source = launcher_path, "accelerate launch"
    else:
        path, source = None, "none"
    return Launch(path, source, launched_by, _int("RANK", 0), _int("WORLD_SIZE", 1))


def resolve_config(
    config: HFParallelConfig | Mapping[str, Any] | str | Path | None = None, **overrides: Any
) -> tuple[HFParallelConfig, str]:
    """Return the settings of this process and a sentence that says which layout was chosen and why.

    Args:
        config: The settings, a mapping of them, a file, a recipe name, "auto" (planned when training starts), or None: the environment variable
            HF_PARALLEL_CONFIG, else the file given to `accelerate launch`, else pure data parallelism.
        overrides: Settings that replace those found, as in `HFParallelConfig.with_overrides`.

    Raises:
        ConfigError: If the settings are not valid, do not fit the number of processes, or are nowhere to be found
            under a launcher that knows no config file.
    """
    refuse_unconnected_task()
    launch = find_launch(config if isinstance(config, str | Path) and config != AUTO else None)
    accelerate: Mapping[str, Any] | None = None
    if isinstance(config, HFParallelConfig):
        found, origin = config, "the HFParallelConfig given in code"
    elif config == AUTO:
        found, origin = HFParallelConfig(layout="auto"), "'auto' given in code"
    elif isinstance(config, Mapping):
        # What a mapping leaves open the overrides may say: only together are they settings.
        source = f"config with overrides {', '.join(overrides)}" if overrides else "config"
        found = HFParallelConfig.from_mapping(HFParallelConfig.replaced(config, **overrides), source)
        origin = "the mapping given in code"
    elif launch.path is not None and (config is None or isinstance(config, str | Path)):
        found, accelerate, origin = _of_file(launch, launch.path)
    elif config is not None and not isinstance(config, str | Path):
        raise ConfigError(
            f"config={spelled(config)}: expected a file, the name of a recipe, a mapping, an HFParallelConfig or None. Give one "
            "of them, for example load_recipe('cpu_pp2')."
        )
    else:
        found, origin = _of_nothing(launch, has_overrides=bool(overrides))
    if overrides and not isinstance(config, Mapping):
        found = found.with_overrides(**overrides)
    origin += f" with {', '.join(overrides)} overridden in code" if overrides else ""
    check_fit(found, accelerate, launch, origin)
    return found, _explain(found, launch.world_size, origin)


def refuse_unconnected_task() -> None:
    """Refuse a process that a cluster's launcher started beside others, which it knows nothing of.

    Raises:
        ConfigError: With the command that starts such a run.
    """
    tasks = unconnected_task(os.environ)
    if tasks is None:
        return
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return
    of_slurm = tasks.launcher == "srun"
    node = "$SLURM_NODEID" if of_slurm else "NUMBER_OF_THE_NODE"
    start = "srun --ntasks-per-node=1 bash -c" if of_slurm else f"{tasks.launcher}, one task a node, of bash -c"
    raise ConfigError(
        f"{tasks.variable}={tasks.value} without WORLD_SIZE: {tasks.launcher} started several tasks that know nothing of each "
        "other, so each of them would train alone. Let each node start one launcher, with the number of GPUs on all nodes as "
        f"N: {start} 'accelerate launch --config_file FILE --num_processes N --num_machines NODES --machine_rank {node} "
        "--main_process_ip FIRST_NODE --main_process_port 29500 script.py'. If each task is meant to be a run of its own, set "
        "WORLD_SIZE=1."
    )


def check_world(config: HFParallelConfig, accelerate_processes: int | None = None) -> None:
    """Refuse to train when the processes that were started do not form the world that `config` needs.

    Args:
        config: The settings of the run.
        accelerate_processes: `accelerator.num_processes`, if there is an accelerator. On a machine without a GPU a
            bare `PartialState()` connects the workers and yet reports one process to everything built on it.

    Raises:
        ConfigError: If there is no process group although several processes were started, if the group or accelerate
            counts another number, or if the world does not divide into whole model copies.
    """
    import torch.distributed as dist

    launched = _int("WORLD_SIZE", 1)
    connected = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if connected != launched and launched > 1:
        raise ConfigError(
            f"WORLD_SIZE={launched} but torch.distributed connects {connected} process: every rank would train alone. "
            f"Import hf_parallel before TrainingArguments or Accelerator, or set {USE_CPU_VARIABLE}=true on a machine "
            f"without a GPU."
        )
    if accelerate_processes not in (None, connected):
        raise ConfigError(
            f"accelerate counts {accelerate_processes} process but torch.distributed connects {connected}: every rank "
            "would train alone. Create TrainingArguments or Accelerator first in the script, before any PartialState(); in a "
            "notebook import hf_parallel in the function that notebook_launcher runs, and in no earlier cell."
        )
    try:
        config.dp_size(connected)
    except ConfigError as error:
        raise ConfigError(f"{error}{_one_process_hint(connected, config)}") from None


def _int(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if len(text) > 9 or not (text.isascii() and text.lstrip("-").isdigit()):
        raise ConfigError(f"{name}={spelled(text)}: expected an integer. Let the launcher set it, or unset {name}.")
    return int(text)


def _of_machine(world_size: int) -> int:
    """Ranks of this machine."""
    local = _int("LOCAL_WORLD_SIZE", world_size)
    if local < 1:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local}: a machine has one rank or more. Let the launcher set it, or unset it."
        )
    return local


def _recipe_of_environment() -> Path:
    try:
        return find_recipe(os.environ[CONFIG_VARIABLE])
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from None


def settings_of(launch: Launch) -> tuple[HFParallelConfig | None, Mapping[str, Any]]:
    """The settings of hf_parallel in the file that applies (None if it has none), and its accelerate settings.

    The import of hf_parallel, `from_pretrained` and the callback ask for the same file of a launch: it is read once.

    Raises:
        ConfigError: With the file name and every problem of our section.
    """
    if launch.path is None:
        return None, {}
    if launch.source == "argument" or not launch.path.is_file():  # what is no file is refused with the reason
        return load_file(launch.path)
    status = launch.path.stat()
    return _file_of_launch(launch.path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _file_of_launch(path: Path, modified_ns: int, num_bytes: int) -> tuple[HFParallelConfig | None, Mapping[str, Any]]:
    """Load a file once for each version of it.

    An import can hand nothing to later calls, and a notebook may change the file.
    """
    return load_file(path)


def _of_file(launch: Launch, path: Path) -> tuple[HFParallelConfig, Mapping[str, Any], str]:
    config, accelerate = settings_of(launch)
    source = launch.source
    if config is not None:
        return config, accelerate, f"{path} ({source})"
    if source != "accelerate launch":
        raise ConfigError(f"{path} ({source}): it has no parallelism_config.hf_parallel section. Add one.")
    origin = f"the defaults, because {path} ({source}) has no parallelism_config.hf_parallel section"
    return HFParallelConfig(), accelerate, origin


def _of_nothing(launch: Launch, has_overrides: bool) -> tuple[HFParallelConfig, str]:
    if launch.launched_by == "torchrun" and launch.world_size > 1 and not has_overrides:
        raise ConfigError(
            f"WORLD_SIZE={launch.world_size} and no settings: torchrun knows no config file, and guessing a layout "
            f"could waste the run. {THREE_WAYS}"
        )
    return HFParallelConfig(), "the defaults, because no config file was given"


def check_fit(config: HFParallelConfig, accelerate: Mapping[str, Any] | None, launch: Launch, origin: str) -> None:
    """Check a config against the launch as it is: its file, its engine, its number of processes."""
    try:
        engine = [kind for kind in FOREIGN_ENGINES if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true"]
        if engine and not accelerate and config.zero.engine != "deepspeed":
            check_accelerate(config, {"distributed_type": engine[0]}, launch.world_size)
        elif accelerate and (launch.world_size > 1 or launch.launched_by == "accelerate"):
            check_accelerate(config, accelerate, launch.world_size)
        config.dp_size(launch.world_size)
        config.check_links(launch.world_size, _of_machine(launch.world_size))
        _refuse_one_queue(config)
    except ConfigError as error:
        raise ConfigError(f"{origin}:\n{error}{_one_process_hint(launch.world_size, config)}") from None


def _refuse_one_queue(config: HFParallelConfig) -> None:
    """Refuse stages where a GPU has one queue for all streams; now, since a process group would need the device already."""
    if config.pp_size > 1 and has_one_queue(os.environ) and os.environ.get(USE_CPU_VARIABLE, "").lower() != "true":
        import torch

        if torch.cuda.is_available():
            raise ConfigError(f"pp_size={config.pp_size}: {ONE_QUEUE}. {ONE_QUEUE_FIX}")


def _one_process_hint(world_size: int, config: HFParallelConfig) -> str:
    if world_size > 1 or config.model_parallel_size == 1:
        return ""
    return (
        f" This is one process: start {config.model_parallel_size} with `accelerate launch` and a file with distributed_type: MULTI_GPU "
        "(also on CPUs, with use_cpu: true: MULTI_CPU starts one)."
    )


def _explain(config: HFParallelConfig, world_size: int, origin: str) -> str:
    dp_size = config.dp_size(world_size)
    if world_size == 1:
        layout = "nothing is parallel (one process)"
    elif config.layout == AUTO:
        layout = f"a layout of {world_size} processes that is planned when training starts"
    elif config.zero.engine == "deepspeed":
        layout = f"DeepSpeed ZeRO-{config.zero.stage} over {world_size} processes"
    elif not config.splits_model:
        layout = f"pure data parallelism over {world_size} processes"
    elif config.ep_size > 1:
        sizes = f"pp {config.pp_size} x dp {dp_size}" if config.pp_size > 1 else f"dp {dp_size}"
        layout = f"{sizes}, experts over ep {config.ep_size} of its ranks, over {world_size} processes"
    else:
        sequence = f" x sp {config.sp_size}" if config.sp_size > 1 else ""
        layout = f"tp {config.tp_size} x pp {config.pp_size}{sequence} x dp {dp_size} over {world_size} processes"
    return f"{layout}, from {origin}"


def has_accelerator() -> bool:
    """Whether ranks can have a device of their own with a communication backend (Apple's MPS has none)."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


@functools.lru_cache(maxsize=1)
def _launcher_of(process: int) -> tuple[Launcher, Path | None]:
    """Return the launcher among the parents of this process, and the config file on its command line.

    Nothing can change either while the process lives; one forked from it has another number.
    """
    import psutil

    try:
        found = _launching(process)
        if found is not None:
            parent, command = found
            arguments = _accelerate_arguments(command)
            return ("torchrun", None) if arguments is None else ("accelerate", _config_file(arguments, parent.cwd()))
    except (psutil.Error, OSError) as error:  # a container may hide /proc; the argument and the variable still work
        warnings.warn(f"hf_parallel: the launcher cannot be inspected ({error}). {THREE_WAYS}", stacklevel=2)
    return ("torchrun" if "LOCAL_RANK" in os.environ else "none"), None


def launcher_pid(process: int) -> int | None:
    """Number of the process that launched `process`: the nearest of its parents that is a launcher; None without one."""
    import psutil

    try:
        found = _launching(process)
    except (psutil.Error, OSError):  # a container may hide /proc: nothing of an earlier start is known then
        return None
    return None if found is None else found[0].pid


@functools.lru_cache(maxsize=1)
def _launching(process: int) -> tuple[Any, list[str]] | None:
    """The nearest parent of a process that is a launcher (psutil's), and its command line."""
    import psutil

    for parent in psutil.Process(process).parents():
        command = parent.cmdline()
        if _accelerate_arguments(command) is not None or _is_torchrun(command):
            return parent, command
    return None


def _accelerate_arguments(command: list[str]) -> list[str] | None:
    """Return what follows `accelerate launch` on a command line, in any of its spellings, or None."""
    for index, token in enumerate(command[:-1]):
        program, rest = os.path.basename(token), command[index + 1 :]
        if (program in ("accelerate", "accelerate.exe") or token == "accelerate.commands.accelerate_cli") and (
            rest[0] == "launch"
        ):
            return rest[1:]
        is_module = token == "accelerate.commands.launch" or token.endswith("accelerate/commands/launch.py")
        if program in ("accelerate-launch", "accelerate-launch.exe") or is_module:
            return rest
    return None


def _is_torchrun(command: list[str]) -> bool:
    return any(os.path.basename(token) == "torchrun" or token == "torch.distributed.run" for token in command[:4])


def _config_file(arguments: list[str], cwd: str) -> Path | None:
    """Return the file that accelerate itself reads for these launch arguments, or None."""
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command_parser

    known, _ = launch_command_parser().parse_known_args(arguments)
    if known.config_file is not None:
        return Path(cwd, known.config_file).resolve()
    default = Path(default_config_file)
    return default if default.is_file() and not known.cpu else None
