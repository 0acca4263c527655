"""Execute a schedule on one rank: compute the actions of its stages, exchange payloads and gradients with the neighbours.

The runtime knows no schedule and no model. A stage is a callable ``stage(payload, **inputs)``: it returns the tuple of
tensors that crosses to the next stage or, on the last stage, the model's output. Payloads may hold any number of tensors
of any shape, integers among them; microbatches may differ in shape and number from run to run. A rank holds one stage
or several (virtual stages).

Three uses share one interpreter: `PipelineRuntime.run` with backward (loss inside the schedule) and without
(evaluation), and the pair `forward_phase` / `backward_phase` for a loss that the caller computes from the outputs.

Extents: B rows of a batch, m microbatches, S positions, H hidden size.

Deadlock: receives are posted before they are needed where the shapes are known, sends are never waited for when just
issued, and `check_schedule` proves a schedule under exactly these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hf_parallel.errors import PlanError, ScheduleError
from hf_parallel.model.tensors import tensors_in
from hf_parallel.pipeline_parallel.run.links import Links, gradient_specs
from hf_parallel.pipeline_parallel.run.live import Inputs, Live, LossFunction, OutputFunction, PhaseState, Run, Stream
from hf_parallel.pipeline_parallel.run.messages import Counters, Probe, signature_of
from hf_parallel.pipeline_parallel.run.transport import Transport
from hf_parallel.pipeline_parallel.run.weight_gradients import WeightGradients, accumulate
from hf_parallel.pipeline_parallel.schedule.actions import Action
from hf_parallel.pipeline_parallel.schedule.program import Program


class _Enter(torch.autograd.Function):
    """Identity from the received leaf to a tensor that the stage may modify in place, as a block of one process may."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class PipelineRuntime:
    """The interpreter of schedules on one rank; all ranks of the pipeline group build theirs together.

    Args:
        stages: Stage index -> ``stage(payload, **inputs)``, an `nn.Module` or any callable; the stages of this rank.
        placement: Rank in the pipeline group of every stage.
        rank: This rank in the pipeline group.
        transports: (source rank, target rank) -> what carries messages between two neighbours, over a group of its own;
            empty if there is one rank.
        probe: Observers of waits and computations; its fields may be set later.
        weights: Defers the weight gradients of this rank's stages; needed by programs that split backwards.
        before: Called with (stage, microbatch) before every forward.

    Attributes:
        at_last_backward: Called before the last backward of a run: the gradients that follow are the last.
        peak_live: Most (stage, microbatch) pairs held at once in the last run, between a forward and the end of its
            backward.
        counters: Messages, headers and bytes since the runtime was built.

    Raises:
        UnsupportedError: If a pair of neighbours has no transport.
    """

    def __init__(
        self,
        stages: Mapping[int, Callable[..., Any]],
        placement: Sequence[int],
        rank: int = 0,
        transports: Mapping[tuple[int, int], Transport] = MappingProxyType({}),
        *,
        probe: Probe | None = None,
        weights: WeightGradients | None = None,
        before: Callable[[int, int], None] | None = None,
    ) -> None:
        self.stages, self.placement, self.rank = dict(stages), tuple(placement), rank
        self.probe = probe if probe is not None else Probe()
        self.before = before
        self.at_last_backward: Callable[[], None] | None = None
        self.counters = Counters()
        self.peak_live = 0
        self._links = Links(placement, rank, transports, self.probe, self.counters)
        self.weights = weights

    @property
    def last_stage(self) -> int:
        """Index of the stage that computes outputs and losses."""
        return len(self.placement) - 1

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank computes outputs and losses."""
        return self.placement[-1] == self.rank

    def run(
        self,
        microbatches: Sequence[Inputs],
        program: Program,
        *,
        backward: bool,
        loss_of: LossFunction | None = None,
        seed: float = 1.0,
    ) -> list[Any]:
        """Execute this rank's actions.

        Args:
            microbatches: Model inputs of every microbatch; the same on all stages.
            program: This rank's part of the schedule.
            backward: Whether the actions train; False runs without autograd and keeps nothing.
            loss_of: ``loss_of(output, microbatch_index)`` gives the normalised scalar loss on the last stage. Needed
                with backward; without, the outputs themselves are returned if it is None.
            seed: Gradient that each loss starts from: 1, or the loss scale of fp16.

        Returns:
            On the rank of the last stage the detached losses, or outputs, in microbatch order; elsewhere an empty list.

        Raises:
            ScheduleError: If an action is not for this rank or these microbatches.
        """
        if backward and self.has_last_stage and loss_of is None:
            raise ScheduleError(
                "run(backward=True) has no loss on the last stage: pass loss_of, or use forward_phase."
            )
        results: dict[int, Any] = {}

        def finish(output: Any, i: int) -> tuple[Tensor, ...]:
            if loss_of is None:
                results[i] = output
                return ()
            loss = loss_of(output, i)
            results[i] = loss.detach()
            return (loss,)

        def seeds(i: int) -> Sequence[Tensor]:
            return (torch.full_like(results[i], seed),)

        run = Run(microbatches, finish, seeds, {}, keeps=backward)
        with torch.set_grad_enabled(backward):
            self._execute(program, run, "FBIW" if backward else "F")
        return [results[i] for i in sorted(results)]

    def forward_phase(
        self, microbatches: Sequence[Inputs], program: Program, outputs_of: OutputFunction | None = None
    ) -> PhaseState:
        """Run all forwards and keep their graphs for a later `backward_phase`.

        Args:
            microbatches: Model inputs of every microbatch; the same on all stages.
            program: This rank's forwards.
            outputs_of: ``outputs_of(output, microbatch_index)`` picks the tensors of the last stage's output that the
                caller computes a loss from; by default all tensors in a tensor, tuple or mapping.

        Returns:
            The state to pass on; its ``outputs`` hold the detached tensors on the rank of the last stage.
        """
        state = PhaseState(len(microbatches))
        outputs: dict[int, tuple[Tensor, ...]] = {}

        def finish(output: Any, i: int) -> tuple[Tensor, ...]:
            tensors = outputs_of(output, i) if outputs_of is not None else tuple(tensors_in(output))
            outputs[i] = tuple(tensor.detach() for tensor in tensors)
            return tensors

        with torch.enable_grad():
            self._execute(program, Run(microbatches, finish, lambda i: (), state.live), "F")
        state.outputs = [outputs[i] for i in sorted(outputs)]
        return state

    def backward_phase(
        self, state: PhaseState, program: Program, output_grads: Sequence[Sequence[Tensor | None]] | None = None
    ) -> None:
        """Run all backwards of a `forward_phase`, once.

        Args:
            state: Result of `forward_phase`; it is empty afterwards.
            program: This rank's backwards.
            output_grads: On the rank of the last stage, for each microbatch the gradients with respect to
                ``state.outputs``; None for a tensor that the loss does not use. Ignored elsewhere.
        """
        if self.has_last_stage and (output_grads is None or len(output_grads) != state.num_microbatches):
            given = "none" if output_grads is None else str(len(output_grads))
            raise ScheduleError(
                f"backward_phase got output gradients for {given} of {state.num_microbatches} microbatches: the last "
                "stage needs them for each. Pass one sequence of gradients a microbatch."
            )
        gradients = output_grads or ()
        run = Run([{}] * state.num_microbatches, lambda output, i: (), lambda i: gradients[i], state.live)
        with torch.enable_grad():
            self._execute(program, run, "BIW")

    def advance(self, stream: Stream, program: Program) -> None:
        """Run what a slice of a schedule that does not drain lets this rank do; messages may be under way before and after.

        Args:
            stream: The microbatches.
            program: This rank's actions, by their numbers.
        """

        def finish(output: Any, i: int) -> tuple[Tensor, ...]:
            loss = stream.loss_of(output, i)
            stream.losses[i] = loss.detach()
            return (loss,)

        run = Run(stream.inputs, finish, lambda i: (torch.ones_like(stream.losses[i]),), stream.live)
        numbers = sorted(stream.inputs)
        self.peak_live = len(run.live)
        self._links.carry_on(program, dict(zip(numbers, self._signatures(run), strict=True)))
        start = self.probe.recorder.mark()
        with torch.enable_grad():
            for action in program.actions:
                with self._named(action.stage, f"action {action}"):
                    self._links.post_ahead()
                    stream.before(action)
                    if action.kind == "F":
                        self._forward(action, run)
                    else:
                        self._backward(action, run)
                    stream.after(action)
        self.probe.recorder.add("schedule", -1, -1, start)

    def aside(self) -> AbstractContextManager[None]:
        """Around other runs while a stream is under way; collective over the pipeline."""
        return self._links.aside()

    def give_up(self, stream: Stream) -> None:
        """Forget microbatches that are under way, and what is sent for them; collective over the pipeline."""
        with self._links.aside():
            stream.live.clear()
            stream.inputs.clear()
            stream.losses.clear()
        self._links.clear()

    def forget_headers(self) -> None:
        """Send headers anew from the next run on; to be called on every rank, after parameters were (un)frozen."""
        self._links.forget()

    def _execute(self, program: Program, run: Run, kinds: str) -> None:
        self._check_actions(program, len(run.microbatches), kinds)
        self.peak_live = len(run.live)
        start = self.probe.recorder.mark()
        self._links.begin(program, self._signatures(run))
        for (stage, i), live in run.live.items():
            if stage != self.last_stage:
                self._links.expect_gradients(stage, i, live.specs)
        last_backward = max((k for k, action in enumerate(program.actions) if action.kind == "B"), default=-1)
        works = {"F": self._forward, "B": self._backward, "I": self._backward_input, "W": self._backward_weight}
        for position, action in enumerate(program.actions):
            with self._named(action.stage, f"action {action}"):
                self._links.post_ahead()
                if position == last_backward and self.at_last_backward is not None:
                    self.at_last_backward()
                works[action.kind](action, run)
        with self._named(self.last_stage if self.has_last_stage else min(self.stages), "finishing its sends"):
            self._links.drain()
        self.probe.recorder.add("schedule", -1, -1, start)

    def _check_actions(self, program: Program, num_microbatches: int, kinds: str) -> None:
        for action in program.actions:
            if action.stage not in self.stages or action.microbatch >= num_microbatches or action.kind not in kinds:
                raise ScheduleError(
                    f"action {action} cannot run here: this rank holds the stages {sorted(self.stages)}, with "
                    f"{num_microbatches} microbatches and kinds {'+'.join(kinds)}. Pass the actions of this rank for "
                    "this batch."
                )

    def _signatures(self, run: Run) -> list[Hashable]:
        """Facts that decide the payload shapes of each microbatch, the same on every rank."""
        stage = next(iter(self.stages.values()))
        training = stage.training if isinstance(stage, nn.Module) else True
        mode = (run.keeps, training, *_autocast_mode())
        found = run.microbatches
        numbers = sorted(found) if isinstance(found, Mapping) else range(len(found))
        return [(signature_of(found[number]), mode) for number in numbers]

    @contextmanager
    def _named(self, stage: int, what: str) -> Iterator[None]:
        """Note on every error which stage failed in what, and let it pass."""
        try:
            yield
        except Exception as error:
            error.add_note(
                f"pipeline stage {stage} of {len(self.placement)} (rank {self.rank} of the pipeline group) failed in "
                f"{what}"
            )
            raise

    def _forward(self, action: Action, run: Run) -> None:
        stage, i = action.stage, action.microbatch
        leaves = self._links.take_payload(stage, i)
        enter: Callable[[Tensor], Tensor] = _Enter.apply
        # A block may write to what it is given, and torch refuses that on a leaf: give it the output of a node.
        payload = tuple(
            enter(leaf) if leaf.requires_grad else leaf for leaf in leaves
        )  # e.g. hidden states f[B/m S H]
        self._links.post_ahead()  # receives are under way while this stage computes
        if self.before is not None:
            self.before(stage, i)

        def compute() -> tuple[Tensor, ...]:
            output = self.stages[stage](payload, **run.microbatches[i])
            return run.finish(output, i) if stage == self.last_stage else self._check_payload(output, stage)

        made: tuple[Tensor, ...] = self._compute(action, compute)
        if run.keeps:
            roots = tuple(get_gradient_edge(t) if t.requires_grad else None for t in made)
            trained = tuple(leaf for leaf in leaves if leaf.requires_grad)
            specs = gradient_specs(made) if stage != self.last_stage else ()
            run.live[stage, i] = Live(trained, roots, specs)
            self.peak_live = max(self.peak_live, len(run.live))
        if stage != self.last_stage:
            self._links.give_payload(stage, i, made)

    def _backward(self, action: Action, run: Run) -> None:
        self._run_backward(action, run.live.pop((action.stage, action.microbatch)), run)

    def _backward_input(self, action: Action, run: Run) -> None:
        live = run.live[action.stage, action.microbatch]
        if self.weights is None:
            raise ScheduleError(
                f"action {action} defers weight gradients, but the runtime has no `weights`: its stages would compute "
                "them at once. Pass weights=WeightGradients(model)."
            )
        with self.weights.deferring() as live.pending:
            self._run_backward(action, live, run)

    def _backward_weight(self, action: Action, run: Run) -> None:
        live = run.live.pop((action.stage, action.microbatch))
        self._compute(action, lambda: accumulate(live.pending or []))

    def _run_backward(self, action: Action, live: Live, run: Run) -> None:
        """Run the backward pass through one stage's graph of one microbatch; consumes it."""
        stage, i = action.stage, action.microbatch
        pairs = [(root, seed) for root, seed in zip(live.roots, self._seeds(live, stage, i, run), strict=True) if root]
        pairs = [(root, seed) for root, seed in pairs if seed is not None]

        def compute() -> None:
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [seed for _, seed in pairs])

        self._compute(action, compute)
        leaves, live.leaves, live.roots = live.leaves, (), ()
        if stage > 0:
            # The sender waits for one gradient a tensor, so one that the stage did not use gets zeros.
            self._links.give_gradients(
                stage, i, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            )

    def _seeds(self, live: Live, stage: int, i: int, run: Run) -> Sequence[Tensor | None]:
        if stage == self.last_stage:
            return run.seeds(i)
        gradients = iter(self._links.take_gradients(stage, i))
        return [None if root is None else next(gradients) for root in live.roots]

    def _compute(self, action: Action, work: Callable[[], Any]) -> Any:
        start = self.probe.recorder.mark()
        result = self.probe.run(f"runs the {action.words} at stage {action.stage}", str(action), work)
        self.probe.recorder.add(action.kind, action.stage, action.microbatch, start)
        return result

    def _check_payload(self, output: Any, stage: int) -> tuple[Tensor, ...]:
        if isinstance(output, tuple) and all(isinstance(tensor, Tensor) for tensor in output):
            return output
        raise PlanError(
            f"stage {stage} of {len(self.placement)} returned {type(output).__name__}: a stage before the last returns "
            "the tuple of tensors that cross to the next one. Return a tuple of tensors."
        )


def _autocast_mode() -> tuple[Hashable, ...]:
    """Return what decides the payload's dtypes beside the inputs: the autocast dtype of each device type in use."""
    kinds = ("cuda", "cpu")
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds)
