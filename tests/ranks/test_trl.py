"""TRL's trainers, unchanged but for the callback, train on a mesh as on one process.

They patch the model's forward after the Trainer's constructor, read the head's weight themselves and count tokens with
`accelerator.gather`.
"""

from __future__ import annotations

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
    "tp2": (2, {"tp_size": 2}),
    "dp2": (2, {}),
}


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


def runs_main(rank: int, world_size: int, parallel: dict[str, Any] | None, data: str, folder: str) -> dict[str, Any]:
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from hf_parallel import HFParallelCallback

    replicas = world_size // (parallel or {}).get("tp_size", 1)
    found = {}
    for kind, model in (("sft", "llama"), ("sft", "gpt2"), ("dpo", "llama")):
        trainer_kind, settings = (SFTTrainer, SFTConfig) if kind == "sft" else (DPOTrainer, DPOConfig)
        arguments = settings(
            output_dir=f"{folder}/{kind}_{model}",
            per_device_train_batch_size=4 // replicas,
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
            **({"precompute_ref_log_probs": True} if kind == "dpo" else {}),
        )
        trainer = trainer_kind(
            model=tiny.MODELS[model](),
            args=arguments,
            train_dataset=load_from_disk(f"{data}/{kind}"),
            processing_class=tokenizer(),
            callbacks=[] if parallel is None else [HFParallelCallback({}, **parallel)],
        )
        trainer.train()
        trainer.save_model(f"{folder}/{kind}_{model}/final")
        keys = ("loss", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy", "rewards/margins")
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        found[f"{kind}_{model}"] = [{key: entry[key] for key in keys if key in entry} for entry in steps]
        if parallel is not None:
            trainer.hf_parallel_session.watchdog.stop()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    found = {}
    for name, (world, parallel) in LAYOUTS.items():
        data, folder = (tmp_path_factory.mktemp(f"{what}_{name}") for what in ("data", "out"))
        write_data(data)
        results = run_ranks(
            runs_main,
            world,
            parallel,
            str(data),
            str(folder),
            tmp_path=folder,
            timeout=200,
            init_group=world > 1,
            env=ENV,
        )
        found[name] = results[0], folder
    return found


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
@pytest.mark.parametrize("name", ["sft_llama", "sft_gpt2", "dpo_llama"])
def test_trl_trains_on_a_mesh_as_on_one_process(name: str, layout: str, runs: dict[str, Any]) -> None:
    (mine, here), (stock, there) = runs[layout], runs["one"]
    for step, (found, expected) in enumerate(zip(mine[name], stock[name], strict=True)):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {step}"
    weights = [load_file(folder / name / "final" / "model.safetensors") for folder in (here, there)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[1].items():
        assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), key
