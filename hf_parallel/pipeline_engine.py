"""The engine of several stages: `model(...)` becomes one run of a schedule.

Three modes. *Fused* (training with labels): forward and backward of the whole schedule happen inside the forward call;
the loss it returns carries an autograd node whose backward only checks and finishes the step. *Split* (training
without labels, for losses computed by the user on logits): all forwards in the forward call, all backwards when the
user's loss is backpropagated; every microbatch's activations live in between. *Forward only* (evaluation).

The Trainer multiplies the loss it gets by factors of its own (accumulation, replicas, loss scale). Fused backwards run
before those are known, so they are seeded with 1 (or the fp16 loss scale); the checked backward receives the factor
and applies it once, to the summed gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from hf_parallel.batches import count_targets, num_rows, split_rows
from hf_parallel.engine import Attachment, Engine
from hf_parallel.errors import UnsupportedError
from hf_parallel.pipeline_parallel.programs import Programs
from hf_parallel.pipeline_parallel.runtime import PhaseState, PipelineRuntime
from hf_parallel.pipeline_parallel.seeds import StepSeeds
from hf_parallel.pipeline_parallel.selfcheck import LossKind


LossFunction: TypeAlias = Callable[..., torch.Tensor]
# Arguments that change what a model returns or keeps; a pipeline returns loss and logits only.
REFUSED = ("past_key_values", "output_hidden_states", "output_attentions")


@dataclass
class PipelineTrainingOutput(ModelOutput):
    """Output of a fused training forward: the loss; the logits exist on the last stage only, and only briefly."""

    loss: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "logits":
            raise AttributeError(
                "logits do not exist in a fused pipeline step: the backward has already run. A loss of your own on "
                "logits works when the model is called without labels (labels = inputs.pop('labels')), or as "
                "Trainer(compute_loss_func=...)."
            )
        raise AttributeError(name)


@dataclass
class _Window:
    """Batches of one accumulation window, the losses of those already run, and the next one to be asked for."""

    batches: list[dict[str, Any]]
    losses: list[torch.Tensor] = field(default_factory=list)
    position: int = 0

    def holds(self, batch: dict[str, Any]) -> bool:
        """Whether `batch` is the next one, with the very tensors announced (extra arguments allowed)."""
        if self.position >= len(self.batches):
            return False
        return all(batch.get(name) is value for name, value in self.batches[self.position].items())


@dataclass(frozen=True)
class _Share:
    """What one microbatch contributes: its labels, its loss normaliser and its weight in a batch's loss."""

    batch: int
    labels: torch.Tensor | None
    num_items: Any
    weight: float


class PipelineEngine(Engine):
    """Runs the schedule.

    Args:
        attachment: Model, mesh, ledger, gradients.
        runtime: Executor of this rank's stages.
        programs: This rank's actions, by number of microbatches.
        num_microbatches: Parts a batch is cut into, at most its rows.
        loss_kind: How the model's own loss is normalised (see `selfcheck.loss_normalisation`).
    """

    def __init__(
        self,
        attachment: Attachment,
        runtime: PipelineRuntime,
        *,
        programs: Programs,
        num_microbatches: int,
        loss_kind: LossKind,
    ) -> None:
        super().__init__(attachment)
        self.runtime = runtime
        self.seeds = StepSeeds(runtime.stages, self._common_seed())
        runtime.before = self.seeds.set
        runtime.stages = {index: self.under_autocast(stage) for index, stage in runtime.stages.items()}
        self._programs = programs
        self._num_microbatches = num_microbatches
        self._loss_kind = loss_kind
        self._loss_function: LossFunction | None = None
        self._window: _Window | None = None
        self._pending = False
        self._seed = 1.0
        self._factors: list[float] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._needs_logits = True

    def _common_seed(self) -> int:
        """Where dropout starts: this process's seed, the same on all ranks of a model copy, another on each copy."""
        seed = torch.tensor(torch.initial_seed() % 2**63, device=self.attachment.device)
        first = self.mesh.shape.rank_at(self.mesh.dp_rank, 0, 0)
        dist.broadcast(seed, src=first, group=self.mesh.mp_group)
        return int(seed) + self.mesh.dp_rank

    @property
    def _loss_rank(self) -> int:
        """World rank of the last stage of this rank's pipeline."""
        mesh = self.mesh
        return mesh.shape.rank_at(mesh.dp_rank, self.runtime.placement[-1], mesh.tp_rank)

    # -- what the Trainer side sets ------------------------------------------------------------------------------

    def begin_window(self, batches: list[dict[str, Any]]) -> None:
        """The next training forwards are these batches: run them as the microbatches of one schedule."""
        self._pending, self._factors = False, []  # a window that training broke off leaves nothing behind
        self._window = _Window([{k: v for k, v in batch.items() if v is not None} for batch in batches])

    @contextmanager
    def loss_function(self, function: LossFunction) -> Iterator[None]:
        """Inside, the last stage uses `function(outputs, labels, num_items_in_batch=n)` instead of the model's loss.

        It must be a sum over label positions divided by `num_items_in_batch`.
        """
        self._loss_function = function
        try:
            yield
        finally:
            self._loss_function = None

    @contextmanager
    def without_logits(self) -> Iterator[None]:
        """Inside, evaluation returns the loss only: full logits are not sent to the other stages."""
        self._needs_logits = False
        try:
            yield
        finally:
            self._needs_logits = True

    # -- model(...) ----------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of `model(...)`: fused, split or forward only."""
        batch = self.bound(args, kwargs)
        self._refuse(batch)
        batch["use_cache"] = False
        if not torch.is_grad_enabled():
            return self._forward_only(batch)
        if self._pending:
            raise UnsupportedError(
                "two training forwards without a backward in between: a pipeline's forward already ran the backward "
                "of its batch. Call accelerator.backward(loss) after each forward, or evaluate under torch.no_grad()."
            )
        if self.trains and "labels" in batch:
            return self._fused(batch)
        if "labels" in batch:  # whether a backward follows is not known, and a fused step has already run it
            raise UnsupportedError(
                f"labels in a batch with pp_size={self.mesh.shape.pp_size} while gradients are recorded and the model is in "
                "evaluation mode (from_pretrained leaves it there). Call model.train() before a training loop, or evaluate "
                "under torch.no_grad()."
            )
        return self._split(batch)

    def _refuse(self, batch: dict[str, Any]) -> None:
        given = [name for name in REFUSED if batch.get(name) not in (None, False)]
        if batch.pop("return_dict", True) is False:
            given.append("return_dict=False")
        if given:
            raise UnsupportedError(
                f"{', '.join(given)} with pp_size={self.mesh.shape.pp_size}: a pipeline returns loss and logits only, "
                "and generate() needs a key-value cache. Save the model with trainer.save_model() and load it in one "
                "process for that, or use pp_size 1."
            )

    # -- fused ---------------------------------------------------------------------------------------------------

    def _fused(self, batch: dict[str, Any]) -> PipelineTrainingOutput:
        window = self._window
        if window is not None and window.holds(batch):
            if window.position == 0:
                extras = {name: value for name, value in batch.items() if name not in window.batches[0]}
                window.losses = self._run_schedule([{**other, **extras} for other in window.batches], last=True)
            loss = window.losses[window.position]
            window.position += 1
        elif window is not None and 0 < window.position < len(window.batches):
            raise UnsupportedError(
                f"batch {window.position} of an accumulation window changed between the data loader and the model: "
                "the schedule of the whole window has already run. Change batches in the collator instead."
            )
        else:
            loss = self._run_schedule([batch], last=GradientState().sync_gradients)[0]
        self._pending = True
        checked: torch.Tensor = _FusedLoss.apply(self._anchor.to(loss.device), loss, self)  # type: ignore[no-untyped-call]
        return PipelineTrainingOutput(loss=checked)

    def _run_schedule(self, batches: list[dict[str, Any]], *, last: bool) -> list[torch.Tensor]:
        """Forward and backward of all batches in one schedule; one loss a batch, equal on all stages.

        Args:
            batches: The batches.
            last: Whether no other schedule follows in this optimizer step.
        """
        self.attachment.batch_check.check(batches)
        microbatches: list[dict[str, Any]] = []
        shares: list[_Share] = []
        for index, batch in enumerate(batches):
            self.check_targets(batch)
            for microbatch, share in self._cut(index, batch):
                microbatches.append(microbatch)
                shares.append(share)
        self._seed = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        self.seeds.next_step()
        # The factor that upstream code applies is not known before its backward.
        self.runtime.at_last_backward = lambda: self.gradients.arm(None, last=last)
        losses = self.runtime.run(
            microbatches,
            self._programs.training(len(microbatches)),
            backward=True,
            loss_of=lambda output, index: self._loss_of(output, shares[index]),
            seed=self._seed,
        )
        return self._share_losses(losses, shares, len(batches))

    def _cut(self, index: int, batch: dict[str, Any]) -> Iterator[tuple[dict[str, Any], _Share]]:
        """Microbatches of one batch with their part in its loss."""
        given = batch.get("num_items_in_batch")
        whole = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
        averages = self._loss_function is None and self._loss_kind == "mean"
        total = count_targets(whole, self._shifted) if given is None or averages else given
        num_items = total if given is None else given
        for microbatch in split_rows(whole, self._num_microbatches):
            labels = microbatch.get("labels")
            weight = 1.0
            if self._loss_function is not None:
                del microbatch["labels"]
            elif averages:
                weight = float(count_targets(microbatch, self._shifted)) / max(float(total), 1.0)
            else:
                if self._loss_kind == "sum_and_extra":
                    # c / (N w) + a, times w, is c / N + a w: the sum stays, the extra term is averaged over the rows.
                    weight = num_rows(microbatch) / num_rows(whole)
                microbatch["num_items_in_batch"] = num_items if weight == 1.0 else num_items * weight
            yield microbatch, _Share(index, labels, num_items, weight)

    def _loss_of(self, output: Any, share: _Share) -> torch.Tensor:
        """The scalar loss of one microbatch, last stage only; microbatch losses add up to the batch's loss."""
        if self._loss_function is not None:
            return self._loss_function(output, share.labels, num_items_in_batch=share.num_items)
        if share.weight == 0.0:  # a mean over no label is nan; this keeps the graph and adds nothing
            logits: torch.Tensor = output["logits"]
            return logits.float().sum() * 0.0
        loss: torch.Tensor = output["loss"]
        return loss if share.weight == 1.0 else loss * share.weight

    def _share_losses(self, losses: Sequence[Any], shares: list[_Share], num_batches: int) -> list[torch.Tensor]:
        total = torch.zeros(num_batches, dtype=torch.float64, device=self.attachment.device)
        for loss, share in zip(losses, shares, strict=False):  # empty on all but the last stage
            total[share.batch] += loss.double()
        with self.attachment.watchdog.waiting("waits for the loss of the last stage"):
            dist.broadcast(total, src=self._loss_rank, group=self.mesh.pp_group)
        return list(total.float().unbind())

    def finish_backward(self, gradient: torch.Tensor) -> None:
        """Backward of the returned loss: note the factor upstream code applied; on the last one, finish the step."""
        self._pending = False
        self._factors.append(float(gradient) / self._seed)
        first = self._factors[0]
        if any(abs(factor - first) > 1e-6 * abs(first) for factor in self._factors):
            raise UnsupportedError(
                f"the losses of one accumulation window were scaled differently: {self._factors}. A fused pipeline "
                "step applies one factor to the gradients of the whole window; scale inside compute_loss_func, or "
                "compute the loss on logits (call the model without labels)."
            )
        if GradientState().sync_gradients:
            self._factors = []
            self._window = None
            self._reduce(first)
        elif self._window is None:  # a window's gradients are all here by its first backward
            with self.attachment.watchdog.waiting("waits for the gradient reduction of the other ranks"):
                self.gradients.accumulate(first)

    def _reduce(self, factor: float) -> None:
        with self.attachment.watchdog.waiting("waits for the gradient reduction of the other ranks"):
            self.gradients.reduce(factor)

    # -- split ---------------------------------------------------------------------------------------------------

    def _split(self, batch: dict[str, Any]) -> CausalLMOutputWithPast:
        self.attachment.batch_check.check([batch])
        batch.pop("labels", None)
        batch.pop("num_items_in_batch", None)
        microbatches = split_rows(batch, self._num_microbatches)
        self.seeds.next_step()
        program = self._programs.forwards(len(microbatches))
        state = self.runtime.forward_phase(microbatches, program, lambda output, index: (output["logits"],))
        logits = self._broadcast_logits([parts[0] for parts in state.outputs])
        self._pending = self.trains
        return CausalLMOutputWithPast(logits=_SplitLogits.apply(self._anchor.to(logits.device), logits, self, state))  # type: ignore[no-untyped-call]

    def backward_split(self, gradient: torch.Tensor, state: PhaseState) -> None:
        """Backward of the logits f[B S V] that a split forward returned."""
        self._pending = False
        rows = [parts[0].shape[0] for parts in state.outputs]  # empty on all but the last stage
        gradients = (
            [(part.to(parts[0].dtype),) for part, parts in zip(gradient.split(rows), state.outputs, strict=True)]
            if rows
            else None
        )
        last = GradientState().sync_gradients
        self.runtime.at_last_backward = lambda: self.gradients.arm(1.0, last=last)
        self.runtime.backward_phase(state, self._programs.backwards(state.num_microbatches), gradients)
        self.attachment.watchdog.runs()
        if last:
            self._reduce(1.0)
        else:
            self.gradients.accumulate(1.0)

    # -- forward only --------------------------------------------------------------------------------------------

    def _forward_only(self, batch: dict[str, Any]) -> CausalLMOutputWithPast:
        if not isinstance(batch.get("labels"), torch.Tensor):
            microbatches = split_rows(batch, self._num_microbatches)
            return CausalLMOutputWithPast(logits=self._broadcast_logits(self._outputs_of(microbatches, "logits")))
        parts = list(self._cut(0, batch))
        shares = [share for _, share in parts]
        outputs = self._outputs_of([microbatch for microbatch, _ in parts], None)
        losses = [self._loss_of(output, share) for output, share in zip(outputs, shares, strict=False)]
        loss = self._share_losses(losses, shares, 1)[0]
        logits = self._broadcast_logits([output["logits"] for output in outputs]) if self._needs_logits else None
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _outputs_of(self, microbatches: list[dict[str, Any]], key: str | None) -> list[Any]:
        """Forward of all microbatches without autograd; the last stage's outputs (or their `key`), else empty."""
        outputs = self.runtime.run(microbatches, self._programs.forwards(len(microbatches)), backward=False)
        return outputs if key is None else [output[key] for output in outputs]

    def _broadcast_logits(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits f[B S V] of the last stage on every stage; `parts` are its microbatches' logits, empty elsewhere."""
        watchdog, group, source = self.attachment.watchdog, self.mesh.pp_group, self._loss_rank
        with watchdog.waiting("waits for the logits of the last stage"):
            if self.runtime.has_last_stage:
                logits = torch.cat([part.float() if part.dtype.itemsize < 4 else part for part in parts]).contiguous()
                double = int(logits.dtype is torch.float64)
                header = torch.tensor([double, *logits.shape], device=self.attachment.device)
            else:
                header = torch.empty(4, dtype=torch.int64, device=self.attachment.device)
            dist.broadcast(header, src=source, group=group)
            if not self.runtime.has_last_stage:
                double, *shape = header.tolist()
                logits = torch.empty(
                    shape, dtype=torch.float64 if double else torch.float32, device=self.attachment.device
                )
            dist.broadcast(logits, src=source, group=group)
        return logits


class _FusedLoss(torch.autograd.Function):
    """A loss whose backward has already run: its own backward hands the upstream factor to the engine."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, engine: PipelineEngine) -> torch.Tensor:
        ctx.engine = engine
        return value.clone()  # callers scale it in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.engine.finish_backward(gradients[0])
        return torch.zeros_like(gradients[0]), None, None


class _SplitLogits(torch.autograd.Function):
    """Logits on every stage; their backward walks back through the pipeline."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, logits: torch.Tensor, engine: PipelineEngine, state: PhaseState
    ) -> torch.Tensor:
        ctx.engine, ctx.state = engine, state
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            ctx.engine.backward_split(gradients[0], ctx.state)
        return torch.zeros((), device=gradients[0].device), None, None, None
