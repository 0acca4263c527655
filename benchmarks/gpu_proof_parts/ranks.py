"""Starts ranks for a step: forked as those of tests are, in a group of the step's choice."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import rank_runner
import tiny
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_proof_parts.machine import Device, Machine, first_gpu


TIMEOUT = timedelta(seconds=120)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a step runs on.

    Args:
        machine: Which one; sizes are tiny where it has no GPU.
        num_gpus: GPUs that may be used.
        folder: For files of the step.
        figures: Where the step's result is written.
    """

    machine: Machine
    num_gpus: int
    folder: Path
    figures: Path

    @property
    def device(self) -> Device:
        """See `Machine`."""
        return self.machine.device

    @property
    def is_tiny(self) -> bool:
        """Whether figures mean nothing."""
        return self.device != "cuda"

    @property
    def kind(self) -> str:
        """Device type of tensors."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def compile_backend(self) -> str | None:
        """What blocks are compiled with; torch.compile does not know soft devices."""
        if self.device == "soft":
            return None
        return "inductor" if self.device == "cuda" and self.machine.compiles else "aot_eager"

    def keep(self, found: dict[str, Any]) -> None:
        """Write what is found so far: a step that is killed has not run in vain."""
        self.figures.write_text(json.dumps(found))

    def backend(self, world_size: int) -> str:
        """Ranks with a GPU each talk through NCCL, ranks that share one through host memory."""
        return "nccl" if self.device == "cuda" and self.num_gpus >= world_size else "gloo"


def launch(
    setting: Setting,
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = None,
    eager: bool = False,
    env: dict[str, str] | None = None,
    timeout: float = 240.0,
) -> list[Any]:
    """What ``function(rank, world_size, *args)`` returns on each rank.

    Args:
        setting: Of the step.
        function: Of a module.
        world_size: Ranks.
        *args: For it.
        backend: Of the group; None for one process without a group.
        eager: Whether the group is bound to the device, so that NCCL makes its communicators at once.
        env: Of the ranks.
        timeout: Seconds.

    Raises:
        RankError: A rank failed or hung.
    """
    if setting.device == "soft" and "softcuda.devices" not in rank_runner.PRELOAD:
        rank_runner.PRELOAD.insert(0, "softcuda.devices")
    variables = {} if world_size > 1 or backend is None else dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    if variables:
        variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    if setting.device == "cuda" and world_size == 1:
        variables["CUDA_VISIBLE_DEVICES"] = first_gpu()  # a Trainer would put a copy of the model on each
    if setting.device == "cpu":
        variables["ACCELERATE_USE_CPU"] = "true"
    return run_ranks(
        _joined,
        world_size,
        function,
        backend,
        eager,
        args,
        tmp_path=setting.folder,
        timeout=timeout,
        init_group=False,
        env=variables | (env or {}),
        grace=2.0,
    )


def _joined(
    rank: int, world_size: int, function: Callable[..., Any], backend: str | None, eager: bool, args: tuple[Any, ...]
) -> Any:
    if backend is not None:
        device = None
        if torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU") != "true":
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=f"file://{Path.cwd() / 'store'}",  # ranks of a launch share their folder
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
            device_id=device if eager else None,
        )
    return function(rank, world_size, *args)


# -- training cases of the tests ---------------------------------------------------------------------------------------


def wide() -> LlamaForCausalLM:
    """A Llama whose products are large enough for a GPU's kernels of every kind, with scaled dot product attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1031,  # odd: shards of the head are uneven
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def trained(rank: int, world_size: int, cases: Sequence[Any], folder: str) -> list[dict[str, Any]]:
    """Run training cases of the tests one after the other."""
    from trainer_cases import ranks_main

    tiny.MODELS["wide"] = wide
    return list(ranks_main(rank, world_size, cases, folder))


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest differences of a run from one process, relative; of logged numbers below 1, absolute."""

    logs: float
    gradients: float
    parameters: float

    def agrees(self) -> bool:
        """Whether they are those of rounding: the limits of tests/gpu."""
        return self.logs <= 2e-5 and self.gradients <= 1e-5 and self.parameters <= 1e-5


def difference(mine: dict[str, Any], reference: dict[str, Any]) -> Difference:
    """Compare what a case logged and wrote with the same of one process."""
    logs = [
        abs(here[key] - value) / max(1.0, abs(value))
        for here, there in zip(mine["history"], reference["history"], strict=True)
        for key, value in there.items()
    ]
    worst = {name: max(_of_tensors(mine, reference, name)) for name in ("gradients", "parameters")}
    return Difference(max(logs), **worst)


def _of_tensors(mine: dict[str, Any], reference: dict[str, Any], name: str) -> Iterator[float]:
    tensors, expected = (load_file(Path(run["folder"]) / f"{name}.safetensors") for run in (mine, reference))
    if tensors.keys() != expected.keys():
        yield float("inf")
        return
    for key, tensor in expected.items():
        yield float((tensors[key] - tensor).norm() / tensor.norm().clamp(min=1e-30))
