"""The output of a training forward with labels whose logits exist in parts, and are gathered when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput


@dataclass
class LabelledOutput(ModelOutput):
    """Output of a training forward with labels: all of the model's own but the logits, which exist in parts only.

    An engine sets how they are gathered when user code reads them.
    """

    loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "logits":
            return self._logits()
        if name in vars(self).get("_none", ()):
            return None
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        held: Any = super()
        order = vars(self).get("_order", ())
        if isinstance(key, int) and -len(order) <= key < len(order):
            key = order[key]
        return self._logits() if key == "logits" else held.__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Get a value as from a dict, with logits."""
        held: Any = super()  # some releases of transformers leave this method without types
        return self._logits() if key == "logits" else held.get(key, default)

    def hide(self, output: ModelOutput, gather: Callable[[Tensor], Tensor]) -> LabelledOutput:
        """Take all of a model's own output; its logits f[... S v] only in the form of `gather`, f[... S V]."""
        for name, value in output.items():
            if name != "logits":
                self[name] = value
        none = frozenset(field.name for field in fields(output)) - set(output)  # type: ignore[arg-type]
        vars(self).update(_order=list(output), _gather=gather, _local=output["logits"], _none=none)
        return self

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
        kept = ("_order", "_gather", "_local", "_none")
        vars(self).update({name: vars(other)[name] for name in kept if name in vars(other)})
        vars(self).update(_before=before, _after=after)

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
