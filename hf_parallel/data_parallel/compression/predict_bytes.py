"""Predicts savings of compression: bytes by formula, the codec's time by a short measurement, the link by the user's word."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hf_parallel.data_parallel.compression.codecs import GradientCompressor
from hf_parallel.data_parallel.compression.compressed_wire import CompressedWire
from hf_parallel.data_parallel.compression.exchange import HierarchicalAllReduce
from hf_parallel.data_parallel.compression.powersgd import PowerSGD, matrix_shape


SAMPLE = 2**19  # elements of the measurement: milliseconds


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of one exchange of all gradients, for one rank.

    Args:
        dense_bytes: Bytes sent without compression, in a ring.
        wire_bytes: Bytes sent with it; between nodes only, where sums inside a node are exact.
        codec_seconds: Seconds spent on encoding and decoding.
    """

    dense_bytes: float
    wire_bytes: float
    codec_seconds: float

    @property
    def ratio(self) -> float:
        """Dense bytes over sent bytes."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def break_even(self) -> float:
        """Gbit/s of a link on which compression takes as long as it saves."""
        saved = max(0.0, self.dense_bytes - self.wire_bytes)
        return 8e-9 * saved / self.codec_seconds if self.codec_seconds else float("inf")

    def seconds(self, gbit_s: float) -> tuple[float, float]:
        """Without and with compression, on a link and one after the other: what overlaps costs less."""
        rate = gbit_s * 1e9 / 8
        return self.dense_bytes / rate, self.wire_bytes / rate + self.codec_seconds

    def line(self, name: str, gbit_s: float | None) -> str:
        """One line for the start of a run."""
        text = (
            f"{name}: {self.wire_bytes / 1e6:.2f} of {self.dense_bytes / 1e6:.2f} MB a rank and exchange ({self.ratio:.1f}x "
            f"fewer), {self.codec_seconds * 1e3:.1f} ms to encode and decode here"
        )
        if gbit_s is None:
            return f"{text}; pays on links below {self.break_even:.3g} Gbit/s"
        before, after = self.seconds(gbit_s)
        return f"{text}; on {gbit_s:g} Gbit/s {after * 1e3:.1f} ms instead of {before * 1e3:.1f} ms"


def predict(wire: CompressedWire, shapes: Mapping[str, torch.Size], device: torch.device) -> Prediction:
    """The prediction for gradients of these shapes.

    Args:
        wire: Wire that will carry them.
        shapes: Trained parameter -> shape on this rank.
        device: Device of the gradients; the codec is tried there.
    """
    sent = {name: shape for name, shape in shapes.items() if not wire.keeps_dense(name, shape)}
    exact = sum(shape.numel() for name, shape in shapes.items() if name not in sent)
    elements, ranks = sum(shape.numel() for shape in sent.values()), wire.group.size()
    ring = 2 * (ranks - 1) / ranks
    dense = ring * 4 * (elements + exact)
    method = wire.method
    if isinstance(method, PowerSGD):
        thin = sum(method.rank * sum(matrix_shape(shape)) for shape in sent.values())
        return Prediction(dense, ring * 4 * (thin + exact), 0.0)
    inner = method.between if isinstance(method, HierarchicalAllReduce) else method
    share, exact_ring = 1.0, ring
    if isinstance(method, HierarchicalAllReduce):
        share, across = 1.0 / method.inside.size(), method.across.size()
        exact_ring = share * 2 * (across - 1) / across
    if inner is None:
        return Prediction(dense, exact_ring * 4 * (elements + exact), 0.0)
    code = share * elements * inner.codec.bytes_per_block / inner.codec.block
    both = inner.schedule == "all_gather"
    wired = (inner.ranks - 1) * code if both else 2 * (inner.ranks - 1) / inner.ranks * code
    encode, decode = _nanoseconds(inner.codec, device)
    passes = encode + inner.ranks * decode if both else encode * (1 + 1 / inner.ranks) + 2 * decode
    return Prediction(dense, wired + exact_ring * 4 * exact, share * elements * passes * 1e-9)


def _nanoseconds(codec: GradientCompressor, device: torch.device) -> tuple[float, float]:
    """To encode and to decode one element, best of three."""
    x = torch.randn(-(-SAMPLE // codec.block) * codec.block, device=device)
    payload = codec.encode(x)

    def best(work: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(3):
            start = perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(perf_counter() - start)
        return min(times) * 1e9 / x.numel()

    return best(lambda: codec.encode(x)), best(lambda: codec.decode(payload))
