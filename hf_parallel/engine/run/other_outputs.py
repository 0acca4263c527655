"""Outputs of a model beside its loss and logits, which user code may read and compute its loss from.

The last stage has them while a schedule runs. They are cut along rows like the batch, so those of a batch are those of its
microbatches one after the other. Whether this holds for a model's outputs is tried on two rows, together and alone.

Extents: B rows of a batch, m microbatches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hf_parallel.batches import num_rows, take_rows
from hf_parallel.engine.run.autograd_nodes import depends_only_on
from hf_parallel.engine.run.last_stage import LastStage
from hf_parallel.engine.run.microbatch_loss import MicrobatchLoss, Share
from hf_parallel.errors import RankMismatchError
from hf_parallel.guards.calls.batches import Announced
from hf_parallel.guards.gradients.aside import Made
from hf_parallel.mesh.groups import Mesh
from hf_parallel.model.tensors import ROWS_AGREE


Forward: TypeAlias = Callable[[list[dict[str, Any]]], list[Any]]
APART = ("loss", "logits")  # these have ways of their own
MULTIPLE = 1e-6  # relative, of a gradient that is a multiple of another
COARSEST = max(ROWS_AGREE.values())
EQUAL = 0.9  # of whole numbers and flags (is the label the most likely token?), which rounding may turn
OWN = "gradient of the own loss"
NO_ROWS = (
    "it is not made of the rows of the batch one by one, and a pipeline computes microbatches apart. Set "
    "pipeline.num_microbatches to 1, or compute it from other outputs. trainer.evaluate(ignore_keys=[...]) passes it over."
)
NOT_NOW = "this call gives none, or microbatches of another shape. Read it where the model gives it in one shape."


@dataclass
class CallKind:
    """Outputs and uses of calls with the same flags, known alike on all stages.

    Attributes:
        gives: Name of each tensor -> whether it had a graph when it was last looked at.
        absent: Outputs that are None.
        names: All outputs that are not None, in the model's order.
        refused: Outputs that microbatches cannot make, with the reason; None if nobody has looked.
        is_read: Whether user code reads any, so that they are sent without being asked for.
        in_two_passes: Whether losses were computed from them that the fused step cannot serve.
        told: Last message about it.
    """

    gives: dict[str, bool]
    absent: frozenset[str]
    names: tuple[str, ...]
    refused: dict[str, str] | None = None
    is_read: bool = False
    in_two_passes: bool = False
    told: str = ""

    @property
    def has_logits(self) -> bool:
        """Whether there are logits."""
        return "logits" in self.names


@dataclass
class Caught:
    """The other outputs of one call, by microbatch; empty on all but the last stage.

    Attributes:
        looks_at_loss: Whether to find out what the model's own loss gives to the outputs.
        parts: Detached tensors by name.
        own: Name of the one output that the model's own loss is computed from, and its gradient.
        gives: Whether each output requires a gradient, as in `CallKind`.
        absent: Names of outputs that are None, as in `CallKind`.
        names: Names of the outputs in order, as in `CallKind`.
    """

    looks_at_loss: bool = False
    parts: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    own: dict[int, tuple[str, Tensor] | None] = field(default_factory=dict)
    gives: dict[str, bool] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, outputs: Sequence[Any]) -> Caught:
        """The other outputs of microbatches that ran without a graph."""
        caught = cls()
        for index, output in enumerate(outputs):
            caught.note(index, output)
        return caught

    def note(self, index: int, output: Any, loss: Tensor | None = None) -> None:
        """Keep the outputs of a microbatch that the last stage has computed.

        Args:
            index: Index of the microbatch.
            output: Output of the model.
            loss: Its part of the batch's loss (0-d), if it has a graph.
        """
        found = _tensors(output)
        self.parts[index] = {name: tensor.detach() for name, tensor in found.items()}
        self.gives = {name: tensor.requires_grad for name, tensor in found.items()}
        self.names = (
            tuple(n for n, value in output.items() if value is not None) if isinstance(output, Mapping) else ()
        )
        if dataclasses.is_dataclass(output):
            self.absent = {f.name for f in dataclasses.fields(output) if getattr(output, f.name) is None}
        if self.looks_at_loss and loss is not None and loss.requires_grad:
            self.own[index] = _own_gradient(loss, found)

    def joined(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Outputs [B ...] of the whole batch, without those that some microbatch lacks or has in another shape."""
        parts = [self.parts[index] for index in sorted(self.parts)]
        return {
            name: torch.cat([part[name] for part in parts]) if len(parts) > 1 else parts[0][name]
            for name in names
            if parts
            and len({part[name].shape[1:] if name in part else None for part in parts}) == 1
            and name in parts[0]
        }

    def joined_own(self) -> tuple[str, Tensor] | None:
        """Name of the output that the loss is computed from and its gradient [B ...]; None if there is not exactly one."""
        found = [self.own.get(index) for index in sorted(self.parts)]
        names = {(one[0], one[1].shape[1:]) if one is not None else ("", ()) for one in found}
        if len(names) != 1 or "" in (name for name, _ in names):
            return None
        parts = [one[1] for one in found if one is not None]
        return names.pop()[0], torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass
class Reading:
    """A training forward whose other outputs may be read.

    Attributes:
        kind: Kind of the call.
        announced: The batch.
        step: Step of the random numbers.
        count: Microbatches.
        caught: The outputs, on the last stage.
        made: Gradients of the model's own loss; None if there was no backward.
        seed: Factor that the loss was multiplied with.
        own: The same as `Caught.joined_own`, on every rank.
    """

    kind: CallKind
    announced: Announced
    step: int
    count: int
    caught: Caught
    made: Made | None
    seed: float = 1.0
    own: tuple[str, Tensor] | None = None


class OtherOutputs:
    """Sends other outputs to all stages, and turns their gradients into losses of microbatches.

    Args:
        mesh: This rank's mesh.
        last_stage: Sends what the last stage has.
        loss: The model's own.
        dtypes: Gives the types that the model computes in.
    """

    def __init__(
        self, mesh: Mesh, last_stage: LastStage, loss: MicrobatchLoss, dtypes: Callable[[], set[torch.dtype]]
    ) -> None:
        self._mesh, self._last_stage, self._loss, self._dtypes = mesh, last_stage, loss, dtypes
        self._kinds: dict[Hashable, CallKind] = {}
        self._deviations: list[Tensor] = []

    # -- kinds of calls ------------------------------------------------------------------------------------------

    def known(self, batch: Mapping[str, Any]) -> CallKind | None:
        """The kind of calls with the flags of `batch`; None before the first."""
        return self._kinds.get(_flags(batch))

    def learn(self, batch: Mapping[str, Any], caught: Caught) -> CallKind:
        """Tell all stages what a call of a new kind gives; collective over the pipeline."""
        _, told = self._last_stage.broadcast_named({}, (caught.gives, frozenset(caught.absent), caught.names))
        kind = self._kinds[_flags(batch)] = CallKind(*told)
        return kind

    # -- values --------------------------------------------------------------------------------------------------

    def send(self, reading: Reading) -> dict[str, Tensor | str]:
        """Outputs [B ...] by name, or why there is none, on every rank; sets `reading.own`. Collective over the pipeline."""
        kind, caught = reading.kind, reading.caught
        refused = (kind.refused or {}) if reading.count > 1 else {}
        wanted = [name for name in kind.gives if name not in refused]
        mine, own = caught.joined(wanted), caught.joined_own()
        if own is not None and own[0] in mine:
            mine[OWN] = own[1]
        values, (name, gives) = self._last_stage.broadcast_named(
            mine, (own[0] if own is not None else "", caught.gives)
        )
        given = values.pop(OWN, None)
        reading.own = (name, given) if given is not None else None
        if reading.made is not None:  # of a forward with a graph, which a model may take an output out of
            kind.gives |= gives
        return {**refused, **{name: NOT_NOW for name in wanted if name not in values}, **values}

    def judge_rows(self, kind: CallKind, batch: Mapping[str, Any], forward: Forward) -> None:
        """Find out which outputs of a call microbatches can make, on its first two rows; collective over the pipeline.

        Args:
            kind: Kind of the call; gets `refused`.
            batch: With labels; runs as several microbatches.
            forward: Runs microbatches without autograd, and gives the last stage's outputs.
        """
        rows = num_rows(batch)
        both = take_rows(batch, 0, min(2, rows), rows)
        alone = [microbatch for microbatch, _ in self._loss.cut(0, both)]
        count = {name: alone[0][name] for name in ("num_items_in_batch",) if name in alone[0]}
        together = forward([{**both, **count}])
        apart = forward(alone)
        refused = {}
        if together:  # on the last stage
            whole, parts = _tensors(together[0]), [_tensors(one) for one in apart]
            refused = {
                name: NO_ROWS
                for name in kind.gives
                if not self._agrees(whole.get(name), [part.get(name) for part in parts])
            }
        _, kind.refused = self._last_stage.broadcast_named({}, refused)

    def _agrees(self, whole: Tensor | None, parts: Sequence[Tensor | None]) -> bool:
        found = [part for part in parts if part is not None and part.ndim]
        if whole is None or len(found) != len(parts) or any(part.shape[1:] != whole.shape[1:] for part in found):
            return False
        joined = torch.cat(found)
        if joined.shape != whole.shape:
            return False
        if not whole.is_floating_point():
            return bool((joined == whole).float().mean() >= EQUAL)
        return bool(_deviation(joined, whole) <= self._tolerance())

    def _tolerance(self) -> float:
        return max((ROWS_AGREE.get(dtype, COARSEST) for dtype in self._dtypes()), default=COARSEST)

    # -- gradients -----------------------------------------------------------------------------------------------

    def ratio(self, reading: Reading, gradients: Mapping[str, Tensor]) -> Tensor | None:
        """The number (0-d) to multiply the model's own loss with so that it has these gradients; None if there is none.

        Collective over the model copy; waits for the device.
        """
        if reading.made is None or reading.made.is_taken or reading.own is None:
            return None
        name, own = reading.own
        if set(gradients) != {name}:
            return None
        base, given = own.double(), gradients[name].double()
        factor = (base * given).sum() / (base * base).sum()
        fits = (given - factor * base).abs().max() <= MULTIPLE * given.abs().max()
        agreed = fits.float()
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._mesh.mp_group)
        return factor.float() if bool(agreed) else None

    def loss_with(
        self, reading: Reading, gradients: Mapping[str, Tensor], shares: Sequence[Share]
    ) -> Callable[[Any, int], Tensor]:
        """The scalar whose gradient with respect to the outputs of a microbatch is `gradients`, for the last stage.

        Args:
            reading: The forward whose outputs the gradients are of.
            gradients: dL/d(output) [B ...] by name; that of "loss" is a number.
            shares: Share of each microbatch in its batch's loss.
        """
        parts = reading.caught.parts
        cut: dict[str, Sequence[Tensor]] = {}
        for name, gradient in gradients.items():
            if name != "loss" and parts:
                rows = [parts[index][name].shape[0] for index in sorted(parts)] if len(parts) > 1 else []
                cut[name] = gradient.split(rows) if rows else [gradient]

        def loss_of(output: Any, index: int) -> Tensor:
            found = _tensors(output)
            self._compare(reading.kind, parts[index], found)
            terms = [(found[name] * each[index]).sum() for name, each in cut.items()]
            if "loss" in gradients:
                terms.append(self._loss.of(output, shares[index]) * gradients["loss"])
            return torch.stack([term.float() if term.dtype.itemsize < 4 else term for term in terms]).sum()

        return loss_of

    def _compare(self, kind: CallKind, before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
        for name, value in before.items():
            if value.is_floating_point():
                same = name in now and now[name].shape == value.shape
                # User code got it without a graph, so its loss has no gradient for it.
                same = same and (kind.gives.get(name, False) or not now[name].requires_grad)
                far = _deviation(now[name].detach(), value) if same else torch.full_like(value.sum(), torch.inf)
                self._deviations.append(far.float())

    def begin_second_pass(self) -> None:
        """Note on all ranks that the second pass of a batch will have to be judged."""
        self._deviations.append(torch.zeros((), device=self._last_stage.device))

    def judge(self) -> None:
        """Refuse a second pass that gave other outputs than the first; collective if there was one.

        Raises:
            RankMismatchError: On every rank.
        """
        found, self._deviations = self._deviations, []
        if not found:
            return
        worst = torch.stack(found).max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._mesh.mp_group)
        if float(worst) > self._tolerance():
            raise RankMismatchError(
                f"a batch whose loss is computed from the model's outputs runs forward twice, and its outputs differ by "
                f"{float(worst):.2g} (relative; at most {self._tolerance():g}): its gradients would be of another forward. "
                "Weights or data were changed between the forward and the backward, or the model draws numbers from "
                "elsewhere than torch. Take that out, or set pp_size to 1."
            )


def _flags(batch: Mapping[str, Any]) -> Hashable:
    """The key that tells kinds of calls apart: inputs and flags, not tensors or numbers, which change from batch to batch."""
    flags = frozenset((name, value if isinstance(value, (bool, str)) else None) for name, value in batch.items())
    return flags, torch.is_grad_enabled()


def _tensors(output: Any) -> dict[str, Tensor]:
    if not isinstance(output, Mapping):
        return {}
    return {name: value for name, value in output.items() if isinstance(value, Tensor) and name not in APART}


def _own_gradient(loss: Tensor, found: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """The output that a loss is computed from, if it is one and nothing else reaches the loss, and its gradient."""
    trained = {name: tensor for name, tensor in found.items() if tensor.requires_grad}
    if not trained or not depends_only_on(loss, list(trained.values())):
        return None
    gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
    given = [(name, one) for name, one in zip(trained, gradients, strict=True) if one is not None]
    return given[0] if len(given) == 1 else None


def _deviation(found: Tensor, expected: Tensor) -> Tensor:
    """Relative distance of two tensors (0-d); equal infinities, and no number in both, count as equal."""
    a, b = found.double(), expected.double()
    alike = torch.isfinite(a) & torch.isfinite(b) | (a == b) | a.isnan() & b.isnan()
    a, b = (torch.nan_to_num(one, nan=0.0, posinf=0.0, neginf=0.0) for one in (a, b))
    far = torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp(min=1e-30)
    return torch.where(alike.all(), far, torch.inf)
