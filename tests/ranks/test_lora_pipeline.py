"""Adapters (PEFT) on a model that is cut into pipeline stages train, are saved and resume as on one process.

If these fail, LoRA runs on a pipeline drift, write folders that PEFT does not load, or forget their adapters on resume.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from adapter_cases import FIVE, same_folder
from rank_runner import RankError, run_ranks
from resume_cases import Cell, Continued, Job, run_cells, run_jobs, states_equal
from thinning import rest_runs, slow_if
from trainer_cases import ENV, NO_NOISE, Case, compare, run_cases
from typer.testing import CliRunner

from hf_parallel.cli.main import app


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PLAIN = Case("plain", steps=3, arguments=NO_NOISE)
PP2 = {"pp_size": 2}
PP4 = {"pp_size": 4}
FOUR_PARTS = {"pp_size": 2, "num_microbatches": 4}
ONE_MICROBATCH = {"pp_size": 2, "num_microbatches": 1}


def case(name: str, model: str, parallel: dict[str, Any], **changes: Any) -> Case:
    return dataclasses.replace(PLAIN, name=name, model=model, parallel=parallel, **changes)


TWO = [
    # The loss of Mixtral's router is of a whole batch.
    *(case(model, model, ONE_MICROBATCH if "mixtral" in model else PP2) for model in tiny.ADAPTED),
    *(case(model, model, PP2) for model in FIVE if model not in tiny.ADAPTED),
    case("blocks_again", "llama_lora", {**PP2, "activation_checkpointing": {"every": 1}}),
    case("checkpointing", "llama_lora", PP2, arguments={**NO_NOISE, "gradient_checkpointing": True}),
    case("interleaved", "llama_lora_late", {**PP2, "schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    case("zero_bubble", "llama_lora", {**PP2, "schedule": "zbv_zero_bubble"}),
    case("own_optimizer", "llama_lora_late", PP2, user_optimizer=True),
    case("other_dtype", "llama_lora_half", ONE_MICROBATCH),
    case("accumulation", "gpt2_lora", PP2, accumulation=2, variable_length=True, loss="subclass"),
    case(
        "best_model",
        "llama_tied_lora",
        PP2,
        steps=5,
        evaluate=True,
        save=True,
        arguments={**NO_NOISE, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
    ),
]
DROPOUT = [
    case("dropout", "llama_lora_dropout", FOUR_PARTS),
    case("dropout_again", "llama_lora_dropout", {**FOUR_PARTS, "schedule": "zbv_zero_bubble"}),
]
FOUR = [
    *(case(f"pp2xdp2_{model}", model, PP2) for model in FIVE),
    case("pp4_late", "llama_lora_late", PP4),
    case("pp4_early", "llama_lora_early", PP4),
    case("dp2", "llama_tied_lora_saved", PP2),
    case("zero1", "phi3_lora", {**PP2, "zero": {"stage": 1}}),
    case("zero1_late", "llama_lora_late", {**PP2, "zero": {"stage": 1}}),
    case("zero2", "gpt2_lora", {**PP2, "zero": {"stage": 2}}),
]
# Slow: models on replicas of stages that are on stages and on replicas (test_adapters.py) in other rows, adapters on the first
# or last of four stages only, as on two, and models that other rows have on stages with something else.
REST = (
    *("pp2xdp2_llama_lora", "pp2xdp2_llama_tied_lora", "pp2xdp2_phi3_lora", "pp2xdp2_gpt2_lora", "pp4_early"),
    *("zero1_late", "llama_lora", "llama_tied_lora", "llama_tied_lora_saved", "llama_lora_late", "gpt2_lora"),
    *("phi3_lora", "mixtral_plain_lora"),
)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, with_rest = tmp_path_factory.mktemp("runs"), rest_runs(request)
    two, four = ([each for each in rows if with_rest or each.name not in REST] for rows in (TWO, FOUR))
    return run_cases([*two, *DROPOUT], 2, folder / "two") | run_cases(four, 4, folder / "four")


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    wanted = [each for each in [*TWO, *FOUR] if each.name not in REST or rest_runs(request)]
    return run_cases(
        [dataclasses.replace(each, parallel=None) for each in wanted], 1, tmp_path_factory.mktemp("stock")
    )


@pytest.mark.parametrize("name", [pytest.param(each.name, marks=slow_if(each.name, REST)) for each in [*TWO, *FOUR]])
def test_adapters_on_stages_train_as_on_one_process(
    name: str, runs: dict[str, dict[str, Any]], stock: dict[str, dict[str, Any]]
) -> None:
    compare(runs[name], stock[name])
    model = next(each.model for each in [*TWO, *FOUR] if each.name == name)
    same_folder(Path(runs[name]["folder"]) / "final", Path(stock[name]["folder"]) / "final", model)


def test_masks_of_adapters_do_not_depend_on_the_schedule(runs: dict[str, dict[str, Any]]) -> None:
    compare(runs["dropout_again"], runs["dropout"])


CELLS = [("1", "pp2"), ("pp2", "1"), ("pp2", "dp2"), ("dp2", "pp2")]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Continued]:
    folder = tmp_path_factory.mktemp("resume")
    return run_cells(
        folder,
        {name: Job(name, str(folder / name), model="llama_tied_lora_saved") for name in ("1", "pp2", "dp2")},
        CELLS,
    )


@pytest.mark.parametrize(("saved", "layout"), CELLS)
def test_adapters_resume_under_another_layout(saved: str, layout: str, resumed: dict[Cell, Continued]) -> None:
    job, losses, straight = resumed[saved, layout]
    assert losses == pytest.approx(straight, abs=1e-5)
    assert states_equal(Path(str(job.resume)), Path(job.folder) / "again")


def test_a_merged_checkpoint_is_a_folder_that_peft_loads(resumed: dict[Cell, Continued], tmp_path: Path) -> None:
    from peft import PeftModel

    logits = []
    for saved in ("1", "pp2"):
        folder = Path(str(resumed[saved, "1" if saved == "pp2" else "pp2"][0].resume))
        result = CliRunner().invoke(app, ["merge", str(folder), str(tmp_path / saved)])
        assert result.exit_code == 0, result.output
        assert {path.name for path in (tmp_path / saved).iterdir()} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        model = PeftModel.from_pretrained(tiny.llama(tied=True), tmp_path / saved).eval()
        with torch.no_grad():
            logits.append(model(torch.arange(24).reshape(2, 12)).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def test_one_process_goes_on_from_what_merge_wrote_for_a_stock_trainer(
    resumed: dict[Cell, Continued], tmp_path: Path
) -> None:
    job, _, straight = resumed["pp2", "1"]
    merged = tmp_path / "stock-3"
    assert CliRunner().invoke(app, ["merge", str(job.resume), str(merged), "--trainer-state"]).exit_code == 0
    (losses,) = run_jobs([dataclasses.replace(job, folder=str(tmp_path / "run"), resume=str(merged))], tmp_path)
    assert losses == pytest.approx(straight, abs=1e-5)


def test_adapters_of_another_config_are_refused(resumed: dict[Cell, Continued], tmp_path: Path) -> None:
    checkpoint = resumed["pp2", "dp2"][0].resume
    with pytest.raises(RankError, match=r"adapter_model\.safetensors is of other adapters") as caught:
        run_jobs([Job("pp2", str(tmp_path / "run"), checkpoint, model="llama_lora_late")], tmp_path)
    assert "rank 0" in str(caught.value)
    assert "rank 1" in str(caught.value)


def loops_main(rank: int, world_size: int, folder: str) -> list[float]:
    """Six steps of an accelerate loop that goes back to the state after the third once; the losses."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    plugin = HFParallelPlugin({}, **PP2) if world_size > 1 else None
    accelerator = Accelerator(cpu=True, parallelism_config=plugin)
    model = tiny.MODELS["gpt2_lora"]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in [0, 1, 2, 3, 4, 3, 4, 5]:
        if len(losses) == 3:
            accelerator.save_state(f"{folder}/state")
        if len(losses) == 5:
            accelerator.load_state(f"{folder}/state")
        loss = model(**tiny.collate(tiny.rows(48)[8 * step : 8 * step + 8])).loss
        accelerator.backward(loss)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert all(p.requires_grad for p in optimizer.state)
    model.save_pretrained(f"{folder}/saved")
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/usual",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if world_size > 1:
        accelerator.hf_parallel.watchdog.stop()
    return losses


def test_a_loop_of_ones_own_trains_saves_and_goes_back(tmp_path: Path) -> None:
    one, two = (
        run_ranks(
            *(loops_main, size, str(tmp_path / str(size))),
            tmp_path=tmp_path,
            init_group=size > 1,
            env=ENV,
        )[0]
        for size in (1, 2)
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert two[5:7] == pytest.approx(two[3:5], rel=1e-6)
    for way in ("saved", "usual"):
        same_folder(tmp_path / "2" / way, tmp_path / "1" / way, "gpt2_lora")


def refusals_main(rank: int, world_size: int, folder: str) -> dict[str, str]:
    from hf_parallel import ParallelError

    found = {}
    for name, make in MADE_WRONG.items():
        case = dataclasses.replace(PLAIN, parallel=PP2)
        tiny.MODELS["llama"] = make
        try:
            from trainer_cases import make_trainer

            make_trainer(case, Path(folder) / name, world_size).train()
            found[name] = "nothing was raised"
        except (ParallelError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def prompt_tuned() -> Any:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(tiny.llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def twice_adapted() -> Any:
    from peft import LoraConfig

    model = tiny.llama_lora()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    return model


MADE_WRONG = {
    "prompt": prompt_tuned,
    "two": twice_adapted,
    "targets": lambda: tiny.lora(tiny.llama(), target_modules=["no_such_layer"]),
}
TEXTS = {
    "prompt": ["UnsupportedError", "PromptTuningConfig with 2 ranks a copy", "virtual tokens", "LoraConfig"],
    "two": ["UnsupportedError", "2 adapters (default, second)", "delete_adapter"],
    "targets": ["Target modules", "no_such_layer"],
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("refusals")
    return run_ranks(refusals_main, 2, str(folder), tmp_path=folder, env=ENV)


@pytest.mark.parametrize("name", MADE_WRONG)
def test_what_cannot_be_cut_is_refused_by_name_on_every_rank(name: str, refusals: list[dict[str, str]]) -> None:
    for found in refusals:
        assert all(text in found[name] for text in TEXTS[name]), found[name]
