"""Facts about the machine that an issue about a run needs, as Markdown to paste."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import hf_parallel


PACKAGES: Final = (
    "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes", "datasets", "safetensors", "numpy", "pydantic", "typer"
)  # fmt: skip
# Beginnings of variables that change what a run does, none of which holds a password or a token.
VARIABLES: Final = (
    "HF_PARALLEL_",
    "ACCELERATE_",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "OMP_",
    "TORCH_NCCL_",
    "TORCHDYNAMO_",
    "PYTORCH_",
)


def bug_report(checks: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Lines of Markdown.

    Args:
        checks: Findings of `hf-parallel doctor`, a line each.
        environment: Environment variables of the process.
    """
    yield f"hf_parallel {hf_parallel.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ""
    yield "```text"
    yield from checks
    yield ""
    yield "packages   " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    chosen = sorted(name for name in environment if name.startswith(VARIABLES))
    yield "variables  " + (
        ", ".join(f"{name}={environment[name]}" for name in chosen) or "none of " + ", ".join(VARIABLES)
    )
    yield "```"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def of_this_process(checks: Sequence[str]) -> str:
    """The report with this process's variables.

    Args:
        checks: Findings of `hf-parallel doctor`, a line each.
    """
    return "\n".join(bug_report(checks, os.environ))
