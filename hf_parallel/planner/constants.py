"""The constants of the model of time: one file, with where each is from."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final


FILE: Final = Path(__file__).parent / "constants.json"


@dataclass(frozen=True)
class Constants:
    """Numbers that no data sheet gives; times in seconds.

    Attributes:
        e_mm: Part of a GPU's achievable rate that a model's products reach.
        e_bw: Part of the memory bandwidth that other kernels reach.
        e_att: Part of the published rate that attention reaches.
        thin: Width at which a product takes twice its time.
        few: Number of tokens at which a product takes twice its time.
        c_intra: Part of a node's links that collectives reach.
        c_inter: Part of the network that they reach.
        congestion: What a doubling of a group's nodes adds to its messages.
        gamma: Part of the shorter one that overlapped work costs.
        t_kernel: Host time of a kernel.
        t_floor: Device time of a kernel besides that of its work.
        t_call: Host time of a collective of tensor parallelism.
        t_message: Time to start such a collective on the device.
        t_micro: Fixed time of a micro-batch on each stage.
        t_step: Fixed time of an optimizer step.
        a_inter: Latency between nodes.
        p2p: Messages between stages, as a multiple of their time on the wire.
        a_intra: Latency inside a node.
        tp_overlapped: What is left of tensor-parallel messages that overlap.
        pp_overlapped: What is left of messages between stages that overlap.
        dp_overlapped: Part of the last backward that hides the reduction.
        unpack: Rate at which quantised weights are unpacked, as a part of that of other kernels.
        flash: Rate of flash attention's later releases, as a multiple of its first and of SDPA's.
        few_keys: Mean number of keys of a query at which attention that stores no scores takes twice its time.
        t_fetch: Host time in which ZeRO 3 other than FSDP fetches and frees a block's parameters, in each of its passes.
        cpu_adam: Parameters per second that a node's host updates.
        update_s: Time of the optimizer for each parameter on the device; 0 takes the time of its memory traffic.
    """

    e_mm: float
    e_bw: float
    e_att: float
    thin: float
    few: float
    c_intra: float
    c_inter: float
    congestion: float
    gamma: float
    t_kernel: float
    t_floor: float
    t_call: float
    t_message: float
    t_micro: float
    t_step: float
    a_inter: float
    p2p: float
    a_intra: float
    tp_overlapped: float
    pp_overlapped: float
    dp_overlapped: float
    unpack: float
    flash: float
    few_keys: float
    t_fetch: float
    cpu_adam: float
    update_s: float = 0.0


@functools.cache
def constants() -> Constants:
    """The constants of the file."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return Constants(**content["fitted"], **content["judged"])
