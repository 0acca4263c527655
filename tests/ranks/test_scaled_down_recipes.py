"""Every recipe trains: its own file, scaled down in sizes only, on CPU processes.

If a row fails, a recipe that is one line to launch ends in an error on the machine it was written for, or trains another
model than one process does.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from rank_runner import run_ranks
from thinning import rest_runs, slow_if
from trainer_cases import ENV, NO_NOISE, Case, Snapshots, compare, finished, make_trainer, run_cases

from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.settings.recipes import KEY, SECTION, find_recipe, list_recipes, load_recipe, read_section


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# What DeepSpeed drives needs its compiled ops: tests/ranks/test_deepspeed.py and tests/launch/test_deepspeed_launch.py.
RECIPES = [name for name in list_recipes() if load_recipe(name).zero.engine != "deepspeed"]

# Of the kind that the recipe is for, with blocks for two groups or four stages; all else is a Llama of 4 blocks.
MODELS = {
    "gpt3": "gpt2",
    "budget_3090_lora": "llama_lora",
    "qlora": "llama_lora",
    "llama_70b": "llama_8",
    "cpu_pp2_zbv": "llama_8",
    "cpu_ep2": "deepseek_v3",
}
# Slow: the same settings as another recipe has, once it is scaled down, or some of them.
REST = ("budget_3090_7b", "qlora_2xt4", "ddp", "cpu_pp2", "cpu_tp2", "cpu_dp2_zero1", "cpu_dp2_zero3")
LOSSY = ("int8", "powersgd", "local8")  # what they send is not exact, so only the first loss is that of one process


def scaled_down(name: str) -> tuple[dict[str, Any], int]:
    """A recipe's file with fewer ranks on each axis, on the CPU, and the number of processes; nothing else changes.

    An axis of several ranks has two, but what nothing is shared over has one; microbatches are two.
    """
    content = dict(read_section(find_recipe(name))[1])
    config = load_recipe(name)
    section = dict(content[SECTION][KEY])
    sizes = {axis: min(2, getattr(config, axis)) for axis in ("tp_size", "pp_size", "sp_size")}
    replicas = min(2, config.dp_size(content["num_processes"]))
    if "pipeline" in section:
        section["pipeline"] = section["pipeline"] | {"num_microbatches": 2}
    world = replicas * math.prod(sizes.values())
    machines = {"num_processes": world, "num_machines": 1, "main_process_port": 0, "use_cpu": True}
    return content | machines | {SECTION: {KEY: section | sizes}}, world


def case_of(name: str, precision: str = "no") -> Case:
    """Three steps of a scaled-down recipe: 2 rows a batch of a model copy, accumulated as the recipe says."""
    content, world = scaled_down(name)
    config = HFParallelConfig.from_mapping(content[SECTION][KEY])
    kind = next((kind for prefix, kind in MODELS.items() if name.startswith(prefix)), "llama")
    kind += "_half" * (kind == "llama_lora" and precision == "bf16")  # adapters in fp32 on a model in 16 bit
    rows = 2 * world // config.model_parallel_size
    steps = config.gradient_accumulation_steps
    accumulation = 1 if steps == "auto" else steps
    return Case(name, model=kind, steps=3, batch=rows, accumulation=accumulation, count=3 * rows * accumulation, arguments=NO_NOISE, parallel=None, delay=int(config.pipeline.schedule == "pipedream_2bw"))  # fmt: skip


def recipes_main(rank: int, world_size: int, names: list[str], folder: str, precision: str) -> list[Any]:
    """Train some scaled-down recipes, each from its own file."""
    from hf_parallel import HFParallelCallback

    found = []
    for name in names:
        file, case = Path(folder) / f"{name}.yaml", case_of(name, precision)
        snapshots = Snapshots(Path(folder) / name)
        # Rows of a process, since the Trainer is told nothing of the layout; and no accumulation: the file says it.
        rows = 2 * world_size
        local = dataclasses.replace(case, batch=rows, accumulation=1, delay=0)
        trainer = make_trainer(local, Path(folder) / name, world_size, [snapshots, HFParallelCallback(str(file))])
        snapshots.trainer = trainer
        trainer.train()
        assert trainer.args.gradient_accumulation_steps == case.accumulation
        found.append(finished(trainer, Path(folder) / name))
    return found


def train_scaled_down(folder: Path, recipes: list[str], precision: str) -> dict[str, dict[str, Any]]:
    """One launch a number of processes."""
    by_world: dict[int, list[str]] = {}
    for name in recipes:
        content, world = scaled_down(name)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content | {"mixed_precision": precision}))
        by_world.setdefault(world, []).append(name)
    found = {}
    env = {**ENV, "ACCELERATE_MIXED_PRECISION": precision}  # what `accelerate launch` makes of the file
    for world, names in by_world.items():
        results = run_ranks(recipes_main, world, names, str(folder), precision, tmp_path=folder, timeout=400, env=env)
        found |= dict(zip(names, results[0], strict=True))
    return found


def wanted(request: pytest.FixtureRequest) -> list[str]:
    return [name for name in RECIPES if rest_runs(request) or name not in REST]


@pytest.fixture(scope="module")
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return train_scaled_down(tmp_path_factory.mktemp("fp32"), wanted(request), "no")


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_cases([case_of(name) for name in wanted(request)], 1, tmp_path_factory.mktemp("stock"))


def losses(run: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in run["history"] if "loss" in entry]


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name, REST)) for name in RECIPES])
def test_a_scaled_down_recipe_trains_as_one_process_does(
    name: str, exact: dict[str, dict[str, Any]], stock: dict[str, dict[str, Any]]
) -> None:
    if name.endswith(LOSSY):
        mine, one = losses(exact[name]), losses(stock[name])
        assert mine[0] == pytest.approx(one[0], abs=1e-5)
        assert mine == pytest.approx(one, abs=1e-2)
    else:
        compare(exact[name], stock[name])


@pytest.mark.slow
def test_scaled_down_gpu_recipes_train_in_their_own_precision(
    tmp_path: Path, stock: dict[str, dict[str, Any]]
) -> None:
    recipes = [name for name in RECIPES if not name.startswith("cpu_")]
    runs = train_scaled_down(tmp_path, recipes, "bf16")
    for name, run in runs.items():
        own = "fp16" if name == "qlora_2xt4" else "bf16"  # which no CPU has
        assert read_section(find_recipe(name))[1]["mixed_precision"] == own
        assert losses(run) == pytest.approx(losses(stock[name]), abs=2e-2), name
