"""The wire between two ranks: payloads, the headers that describe them, receives posted ahead, a bounded send queue.

All messages of one direction between two ranks, activations and gradients of all their stages, share one channel, and
the receiver replays the sender's order, which both know from the schedule. A message is named by the action that sends
it: ``0F3`` is the activation of microbatch 3 from stage 0 to 1, ``1B3`` the gradient from stage 1 to 0.

A header travels only the first time that a microbatch of some signature (shapes of its inputs, grad mode) passes a
boundary. Every rank sees every microbatch's inputs, so both ends know without a flag whether a header comes. Gradients
need none: their shapes are those of the payload that went the other way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from hf_parallel.errors import RankMismatchError, UnsupportedError
from hf_parallel.monitor.recorder import Recorder, silent
from hf_parallel.pipeline_parallel.run.transport import Message, TensorSpec, Transport
from hf_parallel.pipeline_parallel.schedule.actions import Action


DTYPES: Final = (  # those that NCCL sends too
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(slots=True)
class Counters:
    """Counts what this rank has sent and received since it was built; a header counts as no message.

    Attributes:
        headers_sent: Headers sent, one a boundary and signature.
        messages_sent: Payloads and gradients sent, one a microbatch and boundary.
        messages_received: Payloads and gradients received.
        bytes_sent: Bytes of all tensors sent, without headers.
    """

    headers_sent: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0


@dataclass(slots=True)
class Probe:
    """The optional observers of a runtime, and the one place where it blocks.

    Attributes:
        waits: Called with what this rank is about to wait for, and from which rank of the pipeline.
        runs: Called with what this rank is about to compute by itself.
        trace: Called after each action or wait with its name ("1F3", "wait 1F3"), wall seconds and CPU seconds.
        recorder: Keeps when actions, sends and waits were.
    """

    waits: Callable[[str, int], None] | None = None
    runs: Callable[[str], None] | None = None
    trace: Callable[[str, float, float], None] | None = None
    recorder: Recorder = field(default_factory=silent)

    def wait(self, status: str, name: str, work: Callable[[], Any], peer: int) -> Any:
        """Return ``work()``, which blocks until another rank of the pipeline, ``peer``, has done its part."""
        if self.waits is not None:
            self.waits(status, peer)
        return self._observe(name, work)

    def run(self, status: str, name: str, work: Callable[[], Any]) -> Any:
        """Return ``work()``, a computation of this rank."""
        if self.runs is not None:
            self.runs(status)
        return self._observe(name, work)

    def _observe(self, name: str, work: Callable[[], Any]) -> Any:
        if self.trace is None:
            return work()
        wall, cpu = time.perf_counter(), time.thread_time()
        result = work()
        self.trace(name, time.perf_counter() - wall, time.thread_time() - cpu)
        return result


def signature_of(value: Any) -> Hashable:
    """Return what decides a payload's shapes: names, shapes and dtypes of tensors, and flags, at any depth.

    Numbers are left out: a token count changes every step and no shape depends on it.
    """
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return tuple((key, signature_of(value[key])) for key in sorted(value, key=str))
    if isinstance(value, (tuple, list)):
        return tuple(signature_of(item) for item in value)
    return value if isinstance(value, (bool, str)) else type(value).__name__


def encode_header(specs: Sequence[TensorSpec]) -> list[int]:
    """Return the specs as integers: count, then dtype code, requires_grad, number of dims and sizes of each tensor.

    Raises:
        UnsupportedError: If a tensor has a dtype without a code.
    """
    values = [len(specs)]
    for position, spec in enumerate(specs):
        if spec.dtype not in DTYPES:
            raise UnsupportedError(
                f"payload tensor {position} has dtype {spec.dtype}: a stage boundary carries "
                f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}. Move the cut to another block."
            )
        values += [DTYPES.index(spec.dtype), int(spec.requires_grad), len(spec.shape), *spec.shape]
    return values


def decode_header(values: Sequence[int]) -> tuple[TensorSpec, ...]:
    """Return the specs that `encode_header` wrote."""
    specs, at = [], 1
    for _ in range(values[0]):
        dtype, requires_grad, dims = values[at : at + 3]
        specs.append(TensorSpec(tuple(values[at + 3 : at + 3 + dims]), DTYPES[dtype], bool(requires_grad)))
        at += 3 + dims
    return tuple(specs)


Specs: TypeAlias = dict[Hashable, tuple[TensorSpec, ...]]


def _target_of(message: Action) -> int:
    """Stage that a message goes to."""
    return message.stage + (1 if message.kind == "F" else -1)


def message_name(message: Action) -> str:
    """Return what a message is, in words, such as ``the activation of microbatch 3``."""
    return f"the {'activation' if message.kind == 'F' else 'gradient'} of microbatch {message.microbatch}"


@dataclass(slots=True)
class Sender:
    """The sending end of a channel to ``peer``. Sends stay in a queue of ``window``; only older ones are waited for.

    gloo finishes a send when its receive is posted, so waiting for a send just issued would deadlock a 1F1B pipeline.
    """

    transport: Transport
    probe: Probe
    counters: Counters
    peer: int
    window: int = 2
    specs: Specs = field(default_factory=dict)
    queue: deque[tuple[tuple[Message, ...], str]] = field(default_factory=deque)

    def send(self, tensors: Sequence[Tensor], message: Action, signature: Hashable = None) -> None:
        """Start sending; with a signature (not None) a header goes first if the peer has not seen it.

        Args:
            tensors: The payload.
            message: The action that made it.
            signature: Key that decides the payload's shapes, boundary included.

        Raises:
            RankMismatchError: If the payload differs from what the peer expects for this signature.
        """
        header = () if signature is None else self._announce(tensors, message, signature)
        payload = tuple(tensor.detach().contiguous() for tensor in tensors)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += sum(tensor.nbytes for tensor in payload)
        # Header and payload are one entry: a header counted by itself would be waited for as soon as it is sent.
        start = self.probe.recorder.mark()
        parts = (*header, self.transport.isend(payload))
        self.probe.recorder.add(f"send {message.kind}", message.stage, message.microbatch, start)
        target = _target_of(message)
        status = f"waits at stage {message.stage} for stage {target} to receive {message_name(message)}"
        self.queue.append((parts, status))
        self.drain(self.window)

    def drain(self, keep: int = 0) -> None:
        """Wait for all sends but the newest ``keep``."""
        while len(self.queue) > keep:
            parts, status = self.queue.popleft()
            start = self.probe.recorder.mark()
            for part in parts:
                self.probe.wait(status, "drain", part.wait, self.peer)
            self.probe.recorder.add("drain", -1, -1, start)

    def _announce(self, tensors: Sequence[Tensor], message: Action, signature: Hashable) -> tuple[Message, ...]:
        """Start sending the header if the peer has not seen the signature; return what is under way."""
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors)
        known = self.specs.get(signature)
        if known == specs:
            return ()
        target = message.stage + 1
        if known is not None:
            raise RankMismatchError(
                f"payload of microbatch {message.microbatch} to stage {target} is {specs}, but inputs of the same "
                f"shapes gave {known} before: stage {target} expects one payload for one set of input shapes. Set the model's "
                "flags before training begins; a model whose payload shapes depend on the data needs pp_size: 1."
            )
        body = encode_header(specs)
        device = self.transport.device
        # Two messages, i[1] and i[length]: the receiver has to know how much to expect.
        header = (torch.tensor([len(body)], device=device), torch.tensor(body, device=device))
        self.counters.headers_sent += 1
        self.specs[signature] = specs
        return tuple(self.transport.isend([part]) for part in header)


@dataclass(slots=True)
class Receiver:
    """The receiving end of a channel from ``peer``; posts receives ahead, in the order of ``expect``, where the specs are known.

    A message that is taken out of order waits in ``arrived`` until it is asked for.
    """

    transport: Transport
    probe: Probe
    counters: Counters
    ahead: int
    peer: int
    specs: Specs = field(default_factory=dict)
    coming: deque[tuple[Action, Hashable]] = field(default_factory=deque)
    posted: deque[tuple[Action, Message]] = field(default_factory=deque)
    arrived: dict[Action, tuple[Tensor, ...]] = field(default_factory=dict)

    def expect(self, messages: Sequence[Action], keys: Sequence[Hashable]) -> None:
        """Say which messages come next, in the sender's order, and under which key ``specs`` has their shapes.

        The key of a gradient is the message itself: its specs are entered when the payload goes out.
        """
        self.coming = deque(zip(messages, keys, strict=True))

    def post_ahead(self) -> None:
        """Post receives until ``ahead`` of them are outstanding, as far as the specs are known."""
        while self.coming and len(self.posted) < self.ahead and self.coming[0][1] in self.specs:
            self._post(*self.coming.popleft())

    def take(self, wanted: Action) -> tuple[Tensor, ...]:
        """Return the tensors of a message, waiting for it and for all sent before it if need be."""
        while wanted not in self.arrived:
            self._take_next()
        return self.arrived.pop(wanted)

    def settle(self) -> None:
        """Receive all that is expected, for whoever asks later."""
        while self.posted or self.coming:
            self._take_next()

    def _take_next(self) -> None:
        if not self.posted:
            message, key = self.coming.popleft()
            if key not in self.specs:
                self.specs[key] = self._receive_header(message)
            self._post(message, key)
        message, work = self.posted.popleft()
        start = self.probe.recorder.mark()
        self.arrived[message] = self._wait(work, message, message_name(message))
        target = _target_of(message)
        self.probe.recorder.add(f"receive {message.kind}", target, message.microbatch, start)
        self.counters.messages_received += 1

    def _post(self, message: Action, key: Hashable) -> None:
        self.posted.append((message, self.transport.irecv(self.specs[key])))
        if key == message:  # a gradient: its shapes were noted for this one message
            del self.specs[key]

    def _receive_header(self, message: Action) -> tuple[TensorSpec, ...]:
        name = f"the header of microbatch {message.microbatch}"
        length = 1
        values: list[int] = []
        for _ in ("length", "body"):
            spec = TensorSpec((length,), torch.int64, requires_grad=False)
            (tensor,) = self._wait(self.transport.irecv([spec]), message, name)
            values = [int(value) for value in tensor.tolist()]
            length = values[0]
        return decode_header(values)

    def _wait(self, work: Message, message: Action, name: str) -> tuple[Tensor, ...]:
        target = _target_of(message)
        status = f"waits at stage {target} for {name} from stage {message.stage}"
        tensors: tuple[Tensor, ...] = self.probe.wait(status, f"wait for {name}", work.wait, self.peer)
        return tensors
