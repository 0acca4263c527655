"""TRL's trainers, unchanged but for the callback, train on a mesh as on one process.

They patch the model's forward after the Trainer's constructor, read the head's weight themselves and count tokens with
`accelerator.gather`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from rank_runner import run_ranks
from safetensors.torch import load_file
from trainer_cases import ENV


pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one": (1, None),
    "ddp2": (2, None),
    "tp2": (2, {"tp_size": 2}),
    "dp2": (2, {}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 2}),
    "pp2_dp2": (4, {"pp_size": 2, "num_microbatches": 2}),
}
# Name -> trainer, model, data and settings.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "sft_llama": ("sft", "llama", "sft", {}),
    "sft_gpt2": ("sft", "gpt2", "sft", {}),
    "dpo_llama": ("dpo", "llama", "dpo", {"precompute_ref_log_probs": True}),
}
# Losses that are no multiple of the model's own, and metrics of evaluations; for stages.
STAGES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "completions": ("sft", "llama", "completions", {"eval_strategy": "steps", "eval_steps": 2}),
    "dft": ("sft", "gpt2", "completions", {"loss_type": "dft"}),
    "smoothed": ("sft", "llama", "sft", {"label_smoothing_factor": 0.1}),
    "counted_alone": ("sft", "llama", "sft", {"average_tokens_across_devices": False}),
}


def cases_of(world_size: int, parallel: dict[str, Any] | None) -> dict[str, tuple[str, str, str, dict[str, Any]]]:
    """What a layout runs; stock replicas are the reference of losses that replicas average."""
    if parallel is None:
        return CASES | STAGES if world_size == 1 else STAGES
    return CASES | STAGES if "pp_size" in parallel else CASES


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w98", bos_token="w97", unk_token="w0"
    )


def write_data(folder: Path) -> None:
    """Folders that all ranks share, as with data that was loaded: TRL lets one rank write what the others read."""
    from datasets import Dataset

    rows = tiny.rows(48, True)

    def text(ids: list[int]) -> str:
        return " ".join(f"w{token}" for token in ids)

    pairs = [
        {"prompt": text(ids[:4]), "chosen": text(ids[4:]), "rejected": text(ids[4:][::-1])}
        for ids in (row["input_ids"] for row in rows)
    ]
    Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows]).save_to_disk(folder / "sft")
    Dataset.from_list(pairs).save_to_disk(folder / "dpo")
    completions = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    Dataset.from_list(completions).save_to_disk(folder / "completions")


def runs_main(rank: int, world_size: int, parallel: dict[str, Any] | None, data: str, folder: str) -> dict[str, Any]:
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from hf_parallel import HFParallelCallback

    sizes = parallel or {}
    replicas = world_size // (sizes.get("tp_size", 1) * sizes.get("pp_size", 1))
    found = {}
    for name, (kind, model, rows, more) in cases_of(world_size, parallel).items():
        trainer_kind, settings = (SFTTrainer, SFTConfig) if kind == "sft" else (DPOTrainer, DPOConfig)
        arguments = settings(
            output_dir=f"{folder}/{name}",
            per_device_train_batch_size=4 // replicas,
            per_device_eval_batch_size=4 // replicas,
            gradient_accumulation_steps=2,
            max_steps=5,
            logging_steps=1,
            learning_rate=1e-3,
            adam_epsilon=1e-4,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            gradient_checkpointing=False,
            **more,
        )
        dataset = load_from_disk(f"{data}/{rows}")
        trainer = trainer_kind(
            model=tiny.MODELS[model](),
            args=arguments,
            train_dataset=dataset,
            eval_dataset=dataset.select(range(16)) if "eval_strategy" in more else None,
            processing_class=tokenizer(),
            callbacks=[] if parallel is None else [HFParallelCallback({}, **parallel)],
        )
        trainer.train()
        trainer.save_model(f"{folder}/{name}/final")
        keys = ("loss", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy", "rewards/margins")
        keys += tuple(f"eval_{key}" for key in keys)
        steps = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
        found[name] = [step for step in steps if step]
        if parallel is not None:
            trainer.hf_parallel_session.watchdog.stop()
    return found


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """What a layout's runs logged, and where their models are."""

    @functools.cache
    def run(name: str) -> tuple[dict[str, Any], Path]:
        world, parallel = LAYOUTS[name]
        data, folder = (tmp_path_factory.mktemp(f"{what}_{name}") for what in ("data", "out"))
        write_data(data)
        results = run_ranks(
            runs_main,
            world,
            parallel,
            str(data),
            str(folder),
            tmp_path=folder,
            timeout=240,
            init_group=world > 1,
            env=ENV,
        )
        return results[0], folder

    return run


def compare(name: str, layout: str, run_of: Callable[[str], tuple[dict[str, Any], Path]], other: str = "one") -> None:
    (mine, here), (stock, there) = run_of(layout), run_of(other)
    assert len(stock[name]) >= 5
    for step, (found, expected) in enumerate(zip(mine[name], stock[name], strict=True)):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), f"entry {step}"
    weights = [load_file(folder / name / "final" / "model.safetensors") for folder in (here, there)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[1].items():
        assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), key


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("name", CASES)
def test_trl_trains_on_a_mesh_as_on_one_process(name: str, layout: str, run_of: Any) -> None:
    compare(name, layout, run_of)


@pytest.mark.parametrize("layout", ["pp2", "pp2_dp2"])
@pytest.mark.parametrize("name", [*CASES, *STAGES])
def test_trl_trains_on_stages_as_on_one_process(name: str, layout: str, run_of: Any) -> None:
    # Of an evaluation, and without counts over all replicas, the loss is the mean of theirs, as under stock DDP.
    of_replicas = layout == "pp2_dp2" and name in ("completions", "counted_alone")
    compare(name, layout, run_of, "ddp2" if of_replicas else "one")
