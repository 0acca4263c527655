"""What the tensor_parallel section says about modules is what a Trainer run does, and the run equals one process.

If these fail, a setting of the user has no effect, or training with it is silently different.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import zoo
from rank_runner import run_ranks
from tp_models import check_on_ranks
from trainer_cases import ENV, Case, Snapshots, compare, finished, make_trainer, run_cases
from zoo.models import quiet

from hf_parallel import PlanError
from hf_parallel.tensor_parallel.plan.complete import plan_model
from hf_parallel.tensor_parallel.plan.share import plan_on_one_rank


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

MIXED_PLAN = {"model.layers.*.self_attn.*": "gather", "*.1.self_attn.*": "pair", "*.mlp.*": "replicate"}
CASES = [
    Case("overrides", parallel={"tp_size": 2, "plan": MIXED_PLAN}, steps=4),
    Case(
        "whole_head",
        parallel={"tp_size": 2, "chunked_loss": False, "plan": {"lm_head": "replicate", "*.mlp.*": "pair"}},
        steps=4,
    ),
    Case("whole_experts", model="mixtral", parallel={"tp_size": 2, "experts": "whole"}, accumulation=2, steps=4),
    Case("tied_head", model="llama_tied", parallel={"tp_size": 2, "plan": {"lm_head": "gather"}}, steps=4),
]

FOUR_RANKS = Case(
    "staged_experts",
    model="mixtral",
    parallel={"pp_size": 2, "tp_size": 2, "num_microbatches": 1, "experts": "whole", "plan": {"lm_head": "gather"}},
    steps=4,
)


def shown(model: Any) -> dict[str, str]:
    """Module -> what it runs as and the shape of its local weight."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head", "embed_tokens")):
            forward = vars(module).get("tp_scope_inner", vars(module).get("forward"))
            runs = forward.__func__.__name__ if forward is not None else "whole"
            part = module._parameters["weight"]
            found[name] = f"{runs} {tuple(part.shape)}"
        elif name.endswith("experts"):
            shapes = " ".join(str(tuple(parameter.shape)) for parameter in module.parameters())
            runs = vars(module).get("tp_scope_inner", module.forward).__func__.__name__
            found[name] = f"{runs} {shapes}"
    return found


def settings_main(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {}
    for case in CASES:
        here = Path(folder) / case.name
        snapshots = Snapshots(here)
        trainer = snapshots.trainer = make_trainer(case, here, world_size, [snapshots])
        trainer.train()
        results[case.name] = finished(trainer, here) | {"shown": shown(trainer.model)}
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("settings")
    alone = run_cases([dataclasses.replace(case, parallel=None) for case in [*CASES, FOUR_RANKS]], 1, folder / "one")
    staged = run_cases([FOUR_RANKS], 4, folder / "four")
    results = run_ranks(settings_main, 2, str(folder), tmp_path=folder, timeout=300, env=ENV)
    return {"one": alone, "two": results[0] | staged}


@pytest.mark.parametrize("name", [case.name for case in [*CASES, FOUR_RANKS]])
def test_a_run_with_settings_of_its_own_equals_one_process(name: str, runs: dict[str, Any]) -> None:
    compare(runs["two"][name], runs["one"][name])


def test_overrides_are_in_effect(runs: dict[str, Any]) -> None:
    shown = runs["two"]["overrides"]["shown"]
    assert shown["model.layers.0.self_attn.q_proj"] == "gather_forward (16, 32)"
    assert shown["model.layers.0.self_attn.o_proj"] == "gather_forward (16, 32)"
    assert shown["model.layers.1.self_attn.q_proj"] == "column_forward (16, 32)"
    assert shown["model.layers.1.self_attn.o_proj"] == "row_forward (32, 16)"
    assert {shown[f"model.layers.{i}.mlp.down_proj"] for i in range(4)} == {"whole (32, 64)"}
    assert shown["lm_head"] == "vocab_head_forward (50, 32)"


def test_overrides_of_the_vocabulary_are_in_effect(runs: dict[str, Any]) -> None:
    whole, tied = (runs["two"][name]["shown"] for name in ("whole_head", "tied_head"))
    assert (whole["lm_head"], whole["model.embed_tokens"]) == ("whole (99, 32)", "_embedding_forward (50, 32)")
    assert (tied["lm_head"], tied["model.embed_tokens"]) == ("gather_forward (50, 32)", "_embedding_forward (50, 32)")


def test_each_rank_has_whole_experts(runs: dict[str, Any]) -> None:
    shown = runs["two"]["whole_experts"]["shown"]
    assert shown["model.layers.0.mlp.experts"] == "sum_forward (2, 64, 32) (2, 32, 32)"


EXPERTS = ["mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"]


def experts_main(rank: int, world_size: int) -> None:
    for name in EXPERTS:
        with quiet():
            model: Any = zoo.build(name).double()
            model.set_experts_implementation("eager")
            batch = zoo.batch(name, model)
        plan = plan_on_one_rank(lambda model=model, batch=batch: plan_model(model, world_size, batch, experts="whole"))
        assert any(pair.routing is not None for pair in plan.pairs), name
        check_on_ranks(model, plan, dist.group.WORLD, rank, batch)


@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_experts_on_real_ranks_give_the_plain_loss_and_gradients(world_size: int, tmp_path: Path) -> None:
    run_ranks(experts_main, world_size, tmp_path=tmp_path, timeout=200)


def refusals_main(rank: int, world_size: int, folder: str) -> dict[str, str]:
    found = {}
    for name, parallel in {
        "typo": {"plan": {"*.q_prj": "gather"}},
        "pair": {"plan": {"model.layers.0.self_attn.q_proj": "pair", "model.layers.0.self_attn.o_proj": "replicate"}},
        "experts": {"experts": "whole"},
        "head": {"plan": {"lm_head": "pair"}, "vocab_parallel_loss": False},
    }.items():
        try:
            make_trainer(Case(name, parallel={"tp_size": 2, **parallel}), Path(folder), world_size).train()
        except PlanError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("typo", "tensor_parallel.plan['*.q_prj'] names none of the 30 modules that can be sharded. Similar names: "),
        ("pair", "tensor_parallel.plan wants model.layers.0.self_attn.q_proj in a pair with tp_size=2, but it is "),
        (
            "experts",
            "tensor_parallel.experts: whole with tp_size=2, but no experts can be placed whole on ranks: no module",
        ),
        ("head", "tensor_parallel.plan wants lm_head sharded over the vocabulary, but: vocab_parallel_loss is false"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(name: str, text: str, refusals: list[dict[str, str]]) -> None:
    for found in refusals:
        assert found[name].startswith(text), found.get(name)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("refusals")
    return run_ranks(refusals_main, 2, str(folder), tmp_path=folder, timeout=120, env=ENV)
