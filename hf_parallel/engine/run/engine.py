"""What engines have in common: they replace `model.forward` while a model is parallelized.

An engine owns the instance's `forward` from `install` on and notices when somebody replaces it. `DirectEngine` (`direct.py`)
is for one stage, `PipelineEngine` (`pipeline.py`) for several.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from accelerate.state import GradientState
from torch import nn

from hf_parallel.batches import BatchCheck, RandomCheck
from hf_parallel.compat.private_torch import queue_after_backward, set_aside
from hf_parallel.engine.gradients.sync import GradientSync
from hf_parallel.engine.plan.held import Table
from hf_parallel.engine.run.expected import Expected
from hf_parallel.engine.run.methods import install_methods
from hf_parallel.errors import RankMismatchError, UnsupportedError
from hf_parallel.guards.calls.part_hooks import PartHooks
from hf_parallel.guards.meeting import meeting_of_copy
from hf_parallel.guards.weights.alike import CommonWeights
from hf_parallel.guards.weights.buffers import MovingBuffers
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.model.samples import signature_of
from hf_parallel.monitor.recorder import Recorder
from hf_parallel.tensor_parallel.run.reads import in_lockstep


Autocast: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass
class Attachment:
    """The parts an engine works with; made by `attach`.

    Args:
        model: The model, already cut and sharded.
        forward: The model's genuine forward, as it was when the model was prepared.
        device: Device of the model.
        mesh: This rank's mesh.
        ledger: The full model's parameters.
        parameters: Ledger name -> this rank's parameter.
        places: Ledger name -> where this rank's persistent buffer stands.
        gradients: Reduction and clipping.
        batch_check: Same-batch check over a model copy.
        random_check: Same-random-numbers check over tensor-parallel ranks.
        watchdog: Hang reports.
        recorder: Keeps when this rank does what.
    """

    model: nn.Module
    forward: Callable[..., Any]
    device: torch.device
    mesh: Mesh
    ledger: Ledger
    parameters: dict[str, nn.Parameter]
    places: dict[str, tuple[Table, str]]
    gradients: GradientSync
    batch_check: BatchCheck
    random_check: RandomCheck
    watchdog: Watchdog
    recorder: Recorder

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Ledger name -> this rank's persistent buffer, as user code left it."""
        found = {name: table.get(key) for name, (table, key) in self.places.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def common_weights(self) -> CommonWeights:
        """Digests of the weights that other ranks hold too; one object for each comparison."""
        replicas = self.gradients.replicas
        return CommonWeights(self.ledger, self.parameters, self.mesh, lambda: replicas.arriving, self.gradients.scaled)

    def to_gather(self) -> dict[str, torch.Tensor]:
        """Ledger name -> this rank's weight or buffer, which is gathered next; replicas that train by themselves become equal first.

        Raises:
            UnsupportedError: A parameter or a module was replaced since the model was prepared.
        """
        self.gradients.replicas.synchronise()
        self.gradients.refuse_replaced()
        return {**self.parameters, **self.buffers}


class Engine:
    """Owns `model.forward`. Subclasses implement `run`.

    Attributes:
        recorder: Keeps when this rank does what.
        expected: Expectations of the plans about the ranks.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.model = attachment.model
        self.mesh = attachment.mesh
        self.gradients = attachment.gradients
        self.autocast: Autocast = contextlib.nullcontext
        self.scaler: Any = None
        self._signature = signature_of(attachment.model, attachment.forward)
        self._installed: Callable[..., Any] | None = None
        self._holds_back = False
        self._queued = False
        self.watching: Sequence[object] = ()  # modes that follow what user code computes around the model
        self.gathers = meeting_of_copy(self.mesh)
        self._buffers = MovingBuffers(attachment.model, attachment.mesh, attachment.device)
        self.part_hooks = PartHooks(attachment.model, {})
        self.recorder = attachment.recorder
        self.expected = Expected()

    @property
    def ends_step(self) -> bool:
        """Whether a backward pass now is the last of its optimizer step."""
        return bool(GradientState().sync_gradients) and not self._holds_back

    def end_pass_later(self) -> None:
        """Let `end_pass` follow the caller's backward pass that runs: gradients may arrive until it is over."""
        if not self._queued:
            self._queued = True
            self.gradients.begin_backward()
            queue_after_backward(self._end_queued_pass)

    def _end_queued_pass(self) -> None:
        self._queued = False
        self.before_end()
        self.end_pass(1.0, self.compare_step)

    def end_pass(self, factor: float, compare: Callable[[], None]) -> None:
        """End a backward pass; after the last one of an optimizer step compare the ranks, then reduce.

        Args:
            factor: Factor for the gradients.
            compare: Refuses what the ranks must not do differently in a step. Comes first: the reduction changes gradients.
        """
        with self.attachment.watchdog.waiting("waits for the gradient reduction of the other ranks"):
            if self.ends_step:
                self._buffers.end_step()
                compare()
                with self._leaving_others():
                    self.gradients.reduce(factor)
            else:
                self.gradients.accumulate(factor)

    @contextlib.contextmanager
    def _leaving_others(self) -> Iterator[None]:
        """Around what the ranks with this part of the model refuse together: ranks with other parts wait for them."""
        try:
            yield
        except RankMismatchError as error:
            if self.mesh.shape.copy_size > 1:
                self.attachment.watchdog.leaves_others(str(error))
            raise

    def before_end(self) -> None:
        """Bring this pass's gradients to the parameters, if they are not there yet."""

    def compare_step(self) -> None:
        """Refuse losses or batches that differ over the ranks of a model copy."""

    def complete_config(self) -> None:
        """Give this rank what forward passes of any rank wrote to the model's config; collective over the model copy."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add up gradients and reduce nothing, as under DDP's context of this name.

        A single copy has no other to reduce with: what its own ranks share is summed as ever, so that a loop may step inside
        (accelerate's `LocalSGD` does).
        """
        before, self._holds_back = self._holds_back, self._holds_back or self.mesh.shape.num_copies > 1
        try:
            yield
        finally:
            self._holds_back = before

    @contextlib.contextmanager
    def in_model(self, activity: str = "") -> Iterator[None]:
        """Inside, code of the model runs, and none of the user's.

        Args:
            activity: Activity in every step, as in `Watchdog.engaged`.
        """
        with (
            set_aside(*self.watching),
            self.attachment.watchdog.engaged(activity),
            self.gradients.replicas.forward(),
            in_lockstep(self.model),
        ):
            yield

    def install(self) -> None:
        """Replace the instance's forward; its signature stays that of the genuine one (the Trainer inspects it)."""
        engine = self

        @functools.wraps(self.attachment.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            engine.part_hooks.check()
            # A rank may evaluate or generate by itself for long, while the others wait for its next step.
            trains = engine.model.training and torch.is_grad_enabled()
            with engine.in_model("runs the forward pass" if trains else ""):
                return engine.run(args, kwargs)

        # Not a bound method: `inspect.signature` would take the first input of the wrapped one for `self`.
        patched = vars(self.model).get("forward")
        self._installed = forward
        # A wrapper may hand attributes on to what it wraps (Lightning Fabric's does), whose own forward runs inside of ours.
        vars(self.model).update(forward=forward, no_sync=self.no_sync)
        in_parts = self.mesh.shape.copy_size > 1 or self.gradients.replicas.sharded is not None
        install_methods(self.model, self.gradients.replicas, patched, in_parts=in_parts)

    def keep_buffers(self) -> None:
        """Leave each replica the buffers that it has, as DDP does with `broadcast_buffers=False`."""
        self._buffers.sends = False

    def check_installed(self) -> None:
        """Refuse a forward that somebody put over ours.

        Raises:
            UnsupportedError: Names the function that replaced it.
        """
        current = self.model.__dict__.get("forward")
        if current is self._installed:
            return
        name = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', repr(current))}"
        raise UnsupportedError(
            f"model.forward was replaced by {name} after the model was parallelized, which would run a part of the "
            "model without its pipeline or gradient reduction. Patch the model before trainer.train(), evaluate() or "
            "accelerator.prepare(): hf_parallel takes the forward it finds there."
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of `model(...)`."""
        raise NotImplementedError

    def backpropagates(self, loss: torch.Tensor) -> None:
        """Note that `accelerator.backward(loss)` begins."""

    def under_autocast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` run under this engine's autocast, whatever it is at the time of the call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                return function(*args, **kwargs)

        return run

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The call's arguments by name, without those that are None."""
        if args:
            arguments = dict(self._signature.bind_partial(*args, **kwargs).arguments)
            for name, parameter in self._signature.parameters.items():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    arguments.update(arguments.pop(name, {}))
        else:
            arguments = dict(kwargs)
        return {name: value for name, value in arguments.items() if value is not None}

    @property
    def trains(self) -> bool:
        """Whether a forward now is a training forward."""
        return self.model.training and torch.is_grad_enabled()
