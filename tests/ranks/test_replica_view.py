"""The accelerator counts model copies, not the ranks that share one.

If a case fails, a metric summed over `gather`, or a loss divided by a gathered count, is off by tp_size * pp_size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_cases import ENV, Case, make_trainer


pytestmark = pytest.mark.long


LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one": (1, None),
    "ddp2": (2, None),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 2}),
    "tp2_dp2": (4, {"tp_size": 2}),
    "pp2_dp2": (4, {"pp_size": 2, "num_microbatches": 2}),
}


def accelerator_of(parallel: dict[str, Any] | None) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = {} if parallel is None else {"parallelism_config": HFParallelPlugin({}, **parallel)}
    return Accelerator(cpu=True, gradient_accumulation_steps=2, **plugin)


def documented_loop(accelerator: Any, rows: int) -> list[Any]:
    """accelerate's example of gradient accumulation with a mean over the tokens of all processes."""
    model = tiny.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    loader = DataLoader(tiny.rows(48, True), batch_size=rows // accelerator.num_processes, collate_fn=tiny.collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    iterator, history = iter(loader), []
    for _ in range(3):
        batches = [next(iterator) for _ in range(2)]
        count = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in batches)
        count = int(accelerator.gather(count.to(accelerator.device)).sum())
        total = 0.0
        for batch in batches:
            labels = batch.pop("labels")
            logits = model(**batch).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            loss = loss * accelerator.num_processes / count
            accelerator.gradient_state._set_sync_gradients(batch is batches[-1])
            loss.backward()
            total += float(accelerator.reduce(loss.detach(), "mean"))
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        history.append((count, total, norm))
    return history


def views(rank: int, world_size: int, parallel: dict[str, Any] | None) -> dict[str, Any]:
    accelerator = accelerator_of(parallel)
    replica = accelerator.process_index
    with accelerator.split_between_processes(list(range(7))) as mine:
        share = mine
    if rank == world_size - 1:
        accelerator.set_trigger()
    found = {
        "replicas": accelerator.num_processes,
        "sum": int(accelerator.gather(torch.tensor(3)).sum()),
        "rows": accelerator.gather({"a": torch.tensor([[replica]])})["a"].tolist(),
        "reduced": [float(accelerator.reduce(torch.tensor(replica + 1.0), kind)) for kind in ("sum", "mean", "max")],
        "metrics": accelerator.gather_for_metrics(torch.tensor([replica, 10])).tolist(),
        "objects": accelerator.gather_for_metrics([f"replica {replica}"], use_gather_object=True),
        "words": accelerator.gather_for_metrics(["a", "b"]),
        "split": accelerator.gather_for_metrics(share, use_gather_object=True),
        "triggered": (accelerator.check_trigger(), accelerator.check_trigger()),
        "loop": documented_loop(accelerator, 8),
    }
    counts = [accelerator.is_main_process, accelerator.is_last_process]
    if parallel is not None:
        accelerator.hf_parallel.watchdog.stop()
    return {"found": found, "ends": counts}


def counted_by_trainer(rank: int, world_size: int, parallel: dict[str, Any] | None, folder: str) -> Any:
    case = Case(
        "counted", steps=2, parallel=parallel, variable_length=True, arguments={"include_num_input_tokens_seen": "all"}
    )
    trainer = make_trainer(case, Path(folder), world_size)
    trainer.train()
    if parallel is not None:
        trainer.hf_parallel_session.watchdog.stop()
    return trainer.state.num_input_tokens_seen, trainer.get_total_train_batch_size(trainer.args)


def both(rank: int, world_size: int, parallel: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    return views(rank, world_size, parallel) | {"trainer": counted_by_trainer(rank, world_size, parallel, folder)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for name, (world, parallel) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = run_ranks(
            both, world, parallel, str(folder), tmp_path=folder, init_group=world > 1, env=ENV, timeout=120
        )
    return found


@pytest.mark.parametrize(
    ("name", "reference"), [("tp2", "one"), ("pp2", "one"), ("tp2_dp2", "ddp2"), ("pp2_dp2", "ddp2")]
)
def test_what_is_gathered_and_counted_is_that_of_the_replicas(
    name: str, reference: str, runs: dict[str, list[dict[str, Any]]]
) -> None:
    expected = runs[reference][0]["found"]
    for rank, result in enumerate(runs[name]):
        found = dict(result["found"])
        assert [count for count, *_ in found["loop"]] == [count for count, *_ in expected["loop"]]
        losses = [value for step in found.pop("loop") for value in step[1:]]
        assert losses == pytest.approx([v for step in expected["loop"] for v in step[1:]], rel=1e-5), f"rank {rank}"
        assert found == {key: value for key, value in expected.items() if key != "loop"}, f"rank {rank}"
        assert result["ends"] == [rank == 0, rank == len(runs[name]) - 1]
        assert result["trainer"] == runs[reference][0]["trainer"]
