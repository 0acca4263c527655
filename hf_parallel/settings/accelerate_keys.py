"""The keys that the installed accelerate reads of a config file: of its own dataclass and of its own command line."""

from __future__ import annotations

import dataclasses
import functools


@functools.cache
def file_keys() -> frozenset[str]:
    """Keys of a whole file; accelerate refuses others."""
    from accelerate.commands.config.config_args import ClusterConfig

    older = ("fp16", "dynamo_backend")  # which accelerate rewrites as it reads
    return frozenset([*(field.name for field in dataclasses.fields(ClusterConfig)), *older])


@functools.cache
def launch_keys(*prefixes: str) -> frozenset[str]:
    """Arguments of `accelerate launch` that begin so: its sections hold their values, and other keys go nowhere."""
    from accelerate.commands.launch import launch_command_parser

    arguments = vars(launch_command_parser().parse_args(["script.py"]))
    return frozenset(name for name in arguments if name.startswith(prefixes))


@functools.cache
def dynamo_words() -> dict[str, tuple[str, ...]]:
    """Key of a `dynamo_config` section -> the words that accelerate takes for it."""
    from accelerate.utils import DynamoBackend
    from accelerate.utils.constants import TORCH_DYNAMO_MODES

    backends = [backend.value.lower() for backend in DynamoBackend if backend != DynamoBackend.NO]
    return {"dynamo_backend": ("no", *backends), "dynamo_mode": tuple(TORCH_DYNAMO_MODES)}
