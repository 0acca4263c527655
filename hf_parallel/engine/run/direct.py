"""Engines, which replace `model.forward` while a model is parallelized.

`DirectEngine` (one stage: data and tensor parallelism) runs the model's own forward with real autograd and reduces the
gradients when a backward pass ends. `PipelineEngine` (several stages, in `pipeline.py`) runs a schedule. Both own
the instance's `forward` from `install` on and notice when somebody replaces it.
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
from accelerate.utils import convert_to_fp32
from torch import nn

from hf_parallel.batches import BatchCheck, RandomCheck
from hf_parallel.compat.private_peft import base_model
from hf_parallel.compat.private_torch import gives_gradients_away, queue_after_backward, set_aside
from hf_parallel.engine.gradients.sync import GradientSync
from hf_parallel.engine.plan.held import Table
from hf_parallel.engine.run.expected import Expected
from hf_parallel.engine.run.methods import install_methods
from hf_parallel.engine.run.pipeline_inputs import refuse_attentions
from hf_parallel.errors import RankMismatchError, UnsupportedError
from hf_parallel.expert_parallel.exchange import ExpertHooks
from hf_parallel.guards.calls.backwards import Backwards
from hf_parallel.guards.calls.batches import SharedBatch
from hf_parallel.guards.calls.branches import refuse_hooks
from hf_parallel.guards.calls.part_hooks import PartHooks
from hf_parallel.guards.meeting import meeting_of_copy
from hf_parallel.guards.weights.alike import CommonWeights
from hf_parallel.guards.weights.buffers import MovingBuffers
from hf_parallel.hangs.watchdog import Watchdog
from hf_parallel.head.labelled import LabelledOutput
from hf_parallel.ledger import Ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.model.tensors import tensors_in
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
        self._signature = _signature_of(attachment)
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


class DirectEngine(Engine):
    """One stage: the model's own forward and autograd, with the reduction after the last backward of a window."""

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment)
        self._backwards = Backwards(attachment.mesh, attachment.device, attachment.gradients.settings)
        self._expert_hooks = ExpertHooks(self.model)
        self._pass = 0  # batches of this step that were backpropagated
        self._begun = self.recorder.mark()  # when the backward pass of the last one did
        attachment.gradients.replicas.before_reading.append(self._backwards.settle)
        attachment.gradients.replicas.noticed = self.end_pass_later  # of a loss that reads parameters past the model
        common, random = attachment.common_weights(), attachment.random_check
        leave = attachment.watchdog.leaves_others
        compared = attachment.gradients.settings, attachment.gradients.shown.numbers
        self._shared_batch = SharedBatch(attachment.mesh, attachment.device, common, random, *compared, leave)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the genuine forward; when its outputs are backpropagated, reduce the gradients at the end."""
        refuse_attentions(self.model, kwargs, self.mesh.shape.tp_size)
        if self.trains:
            batch = self.bound(args, kwargs)
            self.attachment.batch_check.check([batch])
            looks = self.ends_step or not self.gradients.in_window
            self.gradients.look_at_hooks()
            self._expert_hooks.tell(self.gradients.settings.hooked)
            self._shared_batch.begin(batch, trains=True, looks=looks)
            self.gradients.begin_forward()
            self.gradients.arm(1.0, last=self.ends_step)
        elif "labels" in kwargs:
            self._shared_batch.begin(kwargs)
        context = self.autocast()
        start = self.recorder.mark()
        with self._watching(), self._shared_batch.judging(), context:
            output = made = self.attachment.forward(*args, **kwargs)
        if self.trains:
            if self.gradients.settings.hooked:  # which would wait in the backward pass for ranks that have none
                self._shared_batch.settle()
            self.recorder.add("F", 0, self._pass, start)
        finer = not isinstance(context, contextlib.nullcontext)
        hides = isinstance(output, LabelledOutput)
        if finer:
            output = output.changed(convert_to_fp32) if hides else convert_to_fp32(output)
        if hides:
            output.again(made, self._meet_for_logits, functools.partial(self._gathered, finer))
        held = output.held() if hides else output  # to look at the logits would gather them
        if torch.is_grad_enabled():
            for tensor in tensors_in(held):
                if tensor.requires_grad:
                    tensor.register_hook(self._during_backward)
        if self.mesh.shape.sp_size > 1 and isinstance(held, Mapping):
            whole = {"loss", "logits"} if held.get("loss") is None else {"loss"}
            refuse_hooks(
                {n: value for n, value in held.items() if n not in whole}, f"sp_size={self.mesh.shape.sp_size}"
            )
        return output

    def _meet_for_logits(self) -> None:
        self.gathers.meet("outputs.logits of a training forward with labels")

    def _gathered(self, finer: bool, logits: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = convert_to_fp32(logits) if finer else logits
        if found.requires_grad:
            found.register_hook(self._during_backward)
            shape = self.mesh.shape
            refuse_hooks(
                {"logits": found}, f"sp_size={shape.sp_size}" if shape.sp_size > 1 else f"tp_size={shape.tp_size}"
            )
        return found

    def backpropagates(self, loss: torch.Tensor) -> None:
        """Note the loss, which must be the same on all ranks of a batch: else shards take other steps, or a sum is wrong.

        With ZeRO gradients are taken back now: that of a parameter which the loss reads itself may arrive before those of the
        model's outputs, and would pass for one that user code assigned, which is not averaged.
        """
        if self.gradients.replicas.zero is not None:
            self.gradients.begin_backward()
        if self.mesh.mp_group is not None and loss.numel() == 1:
            self._backwards.lost(loss)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        if not self.trains:
            with self._buffers.beside():
                yield
            return
        with self._buffers.watching(), self.attachment.random_check.watching():
            yield

    def _during_backward(self, gradient: torch.Tensor) -> None:
        if not self._queued:
            self.gradients.given_away = self._gives_gradients_away()
            if self.gradients.given_away and self.gradients.replicas.sharded is None:
                return
            self._begun = self.recorder.mark()
        if self.mesh.mp_group is not None and gradient.is_floating_point():
            self._backwards.scaled(gradient) if gradient.ndim == 0 else self._backwards.arrived(gradient)
        self.end_pass_later()

    def _gives_gradients_away(self) -> bool:
        """Whether user code called `torch.autograd.grad`: what it assigns to `p.grad` is refused at the step, not averaged."""
        trained = (p for p in self.attachment.parameters.values() if p.requires_grad)
        sharded = self.gradients.replicas.sharded
        if sharded is None:
            return gives_gradients_away(trained)
        leaves = map(sharded.gathered_of, trained)  # torch finds no way to the parts
        # One that was gathered last for a reference forward without adapters (PEFT's `disable_adapter`) has no way to it either.
        return gives_gradients_away(leaf for leaf in leaves if leaf is not None and leaf.requires_grad)

    def before_end(self) -> None:
        """Record the backward pass, which is over; microbatches count from the step's first."""
        self.recorder.add("B", 0, self._pass, self._begun)
        self._pass = 0 if self.ends_step else self._pass + 1

    def compare_step(self) -> None:
        """Compare the losses of the ranks that read the same batch."""
        if self.mesh.mp_group is not None:
            self._shared_batch.end_step()
            self._backwards.agree_later()


def _signature_of(attachment: Attachment) -> inspect.Signature:
    """Signature of the model's forward, or of the wrapped model's where that takes `*args` and names none (PEFT's)."""
    found = inspect.signature(attachment.forward)
    nameless = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in found.parameters.values())
    return inspect.signature(base_model(attachment.model).forward) if nameless else found
