"""A loss without logits on real ranks: losses, gradients and parameters after three steps equal one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runner import run_ranks
from torch import Tensor, nn
from tp_models import assert_equal_to_one_process
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig
from vocab_models import VOCAB, vocab_model
from zoo.models import build

from hf_parallel.dry_run.rank.run import axis_of
from hf_parallel.dry_run.rank.step import Training, batches_of
from hf_parallel.engine.session import Session
from hf_parallel.errors import PlanError
from hf_parallel.head import rows
from hf_parallel.memory.meter import Meter
from hf_parallel.memory.terms import Work
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig


pytestmark = pytest.mark.long

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"chunked_loss": "auto", "pp_size": 2, "num_microbatches": 2},
    "tp2": {"chunked_loss": "auto", "tp_size": 2},
    "pp2_tp2": {"chunked_loss": "auto", "pp_size": 2, "tp_size": 2, "num_microbatches": 2},
    "pp2_gpipe": {"chunked_loss": "auto", "pp_size": 2, "num_microbatches": 4, "schedule": "gpipe"},
    "pp2_zero1": {"chunked_loss": "auto", "pp_size": 2, "num_microbatches": 2, "zero": {"stage": 1}},
    "tp2_own_tiles": {"chunked_loss": "auto", "tp_size": 2},
    "tp2_sequence": {"chunked_loss": "auto", "tp_size": 2, "sequence_parallel": True},
}
FAMILIES = ("llama", "llama_tied", "gpt2", "gemma2", "cohere", "granite", "phi", "mixtral")
ENV = {"ACCELERATE_USE_CPU": "true"}
ROWS, LENGTH, REPLICAS = 8, 12, 2
TILE = 7  # tokens; a microbatch that fits into one tile has its logits made


def model_of(family: str) -> nn.Module:
    if family != "mixtral":
        return vocab_model(family)
    model = build("mixtral")
    model.config.output_router_logits = True
    return model


def batch_of(model: Any, seed: int) -> dict[str, Tensor]:
    """Rows of which each half has as many labels, so that the replicas' losses have the mean of one process."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, min(model.config.vocab_size, VOCAB), (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 1:4] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=False, eps=1e-4)


def part_of(batch: dict[str, Tensor], replicas: int, replica: int) -> dict[str, Tensor]:
    size = ROWS // replicas
    return {name: value[replica * size : (replica + 1) * size] for name, value in batch.items()}


def one_process(model: nn.Module, replicas: int, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps with the rows that the ranks compute together, and the first gradients."""
    optimizer, losses, first = optimizer_of(model), [], {}
    for seed in range(3):
        optimizer.zero_grad()
        total = 0.0
        for index in range(replicas * parts):
            loss = model(**part_of(batch_of(model, seed), replicas * parts, index)).loss / (replicas * parts)
            loss.backward()
            total += loss.item()
        losses.append(total)
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, first


def main(rank: int, world_size: int, layout: str, families: tuple[str, ...]) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelPlugin
    from hf_parallel.checkpoints.weights.gather import gather_tensors

    settings = LAYOUTS[layout]
    rows.LEAST_ROWS = 1  # ranks with unequal parts of the vocabulary would choose tiles of unequal size
    for family in families:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        replicas = world_size // (settings.get("pp_size", 1) * settings.get("tp_size", 1))
        # A router's loss is not additive over rows: one process has the same microbatches.
        parts = min(settings.get("num_microbatches", 1), ROWS // replicas) if family == "mixtral" else 1
        reference = model_of(family)
        expected, gradients = one_process(reference, replicas, parts)
        model: Any = model_of(family)
        optimizer: Any = optimizer_of(model)
        accelerator: Any = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **settings))
        head = model.get_output_embeddings()
        model, optimizer = accelerator.prepare(model, optimizer)
        session = accelerator.hf_parallel
        if "logits_deferral" in vars(head):
            head.logits_deferral.tiling.rows = 0 if layout == "tp2_own_tiles" else TILE
        attachment = session.engine.attachment
        losses = []
        for seed in range(3):
            optimizer.zero_grad()
            batch = part_of(batch_of(model, seed), replicas, attachment.mesh.dp_rank)
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item() if replicas > 1 else loss.item())
            if not seed:
                held = {name: p.grad for name, p in attachment.parameters.items() if p.grad is not None}
                if not settings.get("zero"):
                    got = gather_tensors(
                        attachment.ledger, held, attachment.mesh, wanted=lambda one: one.name in gradients
                    )
                    if rank == 0:
                        assert_equal_to_one_process(got, gradients, 1e-5)
            optimizer.step()
        assert losses == pytest.approx(expected, rel=1e-5), (family, layout)
        last_stage = attachment.mesh.pp_rank == settings.get("pp_size", 1) - 1
        if last_stage and "zbv" not in layout:
            # With fewer words a rank than channels one tile would be as large as the logits, which are made then.
            is_small = model.config.vocab_size < 2 * model.config.hidden_size
            expected_tiles = 0 if layout == "tp2_own_tiles" and is_small else 1
            reads = head.logits_deferral.last
            assert (reads.tiled, reads.made) == (expected_tiles, []), (family, layout)
        state = accelerator.get_state_dict(model)
        if rank == 0:
            wanted = {name: p.detach() for name, p in reference.named_parameters()}
            assert_equal_to_one_process({name: state[name] for name in wanted}, wanted, 1e-5)
        session.watchdog.stop()


def run(layout: str, families: tuple[str, ...], tmp_path: Path) -> None:
    settings = LAYOUTS[layout]
    size = settings.get("pp_size", 1) * settings.get("tp_size", 1)
    world_size = size * (REPLICAS if "dp2" in layout or "zero1" in layout else 1)
    run_ranks(main, world_size, layout, families, tmp_path=tmp_path, timeout=300, env=ENV)


@pytest.mark.parametrize("layout", ["pp2", "tp2", "tp2_own_tiles"])
def test_families_train_as_in_one_process(layout: str, tmp_path: Path) -> None:
    run(layout, ("llama", "gemma2"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_families_train_as_in_one_process(layout: str, tmp_path: Path) -> None:
    run(layout, FAMILIES, tmp_path)


def refused_main(rank: int, world_size: int) -> None:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    accelerator: Any = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, pp_size=2, chunked_loss=True))
    model = vocab_model("llama")
    genuine = model.forward

    def softened(*args: Any, **kwargs: Any) -> Any:
        output = genuine(*args, **kwargs)
        output.loss = output.loss + output.logits.logsumexp(-1).mean()
        return output

    model.forward = softened
    with pytest.raises(
        PlanError, match=r"chunked_loss: true, but .* reads them \(logsumexp\).*Set chunked_loss to auto"
    ):
        accelerator.prepare(model)


def test_a_loss_that_needs_logits_is_refused_where_it_must_do_without(tmp_path: Path) -> None:
    run_ranks(refused_main, 2, tmp_path=tmp_path, env=ENV)


SHAPES: dict[str, Any] = {
    # vocabulary 31 times as wide as the hidden states, as of Llama-3-8B
    "llama3": LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    ),
    # 71 times, and a soft-cap, as of Gemma-2-9B
    "gemma2": Gemma2Config(
        vocab_size=6848,
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        final_logit_softcapping=30.0,
        attn_implementation="eager",
    ),
}
MEMORY_STAGES = 2


def peak_main(rank: int, world_size: int, shape: str, chunked: Any) -> int:
    """Bytes alive at the peak of this stage's second step."""
    section = {"pp_size": world_size, "chunked_loss": chunked, "pipeline": {"num_microbatches": 4}}
    config = HFParallelConfig.from_mapping(section | {"monitor": {"batch_check_steps": 0}})
    session = Session.start(config, ScheduleChoice(config.pipeline, config.pp_size), "a test")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[shape]).train()
    engine = session.attach(model, torch.device("cpu"))
    meter = Meter("cpu", functools.partial(axis_of, session.mesh.shape))
    for tensor in (*model.parameters(), *model.buffers()):
        meter.follow(tensor, "weights")
    batches = batches_of(Work(rows=8, length=512), mask=False, new=lambda shape, dtype: torch.ones(shape, dtype=dtype))
    with meter, meter.following_resizes():
        training = Training.of(engine, meter)
        for _ in range(2):
            meter.begin()
            training.step(batches)
    session.watchdog.stop()
    return meter.memory.peak().total_bytes


@pytest.mark.parametrize("shape", ["llama3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_the_last_stage_needs_no_more_memory_than_the_others(shape: str, tmp_path: Path) -> None:
    peaks = run_ranks(peak_main, MEMORY_STAGES, shape, "auto", tmp_path=tmp_path)
    assert peaks[-1] <= 1.1 * max(peaks[:-1])
    with_logits = run_ranks(peak_main, MEMORY_STAGES, shape, False, tmp_path=tmp_path)
    assert with_logits[-1] > 1.3 * peaks[-1]
