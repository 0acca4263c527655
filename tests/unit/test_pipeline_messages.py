"""If these fail, two stages disagree on what is on the wire, or a rank waits for a send that nobody can take yet."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hf_parallel.errors import UnsupportedError
from hf_parallel.pipeline_parallel.run.messages import (
    DTYPES,
    Counters,
    Probe,
    Receiver,
    Sender,
    decode_header,
    encode_header,
    signature_of,
)
from hf_parallel.pipeline_parallel.run.transport import TensorSpec
from hf_parallel.pipeline_parallel.schedule.actions import Action


class LoopMessage:
    def __init__(self, tensors: Sequence[Tensor], log: list[str], name: str) -> None:
        self.tensors, self.log, self.name = tuple(tensors), log, name

    def wait(self) -> tuple[Tensor, ...]:
        self.log.append(self.name)
        return self.tensors


class LoopTransport:
    """What is sent can be received, in order; the log says what was waited for."""

    device = torch.device("cpu")
    receive_ahead = 2

    def __init__(self) -> None:
        self.wire: list[tuple[Tensor, ...]] = []
        self.log: list[str] = []
        self.taken = 0

    def isend(self, tensors: Sequence[Tensor]) -> LoopMessage:
        self.wire.append(tuple(tensors))
        return LoopMessage(tensors, self.log, f"send {len(self.wire) - 1}")

    def irecv(self, specs: Sequence[TensorSpec]) -> LoopMessage:
        tensors = self.wire[self.taken]
        assert [(spec.shape, spec.dtype) for spec in specs] == [(tuple(t.shape), t.dtype) for t in tensors]
        self.taken += 1
        return LoopMessage(tensors, self.log, f"receive {self.taken - 1}")


def sender(transport: LoopTransport, window: int = 2) -> Sender:
    return Sender(transport, Probe(), Counters(), 1, window)


def forward(microbatch: int) -> Action:
    return Action(0, "F", microbatch)


def test_headers_round_trip_for_every_dtype_and_any_number_of_dims() -> None:
    specs = tuple(TensorSpec((3,) * (i % 10), dtype, i % 2 == 0) for i, dtype in enumerate(DTYPES))
    assert decode_header(encode_header(specs)) == specs
    assert decode_header(encode_header(())) == ()


def test_a_dtype_without_a_code_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"payload tensor 1 has dtype torch\.float8_e4m3fn"):
        encode_header([TensorSpec((1,), torch.float32, True), TensorSpec((1,), torch.float8_e4m3fn, True)])


def test_no_send_is_waited_for_before_two_newer_ones_headers_included() -> None:
    transport = LoopTransport()
    link = sender(transport)
    for i in range(2):
        link.send([torch.ones(i + 1)], forward(i), signature=i)
    assert transport.log == []
    assert len(transport.wire) == 6
    link.send([torch.ones(1)], forward(2), signature=0)
    assert transport.log == ["send 0", "send 1", "send 2"]
    link.drain()
    assert transport.log == [f"send {i}" for i in range(7)]
    assert (link.counters.headers_sent, link.counters.messages_sent, link.counters.bytes_sent) == (2, 3, 16)


def test_receives_are_posted_ahead_only_once_their_shapes_are_known() -> None:
    transport = LoopTransport()
    source = sender(transport, window=9)
    for i, signature in enumerate("aaab"):
        source.send([torch.full((2,), float(i))], forward(i), signature)
    target = Receiver(transport, Probe(), Counters(), ahead=2, peer=0)
    target.expect([forward(i) for i in range(4)], "aaab")
    target.post_ahead()
    assert transport.taken == 0
    assert target.take(forward(0))[0].tolist() == [0.0, 0.0]
    target.post_ahead()
    assert [message.microbatch for message, _ in target.posted] == [1, 2]
    assert [target.take(forward(i))[0][0].item() for i in (2, 1, 3)] == [2.0, 1.0, 3.0]
    assert target.counters.messages_received == 4


def test_a_payload_is_sent_detached_and_contiguous() -> None:
    transport = LoopTransport()
    sender(transport).send([torch.ones(4, 2, requires_grad=True).t()], forward(0))
    (sent,) = transport.wire[0]
    assert sent.is_contiguous()
    assert not sent.requires_grad


def test_a_signature_sees_shapes_dtypes_and_flags_but_no_numbers() -> None:
    def signature(**changes: object) -> object:
        inputs = {"ids": torch.zeros(2, 3), "nested": {"a": [torch.zeros(1)]}, "n": 5, "flag": True, "none": None}
        return signature_of(inputs | changes)

    assert signature(n=6, ids=torch.ones(2, 3)) == signature()
    hash(signature())
    different = [{"ids": torch.zeros(2, 4)}, {"ids": torch.zeros(2, 3).long()}, {"flag": False}, {"extra": None},
                 {"nested": {"a": [torch.zeros(2)]}}, {"none": torch.zeros(1)}]  # fmt: skip
    for change in different:
        assert signature(**change) != signature()
