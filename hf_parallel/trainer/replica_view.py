"""Data parallelism as accelerate counts it: a model copy is one process, however many ranks share it.

Ranks of a copy hold the same rows and metrics. What is gathered, summed or split goes over the replicas only, so that sums,
means and counts are those of stock data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import recursively_apply, reduce
from torch.distributed.tensor import DTensor

from hf_parallel.compat.private_collectives import all_gather_new
from hf_parallel.errors import UnsupportedError
from hf_parallel.mesh.groups import Mesh
from hf_parallel.trainer.loaders import Place
from hf_parallel.trainer.stream_rows import rows_of_last


class ReplicaViewMixin(Accelerator):  # type: ignore[misc]
    """Counts replicas where stock counts processes; inert without tensor or pipeline parallelism."""

    flag_tensor: torch.Tensor | None

    @property
    def _mesh(self) -> Mesh:
        mesh: Mesh = self.hf_parallel.mesh
        return mesh

    def _waiting(self, text: str) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.hf_parallel.watchdog.waiting(text)
        return context

    @property
    def num_processes(self) -> int:
        """Replicas: what sums over `gather` are averaged by, and data is split into."""
        return self._mesh.shape.dp_size

    @property
    def process_index(self) -> int:
        """This rank's replica, equal on the ranks of a model copy; one rank of all is `is_main_process`."""
        return self._mesh.dp_rank

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of all."""
        return bool(self.state.is_last_process)

    def gather(self, tensor: Any) -> Any:
        """Concatenate over the replicas; collective over all ranks."""
        with self._waiting("waits for the tensors that other replicas gather"):
            return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        _refuse_part(tensor, "gather")
        rows = tensor.clone()[None] if tensor.ndim == 0 else tensor  # [rows ...], a number is one row
        if self._mesh.dp_group is None:
            return rows
        return all_gather_new(rows, self._mesh.dp_group).flatten(0, 1)  # [replicas * rows ...]

    def _gathered_objects(self, data: Any) -> list[Any]:
        if self._mesh.dp_group is None:
            return list(data)
        parts: list[Any] = [None] * self.num_processes
        dist.all_gather_object(parts, data, group=self._mesh.dp_group)
        return [item for part in parts for item in part]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over the replicas, without the rows that fill the last batch; data without tensors comes as a list."""
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            with self._waiting("waits for the metrics of the other replicas"):
                data: Any = self._gathered_objects(input_data)
        else:
            data = self.gather(input_data)
        state = self.gradient_state
        rows = rows_of_last(state.active_dataloader, state.remainder) if state.end_of_dataloader else 0
        if rows <= 0:
            return data
        if use_gather_object:
            return data[:rows]
        return recursively_apply(lambda tensor: tensor[:rows], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum, average ("mean") or take the largest ("max") over the replicas; collective over all ranks."""

        def over_replicas(part: torch.Tensor) -> torch.Tensor:
            _refuse_part(part, "reduce")
            total = part.clone()
            if self._mesh.dp_group is not None:
                operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
                dist.all_reduce(total, operation, group=self._mesh.dp_group)
            if reduction == "mean":
                total /= self.num_processes
            return total

        with self._waiting("waits for the tensors that other replicas reduce"):
            return recursively_apply(over_replicas, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Whether any rank has set the trigger; resets it."""
        if self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        if int(reduce(self.flag_tensor, "sum")) == 0:
            return False
        self.flag_tensor = torch.tensor(0, device=self.device)
        return True

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Split `inputs` between the replicas: the ranks of a model copy get the same part."""
        place = Place(self.num_processes, self.process_index, self.device)
        split: Callable[..., AbstractContextManager[Any]] = PartialState.split_between_processes
        with split(place, inputs, apply_padding) as part:
            yield part


def _refuse_part(tensor: torch.Tensor, call: str) -> None:
    if isinstance(tensor, DTensor):
        raise UnsupportedError(
            f"accelerator.{call}() of a tensor of shape {tuple(tensor.shape)} that the replicas share out (zero.stage: 3 or engine: "
            "fsdp2): each rank holds another part of it, so there is nothing to combine. Give it tensor.full_tensor(), which "
            "all ranks call. Replicas that average their weights (LocalSGD) need zero.stage: 0 and local_sgd.sync_every."
        )
