"""One process with the callback: settings that act on one rank act, and train as a stock Trainer without them.

If these fail, recomputation, compiled blocks or offloading are configured and not in effect, silently, or change what is trained.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from resume_cases import Job, resumed, run_jobs
from safetensors.torch import load_file
from trainer_cases import ENV, NO_NOISE, Case, Snapshots, compare, finished, make_trainer, stock
from transformers import Trainer, TrainingArguments
from user_loops import LAYOUTS, Loop, difference, run

from hf_parallel import HFParallelCallback


RECOMPUTED = {"activation_checkpointing": {"every": 1}}
COMPILED = {"compile_blocks": "aot_eager"}
OFFLOADED = {"zero": {"stage": 1, "offload_optimizer": "cpu"}}
SHARDED = {"zero": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}}
TOGETHER = {
    "activation_checkpointing": {"every": 2, "offload": True},
    "zero": {"stage": 2, "offload_optimizer": "cpu"},
    "gradient_compression": {"method": "int8"},
    "data_parallel": {"overlap": False},
    **COMPILED,
}
AS: dict[str, Any] = {"steps": 3, "accumulation": 2, "arguments": NO_NOISE}
EVALUATED: dict[str, Any] = {**AS, "variable_length": True, "evaluate": True, "metrics": True}
# The best model is that of step 2, not the last one.
WORST_IS_BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
BEST: dict[str, Any] = {**EVALUATED, "steps": 4, "save": True, "arguments": {**NO_NOISE, **WORST_IS_BEST}}
MEASURED = {**RECOMPUTED, "monitor": {"report": True, "trace_steps": [2]}}
CASES = [
    Case("together", parallel=TOGETHER, **AS),
    Case("sharded", model="llama_tied", parallel={**SHARDED, "activation_checkpointing": {"every": 2}}, **BEST),
    Case("without_group", model="gpt2_dropout", parallel=RECOMPUTED, **BEST),
]
LAUNCHED = Case("launched", parallel={**OFFLOADED, **RECOMPUTED}, **AS)


class Lines(logging.Handler):
    """What hf_parallel logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def trained(rank: int, world_size: int, cases: list[Case], folder: str) -> list[dict[str, Any]]:
    """What each run found; those with settings say whether the engine ran."""
    found = []
    for case in cases:
        place = Path(folder) / case.name
        snapshots, own = Snapshots(place), [] if case.parallel is None else [HFParallelCallback({}, **case.parallel)]
        trainer = snapshots.trainer = make_trainer(case, place, 1, [snapshots, *own])
        trainer.train()
        ran = json.loads(json.dumps(finished(trainer, place)))
        found.append(
            {
                **ran,
                "engine": getattr(trainer.accelerator, "hf_parallel", None) is not None,
                "group": torch.distributed.is_initialized(),
                "best": trainer.state.best_model_checkpoint,
            }
        )
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Without a process group, as `python script.py` starts; runs that offload make one, so the others come first."""
    folder = tmp_path_factory.mktemp("alone")
    together, sharded, without_group = CASES
    cases = [stock(without_group), without_group, together, sharded, stock(together), stock(sharded)]
    [found] = run_ranks(trained, 1, cases, str(folder), tmp_path=folder, init_group=False, env=ENV)
    return {case.name: ran for case, ran in zip(cases, found, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_settings_that_act_train_as_a_stock_trainer(case: Case, runs: dict[str, dict[str, Any]]) -> None:
    assert runs[case.name]["engine"]
    assert not runs[f"stock_{case.name}"]["engine"]
    compare(runs[case.name], runs[f"stock_{case.name}"])


def test_a_group_is_made_for_what_is_offloaded_alone(runs: dict[str, dict[str, Any]]) -> None:
    assert not runs["without_group"]["group"]
    assert runs["together"]["group"]


@pytest.mark.parametrize("name", ["sharded", "without_group"])
def test_the_best_model_is_loaded_at_the_end(name: str, runs: dict[str, dict[str, Any]]) -> None:
    mine, other = runs[name], runs[f"stock_{name}"]
    assert Path(mine["best"]).name == Path(other["best"]).name == "checkpoint-2"
    loaded, expected, best = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (Path(mine["folder"]) / "final", Path(other["folder"]) / "final", mine["best"])
    )
    last = load_file(Path(mine["best"]).with_name("checkpoint-4") / "model.safetensors")
    assert loaded.keys() == expected.keys()
    for key, tensor in loaded.items():
        assert float((tensor - expected[key]).norm() / expected[key].norm()) <= 1e-5, key
        assert torch.equal(tensor, best[key]), key
    assert any(not torch.equal(tensor, last[key]) for key, tensor in loaded.items())


def test_they_act_in_a_group_of_one_too(runs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    [[ran]] = run_ranks(trained, 1, [LAUNCHED], str(tmp_path), tmp_path=tmp_path, env=ENV)
    assert ran["engine"]
    compare(ran, runs["stock_together"])  # which differs from its own in the name alone


@pytest.mark.long
def test_a_trace_and_a_report_are_written(tmp_path: Path) -> None:
    case = Case("measured", model="gpt2_dropout", parallel=MEASURED, **EVALUATED)
    cases = [case, stock(case)]
    [[ran, expected]] = run_ranks(trained, 1, cases, str(tmp_path), tmp_path=tmp_path, init_group=False, env=ENV)
    compare(ran, expected)
    written = {path.name for path in (tmp_path / case.name).iterdir()}
    assert {"hf_parallel_report.html", "hf_parallel_report.json", "hf_parallel_trace.json"} <= written


def small_trainer(parallel: dict[str, Any]) -> Trainer:
    """A Trainer in this process, of two steps of three batches."""
    settings = TrainingArguments(
        *("unused", 4),
        gradient_accumulation_steps=3,
        max_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    return Trainer(
        *(tiny.llama(), settings),
        train_dataset=tiny.rows(64),
        data_collator=tiny.collate,
        callbacks=[HFParallelCallback({}, **parallel)],
    )


def counting(rank: int, world_size: int, parallel: dict[str, Any]) -> list[int]:
    """Forward calls of each block in two steps of three batches."""
    trainer = small_trainer(parallel)
    calls, blocks = [0] * 4, trainer.model.model.layers
    trainer.create_optimizer()  # cuts the model, after trials of it
    for index, block in enumerate(blocks):
        attention = block.self_attn.forward

        def forward(*args: Any, index: int = index, attention: Any = attention, **kwargs: Any) -> Any:
            calls[index] += 1
            return attention(*args, **kwargs)

        block.self_attn.forward = forward
    trainer.train()
    return calls


@pytest.mark.parametrize(("parallel", "passes"), [(RECOMPUTED, 2), ({}, 1)], ids=["recomputed", "stock"])
def test_recomputed_blocks_run_twice(parallel: dict[str, Any], passes: int, tmp_path: Path) -> None:
    [calls] = run_ranks(counting, 1, parallel, tmp_path=tmp_path, init_group=False, env=ENV)
    assert calls == [passes * 2 * 3] * 4


def compiling(rank: int, world_size: int, parallel: dict[str, Any]) -> tuple[int, list[str]]:
    """Graphs that torch made in a run, and what it did not compile."""
    from torch._dynamo.utils import counters

    small_trainer(parallel).train()
    return counters["stats"]["unique_graphs"], sorted(counters["unimplemented"]) + sorted(counters["graph_break"])


def test_blocks_are_compiled(tmp_path: Path) -> None:
    [(graphs, breaks)] = run_ranks(compiling, 1, COMPILED, tmp_path=tmp_path, init_group=False, env=ENV)
    assert graphs >= 1
    assert not breaks


def offloading(rank: int, world_size: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """Where the optimizer of a model lives, and what steps it."""
    trainer = small_trainer(parallel)
    trainer.train()
    zero = trainer.accelerator.hf_parallel.engine.gradients.replicas.zero
    held = [group["params"] for group in trainer.optimizer.optimizer.param_groups]
    masters = {id(shard.master) for shard in zero.shards}
    return {
        "host": zero.host is not None,
        "masters alone": {id(tensor) for group in held for tensor in group} == masters,
        "whole": sum(shard.master.numel() for shard in zero.shards)
        >= sum(p.numel() for p in trainer.model.parameters()),
        "states": len(trainer.optimizer.optimizer.state) == len(masters),
        "devices": {str(shard.master.device) for shard in zero.shards} == {"cpu"},
    }


def test_an_optimizer_lives_in_host_memory(tmp_path: Path) -> None:
    [found] = run_ranks(offloading, 1, OFFLOADED, tmp_path=tmp_path, init_group=False, env=ENV)
    assert all(found.values()), found


def saying(rank: int, world_size: int, settings: list[dict[str, Any]]) -> list[list[str]]:
    """What a Trainer that is made with each says."""
    found = []
    for parallel in settings:
        heard = Lines()
        logging.getLogger("hf_parallel").addHandler(heard)
        small_trainer(parallel)
        logging.getLogger("hf_parallel").removeHandler(heard)
        found.append(heard.lines)
    return found


def test_the_start_up_line_names_settings_without_effect(tmp_path: Path) -> None:
    idle = {"zero": {"stage": 2}, "gradient_compression": {"method": "int8"}}
    [(silent, said, both)] = run_ranks(
        *(saying, 1, [{}, idle, {**idle, **RECOMPUTED}]), tmp_path=tmp_path, init_group=False, env=ENV
    )
    without = "without effect in one process: zero.stage=2, gradient_compression.method=int8"
    assert not any("effect" in line for line in silent)
    assert [line for line in said if without in line], said
    assert [line for line in both if without in line and "in effect: activation_checkpointing.every=1" in line], both


@pytest.mark.parametrize(
    ("saved", "layout", "parallel"),
    [
        pytest.param("1", "dp2", {}, marks=pytest.mark.long, id="to_dp2"),
        pytest.param("dp2", "1", {**OFFLOADED, **RECOMPUTED}, marks=pytest.mark.long, id="of_dp2"),
        pytest.param("1", "1", SHARDED, id="own"),
    ],
)
def test_a_run_resumes_under_other_layouts(saved: str, layout: str, parallel: Any, tmp_path: Path) -> None:
    mine = {**OFFLOADED, **RECOMPUTED} if saved == "1" else {}
    job = Job(saved, str(tmp_path / "saved"), parallel=mine)
    [straight] = run_jobs([job], tmp_path)
    [losses] = run_jobs([resumed(tmp_path, job, layout, parallel=parallel)], tmp_path)
    assert losses == pytest.approx(straight[3:], abs=1e-5)


def steps(loop: Loop) -> None:
    """Three steps of two batches, clipped."""
    loop.prepare()
    for index in range(6):
        with loop.accelerator.no_sync(loop.model) if index % 2 == 0 else contextlib.nullcontext():
            loop.backward(index)
        if index % 2:
            loop.history.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.7)))
            loop.step()


def looping(rank: int, world_size: int, settings: dict[str, dict[str, Any] | None]) -> dict[str, dict[str, Any]]:
    LAYOUTS.update(settings)
    return {name: run(name, steps) for name in settings}


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(RECOMPUTED, id="recomputed"),
        pytest.param(SHARDED, id="sharded"),
        pytest.param(TOGETHER, marks=pytest.mark.long, id="together"),
    ],
)
def test_a_loop_trains_as_a_stock_one(parallel: dict[str, Any], tmp_path: Path) -> None:
    settings = {"one": None, "mine": parallel}
    [found] = run_ranks(looping, 1, settings, tmp_path=tmp_path, init_group=False, env=ENV)
    assert difference(found["mine"], found["one"]) < 1e-5


def evaluating(rank: int, world_size: int, parallel: dict[str, Any] | None) -> dict[str, Any]:
    """A Trainer that only evaluates, and a text."""
    torch.manual_seed(0)
    callbacks = [] if parallel is None else [HFParallelCallback({}, **parallel)]
    settings = TrainingArguments(
        *("unused", 4), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False
    )
    trainer = Trainer(
        *(tiny.llama(), settings), eval_dataset=tiny.rows(10), data_collator=tiny.collate, callbacks=callbacks
    )
    loss = trainer.evaluate()["eval_loss"]
    ids = torch.tensor([[5, 6, 7]])
    text = trainer.model.generate(input_ids=ids, max_new_tokens=4, do_sample=False).tolist()
    return {"loss": loss, "text": text, "rows": len(trainer.predict(tiny.rows(6)).predictions)}


@pytest.mark.long
@pytest.mark.parametrize(
    "parallel", [{**OFFLOADED, **RECOMPUTED}, RECOMPUTED, SHARDED], ids=["offloaded", "recomputed", "sharded"]
)
def test_evaluation_alone(parallel: dict[str, Any], tmp_path: Path) -> None:
    [mine], [other] = (
        run_ranks(evaluating, 1, settings, tmp_path=tmp_path, init_group=False, env=ENV)
        for settings in (parallel, None)
    )
    assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert mine["text"] == other["text"]
    assert mine["rows"] == other["rows"] == 6
