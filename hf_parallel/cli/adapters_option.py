"""The option `--adapters N`, `--adapters r16` or `--adapters` alone, of commands that count what adapters take."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from typing import Annotated, Any, Final, TypeAlias

import typer
from typer.core import TyperCommand


USUAL: Final = "r16"
Adapters: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="[N|rR]",
        help=f"Parameters that are trained instead of the model's: N, or LoRA of rank R on all linear layers (alone: {USUAL}).",
    ),
]


def class_of_command(function: Callable[..., Any]) -> type[TyperCommand]:
    """The class of a command, which has another one if it takes `--adapters`."""
    return AdaptersCommand if "adapters" in signature(function).parameters else TyperCommand


class AdaptersCommand(TyperCommand):
    """A command whose `--adapters` may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give `--adapters` its usual value where another option follows, or nothing."""
        filled = [
            word
            for arg, after in pairwise([*args, "--"])
            for word in ([arg, USUAL] if arg == "--adapters" and after.startswith("--") else [arg])
        ]
        return super().parse_args(ctx, filled)
