"""Sends what the last stage of a pipeline computes to all ranks of the model copy: losses and logits.

The messages also carry a digest of the batch that each rank has read, and whether it has frozen a parameter, so that these
comparisons cost no message of their own.

Extents: B rows of a batch, m microbatches, S positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.compat.private_collectives import rows_of_ranks
from hf_parallel.engine.run.microbatch_loss import Share
from hf_parallel.guards.calls.batches import BatchDigests
from hf_parallel.guards.optimizers.settings import Known
from hf_parallel.guards.weights.freezing import Freezing
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.mesh.groups import Mesh
from hf_parallel.pipeline_parallel.run.runtime import PipelineRuntime


class LastStage:
    """Sends the results of the last stage to the other ranks.

    Args:
        mesh: This rank's mesh.
        runtime: Executor of this rank's stages.
        device: Device of the model.
        watchdog: Hang reports.
        digests: Compares the ranks' batches and common weights.
        freezing: Tells the other ranks which parameters are frozen.
    """

    def __init__(
        self,
        mesh: Mesh,
        runtime: PipelineRuntime,
        device: torch.device,
        watchdog: Watchdog,
        *,
        digests: BatchDigests,
        freezing: Freezing,
    ) -> None:
        self._mesh, self.device, self._watchdog = mesh, device, watchdog
        self._is_here = runtime.has_last_stage
        self._speaks = mesh.tp_rank == mesh.sp_rank == 0  # for the ranks of its stage, which have the same results
        # World rank of the last stage of this rank's pipeline.
        self._source = mesh.shape.rank_at(mesh.dp_rank, runtime.placement[-1], mesh.tp_rank, mesh.sp_rank)
        self._digests, self._freezing = digests, freezing

    def share_losses(
        self, losses: Sequence[Any], shares: Sequence[Share], batches: Sequence[dict[str, Any]]
    ) -> list[torch.Tensor]:
        """The loss (0-d) of each batch on every rank; collective over the model copy.

        Args:
            losses: Loss of each microbatch; empty on ranks without the last stage.
            shares: Share of each microbatch in its batch's loss.
            batches: Batches that this rank has read.
        """
        count = len(batches)
        # f[batches + digests + 1], summed over the ranks: each writes its own slots and leaves zeros in the others.
        message = torch.zeros(count + self._digests.width + 1, dtype=torch.float64, device=self.device)
        if self._speaks:
            for loss, share in zip(losses, shares, strict=False):  # empty on all but the last stage
                message[share.batch] += loss.double()
        self._digests.put(message[count:-1], batches)
        self._freezing.put(message[-1:])
        with self._watchdog.waiting("waits for the loss of the last stage"):
            if self._mesh.mp_group is not None:
                message = rows_of_ranks(message, self._mesh.mp_group).sum(0)
        self._freezing.arrived(message[-1])
        self._digests.arrived(message[count:-1])
        return list(message[:count].float().unbind())

    def send_losses(
        self,
        losses: Sequence[Any],
        shares: Sequence[Share],
        batches: Sequence[dict[str, Any]],
        power: torch.Tensor,
        group: dist.ProcessGroup | None,
        known: Known,
    ) -> Callable[[], tuple[list[torch.Tensor], torch.Tensor]]:
        """Share losses as `share_losses` does, while this rank goes on.

        Return a function that waits for the losses, and for the sum of `power` over the ranks.

        Args:
            losses: Loss of each microbatch; empty on ranks without the last stage.
            shares: Share of each microbatch in its batch's loss.
            batches: Batches that this rank has read.
            power: Summand of this rank in another sum (0-d).
            group: The model copy; nothing else is sent over it, because ranks may come here in different steps.
            known: Facts about the optimizers, of a step that is the same one on all ranks.
        """
        count = len(batches)
        message = torch.zeros(count + self._digests.width + 1, dtype=torch.float64, device=self.device)
        for loss, share in zip(losses if self._mesh.tp_rank == 0 else (), shares, strict=False):
            message[share.batch] += loss.double()
        self._digests.put(message[count:-1], batches, known)
        message[-1] = power
        work = dist.all_reduce(message, group=group, async_op=True)

        def wait() -> tuple[list[torch.Tensor], torch.Tensor]:
            with self._watchdog.waiting("waits for the loss of the last stage"):
                work.wait()
            self._digests.arrived(message[count:-1], known)
            return list(message[:count].float().unbind()), message[-1]

        return wait

    def broadcast_named(self, tensors: Mapping[str, torch.Tensor], note: Any) -> tuple[dict[str, torch.Tensor], Any]:
        """Tensors of the last stage by name, and what it says about them, on every rank; collective over the pipeline.

        Args:
            tensors: Any shapes and types; half precision arrives as float32. Empty where the last stage is not.
            note: Small; counts on the last stage only.
        """
        finer = {n: t.float() if t.is_floating_point() and t.dtype.itemsize < 4 else t for n, t in tensors.items()}
        said: list[Any] = [([(name, t.dtype, tuple(t.shape)) for name, t in finer.items()], note)]
        with self._watchdog.waiting("waits for the outputs of the last stage"):
            dist.broadcast_object_list(said, src=self._source, group=self._mesh.pp_group)
            specs, note = said[0]
            sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in specs]
            if not sum(sizes):
                return {
                    name: torch.empty(shape, dtype=dtype, device=self.device) for name, dtype, shape in specs
                }, note
            if self._is_here:
                flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in finer.values()])
            else:
                flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
            dist.broadcast(flat, src=self._source, group=self._mesh.pp_group)
        pieces = flat.split(sizes)  # cloned, because a view of another type must be aligned
        return {n: p.clone().view(dtype).view(shape) for (n, dtype, shape), p in zip(specs, pieces, strict=True)}, note

    def broadcast_logits(self, parts: Sequence[torch.Tensor], batch: dict[str, Any]) -> torch.Tensor | None:
        """Logits f[B S V] of the last stage on every rank, None if the model gave none; collective over the model copy.

        A classifier's are f[B V].

        Args:
            parts: f[B/m S V] of each microbatch; empty where the last stage is not.
            batch: Batch that this rank has read.
        """
        with self._watchdog.waiting("waits for the logits of the last stage"):
            # i[dims and whether float64, B, S, V, digests, frozen]; half precision is sent as float32.
            header = torch.zeros(5 + self._digests.width, dtype=torch.int64, device=self.device)
            logits: torch.Tensor | None = None
            if parts:
                logits = torch.cat([part.float() if part.dtype.itemsize < 4 else part for part in parts]).contiguous()
                if self._speaks:
                    kind, rest = 2 * logits.ndim + int(logits.dtype is torch.float64), [0] * (3 - logits.ndim)
                    header[:4] = torch.tensor([kind, *logits.shape, *rest], device=header.device)
            self._digests.put(header[4:-1], [batch])
            self._freezing.put(header[-1:])
            dist.all_reduce(header, group=self._mesh.mp_group)
            if not self._is_here:
                kind, *sizes = header[:4].tolist()
                if kind:
                    dtype = torch.float64 if kind % 2 else torch.float32
                    logits = torch.empty(sizes[: kind // 2], dtype=dtype, device=self.device)
            self._freezing.arrived(header[-1])
            self._digests.arrived(header[4:-1])
            if logits is None:
                return None
            dist.broadcast(logits, src=self._source, group=self._mesh.pp_group)
        return logits


def logits_in(outputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Collect the logits f[B/m S V] of each microbatch's outputs; empty if the model gives none."""
    return [output["logits"] for output in outputs if output.get("logits") is not None]
