"""What scripts of others do to an Accelerator has the effect it has in stock accelerate, or is refused by name.

If a row fails, a setting is dropped without a word, replicas read other rows than they should, or a file holds a part of a model.
"""

from __future__ import annotations

import copy
import os
import random
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rank_runner import run_ranks
from thinning import chosen, covering, slow_if
from torch.utils.data import DataLoader, IterableDataset


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "ddp2": None,
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2": {"tp_size": 2},
}
MINE = [name for name, parallel in LAYOUTS.items() if parallel is not None]


def start(name: str, **options: Any) -> Any:
    """An accelerator of that layout."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    parallel = LAYOUTS[name]
    if parallel is not None:
        from hf_parallel import HFParallelPlugin

        options["parallelism_config"] = HFParallelPlugin({}, **parallel)
    return Accelerator(cpu=True, **options)


def parts(accelerator: Any, loader: Any = None) -> tuple[Any, Any, Any]:
    model = tiny.llama(tied=True, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    batch = 8 // accelerator.num_processes
    loader = loader if loader is not None else DataLoader(tiny.rows(32), batch_size=batch, collate_fn=tiny.collate)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(model, optimizer, loader)
    return prepared


def train(accelerator: Any, model: Any, optimizer: Any, batches: Any, steps: int = 99) -> list[float]:
    found = []
    for _, batch in zip(range(steps), batches, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(accelerator.reduce(loss.detach(), "mean")))
    return found


def stopped(accelerator: Any) -> None:
    session = getattr(accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()


# -- what trains as in stock accelerate ------------------------------------------------------------------------------


def autocast_off(name: str) -> list[float]:
    """`AutocastKwargs(enabled=False)` under mixed precision, and what DDP is told that holds always."""
    from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs

    told = DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True)
    accelerator = start(name, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False), told])
    found = train(accelerator, *parts(accelerator))
    stopped(accelerator)
    return found


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Another order on every rank: only one that reads for all is right."""

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(int(os.environ.get("RANK", "0"))).sample(tiny.rows(45), 45))


def stream(name: str) -> list[float]:
    accelerator = start(name)
    batch = 8 // accelerator.num_processes
    model, optimizer, loader = parts(accelerator, DataLoader(Stream(), batch_size=batch, collate_fn=tiny.collate))
    found = train(accelerator, model, optimizer, loader)
    skipped = accelerator.skip_first_batches(loader, 2)
    return [*found, *train(accelerator, model, optimizer, skipped), *counted(accelerator, loader)]


def counted(accelerator: Any, loader: Any) -> list[float]:
    """Label tokens of each gathered batch."""
    found = [accelerator.gather_for_metrics(batch["labels"].ne(-100).sum(-1)) for batch in loader]
    stopped(accelerator)
    return [float(value) for rows in found for value in (len(rows), rows.sum())]


def dispatched(name: str) -> list[float]:
    from accelerate.utils import DataLoaderConfiguration

    accelerator = start(name, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    rows = DataLoader(tiny.rows(45), batch_size=8 // accelerator.num_processes, collate_fn=tiny.collate)
    model, optimizer, loader = parts(accelerator, rows)
    found = [float(len(loader)), *train(accelerator, model, optimizer, loader)]
    return [*found, *counted(accelerator, loader)]


def uneven_inputs(name: str) -> list[float]:
    accelerator = start(name)
    rows = DataLoader(tiny.rows(29), batch_size=8 // accelerator.num_processes, collate_fn=tiny.collate)
    model, optimizer, loader = parts(accelerator, rows)
    with accelerator.join_uneven_inputs([model]):
        found = train(accelerator, model, optimizer, loader)
    stopped(accelerator)
    return found


def deferred(name: str) -> list[float]:
    """Two forward passes under `no_sync`, reduced by `trigger_sync_in_backward`."""
    accelerator = start(name)
    model, optimizer, loader = parts(accelerator)
    found, batches = [], iter(loader)
    for first in batches:
        second = next(batches)
        with accelerator.no_sync(model):
            losses = [model(**first).loss, model(**second).loss]
        accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.7)
        found += [float(accelerator.reduce(loss.detach(), "mean")) for loss in losses] + [float(norm)]
        optimizer.step()
        optimizer.zero_grad()
    stopped(accelerator)
    return found


def restored(name: str) -> list[float]:
    """A copy of the state dict to go back to; then the weights of another, whole model."""
    accelerator = start(name)
    model, optimizer, loader = parts(accelerator)
    found = train(accelerator, model, optimizer, loader, 2)
    kept, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    found += train(accelerator, model, optimizer, loader, 2)
    model.load_state_dict(kept)
    optimizer.load_state_dict(moments)
    assert all(
        type(tensor).__name__ != "PartTensor" for state in optimizer.state.values() for tensor in state.values()
    )
    found += train(accelerator, model, optimizer, loader, 2)
    other = tiny.llama(tied=True, layers=2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.2)
    accelerator.unwrap_model(model).load_state_dict(other.state_dict())
    found += train(accelerator, model, optimizer, loader, 2)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        other.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
        found += [float(tensor.norm()) for _, tensor in sorted(other.state_dict().items())]
    stopped(accelerator)
    return found


BODIES: dict[str, Callable[[str], list[float]]] = {
    body.__name__: body for body in (autocast_off, stream, dispatched, uneven_inputs, deferred, restored)
}
# Replicas get other rows than one process where a last batch is short.
AS_DDP = {"stream", "dispatched", "uneven_inputs"}
REPLICAS = ("dp2", "zero1", "zero3")
CASES = [(body, name) for body in BODIES for name in MINE]
# Slow: replicas, and ranks that share the batch, meet the loops in turns; only what an optimizer is given back meets them all.
TURNS = covering(CASES, (REPLICAS, ("pp2", "tp2")))
REST = [case for case in CASES if case not in TURNS and case[0] != "restored"]


def reference_of(body: str, name: str) -> tuple[str, str]:
    return body, "ddp2" if name in REPLICAS and body in AS_DDP else "stock"


def bodies_main(rank: int, world_size: int, pairs: list[tuple[str, str]]) -> list[Any]:
    """What each body found, or the error that all ranks raised alike, so that the others can follow."""
    found: list[Any] = []
    for body, name in pairs:
        try:
            found.append(BODIES[body](name))
        except Exception:
            found.append(traceback.format_exc())
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    folder, cases = tmp_path_factory.mktemp("bodies"), chosen(request, CASES, ("body", "name"))
    references = list(dict.fromkeys(reference_of(*case) for case in cases))
    one = [case for case in references if case[1] == "stock"]
    two = [*cases, *(case for case in references if case[1] == "ddp2")]
    alone = run_ranks(bodies_main, 1, one, tmp_path=folder, init_group=False, env=ENV)[0]
    both = run_ranks(bodies_main, 2, two, tmp_path=folder, timeout=170, env=ENV)[0]
    return dict(zip([*one, *two], [*alone, *both], strict=True))


@pytest.mark.parametrize(("body", "name"), [pytest.param(*case, marks=slow_if(case, REST)) for case in CASES])
def test_a_loop_trains_as_with_stock_accelerate(body: str, name: str, runs: dict[Any, Any]) -> None:
    expected = runs[reference_of(body, name)]
    assert not isinstance(runs[body, name], str), runs[body, name]
    np.testing.assert_allclose(runs[body, name], expected, rtol=1e-5, atol=1e-5)


# -- what is refused -------------------------------------------------------------------------------------------------


def settings_main(rank: int, world_size: int) -> dict[str, str]:
    from accelerate.utils import (
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
    )

    from hf_parallel import ParallelError

    hook = DDPCommunicationHookType.FP16
    given: dict[str, dict[str, Any]] = {
        "bucket_cap_mb": {"kwargs_handlers": [DistributedDataParallelKwargs(bucket_cap_mb=5)]},
        "comm_hook": {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=hook)]},
        "dynamo": {"dynamo_backend": "cudagraphs"},
        "even_batches": {"dataloader_config": DataLoaderConfiguration(even_batches=False)},
    }
    found: dict[str, str] = {}
    for what, options in given.items():
        try:
            accelerator = start("dp2", **options)
            rows = DataLoader(tiny.rows(20), batch_size=4, collate_fn=tiny.collate)
            train(accelerator, *parts(accelerator, rows))
        except ParallelError as error:
            found[what] = str(error)
    return found


def test_settings_that_nothing_reads_are_refused_before_training(tmp_path: Path) -> None:
    for found in run_ranks(settings_main, 2, tmp_path=tmp_path, env=ENV):
        assert "DistributedDataParallelKwargs(bucket_cap_mb=5) has no effect" in found["bucket_cap_mb"]
        assert "set data_parallel.bucket_cap_mb" in found["bucket_cap_mb"]
        assert "comm_hook=fp16) has no effect" in found["comm_hook"]
        assert "comm_wrapper=fp16) has no effect" in found["comm_hook"]
        assert "set gradient_compression.method" in found["comm_hook"]
        assert "blocks are compiled with inductor or aot_eager" in found["dynamo"]
        assert "the 2 replicas would get [3, 2] batches" in found["even_batches"]


def written(model: Any, optimizer: Any, path: str, plain: bool) -> dict[str, str]:
    """What each way to write a state dict is answered with."""
    from safetensors.torch import save_file

    from hf_parallel import ParallelError

    state = model.state_dict()
    writers: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.save(state, path),
        "part": lambda: torch.save(model.model.state_dict(), path),
        "optimizer": lambda: torch.save(optimizer.state_dict(), path),
    }
    if plain:  # else DTensors, which no plain process can read
        copied = {key: value.cpu().clone() for key, value in state.items()}
        writers |= {
            "copied": lambda: torch.save(copied, path),
            "safetensors": lambda: save_file(copied, path),
            "pretrained": lambda: tiny.llama(layers=2).save_pretrained(f"{path}-model", state_dict=copied),
            "numpy": lambda: [value.numpy() for value in copied.values()],
        }
    found = {}
    for what, write in writers.items():
        try:
            write()
        except ParallelError as error:
            found[what] = str(error)
    return found


def files_main(rank: int, world_size: int, folder: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name in ("pp2", "tp2", "zero3"):
        accelerator = start(name)
        model, optimizer, loader = parts(accelerator)
        train(accelerator, model, optimizer, loader, 1)
        found[name] = written(accelerator.unwrap_model(model), optimizer, f"{folder}/{name}-{rank}", name != "zero3")
        stopped(accelerator)
    return found


def given_main(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """`save_pretrained(state_dict=...)` of what a script made of `named_parameters()`, and of what it may give."""
    from peft import LoraConfig, get_peft_model

    from hf_parallel import ParallelError

    found: dict[str, Any] = {}
    for name in ("pp2", "tp2", "zero3"):
        for kind in ("plain", "lora"):
            accelerator = start(name)
            inner: Any = tiny.llama(layers=2)
            if kind == "lora":
                torch.manual_seed(0)
                lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
                inner = get_peft_model(inner, lora, autocast_adapter_dtype=False)
            optimizer = torch.optim.AdamW([p for p in inner.parameters() if p.requires_grad])
            rows = DataLoader(tiny.rows(8), batch_size=8 // accelerator.num_processes, collate_fn=tiny.collate)
            model, optimizer, loader = accelerator.prepare(inner, optimizer, rows)
            train(accelerator, model, optimizer, loader, 1)
            wanted = "lora_" if kind == "lora" else ""
            own = {key: p.detach().cpu().clone() for key, p in model.named_parameters() if wanted in key}
            whole = accelerator.get_state_dict(model)
            place = Path(folder) / f"{name}-{kind}"
            if rank == 0:
                try:
                    accelerator.unwrap_model(model).save_pretrained(place, state_dict=own)
                except ParallelError as error:
                    found[f"{name}-{kind}"] = (str(error), place.exists())
                accelerator.unwrap_model(model).save_pretrained(place, state_dict=whole)
                ends = {key: value for key, value in whole.items() if "embed_tokens" in key}
                accelerator.unwrap_model(model).save_pretrained(f"{place}-chosen", state_dict=ends)
            accelerator.wait_for_everyone()
            stopped(accelerator)
    return found


def test_a_state_dict_of_one_rank_s_tensors_is_not_saved_as_the_model(tmp_path: Path) -> None:
    found = run_ranks(given_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV)[0]
    assert found.keys() == {f"{name}-{kind}" for name in ("pp2", "tp2", "zero3") for kind in ("plain", "lora")}
    for name, (text, exists) in found.items():
        assert not exists, name
        says = r"tensors of the state_dict are of this rank's stages, and \d+ more" if "pp2" in name else r"this rank"
        assert re.search(says, text), text
        assert re.search(
            r"accelerator\.get_state_dict\(model\), called on every rank|get_state_dict\(model\)", text
        ), text


def test_a_part_of_a_model_is_not_saved_as_if_it_were_all_of_it(tmp_path: Path) -> None:
    for found in run_ranks(files_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV):
        for name in ("pp2", "tp2"):
            assert found[name].keys() == {"torch", "part", "copied", "safetensors", "pretrained", "numpy", "optimizer"}
        assert found["zero3"].keys() == {"torch", "part", "optimizer"}
        for texts in found.values():
            for text in texts.values():
                assert re.search(r"this rank has only its (part of the model|shard of the tensor)", text), text
                assert re.search(r"accelerator\.get_state_dict\(model\)", text), text
