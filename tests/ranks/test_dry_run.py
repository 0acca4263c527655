"""The peak of a dry run is that of the run: live bytes counted on real ranks, op by op."""

from __future__ import annotations

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import run_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from hf_parallel.dry_run.rank.run import Job, axis_of, run_dry
from hf_parallel.dry_run.rank.step import Training, batches_of
from hf_parallel.engine.session import Session
from hf_parallel.memory.meter import Meter
from hf_parallel.memory.terms import Precision, Work
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QUIET = {"monitor": {"batch_check_steps": 0}}
WORK = Work(rows=4, length=128, accumulation=2)
SECTIONS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2, "pipeline": {"num_microbatches": 4}},
    "tp2": {"tp_size": 2},
    "zero1": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "sp2": {"sp_size": 2},
    "ring of sp2": {"sp_size": 2, "sp_attention": "ring"},
    "pp2 x sp2": {"pp_size": 2, "sp_size": 2, "pipeline": {"num_microbatches": 4}},
    "recomputed": {"activation_checkpointing": {"every": 1}},
    "ep2": {"ep_size": 2},
    "ep2 in fp32": {"ep_size": 2},
    "ep2 x dp2, zero1": {"ep_size": 2, "zero": {"stage": 1}},
}
HALF = {"ep2", "ep2 x dp2, zero1"}


def config_of(section: dict[str, Any]) -> Any:
    return MixtralConfig(**SIZES, **EXPERTS) if "ep_size" in section else LlamaConfig(**SIZES)


def route_evenly() -> None:
    """Let each token go to the experts after those of the token before it."""
    stock = MixtralTopKRouter.forward

    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, scores, index = stock(self, hidden_states)
        return logits, scores, torch.arange(index.numel()).view(index.shape) % self.num_experts

    MixtralTopKRouter.forward = forward


def counted(
    rank: int, world_size: int, section: dict[str, Any], dtype: torch.dtype
) -> tuple[int, dict[str, int], dict[str, tuple[int, int]]]:
    """Bytes at the peak of a real step, by kind, and calls and bytes of messages by operation and axis."""
    torch.manual_seed(0)
    config = HFParallelConfig.from_mapping(section | QUIET)
    session = Session.start(config, ScheduleChoice(config.pipeline, config.pp_size), "a test")
    route_evenly()
    model = AutoModelForCausalLM.from_config(config_of(section), dtype=dtype).train()
    device = torch.device("cpu")
    engine = session.attach(model, device)
    meter = Meter("cpu", functools.partial(axis_of, session.mesh.shape))
    for tensor in (*model.parameters(), *model.buffers()):
        meter.follow(tensor, "weights")

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.ones(shape, dtype=dtype)
        meter.follow(made, "batch")
        return made

    batches = batches_of(WORK, mask=False, new=new)
    with meter, meter.following_resizes():
        training = Training.of(engine, meter)
        for _ in range(4):  # replicas compare their buffers in the first three
            meter.begin()
            training.step(batches)
    found = meter.memory.peak()
    return found.total_bytes, dict(found.by_kind), messages(meter.messages, meter.message_bytes)


def messages(calls: Any, sizes: Any) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for (operation, axis, _), count in calls.items():
        before = found.get(f"{operation} {axis}", (0, 0))
        found[f"{operation} {axis}"] = before[0] + count, before[1]
    for (operation, axis, _), size in sizes.items():
        before = found[f"{operation} {axis}"]
        found[f"{operation} {axis}"] = before[0], before[1] + size
    return found


LONG = ("tp2", "zero1", "zero3", "ring of sp2", "pp2 x sp2", "recomputed", "ep2", "ep2 in fp32", "ep2 x dp2, zero1")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in SECTIONS]
)
def test_the_peak_is_that_of_a_real_run(name: str, tmp_path: Path) -> None:
    section = SECTIONS[name]
    config = HFParallelConfig.from_mapping(section | QUIET)
    ranks = 4 if "x dp2" in name else max(2, config.pp_size * config.tp_size * config.sp_size)
    dtype = torch.bfloat16 if name in HALF else torch.float32
    real = run_ranks(counted, ranks, section, dtype, tmp_path=tmp_path)
    precision: Precision = "half" if name in HALF else "fp32"
    for rank, (peak_bytes, by_kind, sent) in enumerate(real):
        found = run_dry(Job(config, config_of(section), WORK, rank, ranks, ranks, on_gpu=False, precision=precision))
        assert found.peak_bytes == pytest.approx(peak_bytes, rel=0.03), (rank, dict(found.peak.by_kind), by_kind)
        large = {key: value for key, value in sent.items() if value[1] > 10_000}
        here = {
            key: value
            for key, value in messages(
                {(m.operation, m.axis, m.dtype): m.calls for m in found.messages},
                {(m.operation, m.axis, m.dtype): m.total_bytes for m in found.messages},
            ).items()
            if value[1] > 10_000
        }
        assert here == large


def test_memory_is_counted_while_another_thread_frees_some() -> None:
    meter = Meter("cpu", lambda ranks: "")
    kept = [torch.empty(10) for _ in range(100)]
    for tensor in kept:
        meter.follow(tensor, "weights")

    def steps() -> None:
        for _ in range(1000):
            meter.follow(torch.empty(10), "activations")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor() as threads:
            for running in [threads.submit(steps) for _ in range(2)]:
                running.result()
    finally:
        sys.setswitchinterval(interval)
