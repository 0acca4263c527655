"""A cluster whose rates were measured on it."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hf_parallel.errors import ConfigError
from hf_parallel.memory.layers import with_layers
from hf_parallel.planner.calibrate import BLOCK_ROWS, HALF_ROWS, Calibration, config_of_text
from hf_parallel.planner.constants import Constants, constants
from hf_parallel.planner.cost import Place, block_pass
from hf_parallel.planner.hardware import Cluster, Gpu
from hf_parallel.planner.layout import LayoutSpec
from hf_parallel.planner.profile import ModelProfile, profile_of


HALVINGS: Final = 40


@dataclass(frozen=True, init=False)
class MeasuredCluster(Cluster):
    """A `Cluster` whose rates inside a node are those of a report.

    Args:
        nodes: Machines like the one that was measured.
        gpus_per_node: Ranks of each machine.
        gpu: A key of the hardware table, for memory and the network.
        calibration: What was measured.
        **sizes: Other arguments of `Cluster`.

    Raises:
        ConfigError: The report is of another kind of device.
    """

    calibration: Calibration = field(kw_only=True)

    def __init__(self, nodes: int, gpus_per_node: int, gpu: str, *, calibration: Calibration, **sizes: Any) -> None:
        super().__init__(nodes, gpus_per_node, gpu, **sizes)
        if (calibration.device == "cpu") != (gpu == "cpu"):
            raise ConfigError(
                f"gpu={gpu} with a report of device {calibration.device}: rates of one say nothing of the other. Calibrate on the "
                "machines that you plan for."
            )
        object.__setattr__(self, "calibration", calibration)

    @property
    def card(self) -> Gpu:
        """The table's entry with what was measured."""
        found, stock = self.calibration, super().card
        n = max(2, found.ranks)
        link = 2 * (n - 1) / n * found.reduce_bytes_s or stock.pcie  # what a ring sends of a tensor, by its time
        attention = found.attention * (found.half_products / found.products if found.device == "cpu" else 1.0)
        return replace(
            stock,
            peak=found.half_products,
            fp32=found.products,
            attention=attention,
            flash=attention,
            achievable=1.0,
            bandwidth=found.moved,
            pcie=link,
            nvlink=None if stock.nvlink is None else link,
            cache=None,  # its part in what was moved was measured
            source="hf-parallel calibrate",
        )

    @property
    def regained(self) -> float:
        """Share of idle time that is won back; above 1 where ranks crowd each other out of caches, so that half do more than half."""
        found = self.calibration
        part = found.half_block_s / found.blocks_s[BLOCK_ROWS.index(HALF_ROWS)]
        return max(0.0, 2 * (1 - part)) if part else 0.0

    def constants(self, tokens: float) -> Constants:
        """The constants of the fit on published runs, with the measured ones in their place."""
        return _constants(self.calibration, self.card, tokens)


@functools.lru_cache(maxsize=64)
def _constants(found: Calibration, card: Gpu, tokens: float) -> Constants:
    n = max(2, found.ranks)
    latency = found.reduce_s / 2 / (n - 1)
    link = card.nvlink or card.pcie
    hop = found.hop_bytes_s and (1 / found.hop_bytes_s) * link
    on_cpu = found.device == "cpu"
    measured = replace(
        constants(),
        e_mm=1.0,
        e_att=1.0,
        few_keys=0.0,  # it was measured at a usual length
        c_intra=1.0,
        t_kernel=0.0 if on_cpu else found.kernel_s,  # a CPU launches nothing: it computes
        t_floor=found.kernel_s if on_cpu else constants().t_floor,
        a_intra=latency or constants().a_intra,
        p2p=hop or constants().p2p,
        t_call=0.0 if on_cpu else constants().t_call,
        t_message=0.0,
        update_s=found.update_s,
        # Threads that compute and threads that send share the cores.
        # A host that computes does not run ahead of a device: what it does for a step is in the times of its operations.
        **(
            {"dp_overlapped": 0.0, "gamma": 1.0, "thin": 0.0, "few": 0.0, "t_micro": 0.0, "t_step": 0.0}
            if on_cpu
            else {}
        ),
    )
    return replace(measured, e_bw=_part_at(tokens, found, card, measured))


def _part_at(tokens: float, found: Calibration, card: Gpu, c: Constants) -> float:
    """The part of the memory's rate that passes of some tokens reach, between those that were measured."""
    sizes = [math.log(rows * found.length) for rows in BLOCK_ROWS]
    parts = [_part_of_bandwidth(found, *pair, card, c) for pair in zip(BLOCK_ROWS, found.blocks_s, strict=True)]
    place = min(max(math.log(tokens), sizes[0]), sizes[-1])
    for (low, high), (before, after) in zip(itertools.pairwise(sizes), itertools.pairwise(parts), strict=True):
        if place <= high:
            return before + (after - before) * (place - low) / (high - low)
    return parts[-1]


def _part_of_bandwidth(found: Calibration, rows: int, seconds: float, card: Gpu, c: Constants) -> float:
    """The part of the memory's rate with which a block takes as long as the measured one did."""
    profile = _block_profile(found.model)
    cluster = _Alone(card)
    low, high = 1e-3, 10.0
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        place = Place(LayoutSpec(micro_batch=rows, dtype="fp32"), cluster, found.length, replace(c, e_bw=middle))  # type: ignore[arg-type]
        if block_pass(profile, profile.kinds[0], place).both > seconds:
            low = middle
        else:
            high = middle
    return high


class _Alone:
    """One device, as costs look at it."""

    num_gpus = gpus_per_node = 1

    def __init__(self, card: Gpu) -> None:
        self.card = card
        self.intra_bytes_s = self.inter_bytes_s = card.pcie


@functools.cache
def _block_profile(model: str) -> ModelProfile:
    return profile_of(with_layers(config_of_text(model), 2))
