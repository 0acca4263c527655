"""What the tensor-parallel ranks of a stage have in common stays bit-equal while they train.

If this fails, ranks drift apart without any error: each saves, routes and normalises with weights of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import Tensor
from trainer_cases import ENV, Case, make_trainer

from hf_parallel.errors import ConfigError, RankMismatchError


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

KINDS = ("uneven_dropout", "gpt2_dropout", "biogpt_dropout", "qwen3", "gpt_oss", "mixtral", "deepseek_v3", "mamba")


def common_parts(attachment: Any) -> dict[str, Tensor]:
    """Replicated parameters, and the sections of sharded ones that every rank holds whole."""
    size, rank = attachment.mesh.shape.tp_size, attachment.mesh.tp_rank
    found: dict[str, Tensor] = {}
    for name, parameter in attachment.parameters.items():
        spec = attachment.ledger.entries[name].spec
        if spec is None:
            found[name] = parameter.detach().clone()
            continue
        parts = torch.split(parameter.detach(), spec.local_sections(size, rank), spec.dim)
        for i, (part, section) in enumerate(zip(parts, spec.sections, strict=True)):
            if not section.sharded:
                found[f"{name} section {i}"] = part.clone()
    return found


def trained(rank: int, world_size: int, folder: str) -> None:
    layout = {"tp_size": 2} if world_size == 2 else {"tp_size": 2, "pp_size": 2, "num_microbatches": 1}
    for model in KINDS if world_size == 2 else KINDS[:1] + KINDS[3:4] + KINDS[6:]:
        case = Case(model, model=model, steps=3, accumulation=2, variable_length=True, clip=0.1, parallel=layout)
        trainer = make_trainer(case, Path(folder) / model, world_size)
        trainer.train()
        assert all(entry["grad_norm"] > case.clip for entry in trainer.state.log_history if "grad_norm" in entry)
        attachment = trainer.accelerator.hf_parallel.engine.attachment
        mine = common_parts(attachment)
        assert mine, model
        everyone: list[Any] = [None] * 2
        dist.all_gather_object(everyone, mine, group=attachment.mesh.tp_group)
        assert everyone[0].keys() == everyone[1].keys(), model
        for name, tensor in everyone[0].items():
            assert torch.equal(tensor, everyone[1][name]), f"{model}: {name}"
        trainer.accelerator.hf_parallel.watchdog.stop()


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicated_parameters_are_bit_equal_after_training(world_size: int, tmp_path: Path) -> None:
    run_ranks(trained, world_size, str(tmp_path), tmp_path=tmp_path, timeout=300, env=ENV)


def ready(model: str, folder: Path, world_size: int) -> Any:
    """A parallelized model in training mode."""
    trainer = make_trainer(Case(model, model=model, parallel={"tp_size": 2}), folder, world_size)
    return trainer.accelerator.prepare(trainer.model).train()


def other_numbers(rank: int, world_size: int, folder: str) -> None:
    batch = tiny.collate(tiny.rows(4))
    model = ready("gpt2_dropout", Path(folder), world_size)
    torch.manual_seed(rank)
    with pytest.raises(RankMismatchError, match=r"rank 1 \(tp 1 of 2\) had another random state .* began .*set_seed"):
        model(**batch)
    model = ready("uneven", Path(folder), world_size)
    torch.manual_seed(rank)
    model(**batch)  # draws nothing
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3  # three heads: the ranks draw differently often
    torch.manual_seed(0)
    with pytest.raises(RankMismatchError, match="after a training forward, though not before"):
        model(**batch)


def test_ranks_that_would_draw_different_masks_are_refused(tmp_path: Path) -> None:
    run_ranks(other_numbers, 2, str(tmp_path), tmp_path=tmp_path, env=ENV)


def wrong_world(rank: int, world_size: int, folder: str) -> None:
    case = Case("odd", model="uneven", parallel={"tp_size": 2}, steps=1)
    with pytest.raises(
        ConfigError, match=r"num_processes=3 is not a multiple of tp_size \* pp_size = 2 \* 1 = 2.*2 or 4"
    ):
        make_trainer(case, Path(folder), world_size)


def test_a_world_that_does_not_divide_into_tp_groups_is_refused(tmp_path: Path) -> None:
    run_ranks(wrong_world, 3, str(tmp_path), tmp_path=tmp_path, env=ENV)
