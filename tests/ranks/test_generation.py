"""`model.generate()` gives the tokens of one process on every layout: by itself, and in a Trainer that evaluates.

If these fail, the samples that somebody reads during training are of a model that nobody has, the ranks of a model copy go on
with different tokens, or a run hangs because only some of them generate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import RankError, run_ranks
from tp_models import spread
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


pytestmark = pytest.mark.timeout(300)

ENV = {"ACCELERATE_USE_CPU": "true"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2": {"tp_size": 2},
    "zero3": {"zero.stage": 3},
}
FOUR: dict[str, dict[str, Any]] = {
    "pp2_tp2": {"pp_size": 2, "tp_size": 2},
    "pp2_dp2": {"pp_size": 2, "schedule": "zbv_zero_bubble"},
    "tp2_zero3": {"tp_size": 2, "zero.stage": 3},
}


def mistral() -> Any:
    """Attention sees four tokens back."""
    torch.manual_seed(0)
    return MistralForCausalLM(
        MistralConfig(**tiny.SMALL, intermediate_size=64, num_hidden_layers=4, sliding_window=4, head_dim=8)
    )


MODELS: dict[str, Any] = {
    "llama": tiny.llama,
    "gpt2": tiny.gpt2,
    "mistral": mistral,
    "llama_lora": tiny.llama_lora,
    "mamba": tiny.mamba,
}


def whole(kind: str) -> Any:
    model = MODELS[kind]().eval()
    spread(model)
    return model


def prepared(model: Any, parallel: dict[str, Any]) -> Any:
    """The model on the mesh, ready to run."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **parallel))
    return accelerator.prepare(model)


def prompts(replica: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of different length, padded on their left; others on another replica."""
    ids = torch.tensor([[5, 8, 11, 14, 17, 20], [0, 0, 40, 42, 44, 46], [0, 0, 0, 0, 7, 9 + replica]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "repetition_penalty": 2.0},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
    "uncached": {"do_sample": True, "use_cache": False},
}


def tokens(model: Any, way: str, seed: int = 11, replica: int = 0, **more: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    options = {"max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": 98, **WAYS[way], **more}
    found: list[list[int]] = model.generate(**prompts(replica), **options).tolist()
    return found


def generate_main(rank: int, world_size: int, layouts: dict[str, dict[str, Any]], kinds: list[str]) -> None:
    for kind in kinds:
        reference = whole(kind)
        for name, parallel in layouts.items():
            copies = world_size // (parallel.get("pp_size", 1) * parallel.get("tp_size", 1))
            replica = rank // (world_size // copies)
            model = prepared(whole(kind), parallel)
            for way in WAYS:
                expected = tokens(reference, way, 11 + replica, replica)
                assert way != "sampling" or len({token for row in expected for token in row[6:]}) > 8
                # The ranks of a copy draw what its first one draws, whatever state they are in.
                first = rank % (world_size // copies) == 0
                seed = 11 + replica if first or copies == world_size else 99
                assert tokens(model, way, seed, replica) == expected, (kind, name, way)
            if name == "pp2" and kind != "mamba":
                with pytest.raises(Exception, match=r"generate\(assistant_model\) with pp_size=2: stages keep no"):
                    tokens(model, "greedy", assistant_model=reference)


@pytest.mark.long
@pytest.mark.parametrize(
    "kinds", [["llama", "llama_lora"], pytest.param(["gpt2", "mistral"], marks=pytest.mark.slow)], ids=str
)
def test_tokens_equal_one_process(kinds: list[str], tmp_path: Path) -> None:
    run_ranks(generate_main, 2, LAYOUTS, kinds, tmp_path=tmp_path, env=ENV, timeout=150)


@pytest.mark.slow
def test_tokens_of_combined_layouts_equal_one_process(tmp_path: Path) -> None:
    run_ranks(generate_main, 4, FOUR, ["llama", "llama_lora", "mistral"], tmp_path=tmp_path, env=ENV, timeout=250)


@pytest.mark.long
def test_tokens_of_a_model_with_states_equal_one_process(tmp_path: Path) -> None:
    run_ranks(generate_main, 2, LAYOUTS, ["mamba"], tmp_path=tmp_path, env=ENV, timeout=150)


def uneven_main(rank: int, world_size: int, kind: str) -> None:
    """Replicas that end at different times wait for each other."""
    reference, model = whole(kind), prepared(whole(kind), LAYOUTS["zero3"])
    for length in (3 + 4 * rank, 9 - 4 * rank):
        assert tokens(model, "greedy", max_new_tokens=length) == tokens(reference, "greedy", max_new_tokens=length)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "llama_lora"])
def test_replicas_of_zero_3_may_stop_at_different_times(kind: str, tmp_path: Path) -> None:
    run_ranks(uneven_main, 2, kind, tmp_path=tmp_path, env=ENV)


def lonely_main(rank: int, world_size: int, parallel: dict[str, Any]) -> None:
    model = prepared(whole("llama"), parallel)
    gathers = model.forward.__closure__  # the engine's
    engine = next(cell.cell_contents for cell in gathers if hasattr(cell.cell_contents, "gathers"))
    engine.gathers._bound_s = 1.0
    if rank == 0:
        tokens(model, "greedy")


@pytest.mark.parametrize("name", ["pp2", "tp2"])
def test_a_rank_that_generates_alone_is_told_so(name: str, tmp_path: Path) -> None:
    text = r"model\.generate\(\) was called by rank 0 .* not by rank 1 .*is_world_process_zero"
    with pytest.raises(RankError, match=text):
        run_ranks(lonely_main, 2, LAYOUTS[name], tmp_path=tmp_path, env=ENV)


# -- in a Trainer ----------------------------------------------------------------------------------------------------


class Samples(TrainerCallback):
    """Writes text at every evaluation, greedily and at random."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        before = torch.get_rng_state()
        training = model.training
        model.eval()
        self.found.append([tokens(model, "greedy"), tokens(model, "sampling")])
        model.train(training)
        torch.set_rng_state(before)


class Predicts(Trainer):
    """Evaluates by what the model writes after the first half of each row."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        half = {name: inputs[name][:, :8] for name in ("input_ids", "attention_mask")}
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        return loss, self.model.generate(**half, **options), inputs["labels"]


def written(prediction: Any) -> dict[str, float]:
    right = prediction.predictions[:, 8:] == prediction.label_ids[:, 8:]
    return {"right": float(right.mean()), "sum": float(prediction.predictions.sum())}


def trained(folder: str, kind: str, parallel: dict[str, Any] | None, replicas: int) -> dict[str, Any]:
    """Logs, samples, and what a Seq2SeqTrainer predicts with the trained weights."""
    from hf_parallel import HFParallelCallback

    def callbacks(*others: Any) -> list[Any]:
        return [*others] if parallel is None else [*others, HFParallelCallback({}, **parallel)]

    samples = Samples()
    shared: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8 // replicas,
        per_device_eval_batch_size=4 // replicas,
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        **shared,
    )
    trainer = Predicts(
        model=MODELS[kind](),
        args=arguments,
        train_dataset=tiny.rows(32),
        eval_dataset=tiny.rows(8),
        data_collator=tiny.collate,
        callbacks=callbacks(samples),
        compute_metrics=written,
    )
    trainer.train()
    keys = ("loss", "grad_norm", "eval_loss", "eval_right", "eval_sum")
    logs = [{key: log[key] for key in keys if key in log} for log in trainer.state.log_history]
    writer = Seq2SeqTrainer(
        model=whole(kind),
        args=Seq2SeqTrainingArguments(
            folder, per_device_eval_batch_size=4 // replicas, predict_with_generate=True, **shared
        ),
        data_collator=lambda rows: {k: v for k, v in tiny.collate(rows).items() if k != "labels"},
        callbacks=callbacks(),
    )
    predicted = writer.predict(tiny.rows(8), max_new_tokens=6, do_sample=False, pad_token_id=0)
    return {"logs": logs, "samples": samples.found, "predicted": predicted.predictions.tolist()}


def trainer_main(rank: int, world_size: int, folder: str, kinds: list[str], layouts: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        for name, parallel in layouts.items():
            copies = world_size // ((parallel or {}).get("pp_size", 1) * (parallel or {}).get("tp_size", 1))
            found[f"{kind} {name}"] = trained(folder, kind, parallel, copies)
    return found


@pytest.mark.long
@pytest.mark.parametrize("kinds", [["llama"], pytest.param(["llama_lora", "gpt2"], marks=pytest.mark.slow)])
def test_text_that_is_sampled_while_training_is_that_of_one_process(kinds: list[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    one = run_ranks(trainer_main, 1, folder, kinds, {"one": None}, tmp_path=tmp_path, env=ENV, init_group=False)[0]
    for found in run_ranks(trainer_main, 2, folder, kinds, LAYOUTS, tmp_path=tmp_path, env=ENV, timeout=200):
        for key, mine in found.items():
            expected = one[f"{key.split()[0]} one"]
            assert mine["samples"] == expected["samples"], key
            assert len(expected["samples"]) == 2
            assert mine["predicted"] == expected["predicted"], key
            for here, there in zip(mine["logs"], expected["logs"], strict=True):
                assert here == pytest.approx(there, abs=1e-5), key
