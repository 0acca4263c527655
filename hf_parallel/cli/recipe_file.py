"""Recipe files that are written: only what our own checks and accelerate's loader both take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from hf_parallel.cli.answers import writing
from hf_parallel.errors import ConfigError
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import KEY, SECTION, check_accelerate, load_recipe


FIRST_MACHINE: Final = "machine-0"  # until the launch line, or the user, says the address


def accelerate_settings(num_processes: int, mixed_precision: str, use_cpu: bool, nodes: int) -> dict[str, Any]:
    """The keys of accelerate that stand around our section in a recipe."""
    address = {"main_process_ip": FIRST_MACHINE} if nodes > 1 else {}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if num_processes > 1 else "NO",
        "num_processes": num_processes,
        "num_machines": nodes,
        "machine_rank": 0,
        **address,
        "main_process_port": 29500 if nodes > 1 else 0,
        "mixed_precision": mixed_precision,
        "use_cpu": use_cpu,
    }


def write_recipe(path: Path, config: HFParallelConfig, accelerate: Mapping[str, Any], head: str = "") -> None:
    """Write a recipe.

    Args:
        path: The file; it is replaced.
        config: Our settings.
        accelerate: The settings around them.
        head: Lines of comments above.

    Raises:
        ConfigError: The settings cannot work, or there can be no such file; nothing is written.
    """
    from accelerate.commands.config.config_args import load_config_from_file

    check_accelerate(config, accelerate)
    config.dp_size(accelerate["num_processes"])
    draft = path.with_name(f".{path.stem}.draft.yaml")
    content = {**accelerate, SECTION: {KEY: config.to_yaml_section()}}
    with writing(path), _removed_at_the_end(draft):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(head + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        loaded = load_config_from_file(str(draft))
        if loaded.parallelism_config != content[SECTION] or load_recipe(draft) != config:
            raise ConfigError(f"{path}: accelerate reads back {loaded.parallelism_config!r}. Check its version.")
        draft.replace(path)


@contextlib.contextmanager
def _removed_at_the_end(file: Path) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(NotADirectoryError):  # its folder is a file
            file.unlink(missing_ok=True)
