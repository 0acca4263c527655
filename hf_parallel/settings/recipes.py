"""Recipes: accelerate config files with one section of ours, `parallelism_config: {hf_parallel: ...}`.

That place is the only one: accelerate refuses unknown top-level keys, ignores unknown keys inside this section, and
keeps them when it rewrites a file. Nobody else checks what stands there, so everything is checked here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_parallel.errors import MAX_LINES, ConfigError
from hf_parallel.settings.asynchronous_rules import fp16_ahead
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.file import parse_yaml, read_bounded
from hf_parallel.settings.precision import fp16_on_cpu
from hf_parallel.settings.problems import as_mapping
from hf_parallel.settings.values import MAX_SHOWN, shown, spelled


SECTION = "parallelism_config"
KEY = "hf_parallel"
AUTO = "auto"  # stands for {layout: auto}, in a file and in code
ONE_PROCESS_TYPES = ("NO", "MULTI_CPU")
SECTIONS = (
    SECTION,
    "deepspeed_config",
    "fsdp_config",
    "megatron_lm_config",
    "fp8_config",
    "dynamo_config",
    "mpirun_config",
)
FOREIGN_ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
# Keys of a `deepspeed_config` section that start processes on several machines and say nothing about training.
LAUNCHER_ONLY = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
)


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes: inside the package when installed, beside it in a checkout."""
    installed = Path(__file__).parents[1] / "recipes_data"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def list_recipes() -> list[str]:
    """Return the names of the shipped recipes, sorted."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def find_recipe(name_or_path: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        name_or_path: A file, else the name of a shipped recipe (`cpu_pp2` or `cpu_pp2.yaml`).

    Raises:
        ConfigError: If it is neither; names the nearest recipe.
    """
    if not isinstance(name_or_path, str | Path):
        raise ConfigError(f"recipe {spelled(name_or_path)}: expected the path of a file or the name of a recipe.")
    path = Path(name_or_path)
    try:
        path = path.expanduser()
        if path.is_file():
            return path.resolve()
        kind = "a folder" if path.is_dir() else "a device or a pipe" if path.exists() else ""
    except (OSError, RuntimeError, ValueError):  # a name too long, a home of nobody: no such file
        path, kind = Path(path.name[-MAX_SHOWN:]), ""
    names = list_recipes()
    name = path.stem if path.suffix in (".yaml", ".yml") else path.name
    if name in names and len(path.parts) == 1:
        return recipes_folder() / f"{name}.yaml"
    if kind:
        raise ConfigError(
            f"{_end_of(str(name_or_path))}: this is {kind}, not a file. Name a settings file or a recipe."
        )
    nearest = difflib.get_close_matches(name[:MAX_SHOWN], names, n=1, cutoff=0.7)
    hint = f"Did you mean {nearest[0]}?" if nearest else "`hf-parallel recipes` lists the recipes."
    if path.suffix or len(path.parts) != 1:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"{_end_of(str(name_or_path))}: this file does not exist{where}. {hint}")
    raise ConfigError(
        f"recipe {spelled(str(name_or_path))}: no such file in {Path.cwd()} and no recipe of that name. {hint} "
        f"Recipes: {', '.join(names)}."
    )


def _end_of(path: str) -> str:
    """A path in a message; of a long one the end, which tells files of one folder apart."""
    return spelled(path) if len(path) < MAX_SHOWN - 2 else f"'...{path[5 - MAX_SHOWN :]}'"


def read_section(path: Path) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """Return our section of an accelerate config file (None if it has none) and the whole file.

    Raises:
        ConfigError: If the file is not a YAML mapping, or holds our key in another place than `parallelism_config`.
    """
    return section_of(read_bounded(path), path)


def section_of(text: str, path: Path) -> tuple[Mapping[str, Any] | None, Mapping[str, Any]]:
    """Do what `read_section` does, for the text of the file `path`."""
    accelerate = parse_yaml(text, path)
    accelerate = {} if accelerate is None else accelerate
    if not isinstance(accelerate, dict):
        raise ConfigError(f"{path}: expected a mapping, found {type(accelerate).__name__}. Write `key: value` lines.")
    odd = odd_sections(path, accelerate)
    if odd:
        raise ConfigError("\n".join(odd[:MAX_LINES]))
    places = [name for name, value in accelerate.items() if isinstance(value, dict) and KEY in value]
    for name in places:
        if name not in (SECTION, KEY) and difflib.get_close_matches(str(name)[:MAX_SHOWN], [SECTION], cutoff=0.85):
            raise ConfigError(f"{path}: {name}: unknown key. Did you mean {SECTION}?")
    misplaced = [f"{name}.{KEY}" for name in places if name != SECTION] + ([KEY] if KEY in accelerate else [])
    if misplaced:
        raise ConfigError(
            f"{path}: {' and '.join(misplaced)}: the settings stand in {SECTION}.{KEY} and nowhere else. Move them there."
        )
    if SECTION not in places:
        _refuse_misspelled_key(path, accelerate.get(SECTION))
        return None, accelerate
    section = accelerate[SECTION][KEY]
    if section == AUTO:
        return {"layout": AUTO}, accelerate
    if section is not None and not isinstance(section, dict):
        near = isinstance(section, str) and difflib.get_close_matches(section[:MAX_SHOWN].lower(), [AUTO], cutoff=0.6)
        fix = f"Set it to {AUTO}." if near else as_mapping(section)
        raise ConfigError(f"{path}: {SECTION}.{KEY}={spelled(section)}: expected a mapping, or auto. {fix}")
    return section or {}, accelerate


def meant_sections(accelerate: Mapping[Any, Any]) -> dict[str, Mapping[str, Any]]:
    """Key path -> content of what stands in another place than our section, or under another name, and is probably meant to be it."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, value in accelerate.items():
        if name == KEY and isinstance(value, Mapping):
            found[KEY] = value
        for key, content in value.items() if isinstance(value, Mapping) else ():
            near = (
                difflib.get_close_matches(str(key)[: 2 * len(KEY)], [KEY], cutoff=0.7)
                if name == SECTION
                else key == KEY
            )
            if near and isinstance(content, Mapping):
                found[f"{name}.{key}"] = content
    return found


def _refuse_misspelled_key(path: Path, section: Mapping[str, Any] | None) -> None:
    """Refuse a key that is meant to be ours: accelerate ignores it, and the run would be plain data parallelism."""
    near = difflib.get_close_matches(KEY, [key[: 2 * len(KEY)] for key in section or {}], n=1, cutoff=0.7)
    if near:
        raise ConfigError(f"{path}: {SECTION}.{near[0]}: unknown key. Did you mean {SECTION}.{KEY}?")


def odd_sections(path: Path, accelerate: Mapping[Any, Any]) -> list[str]:
    """Keys that are no strings, and values where accelerate, and we, read a mapping; a message each."""
    problems = [
        f"{path}: {spelled(key)}: keys are strings. Quote or remove it."
        for key in accelerate
        if not isinstance(key, str)
    ]
    for name in SECTIONS:
        section = accelerate.get(name)
        if section is not None and not isinstance(section, dict):
            problems.append(
                f"{path}: {name}={spelled(section)}: expected a mapping. Write its keys on lines below it, or remove it."
            )
        elif section:
            odd = [key for key in section if not isinstance(key, str)]
            problems += [f"{path}: {name}[{spelled(key)}]: keys are strings. Quote or remove it." for key in odd]
    return problems


def check_accelerate(config: HFParallelConfig, accelerate: Mapping[str, Any], world_size: int | None = None) -> None:
    """Refuse accelerate settings under which `config` would silently do nothing, or not fit.

    Args:
        config: Our settings.
        accelerate: The whole accelerate file.
        world_size: Processes really started; None takes `num_processes` of the file.

    Raises:
        ConfigError: With every problem, one a line.
    """
    problems = []
    kind = shown(accelerate.get("distributed_type", "NO")).strip("'")
    shared, also = (f", sp_size={config.sp_size}", ", sp_size") if config.sp_size > 1 else ("", "")
    if kind in ONE_PROCESS_TYPES and (kind == "MULTI_CPU" or config.splits_model):
        problems.append(
            f"distributed_type={kind!r}: accelerate starts ONE process for it, whatever num_processes says. "
            f"Set distributed_type to MULTI_GPU, and add use_cpu: true on a machine without a GPU."
        )
    if kind in FOREIGN_ENGINES and config.model_parallel_size > 1:
        problems.append(
            f"distributed_type={kind!r} with tp_size={config.tp_size} and pp_size={config.pp_size}{shared}: {kind} wraps the "
            f"whole model and cannot be cut. Set distributed_type to MULTI_GPU, or tp_size and pp_size{also} to 1."
        )
    ours = config.zero.engine == "deepspeed"
    problems += _deepspeed_file(accelerate, kind) if ours else []
    replicas = replica_settings(config) if kind in FOREIGN_ENGINES and not (ours and kind == "DEEPSPEED") else []
    if replicas:
        problems.append(
            f"distributed_type={kind!r} with {', '.join(replicas)}: {kind} drives the run itself, so that would have no "
            f"effect. Set distributed_type to MULTI_GPU, {'or zero.engine to deepspeed, ' * (kind == 'DEEPSPEED')}or use what "
            f"{kind} has of its own."
        )
    problems += _stock_sizes(accelerate.get(SECTION) or {})
    problems += fp16_ahead(
        config.pipeline.schedule, accelerate.get("mixed_precision"), "mixed_precision=fp16", "mixed_precision to bf16"
    )
    num_processes = accelerate.get("num_processes", -1) if world_size is None else world_size
    is_number = isinstance(num_processes, int) and not isinstance(num_processes, bool)
    if not is_number and num_processes is not None:
        problems.append(
            f"num_processes={spelled(num_processes)}: expected an integer. Set num_processes to a number without quotes."
        )
    elif is_number and num_processes > 0 and kind not in ONE_PROCESS_TYPES:
        try:
            config.dp_size(num_processes)
            machines = accelerate.get("num_machines", 1)
            counted = isinstance(machines, int) and machines > 0 and num_processes % machines == 0
            if world_size is None and counted:  # the launch itself knows what it has started
                config.check_links(num_processes, num_processes // machines)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _deepspeed_file(accelerate: Mapping[str, Any], kind: str) -> list[str]:
    """Problems of keys beside `zero.engine: deepspeed`: they would be a second set of settings, or have no effect."""
    problems = []
    if kind == "NO":
        problems.append(
            "distributed_type='NO' with zero.engine=deepspeed: accelerate starts a plain process. Set distributed_type to "
            "MULTI_GPU, also for one process."
        )
    section = accelerate.get("deepspeed_config") or {}
    problems += [
        f"deepspeed_config.{key}={shown(value)} beside zero.engine=deepspeed: DeepSpeed's config is made from the zero section alone. "
        f"Remove deepspeed_config.{key}."
        for key, value in section.items()
        if key not in LAUNCHER_ONLY
    ]
    asked = "mixed_precision='fp16' with zero.engine=deepspeed and use_cpu=true"
    return [
        *problems,
        *fp16_on_cpu(accelerate.get("mixed_precision"), on_cpu=accelerate.get("use_cpu") is True, asked=asked),
    ]


def _stock_sizes(section: Mapping[str, Any]) -> list[str]:
    """Problems of keys beside our section: sizes that accelerate would apply too, and keys of ours that are not indented."""
    return [
        f"{SECTION}.{key}={shown(value)} beside {SECTION}.{KEY}: {_why_not_beside(str(key))}"
        for key, value in section.items()
        if key != KEY and value not in (None, 1)
    ]


def _why_not_beside(key: str) -> str:
    """Accelerate validates its own sizes against its own engines as soon as one differs from 1, and drops other keys."""
    if not key.startswith(f"{SECTION}_"):
        near = difflib.get_close_matches(key[:MAX_SHOWN], HFParallelConfig.model_fields, n=1, cutoff=0.6)
        fix = f"Indent it below {KEY}, as {KEY}.{near[0]}." if near else "Remove it."
        return f"accelerate drops it, and it has no effect. {fix}"
    if key.endswith(("cp_size", "sp_size")):
        fix = f"Remove it, and set {SECTION}.{KEY}.sp_size, which shares the sequence of each row over ranks."
    else:
        fix = f"Remove it; the sizes stand in {SECTION}.{KEY}."
    return f"accelerate would apply it as well. {fix}"


def load_file(path: Path) -> tuple[HFParallelConfig | None, Mapping[str, Any]]:
    """Return the config of a file (None if it has no section of ours) and its accelerate settings.

    Raises:
        ConfigError: With the file name and every problem of our section.
    """
    section, accelerate = read_section(path)
    if section is None:
        return None, accelerate
    return HFParallelConfig.from_mapping(section, source=f"{path}, {SECTION}.{KEY}"), accelerate


def load_recipe(name_or_path: str | Path) -> HFParallelConfig:
    """Return the validated config of a recipe.

    Args:
        name_or_path: A file, else the name of a shipped recipe.

    Raises:
        ConfigError: With every problem of our section, else of the accelerate settings around it.
    """
    return read_recipe(name_or_path)[0]


def read_recipe(name_or_path: str | Path) -> tuple[HFParallelConfig, Mapping[str, Any]]:
    """Return the validated config of a recipe and the accelerate settings around it.

    Args:
        name_or_path: A file, else the name of a shipped recipe.

    Raises:
        ConfigError: With every problem of our section, else of the accelerate settings around it.
    """
    path = find_recipe(name_or_path)
    config, accelerate = load_file(path)
    if config is None:
        raise ConfigError(f"{path}: it has no {SECTION}.{KEY} section. Add one, for example {KEY}: {{pp_size: 2}}.")
    try:
        check_accelerate(config, accelerate)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None
    return config, accelerate


def replica_settings(config: HFParallelConfig) -> list[str]:
    """Settings other than tp and pp that are not the defaults and that an engine which drives a run itself ignores."""
    given = {
        f"layout={config.layout}": config.layout == AUTO,
        f"ep_size={config.ep_size}": config.ep_size > 1,
        f"zero.stage={config.zero.stage}": config.zero.stage > 0,
        f"gradient_compression.method={config.gradient_compression.method}": config.gradient_compression.method
        != "none",
        f"local_sgd.sync_every={config.local_sgd.sync_every}": config.local_sgd.sync_every > 1,
        f"activation_checkpointing.every={config.activation_checkpointing.every}": config.activation_checkpointing.every
        is not None,
        f"gradient_accumulation_steps={config.gradient_accumulation_steps}": config.gradient_accumulation_steps
        != "auto",
        f"checkpoint.memory_steps={config.checkpoint.memory_steps}": config.checkpoint.memory_steps > 0,
    }
    return [text for text, chosen in given.items() if chosen] + config.monitor.asked
