"""Execute a schedule on one rank: compute its stage's actions, exchange payloads and gradients with the neighbours.

The runtime knows no schedule and no model. A stage is a callable ``stage(payload, **inputs)``: it returns the tuple of
tensors that crosses to the next stage or, on the last stage, the model's output. Payloads may hold any number of tensors
of any shape, integers among them; microbatches may differ in shape and number from run to run.

Three uses share one interpreter: `PipelineRuntime.run` with backward (loss inside the schedule) and without
(evaluation), and the pair `forward_phase` / `backward_phase` for a loss that the caller computes from the outputs.

Deadlock: receives are posted before they are needed where the shapes are known, sends are never waited for when just
issued, and `check_schedule` proves a schedule under exactly these rules. Activations and gradients travel on two
transports; NCCL needs them on two groups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hf_parallel.errors import PlanError, ScheduleError, UnsupportedError
from hf_parallel.pipeline_parallel.actions import Action
from hf_parallel.pipeline_parallel.messages import Counters, Probe, Receiver, Sender, signature_of
from hf_parallel.pipeline_parallel.transport import TensorSpec, Transport, connect


Inputs: TypeAlias = Mapping[str, Any]
LossFunction: TypeAlias = Callable[[Any, int], Tensor]
OutputFunction: TypeAlias = Callable[[Any, int], tuple[Tensor, ...]]


class _Enter(torch.autograd.Function):
    """Identity from the received leaf to a tensor that the stage may modify in place, as a block of one process may."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@dataclass(slots=True)
class _Live:
    """A microbatch between its forward and its backward: the received leaves and the tensors to start backward from."""

    leaves: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]


@dataclass(slots=True)
class PhaseState:
    """What `forward_phase` keeps for `backward_phase`.

    Attributes:
        outputs: On the last stage the detached output tensors of each microbatch, elsewhere empty.
    """

    microbatches: Sequence[Inputs]
    live: dict[int, _Live] = field(default_factory=dict)
    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)


class PipelineRuntime:
    """The interpreter of schedules on one rank; all ranks of the pipeline group build theirs together.

    Args:
        stage: ``stage(payload, **inputs)``; an `nn.Module` or any callable.
        stage_index: This rank's stage, its rank in the pipeline group.
        num_stages: Number of stages; with 1 there are no messages and the transports may be None.
        transport_down: Carries activations from stage s to s + 1.
        transport_up: Carries gradients from stage s + 1 to s. May be the same object on gloo, not on NCCL.
        send_window: Sends left unfinished in each direction before the oldest is waited for, at least 1.
        cache_headers: Send a header only at the first sight of an input signature. False sends one with every payload,
            for models whose payload shapes depend on the data.
        probe: Observers of waits and computations; its fields may be set later.

    Attributes:
        peak_live: Most microbatches held alive at once in the last run.
        counters: Messages, headers and bytes since the runtime was built.

    Raises:
        UnsupportedError: If both transports run their operations one after another on one group.
    """

    def __init__(
        self,
        stage: Callable[..., Any],
        stage_index: int,
        num_stages: int,
        transport_down: Transport | None = None,
        transport_up: Transport | None = None,
        *,
        send_window: int = 2,
        cache_headers: bool = True,
        probe: Probe | None = None,
    ) -> None:
        self.stage, self.stage_index, self.num_stages = stage, stage_index, num_stages
        self.cache_headers = cache_headers
        self.probe = probe if probe is not None else Probe()
        self.counters = Counters()
        self.peak_live = 0
        self._down_out: Sender | None = None
        self._down_in: Receiver | None = None
        self._up_out: Sender | None = None
        self._up_in: Receiver | None = None
        if num_stages > 1:
            if transport_down is None or transport_up is None:
                raise UnsupportedError(f"pipeline of {num_stages} stages has no transport: pass both transports.")
            self._open_links(transport_down, transport_up, send_window)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes outputs and losses."""
        return self.stage_index == self.num_stages - 1

    def run(
        self,
        microbatches: Sequence[Inputs],
        actions: Sequence[Action],
        *,
        backward: bool,
        loss_of: LossFunction | None = None,
        seed: float = 1.0,
    ) -> list[Any]:
        """Execute this rank's actions.

        Args:
            microbatches: Model inputs of every microbatch; the same on all stages.
            actions: This rank's actions.
            backward: Whether the actions train; False runs without autograd and keeps nothing.
            loss_of: ``loss_of(output, microbatch_index)`` gives the normalised scalar loss on the last stage. Needed
                with backward; without, the outputs themselves are returned if it is None.
            seed: Gradient that each loss starts from: 1, or the loss scale of fp16.

        Returns:
            On the last stage the detached losses, or outputs, in microbatch order; elsewhere an empty list.

        Raises:
            ScheduleError: If an action is not for this stage or these microbatches.
        """
        self._check_actions(actions, len(microbatches), backward, loss_of)
        results: dict[int, Any] = {}
        live: dict[int, _Live] = {}
        signatures = self._begin(microbatches, actions, backward)

        def finish(output: Any, i: int) -> tuple[Tensor, ...]:
            if loss_of is None:
                results[i] = output
                return ()
            loss = loss_of(output, i)
            results[i] = loss.detach()
            return (loss,)

        def forward(i: int) -> None:
            kept = self._forward(microbatches[i], i, signatures[i], finish)
            if backward:
                self._hold(live, i, kept)

        def backpropagate(i: int) -> None:
            kept = live.pop(i)
            self._backward(
                kept, i, tuple(torch.full_like(loss, seed) for loss in kept.roots) if self.is_last else None
            )

        with torch.set_grad_enabled(backward):
            for action in actions:
                self._perform(action, forward if action.kind == "F" else backpropagate)
        self._drain()
        return [results[i] for i in sorted(results)]

    def forward_phase(self, microbatches: Sequence[Inputs], outputs_of: OutputFunction | None = None) -> PhaseState:
        """Run all forwards and keep their graphs for a later `backward_phase`.

        Args:
            microbatches: Model inputs of every microbatch; the same on all stages.
            outputs_of: ``outputs_of(output, microbatch_index)`` picks the tensors of the last stage's output that the
                caller computes a loss from; by default all tensors in a tensor, tuple or mapping.

        Returns:
            The state to pass on; its ``outputs`` hold the detached tensors on the last stage.
        """
        actions = [Action(self.stage_index, "F", i) for i in range(len(microbatches))]
        signatures = self._begin(microbatches, actions, backward=True)
        state = PhaseState(microbatches)

        def finish(output: Any, i: int) -> tuple[Tensor, ...]:
            tensors = outputs_of(output, i) if outputs_of is not None else _tensors_of(output)
            state.outputs.append(tuple(tensor.detach() for tensor in tensors))
            return tensors

        def forward(i: int) -> None:
            self._hold(state.live, i, self._forward(microbatches[i], i, signatures[i], finish))

        with torch.enable_grad():
            for action in actions:
                self._perform(action, forward)
        self._drain()
        return state

    def backward_phase(self, state: PhaseState, output_grads: Sequence[Sequence[Tensor | None]] | None = None) -> None:
        """Run all backwards of a `forward_phase`, once.

        Args:
            state: What `forward_phase` returned; it is empty afterwards.
            output_grads: On the last stage, for each microbatch the gradients with respect to ``state.outputs``; None
                for a tensor that the loss does not use. Ignored elsewhere.
        """
        if self.is_last and (output_grads is None or len(output_grads) != len(state.microbatches)):
            given = "none" if output_grads is None else str(len(output_grads))
            raise ScheduleError(
                f"backward_phase got output gradients for {given} of {len(state.microbatches)} microbatches: the last "
                "stage needs them for each. Pass one sequence of gradients a microbatch."
            )
        actions = [Action(self.stage_index, "B", i) for i in range(len(state.microbatches))]
        if self._up_in is not None:
            self._up_in.specs = {i: _gradient_specs(kept.roots) for i, kept in state.live.items()}
            self._up_in.expect(range(len(actions)), range(len(actions)))

        def backpropagate(i: int) -> None:
            seeds = tuple(output_grads[i]) if self.is_last and output_grads is not None else None
            self._backward(state.live.pop(i), i, seeds)

        for action in actions:
            self._perform(action, backpropagate)
        self._drain()

    def forget_headers(self) -> None:
        """Send headers anew from the next run on; to be called on every rank, after parameters were (un)frozen."""
        for link in (self._down_out, self._down_in):
            if link is not None:
                link.specs.clear()

    def _open_links(self, down: Transport, up: Transport, window: int) -> None:
        if down.serial and up.serial and down.group is up.group:
            raise UnsupportedError(
                "pipeline transports for activations and gradients share one NCCL group: its operations run one after "
                "another, so a send in one direction blocks the other for ever. Create a second group for gradients."
            )
        if down.serial:
            connect(down, self.stage_index, self.num_stages, downwards=True)
        if up.serial:
            connect(up, self.stage_index, self.num_stages, downwards=False)
        here, probe, counters = self.stage_index, self.probe, self.counters
        if here > 0:
            self._down_in = Receiver(down, here, here - 1, "activation", probe, counters, down.receive_ahead)
            self._up_out = Sender(up, here, here - 1, "gradient", probe, counters, window)
        if not self.is_last:
            self._down_out = Sender(down, here, here + 1, "activation", probe, counters, window)
            self._up_in = Receiver(up, here, here + 1, "gradient", probe, counters, up.receive_ahead)

    def _check_actions(
        self, actions: Sequence[Action], num_microbatches: int, backward: bool, loss_of: LossFunction | None
    ) -> None:
        for action in actions:
            kinds = "FB" if backward else "F"
            if action.stage != self.stage_index or action.microbatch >= num_microbatches or action.kind not in kinds:
                raise ScheduleError(
                    f"action {action} cannot run here: this is stage {self.stage_index}, with {num_microbatches} "
                    f"microbatches and kinds {'+'.join(kinds)}. Pass the actions of this rank for this batch."
                )
        if backward and self.is_last and loss_of is None:
            raise ScheduleError(
                "run(backward=True) has no loss on the last stage: pass loss_of, or use forward_phase."
            )

    def _begin(self, microbatches: Sequence[Inputs], actions: Sequence[Action], backward: bool) -> list[Hashable]:
        """Reset the per-run state; return each microbatch's signature, the same on every rank."""
        self.peak_live = 0
        if not self.cache_headers:
            self.forget_headers()
        training = self.stage.training if isinstance(self.stage, nn.Module) else True
        mode = (backward, training, *_autocast_mode())
        signatures: list[Hashable] = [
            (signature_of(inputs), mode) if self.cache_headers else i for i, inputs in enumerate(microbatches)
        ]
        if self._down_in is not None:
            self._down_in.expect([a.microbatch for a in actions if a.kind == "F"], signatures)
        if self._up_in is not None:
            # A gradient needs no header: its specs are those of this rank's own outputs, known from the forward on.
            self._up_in.specs.clear()
            self._up_in.expect([a.microbatch for a in actions if a.kind == "B"], range(len(microbatches)))
        return signatures

    def _perform(self, action: Action, work: Callable[[int], None]) -> None:
        with self._named(f"action {action}"):
            self._post_ahead()
            work(action.microbatch)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Note on every error which stage failed in what, and let it pass."""
        try:
            yield
        except Exception as error:
            error.add_note(
                f"pipeline stage {self.stage_index} of {self.num_stages} (rank {self.stage_index} of the pipeline "
                f"group) failed in {what}"
            )
            raise

    def _post_ahead(self) -> None:
        if self._down_in is not None:
            self._down_in.post_ahead()
        if self._up_in is not None:
            self._up_in.post_ahead()

    def _hold(self, live: dict[int, _Live], microbatch: int, kept: _Live) -> None:
        live[microbatch] = kept
        self.peak_live = max(self.peak_live, len(live))

    def _forward(self, inputs: Inputs, i: int, signature: Hashable, finish: OutputFunction) -> _Live:
        leaves: tuple[Tensor, ...] = ()
        payload: tuple[Tensor, ...] = ()
        if self._down_in is not None:
            leaves = self._down_in.take()
            for leaf, spec in zip(leaves, self._down_in.specs[signature], strict=True):
                leaf.requires_grad_(spec.requires_grad)
            enter: Callable[[Tensor], Tensor] = _Enter.apply
            payload = tuple(enter(leaf) if leaf.requires_grad else leaf for leaf in leaves)
            self._post_ahead()

        def compute() -> tuple[Tensor, ...]:
            output = self.stage(payload, **inputs)
            return finish(output, i) if self.is_last else self._check_payload(output)

        action = f"{self.stage_index}F{i}"
        roots: tuple[Tensor, ...] = self.probe.run(f"stage {self.stage_index} runs {action}", action, compute)
        if self._down_out is not None and self._up_in is not None:
            self._up_in.specs[i] = _gradient_specs(roots)
            # The receive of the gradient is posted before the send, so that a fast peer never finds it missing.
            self._up_in.post_ahead()
            self._down_out.send(roots, i, signature)
        return _Live(leaves, roots)

    def _backward(self, kept: _Live, i: int, seeds: tuple[Tensor | None, ...] | None) -> None:
        if seeds is None:
            if self._up_in is None:
                raise ScheduleError(f"backward of microbatch {i} has no gradients: the last stage starts from seeds.")
            grads = iter(self._up_in.take())
            self._up_in.specs.pop(i)
            seeds = tuple(next(grads) if root.requires_grad else None for root in kept.roots)
        pairs = [
            (root, seed)
            for root, seed in zip(kept.roots, seeds, strict=True)
            if root.requires_grad and seed is not None
        ]
        action = f"{self.stage_index}B{i}"

        def compute() -> None:
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [seed for _, seed in pairs])

        self.probe.run(f"stage {self.stage_index} runs {action}", action, compute)
        if self._up_out is not None:
            self._up_out.send(
                [torch.zeros_like(x) if x.grad is None else x.grad for x in kept.leaves if x.requires_grad], i
            )

    def _check_payload(self, output: Any) -> tuple[Tensor, ...]:
        if isinstance(output, tuple) and all(isinstance(tensor, Tensor) for tensor in output):
            return output
        raise PlanError(
            f"stage {self.stage_index} of {self.num_stages} returned {type(output).__name__}: a stage before the last "
            "returns the tuple of tensors that cross to the next one. Return a tuple of tensors."
        )

    def _drain(self) -> None:
        with self._named("finishing its sends"):
            for link in (self._down_out, self._up_out):
                if link is not None:
                    link.drain()


def _tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a model output, in order: a tensor, or tuples, lists and mappings of them."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, Mapping):
        return _tensors_of(tuple(output.values()))
    if isinstance(output, (tuple, list)):
        return tuple(tensor for item in output for tensor in _tensors_of(item))
    return ()


def _gradient_specs(roots: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """Return what comes back for a payload: one gradient for each tensor that requires one."""
    return tuple(TensorSpec.of(root) for root in roots if root.requires_grad)


def _autocast_mode() -> tuple[Hashable, ...]:
    """Return what decides the payload's dtypes beside the inputs: the autocast dtype of each device type in use."""
    kinds = ("cuda", "cpu")
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds)
