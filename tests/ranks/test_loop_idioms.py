"""Loops as accelerate's documentation has them give the losses, norms and weights of stock accelerate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rank_runner import run_ranks
from thinning import chosen, thinned
from torch.utils.data import DataLoader


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "pp2": PP2,
    "tp2": {"tp_size": 2},
}


def begin(name: str, **options: Any) -> tuple[Any, Any, Any, Any, int]:
    """Accelerator, model, optimizer, loader, and how many replicas there are."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    parallel = LAYOUTS[name]
    if parallel is not None:
        from hf_parallel import HFParallelPlugin

        options["parallelism_config"] = HFParallelPlugin({}, **parallel)
    accelerator = Accelerator(cpu=True, **options)
    replicas = accelerator.num_processes
    model = tiny.llama(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    loader = DataLoader(tiny.rows(48), batch_size=8 // replicas, collate_fn=tiny.collate)
    return accelerator, model, optimizer, loader, replicas


def token_sums(name: str) -> tuple[Any, ...]:
    """examples/by_feature/gradient_accumulation_for_autoregressive_models.py: sums over the tokens of a window."""
    accelerator, model, optimizer, loader, replicas = begin(name)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms, batches = [], list(loader)
    for window in (batches[:3], batches[3:]):
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window) * replicas
        for index, batch in enumerate(window):
            context = model.no_sync if index < len(window) - 1 and accelerator.num_processes > 1 else nullcontext
            with context():
                labels = batch["labels"]
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                rows = logits[:, :-1].reshape(-1, logits.shape[-1])
                total = torch.nn.functional.cross_entropy(rows, labels[:, 1:].reshape(-1), reduction="sum")
                accelerator.backward(total * replicas / count)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, norms


def several_models(name: str) -> tuple[Any, ...]:
    """`accumulate` with two models, models prepared twice, autocast around them, an early stop."""
    accelerator, model, optimizer, loader, _ = begin(name, gradient_accumulation_steps=2)
    model = accelerator.prepare(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    other = torch.nn.Linear(2, 2).requires_grad_(False)
    norms = []
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model, other), accelerator.autocast():
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if index == 3 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return accelerator, model, [*norms, index]


def out_of_memory(name: str) -> tuple[Any, ...]:
    """examples/by_feature/memory.py: a batch size that is too large, and the next smaller one with a model of its own."""
    from accelerate.utils import find_executable_batch_size

    accelerator, _, _, _, replicas = begin(name)

    @find_executable_batch_size(starting_batch_size=9)
    def run(batch_size: int) -> tuple[Any, list[float]]:
        accelerator.free_memory()
        model = tiny.llama(tied=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
        loader = DataLoader(tiny.rows(48), batch_size=batch_size // replicas, collate_fn=tiny.collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        norms = []
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            if batch_size == 9:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return model, norms

    model, norms = run()
    return accelerator, model, norms


def moving_average(name: str) -> tuple[Any, ...]:
    """A copy of the prepared model follows it; possible where ranks hold the whole model."""
    accelerator, model, optimizer, loader, _ = begin(name)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    average = copy.deepcopy(accelerator.unwrap_model(model))
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(new, 0.5)
    return accelerator, model, [float(sum(p.double().sum() for p in average.parameters()))]


def pruned(name: str) -> tuple[Any, ...]:
    """docs/trainer.md: the smallest tenth of all weights becomes zero; stock reads them off the model."""
    from accelerate.utils import broadcast

    accelerator, model, optimizer, loader, _ = begin(name)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms = []
    for index, batch in enumerate(loader):
        accelerator.backward(model(**batch).loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        if index not in (1, 3):
            continue
        threshold = torch.zeros((), device=accelerator.device)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            once = {value.data_ptr(): value for value in state.values()}.values()
            whole = torch.cat([p.detach().abs().flatten() for p in (model.parameters() if name == "stock" else once)])
            threshold = whole.kthvalue(len(whole) // 10).values
        threshold = broadcast(threshold)
        for parameter in model.parameters():
            parameter.data.mul_(parameter.abs() > threshold)
        norms.append(float(threshold))
    return accelerator, model, norms


IDIOMS: dict[str, tuple[Callable[[str], tuple[Any, ...]], tuple[str, ...]]] = {
    "token_sums": (token_sums, ("dp2", "zero1", "zero3", "pp2", "tp2")),
    "several_models": (several_models, ("dp2", "zero1", "zero3", "pp2", "tp2")),
    "out_of_memory": (out_of_memory, ("dp2", "zero1", "zero3", "pp2", "tp2")),
    "moving_average": (moving_average, ("dp2",)),
    "pruned": (pruned, ("dp2", "zero1", "pp2", "tp2")),
}


CASES = [(idiom, name) for idiom, (_, names) in IDIOMS.items() for name in names]


def idioms_main(rank: int, world_size: int, pairs: list[tuple[str, str]]) -> list[tuple[list[float], dict[str, Any]]]:
    found = []
    for idiom, name in pairs:
        accelerator, model, numbers = IDIOMS[idiom][0](name)
        state = accelerator.get_state_dict(model)
        found.append((numbers, {key: value.detach().numpy().copy() for key, value in state.items()}))
        session = getattr(accelerator, "hf_parallel", None)
        if session is not None:
            session.watchdog.stop()
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    folder, two = tmp_path_factory.mktemp("idioms"), chosen(request, CASES, ("idiom", "name"))
    one = [(idiom, "stock") for idiom in dict.fromkeys(idiom for idiom, _ in two)]
    alone = run_ranks(idioms_main, 1, one, tmp_path=folder, init_group=False, env=ENV)[0]
    both = run_ranks(idioms_main, 2, two, tmp_path=folder, timeout=170, env=ENV)[0]
    return dict(zip([*one, *two], [*alone, *both], strict=True))


# Copies and parts of them, and stages and shards, meet the loops in turns.
@pytest.mark.parametrize(("idiom", "name"), thinned(CASES, (("dp2", "zero1"), ("pp2", "tp2"))))
def test_documented_loops_train_as_with_stock_accelerate(idiom: str, name: str, runs: dict[Any, Any]) -> None:
    (numbers, state), (expected, reference) = runs[idiom, name], runs[idiom, "stock"]
    np.testing.assert_allclose(numbers, expected, rtol=1e-5, atol=1e-5)
    names = state.keys() & reference.keys()
    assert len(names) > 30
    for key in names:
        assert np.linalg.norm(state[key] - reference[key]) <= 1e-5 * np.linalg.norm(reference[key]), key


def local_main(rank: int, world_size: int) -> list[str]:
    from accelerate.local_sgd import LocalSGD

    from hf_parallel import ParallelError

    accelerator, model, optimizer, loader, _ = begin("dp2")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    try:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
            for batch in loader:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                local.step()
    except ParallelError as error:
        found.append(str(error))
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
    except ParallelError as error:
        found.append(str(error))
    accelerator.hf_parallel.watchdog.stop()
    return found


def test_what_replicas_cannot_do_by_themselves_is_refused_by_name(tmp_path: Path) -> None:
    for first, second in run_ranks(local_main, 2, tmp_path=tmp_path, env=ENV):
        assert "For steps that replicas take by themselves set local_sgd.sync_every" in first
        assert "keep even_batches=True" in second
