"""Everything a Trainer user may switch on gives on a mesh what it gives on one process, or is refused by name.

If a row fails, a feature that works without hf_parallel silently does something else with it: resuming starts from
other numbers, metrics are computed on other rows, the best checkpoint is not the one that is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from feature_cases import Run, features_main
from rank_runner import run_ranks
from safetensors.torch import load_file
from thinning import rest_runs
from transformers import DynamicCache


# All runs happen in the set-up of the first test.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


ENV = {"ACCELERATE_USE_CPU": "true"}
PP2 = {"pp_size": 2, "num_microbatches": 4}
MESHES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "stock": (1, None),
    "ddp2": (2, None),
    "pp2": (2, PP2),
    "tp2": (2, {"tp_size": 2}),
    "dp2": (2, {}),
    "pp2_tp2": (4, {"pp_size": 2, "tp_size": 2, "num_microbatches": 3}),
    "pp2_dp2": (4, PP2),
}
# (feature, mesh, the run it must equal)
ROWS = [
    *(
        (name, "pp2", "stock")
        for name in [
            "checkpoint_files",
            "best_model",
            "evaluate_first",
            "evaluate_then_train",
            "metric_options",
            "bf16",
            "counting",
            "checkpointing",
            "schedules",
            "optimizers",
            "iterable",
            "subclass",
            "explicit",
            "again",
        ]
    ),
    *((name, "tp2", "stock") for name in ["checkpoint_files", "evaluate_first", "bf16", "counting", "checkpointing"]),
    *((name, "pp2_tp2", "stock") for name in ["checkpoint_files", "best_model", "evaluate_first"]),
    # Ragged tails and dropout masks depend on the number of replicas: stock DDP is the reference.
    *((name, "dp2", "ddp2") for name in ["evaluate_first", "metric_options", "counting", "dropout"]),
    *((name, "pp2_dp2", "ddp2") for name in ["evaluate_first", "counting"]),
    *((name, mesh, "stock") for name in ("iterable", "evaluate_then_train") for mesh in ("dp2", "pp2_dp2")),
]
RESUMED = ["pp2", "tp2", "pp2_tp2", "pp2_dp2"]
REPEATED = ["pp2", "pp2_dp2"]
# Slow: what other rows show, of a feature that has rows on each of the two axes of a mesh, or on replicas of stages.
REST = {
    ("checkpoint_files", "tp2"),
    ("best_model", "pp2_tp2"),
    ("evaluate_first", "pp2_tp2"),
    ("counting", "pp2_dp2"),
    ("iterable", "dp2"),
    ("evaluate_then_train", "dp2"),
    ("resume", "pp2_tp2"),
    ("checkpointing", "pp2"),
    ("iterable", "pp2"),
    ("evaluate_then_train", "pp2"),
    ("resume", "pp2"),
    ("dropout", "pp2"),
    ("bf16", "tp2"),
    ("counting", "tp2"),
    ("evaluate_first", "pp2_dp2"),
    ("metric_options", "dp2"),
}


def marked(feature: str, mesh: str, *values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow if (feature, mesh) in REST else ())


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Any]]:
    """(feature, mesh) -> result of every rank; one launch a world size."""
    with_rest = rest_runs(request)
    rows = [row for row in ROWS if with_rest or row[:2] not in REST]
    wanted = {(feature, mesh): None for feature, one, other in rows for mesh in (one, other)}
    wanted |= {("resume", mesh): None for mesh in RESUMED} | {("dropout", mesh): None for mesh in REPEATED}
    found: dict[tuple[str, str], list[Any]] = {}
    for world_size in (1, 2, 4):
        chosen = [key for key in wanted if MESHES[key[1]][0] == world_size and (with_rest or key not in REST)]
        folder = tmp_path_factory.mktemp(f"features{world_size}")
        results = run_ranks(
            features_main,
            world_size,
            [(feature, MESHES[mesh][1]) for feature, mesh in chosen],
            str(folder),
            tmp_path=folder,
            timeout=170,
            init_group=world_size > 1,
            env=ENV,
        )
        found |= {key: list(each) for key, each in zip(chosen, zip(*results, strict=True), strict=True)}
    return found


def differences(mine: Any, other: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(path, difference) of every number and tensor; anything else must be equal."""
    if isinstance(other, dict):
        assert mine.keys() == other.keys(), path
        for key, value in other.items():
            yield from differences(mine[key], value, f"{path}/{key}")
    elif isinstance(other, list):
        assert len(mine) == len(other), path
        for index, value in enumerate(other):
            yield from differences(mine[index], value, f"{path}/{index}")
    elif isinstance(other, str) and other.startswith("weights:"):
        here, there = (load_file(Path(text.removeprefix("weights:"))) for text in (mine, other))
        assert here.keys() == there.keys(), path
        for name, tensor in there.items():
            yield f"{path}/{name}", float((here[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
    elif isinstance(other, str) and other.startswith("array:"):
        here, there = (np.load(text.removeprefix("array:")) for text in (mine, other))
        assert here.shape == there.shape, path
        yield path, float(np.abs(here - there).max())
    elif isinstance(other, float):
        yield path, abs(mine - other)
    else:
        assert mine == other, path


def compare(mine: Any, other: Any, tolerance: float = 1e-5) -> None:
    for path, difference in differences(mine, other):
        assert difference <= tolerance, f"{path} differs by {difference:.1e}"


@pytest.mark.parametrize(("feature", "mesh", "reference"), [marked(*row[:2], *row) for row in ROWS])
def test_a_feature_gives_what_it_gives_without_a_mesh(
    feature: str, mesh: str, reference: str, runs: dict[tuple[str, str], list[Any]]
) -> None:
    mine, other = runs[feature, mesh][0], runs[feature, reference][0]
    if feature == "checkpoint_files":
        mine = {**mine, "files": None}
    compare(mine, other, 1e-2 if feature == "bf16" else 1e-5)


@pytest.mark.parametrize("mesh", [marked("resume", mesh, mesh) for mesh in RESUMED])
def test_a_resumed_run_continues_as_the_uninterrupted_one(mesh: str, runs: dict[tuple[str, str], list[Any]]) -> None:
    found = runs["resume", mesh][0]
    assert len(found["resumed"][0]) == 3  # two steps and the summary
    compare(found["resumed"], found["straight"], 1e-6)


@pytest.mark.parametrize("mesh", [marked("dropout", mesh, mesh) for mesh in REPEATED])
def test_dropout_repeats_itself(mesh: str, runs: dict[tuple[str, str], list[Any]]) -> None:
    found = runs["dropout", mesh][0]
    compare(found["second"], found["first"], 1e-7)


def test_the_loaded_best_model_is_the_best_checkpoint(runs: dict[tuple[str, str], list[Any]]) -> None:
    for found in (runs[key][0] for key in (("best_model", "pp2"), ("best_model", "pp2_tp2")) if key in runs):
        assert found["best"][0] == "checkpoint-2"
        compare(found["final"], found["of_best"], 0.0)


def test_a_checkpoint_has_the_usual_files_and_no_pickled_objects(runs: dict[tuple[str, str], list[Any]]) -> None:
    for feature, mesh in runs.keys() & {("checkpoint_files", mesh) for mesh in ("pp2", "tp2", "pp2_tp2")}:
        world_size = MESHES[mesh][0]
        assert set(runs[feature, mesh][0]["files"]) == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "scheduler.pt",
            "trainer_state.json",
            "training_args.json",
            *(f"rng_state_{rank}.pth" for rank in range(world_size)),
            "manifest.json",
            "training_state",
            "training_state.json",
        }


def test_every_rank_sees_the_same_numbers(runs: dict[tuple[str, str], list[Any]]) -> None:
    for key, ranks in runs.items():
        assert all(other == ranks[0] for other in ranks), key


# -- refusals --------------------------------------------------------------------------------------------------------


def refusals_main(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What cannot work is refused on every rank, by name, before anything hangs."""
    from hf_parallel import HFParallelCallback, HFParallelPlugin, ParallelError

    found: dict[str, str] = {}

    def refused(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except ParallelError as error:
            found[name] = f"{type(error).__name__}: {error}"

    pp2, tp2 = (Run(Path(folder), MESHES[mesh][1], world_size) for mesh in ("pp2", "tp2"))
    plain = Run(Path(folder), None, world_size)
    adapted = tiny.llama()
    adapted.peft_config = {"default": SimpleNamespace(peft_type="IA3")}
    refused("peft tp", lambda: tp2.trainer(model=adapted))
    several = {"ddp_bucket_cap_mb": 5, "auto_find_batch_size": True, "bf16_full_eval": True, "save_on_each_node": True}
    several["accelerator_config"] = {"dispatch_batches": True}
    refused("several", lambda: pp2.trainer(arguments=several))
    zero3 = Run(Path(folder), {"zero": {"stage": 3}}, world_size)
    refused("zero3", lambda: zero3.trainer(arguments={"bf16_full_eval": True}))
    refused("adafactor", lambda: tp2.trainer(arguments={"optim": "adafactor"}).train())
    late = plain.trainer()
    late.add_callback(HFParallelCallback({}, **PP2))
    refused("late", late.train)
    plugin = HFParallelPlugin({}, **PP2)
    refused("arguments", lambda: plain.trainer(arguments={"parallelism_config": plugin}))
    twice = pp2.trainer(model_init=lambda: tiny.llama())
    twice.train()
    refused("trial", lambda: twice.train(trial={"learning_rate": 1e-4}))
    trained = pp2.trainer()
    trained.train()
    refused("cache", lambda: trained.model(torch.tensor([[1, 2, 3]]), past_key_values=DynamicCache()))
    refused("deepcopy", lambda: copy.deepcopy(trained.model))
    return found


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("refusals")
    return run_ranks(refusals_main, 2, str(folder), tmp_path=folder, env=ENV)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("peft tp", ["UnsupportedError", "peft_type=IA3 with tp_size=2", "tp_size to 1"]),
        (
            "several",
            [
                "ConfigError",
                "ddp_bucket_cap_mb=5",
                "auto_find_batch_size=True",
                "dispatch_batches=True",
                "bf16_full_eval",
                "save_on_each_node=True",
            ],
        ),
        ("zero3", ["ConfigError", "bf16_full_eval or fp16_full_eval=True with zero.stage 3", "bf16=True autocasts"]),
        (
            "adafactor",
            ["UnsupportedError", "optimizer Adafactor of transformers.optimization with tp_size=2", "AdamW"],
        ),
        ("late", ["ConfigError", "add_callback()"]),
        ("arguments", ["UnsupportedError", "callbacks=[HFParallelCallback("]),
        ("trial", ["UnsupportedError", "a second model", "trials of a search as runs of their own"]),
        ("cache", ["UnsupportedError", "past_key_values with pp_size=2", "save_model()"]),
        ("deepcopy", ["UnsupportedError", "copy.deepcopy"]),
    ],
)
def test_what_cannot_work_is_refused_by_name_on_every_rank(
    name: str, texts: list[str], refusals: list[dict[str, str]]
) -> None:
    for found in refusals:
        assert all(text in found[name] for text in texts), found.get(name)
