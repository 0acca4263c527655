"""Bytes that an optimizer keeps of each parameter, by the names of TrainingArguments.optim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


ADAMW: Final = "adamw_torch"
IN_8_BIT: Final = 1 + 4 / 256  # a byte, and a scale in fp32 for each 256 of them


class Kept(NamedTuple):
    """Numbers that an optimizer keeps of a parameter.

    Attributes:
        copies: Numbers in the dtype of what it updates.
        own: Bytes of numbers in a dtype of their own.
        of_embedding: The same of an element of the token embedding; None for `own`.
        passing: Numbers in fp32 that its step takes for a while, of one parameter after the other; where these are in 16 bit, the
            parameter and its gradient in fp32, too.
    """

    copies: float = 0.0
    own: float = 0.0
    of_embedding: float | None = None
    passing: int = 0


# Sources: torch 2.13 optim/sgd.py; transformers 5.24 optimization.py (Adafactor keeps a row and a column of each matrix, counted as
# none) and trainer.py, which has bitsandbytes keep embeddings in fp32; bitsandbytes 0.50 optim/optimizer.py. What a paged optimizer
# keeps leaves a GPU only when that is full, so it counts.
_NUMBERS: Final = {"adamw": 2, "lion": 1, "ademamix": 3}
_IN_FP32: Final = {
    "lion_32bit",
    "ademamix",
    *(f"paged_{name}_32bit" for name in _NUMBERS),
    "rmsprop_bnb",
    "rmsprop_bnb_32bit",
}
_IN_8_BIT: Final = {
    "adamw_bnb_8bit",
    "rmsprop_bnb_8bit",
    *(f"{paged}{name}_8bit" for name in _NUMBERS for paged in ("", "paged_")),
}


def _numbers(name: str) -> int:
    """Numbers that an optimizer of bitsandbytes keeps of a parameter; RMSprop keeps one."""
    return next((count for kind, count in _NUMBERS.items() if kind in name), 1)


OPTIMIZERS: Final[Mapping[str, Kept]] = {
    **dict.fromkeys((ADAMW, "adamw_torch_fused"), Kept(copies=2)),
    "sgd": Kept(),
    "sgd_momentum": Kept(copies=1),  # sgd with momentum in optim_args
    "adafactor": Kept(passing=2),
    **{name: Kept(own=4.0 * _numbers(name)) for name in sorted(_IN_FP32)},
    **{name: Kept(own=IN_8_BIT * _numbers(name), of_embedding=4.0 * _numbers(name)) for name in sorted(_IN_8_BIT)},
}


def kept_bytes(optim: str, element: float) -> float:
    """Bytes of a parameter whose updated copy has `element` bytes."""
    kept = OPTIMIZERS[optim]
    return kept.copies * element + kept.own


def more_of_embedding(optim: str) -> float:
    """Bytes that an element of the token embedding takes beyond those of another parameter."""
    kept = OPTIMIZERS[optim]
    return 0.0 if kept.of_embedding is None else kept.of_embedding - kept.own


def passing_bytes(optim: str, element: float) -> float:
    """Bytes of an element of the largest parameter that the step takes for a while, where parameters have `element` bytes."""
    passing = OPTIMIZERS[optim].passing
    return 4.0 * (passing + (2 if passing and element < 4 else 0))


def optimizer_of(optim: str, optim_args: str | None) -> str:
    """The key of `OPTIMIZERS` for arguments of a Trainer; AdamW's for one that is not known."""
    given = dict(one.partition("=")[::2] for one in (optim_args or "").replace(" ", "").split(","))
    if optim == "sgd" and given.get("momentum", "0").strip("0.") != "":
        return "sgd_momentum"
    return optim if optim in OPTIMIZERS else ADAMW
