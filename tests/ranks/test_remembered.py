"""A second start of the same model takes what the first found out; a model that is another one is looked at again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted_calls import sizes_of_calls
from rank_runner import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.engine.plan import head as plan_head
from hf_parallel.engine.plan import self_check
from hf_parallel.engine.plan import shards as plan_shards
from hf_parallel.engine.session import Session
from hf_parallel.pipeline_parallel.schedule.programs import ScheduleChoice
from hf_parallel.settings.config import HFParallelConfig


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config).train()


def step(settings: dict[str, Any], change: Any = None) -> list[float]:
    """Attach, take a training step; the loss and the norm of the gradients."""
    config = HFParallelConfig(**settings)
    model = llama()
    if change is not None:
        change(model)
    session = Session.start(config, ScheduleChoice(config.pipeline, config.pp_size), "a test", dist.get_world_size())
    engine = session.attach(model, torch.device("cpu"))
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = [float(loss.detach()), float(engine.gradients.norm())]
    session.watchdog.stop()
    return found


def scaled(model: Any) -> None:
    model.model.layers[2].self_attn.scaling = 0.5


def patched(model: Any) -> None:
    mlp = model.model.layers[2].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x)


def starts(rank: int, world_size: int, settings: dict[str, Any], folder: str) -> None:
    counts = {"checks": 0, "plans": 0, "heads": 0}

    def counted(where: Any, name: str, what: str) -> None:
        real = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return real(*args, **kwargs)

        setattr(where, name, call)

    counted(self_check, "check_split", "checks")
    counted(self_check, "verify_model", "checks")
    counted(plan_shards, "plan_model", "plans")
    counted(plan_head, "judge_head", "heads")

    def run(change: Any = None, **more: Any) -> tuple[list[float], dict[str, int]]:
        counts.update(dict.fromkeys(counts, 0))
        found = step({**settings, **more}, change)
        dist.barrier()
        return found, dict(counts)

    section = "pipeline" if "pp_size" in settings else "tensor_parallel"
    first = {"checks": int(rank == 0), "plans": int(rank == 0 and section == "tensor_parallel")}
    first["heads"] = int(rank == 0)
    nothing = dict.fromkeys(first, 0)
    loss, found = run()
    assert found == first
    assert run() == (loss, nothing)
    assert run(scaled)[1] == first
    assert run(patched) == (loss, first)
    assert run(patched) == (loss, first)  # nothing is remembered of it
    assert run(**{section: {"self_check": "on"}}) == (loss, first)
    dist.barrier()
    if rank == 0:
        for file in Path(folder).rglob("*.json"):
            file.write_text("{")
    dist.barrier()
    assert run() == (loss, first)
    assert run() == (loss, nothing)


@pytest.mark.parametrize(
    "settings", [pytest.param({"pp_size": 2}, marks=pytest.mark.long), {"tp_size": 2}], ids=["pp2", "tp2"]
)
def test_the_second_start_of_a_model_finds_out_nothing_again(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    run_ranks(starts, 2, settings, str(folder), tmp_path=tmp_path, env={"HF_PARALLEL_CACHE": str(folder)})


def trainings(rank: int, world_size: int, settings: dict[str, Any], folder: str) -> list[tuple[float, int, int]]:
    """Of two runs of a Trainer: the loss, the elements of the largest model that was tried, and the checks."""
    import tiny
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    from hf_parallel import HFParallelCallback
    from hf_parallel.model import narrow

    narrow.SMALL = 0  # type: ignore[misc]
    checked = sizes_of_calls(self_check, "check_split", "verify_model")
    heads = sizes_of_calls(plan_head, "judge_head")
    found = []
    for index in range(2):
        AcceleratorState._reset_state()
        checked.clear()
        heads.clear()
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(**tiny.SMALL | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4})
        )
        arguments = TrainingArguments(
            f"{folder}/{index}",
            per_device_train_batch_size=4,
            max_steps=2,
            use_cpu=True,
            report_to=[],
            logging_steps=2,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=tiny.rows(8, False),
            data_collator=tiny.collate,
            callbacks=[HFParallelCallback({}, **settings)],
        )
        loss = trainer.train().training_loss
        found.append((loss, max(checked + heads, default=0), len(checked)))
    return found


@pytest.mark.parametrize(
    "settings", [{"pp_size": 2}, pytest.param({"tp_size": 2}, marks=pytest.mark.long)], ids=["pp2", "tp2"]
)
def test_a_trainer_checks_a_narrow_model_once(settings: dict[str, Any], tmp_path: Path) -> None:
    environment = {"HF_PARALLEL_CACHE": str(tmp_path / "cache")}
    found = run_ranks(trainings, 2, settings, str(tmp_path), tmp_path=tmp_path, env=environment)
    (first, largest, checks), again = found[0]
    assert checks == 1
    assert largest < 4 * 4 * 128 * 128  # a quarter of the blocks' elements and less
    assert again == (first, 0, 0)
