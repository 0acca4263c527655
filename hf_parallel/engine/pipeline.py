"""The engine of several stages: `model(...)` becomes one run of a schedule.

Three modes. *Fused* (training with labels): forward and backward of the whole schedule happen inside the forward call;
the loss it returns carries an autograd node whose backward only checks and finishes the step. *Split* (training
without labels, for losses computed by the user on logits): all forwards in the forward call, all backwards when the
user's loss is backpropagated; every microbatch's activations live in between. *Forward only* (evaluation).

The Trainer multiplies the loss it gets by factors of its own (accumulation, replicas, loss scale). Fused backwards run
before those are known, so they are seeded with 1 (or the fp16 loss scale). Where stock code alone stands between the
data loader and the model (an announced window), one factor is applied once, to the summed gradients. Where user code
does, the gradients of each forward are held apart until its loss is backpropagated, and take the factor then.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hf_parallel.batches import count_targets, num_rows, split_rows
from hf_parallel.compat.private_torch import queue_after_backward
from hf_parallel.compat.private_transformers import loss_functions
from hf_parallel.engine.direct import Attachment, Engine
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.aside import Made, add, apart
from hf_parallel.guards.backwards import Backwards
from hf_parallel.guards.batches import Announced, RiddenDigests
from hf_parallel.guards.direct import DirectGradients
from hf_parallel.guards.freezing import Freezing
from hf_parallel.guards.outputs import PipelineOutput, PipelineTrainingOutput
from hf_parallel.model.random_streams import StepSeeds
from hf_parallel.pipeline_parallel.plan.loss_kind import LossKind
from hf_parallel.pipeline_parallel.run.runtime import PhaseState, PipelineRuntime
from hf_parallel.pipeline_parallel.run.stage import Stage
from hf_parallel.pipeline_parallel.schedule.programs import Programs
from hf_parallel.tensor_parallel.run.reads import in_lockstep


logger = logging.getLogger(__name__)

LossFunction: TypeAlias = Callable[..., torch.Tensor]
# What the Trainer adds to a batch when it calls the model.
COUNTS = frozenset({"num_items_in_batch", "use_cache"})
# Arguments that change what a model returns or keeps; a pipeline returns loss and logits only.
REFUSED = ("past_key_values", "output_hidden_states", "output_attentions")


@dataclass
class _Window:
    """Batches of one accumulation window, the losses of those already run, and the next one to be asked for."""

    batches: list[Announced]
    losses: list[torch.Tensor] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    position: int = 0

    def holds(self, batch: dict[str, Any]) -> bool:
        """Whether `batch` is the next one, with the very tensors announced, unchanged."""
        if self.position >= len(self.batches) or not self.batches[self.position].is_in(batch, COUNTS):
            return False
        return self.position == 0 or all(batch.get(name) is value for name, value in self.extras.items())


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
        loss_kind: How the model's own loss may be computed (see `loss_kind.judge_loss`).
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
        first: Stage = next(iter(runtime.stages.values()))  # type: ignore[assignment]
        self._running, self._plan = first.running, first.plan
        self.seeds = StepSeeds(runtime.stages, self._common_seed())
        runtime.before = self.seeds.set
        runtime.stages = {index: self.under_autocast(stage) for index, stage in runtime.stages.items()}
        self._freezing = Freezing(
            *(self.model, attachment.ledger, attachment.parameters, self.mesh),
            always_asks=self.gradients.replicas.partitions,
        )
        self._programs = programs
        self._num_microbatches = num_microbatches
        self._loss_kind = loss_kind
        self._judged = loss_functions(self.model)
        self._loss_function: LossFunction | None = None
        self._loss_shifts = True
        self._window: _Window | None = None
        self._seed = 1.0
        self._factors: list[float] = []
        self._passed: list[tuple[Made, torch.Tensor]] = []
        self._queued = False
        self._ridden = RiddenDigests(self.mesh, self._common_weights(attachment), self.gradients.shown.factors)
        self._backwards = Backwards(self.mesh, attachment.device)
        self._direct = self._watch_direct()
        self._anchor = torch.zeros((), requires_grad=True)
        self._needs_logits = True
        self._told_again = False

    def _watch_direct(self) -> DirectGradients:
        entries, size = self.attachment.ledger.entries, self.mesh.shape.pp_size
        everywhere = frozenset(name for name, entry in entries.items() if len(entry.holders) == size)
        return DirectGradients(self.attachment.parameters, everywhere, size, self._queue)

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
        """The next training forwards are these batches: run them as the microbatches of one schedule.

        Only where stock code alone stands between here and the model: the first call runs all of them as they are then.
        """
        self._factors = []  # a window that training broke off leaves nothing behind
        self._window = _Window([Announced(batch) for batch in batches])

    @contextmanager
    def loss_function(self, function: LossFunction, *, shifted: bool = True) -> Iterator[None]:
        """Inside, the last stage uses `function(outputs, labels, num_items_in_batch=n)` instead of the model's loss.

        Args:
            function: A sum over label positions divided by `num_items_in_batch`.
            shifted: Whether the first label of a row is none of them; counts where nobody gave a number.
        """
        self._loss_function, self._loss_shifts = function, shifted
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

    def install(self) -> None:
        """As of every engine; from here on user code has the model, which is not whole."""
        super().install()
        self._running.depth = 0

    # -- model(...) ----------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of `model(...)`: fused, split or forward only."""
        with self._running.inside():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = self.bound(args, kwargs)
        self._refuse(batch)
        batch["use_cache"] = False
        if not torch.is_grad_enabled():
            return self._forward_only(batch)
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
        embedded = batch.get("inputs_embeds")
        if isinstance(embedded, torch.Tensor) and (embedded.requires_grad or not self._planned_for("inputs_embeds")):
            raise UnsupportedError(
                f"inputs_embeds in a batch with pp_size={self.mesh.shape.pp_size}: the embedding is on the rank of the first "
                "stage only, so the other ranks can neither make these vectors nor train what made them. Give the model "
                "input_ids; what changes embeddings can be a forward hook of model.get_input_embeddings(), registered "
                "before training. Or set pp_size to 1."
            )
        if batch.pop("return_dict", True) is False:
            given.append("return_dict=False")
        if given:
            raise UnsupportedError(
                f"{', '.join(given)} with pp_size={self.mesh.shape.pp_size}: a pipeline returns loss and logits only, "
                "and generate() needs a key-value cache. Save the model with trainer.save_model() and load it in one "
                "process for that, or use pp_size 1."
            )

    def _planned_for(self, name: str) -> bool:
        """Whether the stages were planned with a sample that has the input `name`."""
        return any(name in inputs for inputs in self._plan.covered)

    # -- fused ---------------------------------------------------------------------------------------------------

    def _fused(self, batch: dict[str, Any]) -> PipelineTrainingOutput:
        window = self._window
        made: Made | None = None
        if window is not None and window.holds(batch):
            if window.position == 0:
                window.extras = {name: value for name, value in batch.items() if name in COUNTS}
                batches = [{**other.batch, **window.extras} for other in window.batches]
                window.losses = self._run_schedule(batches, arms=True)
            loss = window.losses[window.position]
            window.position += 1
        elif window is not None and 0 < window.position < len(window.batches):
            raise UnsupportedError(
                f"batch {window.position} of an accumulation window changed between the data loader and the model: "
                "the schedule of the whole window has already run. Change batches in the collator instead."
            )
        else:
            self._window = None
            with apart(list(self.attachment.parameters.values())) as made:
                loss = self._run_schedule([batch], arms=False)[0]
            self._direct.watch()
        anchor = self._anchor.to(loss.device)
        with made.noticing() if made is not None else nullcontext():
            checked: torch.Tensor = _FusedLoss.apply(anchor, loss, self, made, self._seed)  # type: ignore[no-untyped-call]
        output = PipelineTrainingOutput(loss=checked)
        if made is None:
            return output
        return output.runs_again(functools.partial(self._logits_again, Announced(batch), self.seeds.step))

    def _run_schedule(self, batches: list[dict[str, Any]], *, arms: bool) -> list[torch.Tensor]:
        """Forward and backward of all batches in one schedule; one loss a batch, equal on all stages.

        Args:
            batches: The batches.
            arms: Whether these are the only gradients of their step, so that they may leave in the last backward.
        """
        self.attachment.batch_check.check(batches)
        self._check_loss()
        microbatches: list[dict[str, Any]] = []
        shares: list[_Share] = []
        for index, batch in enumerate(batches):
            self.check_targets(batch)
            for microbatch, share in self._cut(index, batch):
                microbatches.append(microbatch)
                shares.append(share)
        self._seed = float(self.scaler.get_scale()) if self.scaler is not None else 1.0
        self._follow_freezing()
        self.seeds.next_step()
        self._direct.stop()
        # The factor that upstream code applies is not known before its backward.
        self.runtime.at_last_backward = (lambda: self.gradients.arm(None, last=True)) if arms else None
        self.gradients.begin_forward()
        if arms:
            self.gradients.begin_backward()
        with self._buffers.watching(len(microbatches) // len(batches), batches):
            losses = self.runtime.run(
                microbatches,
                self._programs.training(len(microbatches)),
                backward=True,
                loss_of=lambda output, index: self._loss_of(output, shares[index]),
                seed=self._seed,
            )
        if arms:
            self.gradients.end_schedule()
        return self._share_losses(losses, shares, batches)

    def _follow_freezing(self) -> None:
        """What stages send each other changes with what is trained."""
        with self.attachment.watchdog.waiting("waits for the other stages to begin the step"):
            if self._freezing.begin():
                self.runtime.forget_headers()

    def _drop_frozen(self, *, keeps: bool = False) -> set[int]:
        """Gradients of parameters that were frozen before the schedule do not count; their ids.

        Args:
            keeps: Whether `p.grad` is of earlier schedules, when the parameter was trained.
        """
        with self.attachment.watchdog.waiting("waits for what the other stages froze"):
            frozen = self._freezing.finish()
        for parameter in frozen if not keeps else ():
            parameter.grad = None
        if frozen:
            self.gradients.follow_freezing()
        return {id(parameter) for parameter in frozen}

    def _check_loss(self) -> None:
        """A loss function that was replaced since it was judged gets whole batches, which is always right."""
        now = loss_functions(self.model)
        if self._loss_kind != "whole" and any(a is not b for a, b in zip(now, self._judged, strict=True)):
            self._loss_kind = "whole"
            logger.warning(
                "hf_parallel: the loss function of %s was replaced after the model was parallelized, so every batch runs "
                "as one microbatch. Replace it before trainer.train(), so that its kind can be found out.",
                type(self.model).__name__,
            )

    def _cut(self, index: int, batch: dict[str, Any]) -> Iterator[tuple[dict[str, Any], _Share]]:
        """Microbatches of one batch with their part in its loss."""
        given = batch.get("num_items_in_batch")
        if self._loss_function is None and self._loss_kind == "whole":
            yield dict(batch), _Share(index, batch["labels"], given, 1.0)
            return
        whole = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
        averages = self._loss_function is None and self._loss_kind == "mean"
        if given is None or averages:
            named = {"labels": whole["labels"]} if self._loss_function is not None else whole
            total = count_targets(named, self._shifted if named is whole else self._loss_shifts)
        else:
            total = given
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

    def _share_losses(
        self, losses: Sequence[Any], shares: list[_Share], batches: Sequence[dict[str, Any]]
    ) -> list[torch.Tensor]:
        """The loss of each batch on all ranks of the model copy; what each rank has read and frozen rides on the message."""
        told = torch.zeros(len(batches) + self._ridden.width + 1, dtype=torch.float64, device=self.attachment.device)
        if self.mesh.tp_rank == 0:
            for loss, share in zip(losses, shares, strict=False):  # empty on all but the last stage
                told[share.batch] += loss.double()
        self._ridden.put(told[len(batches) : -1], batches)
        self._freezing.put(told[-1:])
        with self.attachment.watchdog.waiting("waits for the loss of the last stage"):
            dist.all_reduce(told, group=self.mesh.mp_group)
        self._freezing.arrived(told[-1])
        self._ridden.arrived(told[len(batches) : -1])
        return list(told[: len(batches)].float().unbind())

    def finish_backward(self, gradient: torch.Tensor, made: Made | None, seed: float) -> None:
        """Backward of a returned loss: apply the factor of upstream code; on the last one, finish the step."""
        if made is not None:
            self._passed.append((made, gradient / seed))
            self._queue()
            return
        self.gradients.begin_callers_backward()
        self._ridden.judge()
        self._factors.append(float(gradient) / seed)
        first = self._factors[0]
        if not all(abs(factor - first) <= 1e-6 * abs(first) for factor in self._factors):
            raise UnsupportedError(
                f"the losses of one accumulation window were scaled differently: {self._factors}. A fused pipeline "
                "step applies one factor to the gradients of the whole window; scale inside compute_loss_func, or "
                "in a compute_loss or training_step of a Trainer subclass."
            )
        if self.ends_step:
            self._factors = []
            self._window = None
            self._reduce(first)
            self._drop_frozen()

    def _queue(self) -> None:
        """Finish the backward pass that now runs when it is over: gradients may still arrive."""
        if not self._queued:
            self._queued = True
            self.gradients.begin_backward()
            queue_after_backward(self._finish_pass)

    def _finish_pass(self) -> None:
        self._queued = False
        passed, self._passed = self._passed, []
        last, on_cpu = self.ends_step, self.attachment.device.type == "cpu"
        frozen: set[int] = set()
        if last or on_cpu:  # a GPU is waited for at the end of a step only
            frozen = self._drop_frozen(keeps=bool(passed) and on_cpu)
        for made, factor in passed:
            gradients = [(parameter, gradient) for parameter, gradient in made.take() if id(parameter) not in frozen]
            self._backwards.scaled(factor)
            add(gradients, factor)
        with self.attachment.watchdog.waiting("waits for the gradient reduction of the other ranks"):
            if last:
                self._buffers.end_step()
                found, self._direct.found = self._direct.found, []
                self._backwards.agree(found, tolerates_nan=self.scaler is not None)
                self._ridden.judge()
                self.gradients.reduce(1.0)
            else:
                self.gradients.accumulate(1.0)

    def _reduce(self, factor: float) -> None:
        self._buffers.end_step()
        with self.attachment.watchdog.waiting("waits for the gradient reduction of the other ranks"):
            self.gradients.reduce(factor)

    # -- split ---------------------------------------------------------------------------------------------------

    def _split(self, batch: dict[str, Any]) -> PipelineOutput:
        self.attachment.batch_check.check([batch])
        batch.pop("labels", None)
        batch.pop("num_items_in_batch", None)
        microbatches = split_rows(batch, self._num_microbatches)
        self._follow_freezing()
        self.seeds.next_step()
        self._direct.stop()
        self.gradients.begin_forward()
        program = self._programs.forwards(len(microbatches))
        with self._buffers.watching(len(microbatches), [batch]) if self.trains else nullcontext():
            state = self.runtime.forward_phase(microbatches, program, lambda output, index: (output["logits"],))
        logits = self._broadcast_logits([parts[0] for parts in state.outputs], batch)
        self._direct.watch()
        return PipelineOutput(logits=self._split_logits(logits, state))

    def _split_logits(self, logits: torch.Tensor, state: PhaseState) -> torch.Tensor:
        found: torch.Tensor = _SplitLogits.apply(self._anchor.to(logits.device), logits, self, state)  # type: ignore[no-untyped-call]
        return found

    def _logits_again(self, announced: Announced, step: int) -> torch.Tensor:
        """Logits f[B S V] of a batch whose fused step has run: its forward again, with the same random numbers.

        Where gradients are recorded, what a loss does to them goes back through the stages beside what is made already.
        """
        if not announced.is_in(announced.batch, COUNTS):
            raise UnsupportedError(
                "outputs.logits is read after the batch was changed in place: a pipeline makes them by running the batch again. "
                "Read them before, or change a copy."
            )
        self.gathers.meet("outputs.logits of a training forward with labels")
        self._tell_again()
        engaged, whole = self.attachment.watchdog.engaged(), self._loss_function is None and self._loss_kind == "whole"
        batch = {
            name: value for name, value in announced.batch.items() if name not in ("labels", "num_items_in_batch")
        }
        microbatches = [batch] if whole else split_rows(batch, self._num_microbatches)
        program = self._programs.forwards(len(microbatches))
        before, self.seeds.step = self.seeds.step, step
        try:
            with engaged, self.gradients.replicas.forward(), in_lockstep(self.model), self._running.inside():
                if not torch.is_grad_enabled():
                    return self._broadcast_logits(self._outputs_of(microbatches, "logits"), batch)
                state = self.runtime.forward_phase(microbatches, program, lambda output, index: (output["logits"],))
                logits = self._broadcast_logits([parts[0] for parts in state.outputs], batch)
        finally:
            self.seeds.step = before
        return self._split_logits(logits, state)

    def _tell_again(self) -> None:
        if not self._told_again and self.mesh.rank == 0:
            logger.warning(
                "hf_parallel: outputs.logits is read in training steps with labels, where a pipeline has run the backward pass "
                "already: each such batch runs forward twice, and backward twice if the loss depends on them. Cheaper: call the "
                "model without labels and compute the whole loss from the logits."
            )
        self._told_again = True

    def backward_split(self, gradient: torch.Tensor, state: PhaseState) -> None:
        """Backward of the logits f[B S V] that a split forward returned."""
        if state.num_microbatches and not state.live:
            raise UnsupportedError(
                "the logits of one training forward were backpropagated twice with pp_size above 1: the stages' graphs are gone "
                "after the first time. Add the losses up before one backward, or call the model again."
            )
        self._queue()
        self._backwards.arrived(gradient)
        rows = [parts[0].shape[0] for parts in state.outputs]  # empty on all but the last stage
        gradients = (
            [(part.to(parts[0].dtype),) for part, parts in zip(gradient.split(rows), state.outputs, strict=True)]
            if rows
            else None
        )
        self.runtime.at_last_backward = (
            None  # no bucket leaves early: the loss may still give a parameter a gradient itself
        )
        with self._direct.resting(), self._running.inside():
            self.runtime.backward_phase(state, self._programs.backwards(state.num_microbatches), gradients)
        self.attachment.watchdog.runs()

    # -- forward only --------------------------------------------------------------------------------------------

    def _forward_only(self, batch: dict[str, Any]) -> PipelineOutput:
        if not isinstance(batch.get("labels"), torch.Tensor):
            microbatches = split_rows(batch, self._num_microbatches)
            return PipelineOutput(logits=self._broadcast_logits(self._outputs_of(microbatches, "logits"), batch))
        self._check_loss()
        parts = list(self._cut(0, batch))
        shares = [share for _, share in parts]
        outputs = self._outputs_of([microbatch for microbatch, _ in parts], None)
        losses = [self._loss_of(output, share) for output, share in zip(outputs, shares, strict=False)]
        loss = self._share_losses(losses, shares, [batch])[0]
        logits = self._broadcast_logits([output["logits"] for output in outputs], {}) if self._needs_logits else None
        return PipelineOutput(loss=loss, logits=logits)

    def _outputs_of(self, microbatches: list[dict[str, Any]], key: str | None) -> list[Any]:
        """Forward of all microbatches without autograd; the last stage's outputs (or their `key`), else empty."""
        outputs = self.runtime.run(microbatches, self._programs.forwards(len(microbatches)), backward=False)
        return outputs if key is None else [output[key] for output in outputs]

    def _broadcast_logits(self, parts: Sequence[torch.Tensor], batch: dict[str, Any]) -> torch.Tensor:
        """Logits f[B S V] of the last stage on every stage; `parts` are its microbatches' logits, empty elsewhere.

        What each rank has read of `batch` rides on the message that tells the shape.
        """
        watchdog, group, source = self.attachment.watchdog, self.mesh.pp_group, self._loss_rank
        with watchdog.waiting("waits for the logits of the last stage"):
            header = torch.zeros(5 + self._ridden.width, dtype=torch.int64, device=self.attachment.device)
            if self.runtime.has_last_stage:
                logits = torch.cat([part.float() if part.dtype.itemsize < 4 else part for part in parts]).contiguous()
                if self.mesh.tp_rank == 0:
                    double = int(logits.dtype is torch.float64)
                    header[:4] = torch.tensor([double, *logits.shape], device=header.device)
            self._ridden.put(header[4:-1], [batch])
            self._freezing.put(header[-1:])
            dist.all_reduce(header, group=self.mesh.mp_group)
            if not self.runtime.has_last_stage:
                double, *shape = header[:4].tolist()
                logits = torch.empty(
                    shape, dtype=torch.float64 if double else torch.float32, device=self.attachment.device
                )
            self._freezing.arrived(header[-1])
            self._ridden.arrived(header[4:-1])
            dist.broadcast(logits, src=source, group=group)
        return logits


class _FusedLoss(torch.autograd.Function):
    """A loss whose backward has already run: its own backward hands the upstream factor to the engine."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, value: torch.Tensor, engine: PipelineEngine, made: Made | None, seed: float
    ) -> torch.Tensor:
        ctx.engine, ctx.made, ctx.seed = engine, made, seed
        if made is not None:
            ctx.save_for_backward(anchor)  # kept as long as the graph is
        return value.clone()  # callers scale it in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.engine.finish_backward(gradients[0], ctx.made, ctx.seed)
        return torch.zeros_like(gradients[0]), None, None, None, None


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
