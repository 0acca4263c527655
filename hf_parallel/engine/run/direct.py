"""The engine of one stage: the model's own forward and autograd, with data and tensor parallelism around it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import convert_to_fp32

from hf_parallel.compat.private_torch import gives_gradients_away
from hf_parallel.engine.run.engine import Attachment, Engine
from hf_parallel.engine.run.pipeline_inputs import refuse_attentions
from hf_parallel.expert_parallel.exchange import ExpertHooks
from hf_parallel.guards.calls.backwards import Backwards
from hf_parallel.guards.calls.batches import SharedBatch
from hf_parallel.guards.calls.branches import refuse_hooks
from hf_parallel.head.labelled import LabelledOutput
from hf_parallel.model.tensors import tensors_in


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
