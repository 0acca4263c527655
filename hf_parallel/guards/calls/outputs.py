"""Outputs of a pipeline's model call, which say in clear words what they do not have.

A stock output answers an unknown name with a bare `AttributeError`, far from the reason: that a pipeline returns loss,
logits and tensors with one entry a row only, and logits and others when they are asked for. By place, and in `items()`, it
has what the model's own output has there, or refuses: a place that holds something else would be taken for it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers.utils.generic import ModelOutput

from hf_parallel.compat.private_transformers import CACHES
from hf_parallel.errors import UnsupportedError


# What a stock output has under these names is None unless it was asked for, and a pipeline refuses to be asked.
NONE_UNASKED = (*CACHES, "hidden_states", "attentions")
More: TypeAlias = dict[str, "torch.Tensor | str"]  # an output, or why there is none
LOGITS = ("logits", 1)  # by name and by place behind a loss
LACKING = (
    "outputs by place, items() or to_tuple() of a call without labels with pp_size above 1: the model's config asks for {names} "
    "too, which stages have in parts, so the places would not be those of one process. Read outputs.logits by name, or switch "
    "output_hidden_states, output_attentions and output_router_logits of model.config off."
)


class MissingOutput(UnsupportedError, AttributeError, KeyError, IndexError):
    """Asked of a pipeline's output by attribute, key or position; what `hasattr` and `except KeyError` expect."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class _ExplainsMissing:
    """Mixin of model outputs: every way to ask for what they do not have ends in `_why_not`."""

    def lacks(self, names: Collection[str]) -> None:
        """Refuse these, which the model's config asks for, instead of being None: stages have a part of them."""
        vars(self)["_lacking"] = names

    def lists(self, names: Sequence[str]) -> None:
        """List these names, in this order, by place and in iterations."""
        vars(self)["_listed"] = tuple(names)

    def lists_own(self) -> None:
        """List only what it holds itself: nobody looks at the places of others."""
        vars(self)["_listed"] = tuple(self._own())

    def _is_none(self, name: Any) -> bool:
        asked = name in vars(self).get("_lacking", ())
        return (name in NONE_UNASKED and not asked) or name in vars(self).get("_more", ((), ()))[1]

    def has_more(self, names: Collection[str], absent: Collection[str], read: Callable[[], More]) -> None:
        """Offer other outputs of the model: collective over the ranks of a model copy when one is read first.

        Args:
            names: Names of the outputs that are tensors.
            absent: Names of the outputs that are None.
            read: Returns the tensors.
        """
        vars(self)["_more"] = names, absent, read

    def _has(self, key: Any) -> bool:
        return bool(key in vars(self).get("_more", ((),))[0])

    def _other(self, name: str) -> torch.Tensor:
        found = vars(self)["_more"][2]()[name]
        if isinstance(found, str):
            raise MissingOutput(f"outputs[{name!r}] with pp_size above 1: {found}")
        return found  # type: ignore[no-any-return]

    def _own(self) -> list[str]:
        """Names of the outputs that it holds itself."""
        held: Any = self
        return list(OrderedDict.__iter__(held))

    def _held(self, name: str) -> Any:
        held: Any = self
        return OrderedDict.__getitem__(held, name)

    def _places(self) -> Sequence[str]:
        """Names in the order of the model's own output."""
        listed: Sequence[str] | None = vars(self).get("_listed")
        if listed is None and vars(self).get("_lacking"):
            raise MissingOutput(LACKING.format(names=", ".join(vars(self)["_lacking"])))
        return self._own() if listed is None else listed

    def __iter__(self) -> Iterator[str]:
        return iter(self._places())

    def __len__(self) -> int:
        return len(self._places())

    def __contains__(self, key: object) -> bool:
        return key in self._own() or key in vars(self).get("_listed", ())

    def keys(self) -> Any:
        """Keys as the model's own output has them."""
        held: Any = self
        return KeysView(held)

    def items(self) -> Any:
        """Items as the model's own output has them; reads what it passes."""
        held: Any = self
        return ItemsView(held)

    def values(self) -> Any:
        """Values as the model's own output has them; reads what it passes."""
        held: Any = self
        return ValuesView(held)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy what it holds; the rest is read from the same stages (Lightning Fabric copies outputs to convert them)."""
        own = {name: copy.deepcopy(self._held(name), memo) for name in self._own()}
        made = type(self)(**own)
        vars(made).update((name, value) for name, value in vars(self).items() if name not in own)
        return made

    def __repr__(self) -> str:
        """Show only what is here already: a rank that prints it must not wait for the others."""
        held = ", ".join(f"{name}={self._held(name)!r}" for name in self._own())
        return f"{type(self).__name__}({held})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._has(name):
            return self._other(name)
        if self._is_none(name):
            return None
        raise MissingOutput(self._why_not(name))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple(self[name] for name in self._places()[key])
        if isinstance(key, int):
            places = self._places()
            if not -len(places) <= key < len(places):
                raise MissingOutput(self._why_not(key))
            return self[places[key]]
        if self._has(key):
            return self._other(key)
        if key in self._own():
            return self._held(key)
        raise MissingOutput(self._why_not(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Get a value as from a dict, for what a stock output may lack too.

        Anything else is refused instead of being None.
        """
        if key in self._own() or self._has(key):
            return self[key]
        if key == "loss" or self._is_none(key):
            return default
        raise MissingOutput(self._why_not(key))

    def _why_not(self, key: Any) -> str:
        return (
            f"outputs[{key!r}] of a model with pp_size above 1: a pipeline returns loss and logits only, and of a call "
            "with labels what other tensors the model's forward returns. Compute it from logits (call the model without "
            "labels), or train with pp_size 1."
        )


@dataclass(repr=False)
class PipelineOutput(_ExplainsMissing, ModelOutput):
    """Loss and logits; the logits are None where nobody needs them.

    Args:
        loss: Loss of the batch (0-d).
        logits: Logits f[B S V].
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass(repr=False)
class PipelineTrainingOutput(_ExplainsMissing, ModelOutput):
    """Output of a training forward with labels: the loss. Its logits are made by a second forward, for who asks for them.

    Args:
        loss: Loss of the batch (0-d).
    """

    loss: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return self._logits() if name == "logits" and self._can_run_again() else super().__getattr__(name)

    def __getitem__(self, key: Any) -> Any:
        return self._logits() if key == "logits" and self._can_run_again() else super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Get a value as from a dict, with logits."""
        return self._logits() if key == "logits" and self._can_run_again() else super().get(key, default)

    def runs_again(self, again: Callable[[], torch.Tensor | None]) -> PipelineTrainingOutput:
        """Make the logits f[B S V] by `again` when they are asked for: collective over the ranks of a model copy."""
        vars(self)["_again"] = again
        return self

    def _can_run_again(self) -> bool:
        return "_again" in vars(self)

    def _logits(self) -> torch.Tensor:
        made: dict[bool, torch.Tensor] = vars(self).setdefault("_made", {})
        wants_graph = torch.is_grad_enabled()
        found = made.get(True, made.get(wants_graph))
        if found is None:
            found = made[wants_graph] = vars(self)["_again"]()
        return found

    def _why_not(self, key: Any) -> str:
        if key in LOGITS:
            return (
                "logits do not exist in a fused pipeline step: the backward has already run. A loss of your own on "
                "logits works when the model is called without labels (labels = inputs.pop('labels')), or as "
                "Trainer(compute_loss_func=...)."
            )
        return (
            f"outputs[{key!r}] of a training step with pp_size above 1: it has loss, logits and the tensors that the "
            "model's forward returned, because the backward has already run, stage by stage. What is computed from logits "
            "works when the model is called without labels (labels = inputs.pop('labels')); for anything else train with "
            "pp_size 1."
        )
