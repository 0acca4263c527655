"""Adapters (PEFT LoRA) on tensor-parallel layers train as on one process, and cost no collective in the forward.

If these fail, LoRA runs on shards drift silently: a factor that every rank holds gets a part of its gradient, or each rank
adds the whole product before the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from adapter_cases import FIVE, same_folder
from rank_runner import run_ranks
from resume_cases import Job, run_cells, states_equal
from tp_models import Counter, plan_sample, tiny_batch, tiny_model
from trainer_cases import ENV, NO_NOISE, Case, compare, run_cases

from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel


pytestmark = pytest.mark.timeout(400)

PLAIN = Case("plain", steps=3, arguments=NO_NOISE)
TP2 = {"tp_size": 2}
SEQUENCE = {"tp_size": 2, "tensor_parallel": {"sequence_parallel": True}}
TWO: Mapping[str, tuple[str, dict[str, Any]]] = {  # name -> model, settings
    "llama_lora": ("llama_lora", TP2),
    "gpt2_lora": ("gpt2_lora", TP2),
    "mixtral": ("mixtral_lora_attention", TP2),
    "phi3_lora": ("phi3_lora", TP2),
    "tied": ("llama_tied_lora", TP2),
    "tied_saved": ("llama_tied_lora_saved", TP2),
    "head": ("llama_lora_head", TP2),
    "early": ("llama_lora_early", TP2),
    **({"native": ("llama_native_lora", TP2)} if tiny.HAS_ADD_ADAPTER else {}),
    "biases": ("llama_lora_biases", TP2),
    "conv_biases": ("gpt2_lora_biases", TP2),
    "dropout": ("llama_lora_dropout", TP2),
    "uneven": ("uneven_lora", TP2),
    "latent": ("deepseek_v3_lora", TP2),
    "sequence": ("llama_lora", SEQUENCE),
    "sequence_biases": ("gpt2_lora_biases", SEQUENCE),
    "recomputed": ("llama_lora", {**TP2, "activation_checkpointing": {"every": 1}}),
}


def sharded(model: str) -> str:
    return f"{model}_attention" if "mixtral" in model else model


FOUR: Mapping[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("llama_lora", TP2),
    "zero1": ("gpt2_lora", {**TP2, "zero": {"stage": 1}}),
    "zero3": ("phi3_lora", {**TP2, "zero": {"stage": 3}}),
    # Stacked experts are not sharded: of Mixtral its attention has adapters.
    **{f"pp2_{model}": (sharded(model), {"pp_size": 2, "tp_size": 2}) for model in FIVE},
    "pp2_tied_saved": ("llama_tied_lora_saved", {"pp_size": 2, "tp_size": 2}),
    "pp2_zero_bubble": ("gpt2_lora_biases", {"pp_size": 2, "tp_size": 2, "schedule": "zbv_zero_bubble"}),
}


Runs = dict[str, dict[str, Any]]
SLOW = ((), (pytest.mark.slow,))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Runs]:
    """The runs that are wanted (`-k` may have chosen one), and those of their models on one process."""
    items: list[Any] = [item for item in request.session.items if hasattr(item, "callspec")]
    wanted = {item.callspec.params["name"] for item in items if item.path == request.path}
    folder = tmp_path_factory.mktemp("runs")
    found: Runs = {}
    for world_size, table in ((2, TWO), (4, FOUR)):
        cases = [
            dataclasses.replace(PLAIN, name=name, model=model, parallel=how)
            for name, (model, how) in table.items()
            if name in wanted
        ]
        found |= run_cases(cases, world_size, folder / str(world_size)) if cases else {}
    models = sorted({model for name, (model, _) in {**TWO, **FOUR}.items() if name in wanted})
    stock = [dataclasses.replace(PLAIN, name=model, model=model, parallel=None) for model in models]
    return found, run_cases(stock, 1, folder / "stock")


# Models on stages of shards that are on stages (test_lora_pipeline.py) and on shards in other rows.
REST = ("pp2_llama_lora", "pp2_llama_tied_lora", "pp2_phi3_lora", "recomputed")


def marked(name: str) -> Any:
    return pytest.param(name, marks=() if name == "llama_lora" else [pytest.mark.long, *SLOW[name in REST]])


@pytest.mark.parametrize("name", [marked(name) for name in [*TWO, *FOUR]])
def test_adapters_on_shards_train_as_on_one_process(name: str, runs: tuple[Runs, Runs]) -> None:
    found, stock = runs
    model = {**TWO, **FOUR}[name][0]
    mine, expected = found[name], stock[model]
    compare(mine, expected)
    same_folder(Path(mine["folder"], "final"), Path(expected["folder"], "final"), model)


CELLS = [("1", "tp2"), ("tp2", "1"), ("tp2", "pp2"), ("pp2", "tp2")]


@pytest.mark.long
def test_adapters_of_shards_resume_under_another_layout(tmp_path: Path) -> None:
    sources = {name: Job(name, str(tmp_path / name), model="llama_tied_lora_saved") for name in ("1", "tp2", "pp2")}
    for job, losses, straight in run_cells(tmp_path, sources, CELLS).values():
        assert losses == pytest.approx(straight, abs=1e-5)
        assert states_equal(Path(str(job.resume)), Path(job.folder) / "again")


def collectives(model: torch.nn.Module, rank: int) -> tuple[int, int, int]:
    """All-reduces of a forward and of its backward pass, and the number of pairs, on real ranks."""
    plan = plan_tensor_parallel(model, 2, plan_sample())
    apply_tensor_parallel(model, plan, dist.group.WORLD, rank, lambda name: True)
    with Counter("all_reduce") as reduces:
        loss = model(**tiny_batch(), use_cache=False).loss
        forward, reduces.calls = reduces.calls, 0
        loss.backward()
    return forward, reduces.calls, len(plan.pairs)


def count_main(rank: int, world_size: int) -> None:
    for case in ("llama", "gpt2", "phi3"):
        forward, backward, num_pairs = collectives(tiny_model(case), rank)
        for dtype in (torch.float32, torch.bfloat16):  # adapters are fp32 on a model in bf16
            adapted = collectives(tiny.lora(tiny_model(case, dtype), fan_in_fan_out=case == "gpt2"), rank)
            # The frozen embedding wants no gradient from the first block; the factors that all ranks of a pair hold are summed
            # together.
            assert adapted == (forward, backward - 1 + num_pairs, num_pairs), (case, dtype)


def test_adapters_cost_no_collective_in_the_forward_and_one_in_the_backward_of_a_pair(tmp_path: Path) -> None:
    run_ranks(count_main, 2, tmp_path=tmp_path)


def greedy(model: Any) -> Any:
    options = {"max_new_tokens": 8, "do_sample": False, "repetition_penalty": 2.0, "pad_token_id": 0}
    return model.generate(input_ids=torch.tensor([[5, 8, 11, 14], [40, 42, 44, 46]]), **options).tolist()


def generate_main(rank: int, world_size: int) -> None:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    expected = greedy(tiny.llama_lora().eval())
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, tp_size=2))
    model = accelerator.prepare(tiny.llama_lora().eval())
    assert greedy(model) == expected
    with model.disable_adapter():
        without = greedy(model)
    assert without == greedy(tiny.llama().eval())
    assert without != expected


@pytest.mark.long
def test_a_model_with_adapters_on_shards_generates_as_one_process(tmp_path: Path) -> None:
    run_ranks(generate_main, 2, tmp_path=tmp_path, env=ENV)
