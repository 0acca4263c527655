"""The loss of one of several replicas: what is no sum over tokens by their number counts once, and not once a replica.

A Trainer divides a sum by the tokens of all replicas, and multiplies the loss by the number of replicas, as their gradients are
averaged. That multiplies a router's auxiliary loss, a penalty, and a mean that ignores the number of tokens, too. Here a
loss gets the tokens of an average replica, and is divided by the number of replicas: then the multiplication gives all of them
as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class ReplicaShare:
    """The number of tokens of one optimizer step, as a loss gets it.

    Args:
        count: `num_items_in_batch` of all replicas; recognised by identity.
        replicas: Number of replicas, by which the caller multiplies the loss.
    """

    def __init__(self, count: Any, replicas: int) -> None:
        self.count, self._replicas = count, replicas
        self.own = count / replicas

    def forward(self, run: Callable[[tuple[Any, ...], dict[str, Any]], Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """`run(args, kwargs)`, a call of the model; one that is not given the count is left alone."""
        if kwargs.get("num_items_in_batch") is not self.count:
            return run(args, kwargs)
        output = run(args, {**kwargs, "num_items_in_batch": self.own})
        if isinstance(output, Mapping):
            if isinstance(output.get("loss"), Tensor):
                output["loss"] = output["loss"] / self._replicas  # type: ignore[index]  # a ModelOutput can be written to
        elif isinstance(output, tuple) and kwargs.get("labels") is not None:
            output = (output[0] / self._replicas, *output[1:])
        return output

    def function(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A `compute_loss_func` that gets the count of an average replica, and whose result is divided."""

        def computed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
            own = self.own if num_items_in_batch is self.count else num_items_in_batch
            return function(outputs, labels, num_items_in_batch=own) / self._replicas

        return computed
