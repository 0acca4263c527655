"""Carries payloads and gradients from stage to stage: over a channel to another rank, or by hand on the same one.

The runtime asks for what a stage needs and gives away what it made; where the neighbour stage lives is known here only.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_parallel.errors import UnsupportedError
from hf_parallel.pipeline_parallel.run.messages import Counters, Probe, Receiver, Sender, Specs
from hf_parallel.pipeline_parallel.run.transport import TensorSpec, Transport, connect
from hf_parallel.pipeline_parallel.schedule.actions import Action
from hf_parallel.pipeline_parallel.schedule.program import Program


class Links:
    """The neighbours of the stages of one rank.

    Args:
        placement: Rank of each stage.
        rank: This rank.
        transports: (source rank, target rank) -> what carries messages from one to the other, for the pairs of
            `neighbour_pairs` that this rank is in.
        probe: Observers of waits.
        counters: Counts messages.

    Raises:
        UnsupportedError: A pair has no transport.
    """

    def __init__(
        self,
        placement: Sequence[int],
        rank: int,
        transports: Mapping[tuple[int, int], Transport],
        probe: Probe,
        counters: Counters,
    ) -> None:
        self.placement, self.rank = tuple(placement), rank
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        self._handed: dict[Action, tuple[Tensor, ...]] = {}
        self._signatures: Sequence[Hashable] | Mapping[int, Hashable] = ()
        mine = [pair for pair in neighbour_pairs(self.placement) if rank in pair]
        missing = [pair for pair in mine if pair not in transports]
        if missing:
            raise UnsupportedError(
                f"pipeline of {len(self.placement)} stages on {max(placement) + 1} ranks has no transport from rank "
                f"{missing[0][0]} to rank {missing[0][1]}: pass one for each direction of each pair of neighbours."
            )
        for source, target in mine:  # sorted, so connections are opened in one order on all ranks
            transport = transports[source, target]
            if transport.opens_late:
                connect(transport, sends=source == rank)
            if source == rank:
                self.senders[target] = Sender(transport, probe, counters, target)
            else:
                self.receivers[source] = Receiver(transport, probe, counters, transport.receive_ahead, source)

    def begin(self, program: Program, signatures: Sequence[Hashable]) -> None:
        """Expect the messages of a program; a payload's shapes follow from its microbatch's signature."""
        self._signatures = signatures
        self._handed.clear()
        for sender in self.senders.values():
            sender.window = program.send_window
        for peer, receiver in self.receivers.items():
            receiver.specs = {key: specs for key, specs in receiver.specs.items() if not isinstance(key, Action)}
            messages = program.incoming.get(peer, ())
            receiver.expect(messages, [self._key(message) for message in messages])

    def carry_on(self, program: Program, signatures: Mapping[int, Hashable]) -> None:
        """Expect the messages of a program beside those of the one before, of which some are still to come."""
        self._signatures = signatures
        for sender in self.senders.values():
            sender.window = program.send_window
        for peer, receiver in self.receivers.items():
            receiver.coming.extend((message, self._key(message)) for message in program.incoming.get(peer, ()))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, programs run while another one is under way; collective over the pipeline."""
        signatures = self._signatures
        kept: dict[int, tuple[dict[Action, tuple[Tensor, ...]], Specs]] = {}
        for peer, receiver in self.receivers.items():
            receiver.settle()
            gradients: Specs = {key: specs for key, specs in receiver.specs.items() if isinstance(key, Action)}
            kept[peer] = receiver.arrived, gradients
            receiver.arrived = {}
        self.drain()
        try:
            yield
        finally:
            self._signatures = signatures
            for peer, (arrived, gradients) in kept.items():
                self.receivers[peer].arrived = arrived
                self.receivers[peer].specs |= gradients

    def post_ahead(self) -> None:
        """Post receives whose shapes are known."""
        for receiver in self.receivers.values():
            receiver.post_ahead()

    def take_payload(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Leaves that a stage's forward starts from; () on stage 0. Waits for them."""
        if stage == 0:
            return ()
        message = Action(stage - 1, "F", microbatch)
        source = self.placement[stage - 1]
        if source == self.rank:
            return self._handed.pop(message)
        receiver = self.receivers[source]
        leaves = receiver.take(message)
        for leaf, spec in zip(leaves, receiver.specs[self._key(message)], strict=True):
            leaf.requires_grad_(spec.requires_grad)
        return leaves

    def give_payload(self, stage: int, microbatch: int, payload: Sequence[Tensor]) -> None:
        """Pass on what a stage's forward made."""
        message = Action(stage, "F", microbatch)
        target = self.placement[stage + 1]
        if target == self.rank:
            # A copy: the next stage may work in place on what this stage's graph has saved.
            self._handed[message] = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in payload)
            return
        if torch.is_grad_enabled():
            # The receive of the gradient is posted before the send, so that a fast peer never finds it missing.
            self.expect_gradients(stage, microbatch, gradient_specs(payload))
            self.receivers[target].post_ahead()
        self.senders[target].send(payload, message, self._key(message))

    def expect_gradients(self, stage: int, microbatch: int, specs: tuple[TensorSpec, ...]) -> None:
        """Say which gradients will come back for a payload of a stage before the last."""
        source = self.placement[stage + 1]
        if source != self.rank:
            self.receivers[source].specs[Action(stage + 1, "B", microbatch)] = specs

    def take_gradients(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Gradients of the tensors of a stage's payload that require one. Waits for them; not on the last stage."""
        message = Action(stage + 1, "B", microbatch)
        source = self.placement[stage + 1]
        return self._handed.pop(message) if source == self.rank else self.receivers[source].take(message)

    def give_gradients(self, stage: int, microbatch: int, gradients: Sequence[Tensor]) -> None:
        """Pass on the gradients of what a stage received; not on stage 0."""
        message = Action(stage, "B", microbatch)
        target = self.placement[stage - 1]
        if target == self.rank:
            self._handed[message] = tuple(gradients)
        else:
            self.senders[target].send(gradients, message)

    def drain(self) -> None:
        """Wait until everything sent has arrived."""
        for sender in self.senders.values():
            sender.drain()

    def clear(self) -> None:
        """Drop what has arrived and nobody will ask for."""
        for receiver in self.receivers.values():
            receiver.arrived.clear()
            receiver.specs = {key: specs for key, specs in receiver.specs.items() if not isinstance(key, Action)}

    def forget(self) -> None:
        """Send headers anew."""
        for sender in self.senders.values():
            sender.specs.clear()
        for receiver in self.receivers.values():
            receiver.specs.clear()

    def _key(self, message: Action) -> Hashable:
        return message if message.kind == "B" else (message.stage, self._signatures[message.microbatch])


def neighbour_pairs(placement: Sequence[int]) -> list[tuple[int, int]]:
    """(source, target) ranks that exchange messages, both directions of each, sorted."""
    pairs = {pair for pair in itertools.pairwise(placement) if pair[0] != pair[1]}
    return sorted(pairs | {(target, source) for source, target in pairs})


def gradient_specs(payload: Iterable[Tensor]) -> tuple[TensorSpec, ...]:
    """Describe what comes back for a payload: one gradient for each tensor that requires one."""
    return tuple(TensorSpec.of(tensor) for tensor in payload if tensor.requires_grad)
