"""Facts of a rank for its report beside its records: FLOPs of a token, the peak of its device, bytes sent, memory."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass

import psutil
import torch

from hf_parallel.engine.run.engine import Engine
from hf_parallel.engine.run.expected import states_with_zero
from hf_parallel.engine.run.pipeline import PipelineEngine
from hf_parallel.errors import ConfigError
from hf_parallel.monitor.recorder import Axis
from hf_parallel.planner.hardware import gpu_table
from hf_parallel.planner.here import key_of
from hf_parallel.planner.profile import profile_of
from hf_parallel.settings.config import HFParallelConfig


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token, forward and backward; 0 if not known.

    Attributes:
        model: FLOPs that the model needs: no recomputation, no gradients of frozen weights.
        hardware: FLOPs with what is computed again.
    """

    model: float = 0.0
    hardware: float = 0.0


def flops_of(engine: Engine, config: HFParallelConfig, seq_len: int) -> Flops:
    """FLOPs of a token of rows of `seq_len` tokens, from the model's config."""
    try:
        profile = profile_of(engine.model.config)
    except Exception as error:  # noqa: BLE001 - a config may be of any kind; training goes on without this metric
        logger.info("hf_parallel: FLOPs of this model are not known (%s), so logs have no FLOP/s.", error)
        return Flops()
    forward = profile.flops(seq_len) / 3
    parameters = [p for p in engine.attachment.parameters.values() if p.is_floating_point()]
    trained = sum(p.numel() for p in parameters if p.requires_grad) / max(1, sum(p.numel() for p in parameters))
    model = forward * (2 + trained)
    blocks = len(profile.layers)
    by_trainer = any(getattr(module, "gradient_checkpointing", False) is True for module in engine.model.modules())
    again = blocks if by_trainer else engine.expected.recomputed
    products = config.activation_checkpointing.products
    share = again / blocks * (1 - 1 / products if products else 1.0)
    return Flops(model, model + forward * share * (1 - profile.vocab * profile.hidden / profile.active))


def peak_of(engine: Engine) -> float:
    """FLOP/s of the device in the type of the arithmetic; 0 if it is not in the hardware table."""
    device = engine.attachment.device
    if device.type != "cuda":
        return 0.0
    try:
        card = gpu_table()[key_of(torch.cuda.get_device_name(device))]
    except ConfigError:
        return 0.0
    single = next(iter(engine.attachment.parameters.values())).dtype == torch.float32
    with engine.autocast():
        return card.fp32 if single and not torch.is_autocast_enabled("cuda") else card.peak


def sent_bytes(engine: Engine) -> dict[Axis, float]:
    """Bytes that this rank has handed to collectives and messages so far."""
    found: dict[Axis, float] = {
        "dp": float(engine.gradients.replicas.sent_bytes),
        "pp": float(engine.gradients.buckets.shared_bytes),
        **{axis: float(engine.recorder.sent[axis]) for axis in ("tp", "sp", "ep")},
    }
    if isinstance(engine, PipelineEngine):
        found["pp"] += engine.runtime.counters.bytes_sent
    return found


class PeakMemory:
    """Most that training took.

    Args:
        device: On a GPU tensors count; on a CPU what the process took beyond what it has now, and the weights.
        weights: Bytes of this rank's weights, which are in memory now.
    """

    def __init__(self, device: torch.device, weights: float) -> None:
        self._device = device
        self._others = 0.0 if device.type == "cuda" else max(0.0, psutil.Process().memory_info().rss - weights)

    @property
    def bytes(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        return max(0.0, 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._others)


def expected_bytes(engine: Engine, config: HFParallelConfig, tokens: float) -> float:
    """Weights, gradients, Adam and activations of this rank.

    Args:
        engine: The engine.
        config: The settings.
        tokens: Tokens of a microbatch.
    """
    expected = engine.expected
    activations = expected.activation_bytes[engine.mesh.pp_rank] if expected.activation_bytes else 0.0
    return sum(states_bytes(engine, config)) + activations * tokens if expected.states_bytes else 0.0


def states_bytes(engine: Engine, config: HFParallelConfig) -> tuple[float, ...]:
    """Weights, gradients and Adam's states of this rank; zeros where they are not known."""
    mesh, expected = engine.mesh, engine.expected
    if not expected.states_bytes:
        return 0.0, 0.0, 0.0
    return states_with_zero(expected.states_bytes[mesh.pp_rank], config.zero, mesh.dp_shard_group)
