"""`accelerator.save_state` and `load_state`, `save_pretrained` and `no_sync` in a loop of one's own, on every layout.

If a row fails, a script as accelerate's documentation has it dies, or goes on from another state than it saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM


pytestmark = pytest.mark.long


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 2}
TP2 = {"tp_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "stock": (1, None),
    "ddp2": (2, None),
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2_zero1": (2, {"zero": {"stage": 1}}),
    "dp2_zero3": (2, {"zero": {"stage": 3}}),
    "pp2": (2, PP2),
    "tp2": (2, TP2),
    "pp2_dp2": (4, PP2),
    "tp2_dp2_zero1": (4, {**TP2, "zero": {"stage": 1}}),
}


class Counter:
    """A user's object, registered for checkpointing."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def start(parallel: dict[str, Any] | None, model: Any, **options: Any) -> tuple[Any, ...]:
    """A new accelerator and all that is prepared with it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    if parallel is not None:
        from hf_parallel import HFParallelPlugin

        options["parallelism_config"] = HFParallelPlugin({}, **parallel)
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
    replicas = accelerator.num_processes
    loader = DataLoader(tiny.rows(64, True), batch_size=8 // replicas, collate_fn=tiny.collate)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    return accelerator, *prepared, counter


def train(parts: tuple[Any, ...], batches: Any, steps: int) -> list[list[float]]:
    accelerator, model, optimizer, _, scheduler, counter = parts
    history = []
    model.train()
    for _, inputs in zip(range(steps), batches, strict=False):
        loss = model(**inputs).loss
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.7))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.value += 1
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        history.append([mean, norm, scheduler.get_last_lr()[0], counter.value])
    return history


def ended(accelerator: Any, model: Any) -> dict[str, Any]:
    state = accelerator.get_state_dict(model)
    session = getattr(accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    return {k: v.detach().float().numpy().copy() for k, v in state.items()} if accelerator.is_main_process else {}


def other(model: Any) -> Any:
    """Trained weights that nothing should be left of."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.requires_grad else 1.0)
    return model


def state_main(rank: int, world_size: int, name: str, kind: str, folder: str, saved: str | None) -> dict[str, Any]:
    """Six steps; and three, saved, and three from there in new objects. `saved`: only load it and go on."""
    parallel = LAYOUTS[name][1]
    found: dict[str, Any] = {}
    where = f"{folder}/{name}"
    if saved is None:
        parts = start(parallel, tiny.MODELS[kind]())
        found["straight"] = train(parts, parts[3], 6)
        found["weights"] = ended(parts[0], parts[1])
        if parallel is None:
            return found
        parts = start(parallel, tiny.MODELS[kind]())
        train(parts, parts[3], 3)
        Path(where).mkdir(parents=True, exist_ok=True)
        Path(where, f"mine_{rank}.txt").write_text("a file of the user's")
        parts[0].save_state(where)
        parts[0].save_state(where)  # over an older one
        parts[0].hf_parallel.watchdog.stop()
        assert Path(where, f"mine_{rank}.txt").exists()
    parts = start(parallel, other(tiny.MODELS[kind]()))
    accelerator, model, _, loader, *_ = parts
    batches = list(accelerator.skip_first_batches(loader, 3))  # a new iterator draws a random number
    accelerator.load_state(saved or where)
    found["resumed"] = train(parts, batches, 3)
    found["resumed_weights"] = ended(accelerator, model)
    return found


def states(name: str, kind: str, folder: Path, saved: str | None = None) -> dict[str, Any]:
    size = LAYOUTS[name][0]
    args = (name, kind, str(folder), saved)
    return run_ranks(state_main, size, *args, tmp_path=folder, init_group=size > 1, env=ENV)[0]


def equal(mine: dict[str, Any], expected: dict[str, Any]) -> None:
    assert mine.keys() == expected.keys()
    for key, tensor in expected.items():
        assert np.linalg.norm(mine[key] - tensor) <= 1e-5 * np.linalg.norm(tensor), key


def reference_of(name: str) -> str:
    """Replicas differ from one process where they do under stock DDP: means over rows of their own, scheduler steps."""
    return "ddp2" if "dp2" in name else "stock"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {name: states(name, "llama_tied", tmp_path_factory.mktemp(name)) for name in ("stock", "ddp2")}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    ["dp2", "dp2_zero3", "pp2", *(pytest.param(n, marks=SLOW) for n in ("one", "dp2_zero1", "tp2", "pp2_dp2"))],
)
def test_a_loop_goes_on_from_its_saved_state(name: str, stock: dict[str, Any], tmp_path: Path) -> None:
    found, expected = states(name, "llama_tied", tmp_path), stock[reference_of(name)]
    np.testing.assert_allclose(found["straight"], expected["straight"], atol=1e-5)
    np.testing.assert_allclose(found["resumed"], expected["straight"][3:], atol=1e-5)
    names = {key.removeprefix("module.") for key in expected["weights"]} & found["weights"].keys()
    assert len(names) > 30
    for weights in (found["weights"], found["resumed_weights"]):
        equal({key: weights[key] for key in names}, {key: expected["weights"][key] for key in names})


@pytest.mark.parametrize(
    ("saver", "loader"),
    [("pp2", "one"), pytest.param("one", "tp2", marks=SLOW), pytest.param("dp2_zero3", "pp2_dp2", marks=SLOW)],
)
def test_a_state_is_loaded_under_another_layout(saver: str, loader: str, stock: Any, tmp_path: Path) -> None:
    states(saver, "llama_tied", tmp_path)
    found = states(loader, "llama_tied", tmp_path, saved=f"{tmp_path}/{saver}")
    np.testing.assert_allclose(found["resumed"], stock[reference_of(loader)]["straight"][3:], atol=1e-5)


def counts_main(rank: int, world_size: int, folder: str, saves: bool) -> list[Any]:
    """The learning rates of three steps, and of three more after a state; whatever the number of replicas."""
    from hf_parallel import ParallelError

    found: list[Any] = []
    for counts in (True, False):
        where = f"{folder}/{counts}"
        parts = start({}, tiny.llama(), step_scheduler_with_optimizer=counts)
        if not saves:
            try:
                parts[0].load_state(where)
            except ParallelError as error:
                found.append(str(error))
        found.append([step[2] for step in train(parts, parts[3], 3)])
        if saves:
            parts[0].save_state(where)
        parts[0].hf_parallel.watchdog.stop()
    return found


def test_a_scheduler_that_counts_replicas_goes_on_with_as_many_only(tmp_path: Path) -> None:
    """One that counts updates goes on under any number."""
    run_ranks(counts_main, 2, str(tmp_path), True, tmp_path=tmp_path, env=ENV)
    args = counts_main, 1, str(tmp_path), False
    refused, _, resumed = run_ranks(*args, tmp_path=tmp_path, init_group=False, env=ENV)[0]
    assert (
        "was saved with 2 replicas and this run has 1: accelerate steps a prepared scheduler once a replica" in refused
    )
    assert "Make both accelerators with step_scheduler_with_optimizer=False" in refused
    np.testing.assert_allclose(resumed, [3e-3 / (1 + step / 4) for step in (4, 5, 6)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2", "dp2_zero1", "dp2_zero3", "pp2", "pp2_dp2"])
def test_dropout_goes_on_from_the_saved_random_states(name: str, tmp_path: Path) -> None:
    found = states(name, "gpt2_dropout", tmp_path)
    np.testing.assert_allclose(found["resumed"], found["straight"][3:], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2", "dp2_zero1", "dp2_zero3"])
def test_adapters_go_on_from_their_saved_state(name: str, tmp_path: Path) -> None:
    found = states(name, "llama_lora", tmp_path)
    np.testing.assert_allclose(found["resumed"], found["straight"][3:], atol=1e-6)


# -- naming, hooks, damage -------------------------------------------------------------------------------------------


def naming_main(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from accelerate.utils import ProjectConfiguration

    from hf_parallel import ParallelError

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    parts = start(PP2, tiny.llama(), project_config=project)
    accelerator, model, _, loader, *_ = parts
    for _ in range(3):
        train(parts, loader, 1)
        accelerator.save_state()
    before = sorted(path.name for path in Path(folder, "checkpoints").iterdir())
    value = parts[-1].value
    parts[-1].value = 0
    accelerator.load_state()
    assert parts[-1].value == value
    found: dict[str, Any] = {"folders": before}
    accelerator.wait_for_everyone()
    if rank == 0:
        path = Path(folder, "checkpoints", "checkpoint_2", "model.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        (Path(folder, "checkpoints", "checkpoint_1", "hf_parallel_state.json")).unlink()
    accelerator.wait_for_everyone()
    for name, where in {"damaged": "checkpoint_2", "unfinished": "checkpoint_1"}.items():
        try:
            accelerator.load_state(f"{folder}/checkpoints/{where}")
        except ParallelError as error:
            found[name] = str(error)
    project.automatic_checkpoint_naming = False
    accelerator.save_state(f"{folder}/planted")
    accelerator.wait_for_everyone()
    listing = Path(folder, "planted", "hf_parallel_state.json")
    if rank == 0:
        listed = json.loads(listing.read_text())
        listed["files"].pop("rank_1.pt")  # of a pickle that nobody vouches for
        listing.write_text(json.dumps(listed))
    accelerator.wait_for_everyone()
    with pytest.raises(ParallelError, match=r"rank_1\.pt is not in hf_parallel_state\.json: no save wrote it there"):
        accelerator.load_state(f"{folder}/planted")
    calls: list[Any] = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, where: calls.append((len(models), sorted(weights.pop())[:1], where))
    )
    accelerator.register_load_state_pre_hook(lambda models, where: calls.append(models.pop() is model))
    accelerator.save_state(f"{folder}/hooked")
    accelerator.load_state(f"{folder}/hooked")
    found["calls"], found["hooked"] = calls, sorted(path.name for path in Path(folder, "hooked").iterdir())
    accelerator.hf_parallel.watchdog.stop()
    return found


def test_states_are_named_rotated_and_refused_when_damaged(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(naming_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV)):
        assert found["folders"] == ["checkpoint_1", "checkpoint_2"]
        assert "model.safetensors is damaged" in found["damaged"]
        assert "is no state that accelerator.save_state() finished writing" in found["unfinished"]
        assert found["calls"][0] == (1, ["lm_head.weight"] if rank == 0 else [], f"{tmp_path}/hooked")
        assert found["calls"][1] is True
        assert "model.safetensors" not in found["hooked"]


# -- the model at the end of a run -----------------------------------------------------------------------------------


def export_main(rank: int, world_size: int, name: str, folder: str) -> dict[str, Any]:
    parts = start(LAYOUTS[name][1], tiny.llama(tied=True))
    accelerator, model, _, loader, *_ = parts
    train(parts, loader, 2)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{folder}/plain", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    unwrapped.save_pretrained(
        f"{folder}/given",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    unwrapped.save_pretrained(f"{folder}/parts", max_shard_size="20KB")
    accelerator.save_model(model, f"{folder}/accelerate")
    state = ended(accelerator, model)
    if accelerator.is_main_process:
        accelerator.print("saved")
    return state


@pytest.mark.parametrize(
    "name", ["dp2_zero3", "pp2", *(pytest.param(n, marks=SLOW) for n in ("dp2", "dp2_zero1", "tp2", "pp2_dp2"))]
)
def test_save_pretrained_on_every_rank_writes_the_whole_model(name: str, tmp_path: Path) -> None:
    args = (name, str(tmp_path))
    state = run_ranks(export_main, LAYOUTS[name][0], *args, tmp_path=tmp_path / "ranks", env=ENV)[0]
    for kind in ("plain", "given", "parts"):
        model = LlamaForCausalLM.from_pretrained(tmp_path / kind)
        named = dict(model.named_parameters())
        for key, parameter in named.items():
            np.testing.assert_array_equal(parameter.detach().numpy(), state[key])
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    saved = load_file(tmp_path / "accelerate" / "model.safetensors")
    for key, tensor in saved.items():
        np.testing.assert_array_equal(tensor.numpy(), state.get(key, state["model.embed_tokens.weight"]))


def alone_main(rank: int, world_size: int, call: str, folder: str) -> str:
    from hf_parallel import ParallelError

    parts = start({**PP2, "monitor": {"hang_timeout_s": 2.0}}, tiny.llama())
    accelerator, model, *_ = parts
    calls = {
        "save_pretrained": lambda: model.save_pretrained(folder),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "save_state": lambda: accelerator.save_state(folder),
        "save_model": lambda: accelerator.save_model(model, folder),
    }
    text = ""
    if accelerator.is_main_process:
        try:
            calls[call]()
        except ParallelError as error:
            text = str(error)
    accelerator.hf_parallel.watchdog.stop()
    return text


@pytest.mark.parametrize(
    "call", ["save_pretrained", *(pytest.param(n, marks=SLOW) for n in ("get_state_dict", "save_state", "save_model"))]
)
def test_a_save_on_rank_0_alone_ends_with_what_to_do(call: str, tmp_path: Path) -> None:
    text = run_ranks(alone_main, 2, call, str(tmp_path / "x"), tmp_path=tmp_path, env=ENV)[0]
    assert "was called by rank 0 (pp 0 of 2) and for 2 s not by rank 1 (pp 1 of 2)" in text
    assert "Take it out of `if accelerator.is_main_process:`" in text


def apart_main(rank: int, world_size: int, folder: str) -> list[str]:
    from hf_parallel import ParallelError

    texts = []
    for number in range(2):  # the second model meets under keys of its own
        parts = start({**PP2, "monitor": {"hang_timeout_s": 30.0}}, tiny.llama())
        accelerator, model, *_ = parts
        if number == 0:
            accelerator.get_state_dict(model)
        try:
            _ = model.save_pretrained(folder) if accelerator.is_main_process else accelerator.get_state_dict(model)
        except ParallelError as error:
            texts.append(str(error))
        accelerator.hf_parallel.watchdog.stop()
    return texts


@pytest.mark.long
def test_ranks_that_save_in_different_calls_end_at_once_with_both(tmp_path: Path) -> None:
    texts = run_ranks(apart_main, 2, str(tmp_path / "x"), tmp_path=tmp_path, timeout=60.0, env=ENV)
    for text, (here, there) in zip(texts, [(0, 1), (1, 0)], strict=True):
        calls = ("model.save_pretrained()", "accelerator.get_state_dict()")
        assert len(text) == 2
        for one in text:
            assert f"{calls[here]} was called where rank {there} (pp {there} of 2) called {calls[there]}:" in one


# -- gradients that are only added up --------------------------------------------------------------------------------


def no_sync_main(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    from contextlib import nullcontext

    found = {}
    for name in names:
        for how in ("accelerator", "model"):
            parts = start(LAYOUTS[name][1], tiny.llama(tied=True))
            accelerator, model, optimizer, loader, *_ = parts
            history = []
            for index, inputs in enumerate(loader):
                last = index % 3 == 2
                wait = accelerator.no_sync(model) if how == "accelerator" else getattr(model, "no_sync", nullcontext)()
                with nullcontext() if last else wait:
                    loss = model(**inputs).loss / 3
                    accelerator.backward(loss)
                if last:
                    history.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.7)))
                    optimizer.step()
                    optimizer.zero_grad()
            found[f"{name}-{how}"] = history, ended(accelerator, model)
    return json.loads(json.dumps({key: history for key, (history, _) in found.items()})) | {
        f"{key}-weights": weights for key, (_, weights) in found.items()
    }


def test_no_sync_adds_up_gradients_as_under_stock_ddp(tmp_path: Path) -> None:
    names = ["dp2", "dp2_zero1", "pp2", "tp2", "dp2_zero3"]
    expected = run_ranks(no_sync_main, 1, ["stock"], tmp_path=tmp_path, init_group=False, env=ENV)[0]
    expected |= run_ranks(no_sync_main, 2, ["ddp2"], tmp_path=tmp_path, env=ENV)[0]
    found = run_ranks(no_sync_main, 2, names, tmp_path=tmp_path, timeout=150, env=ENV)[0]
    for name in names:
        for how in ("accelerator", "model"):
            other = f"{reference_of(name)}-accelerator"
            np.testing.assert_allclose(found[f"{name}-{how}"], expected[other], rtol=1e-5, err_msg=name)
            weights, reference = found[f"{name}-{how}-weights"], expected[f"{other}-weights"]
            names = weights.keys() & reference.keys()
            assert len(names) > 30
            equal({key: weights[key] for key in names}, {key: reference[key] for key in names})
