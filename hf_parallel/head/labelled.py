"""The output of a training forward with labels whose logits exist in parts, and are gathered when somebody reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput


_MISSING: Final = object()
KEPT: Final = ("_order", "_gather", "_local", "_none", "_kind")


@dataclass(init=False)
class LabelledOutput(ModelOutput):
    """Output of a training forward with labels: all of the model's own but the logits, which exist in parts only.

    An engine sets how they are gathered when user code reads them: by attribute, by key or index, or among the items of the
    mapping. Copies and pickles are of the model's own class. Its text has what exists, without the logits.
    """

    loss: Tensor | None = None

    def __init__(self, **held: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name, value in held.items():
            self[name] = value

    def __getattr__(self, name: str) -> Any:
        if name == "logits":
            return self._logits()
        if name in vars(self).get("_none", ()):
            return None
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None and (name in self or self._hides(name)):
            self[name] = value
        else:
            super().__setattr__(name, value)  # type: ignore[no-untyped-call]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple(self[name] for name in tuple(self)[key])
        name = tuple(self)[key] if isinstance(key, int) else key
        if self._hides(name):
            return self._logits()
        found = self.get(name, _MISSING)
        if found is _MISSING:
            raise KeyError(name)
        return found

    def get(self, key: Any, default: Any = None) -> Any:
        """Get a value as from a dict, with logits."""
        held: Any = super()  # some releases of transformers leave this method without types
        return self._logits() if self._hides(key) else held.get(key, default)

    def __iter__(self) -> Iterator[str]:
        held, order = self.held(), vars(self).get("_order", ())
        yield from (name for name in order if name in self)
        yield from (name for name in held if name not in order)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        held: Any = super()
        is_offered = "_before" in vars(self)  # not yet where fully_shard flattens what the model returns
        return (is_offered and self._hides(key)) or held.__contains__(key)

    def keys(self) -> Any:
        """The names of all outputs, as of a dict."""
        return KeysView(self)

    def values(self) -> Any:
        """All outputs, as of a dict."""
        return ValuesView(self)

    def items(self) -> Any:
        """All outputs with their names, as of a dict."""
        return ItemsView(self)

    def __reduce__(self) -> Any:
        return functools.partial(vars(self).get("_kind", type(self)), **dict(self.items())), ()

    def held(self) -> dict[str, Any]:
        """All outputs that exist: not logits that nobody has set."""
        return dict(super().items())

    def hide(self, output: ModelOutput, gather: Callable[[Tensor], Tensor]) -> LabelledOutput:
        """Take all of a model's own output; its logits f[... S v] only in the form of `gather`, f[... S V]."""
        for name, value in output.items():
            if name != "logits":
                self[name] = value
        none = frozenset(field.name for field in fields(output)) - set(output)  # type: ignore[arg-type]
        kept = {"_order": list(output), "_gather": gather, "_local": output["logits"], "_none": none}
        vars(self).update(kept, _kind=type(output))
        return self

    def changed(self, change: Callable[[Any], Any]) -> LabelledOutput:
        """Make another one by a change of all that exists."""
        made = LabelledOutput(**{name: change(value) for name, value in self.held().items()})
        vars(made).update({name: vars(self)[name] for name in KEPT if name in vars(self)})
        return made

    def then(self, after: Callable[[Tensor], Tensor]) -> LabelledOutput:
        """Do `after` to the logits that were gathered, before anybody sees them."""
        gather = vars(self)["_gather"]
        vars(self)["_gather"] = lambda local: after(gather(local))
        return self

    def again(self, other: LabelledOutput, before: Callable[[], None], after: Callable[[Tensor], Tensor]) -> None:
        """Gather the logits of `other` when somebody asks for them.

        Args:
            other: The output that a model has made.
            before: Called first; all ranks of the group must gather.
            after: Function to apply to the gathered logits.
        """
        vars(self).update({name: vars(other)[name] for name in KEPT if name in vars(other)})
        vars(self).update(_before=before, _after=after)

    def _hides(self, key: object) -> bool:
        """Whether a key is that of logits which the model made, and nobody has set others since."""
        held: Any = super()
        return key == "logits" and "_local" in vars(self) and not held.__contains__(key)

    def _logits(self) -> Tensor:
        kept = vars(self)
        if "_before" not in kept or "_local" not in kept:
            raise AttributeError(
                "logits are sharded over the vocabulary in a training forward with labels, and not gathered. For a "
                "loss of your own call the model without labels (labels = inputs.pop('labels')) or use "
                "Trainer(compute_loss_func=...); or set tensor_parallel.vocab_parallel_loss: false."
            )
        made: dict[bool, Tensor] = kept.setdefault("_made", {})
        wants_graph = torch.is_grad_enabled()
        found = made.get(True, made.get(wants_graph))
        if found is None:
            kept["_before"]()
            found = made[wants_graph] = kept["_after"](kept["_gather"](kept["_local"]))
        return found
