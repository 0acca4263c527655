"""DeepSpeed drives a stock Trainer with our settings: losses are those of plain data parallelism, folders load, runs resume.

Needs DeepSpeed and a compiler: `make test-deepspeed`. Its ops are built once, before any rank starts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from trainer_cases import ENV, Case, make_trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_parallel.errors import ConfigError


pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
STEPS = 4


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero": {"engine": "deepspeed", "stage": stage, **more}}


BOTH = {"offload_optimizer": "cpu", "offload_param": "cpu"}
CASES = [
    Case("stage1", parallel=zero(1)),
    Case("stage2", parallel=zero(2)),
    Case("stage3", parallel=zero(3)),
    Case("stage1_cpu", parallel=zero(1, offload_optimizer="cpu")),
    Case("stage2_cpu", parallel=zero(2, offload_optimizer="cpu")),
    Case("stage3_cpu", parallel=zero(3, offload_optimizer="cpu")),
    Case("stage3_both", parallel=zero(3, **BOTH)),
    Case("stage2_small_messages", parallel=zero(2) | {"data_parallel": {"bucket_cap_mb": 0.01, "overlap": False}}),
]


@pytest.fixture(scope="module", autouse=True)
def ops() -> None:
    """Build what the ranks would build otherwise, each waiting for the other."""
    from hf_parallel.deepspeed.ops import CPU_ADAM, SHARED_MEMORY, build

    os.environ["DS_ACCELERATOR"] = "cpu"
    build([SHARED_MEMORY, CPU_ADAM])


def train(rank: int, world_size: int, case: Case, folder: str, resume: bool = False) -> dict[str, Any]:
    trainer, before = make_trainer(case, Path(folder), world_size), None
    if (
        case.evaluate and case.parallel is None
    ):  # stock replicas that evaluate first train each for itself (transformers 5.23)
        before = make_trainer(case, Path(folder), world_size).evaluate()["eval_loss"]
    elif case.evaluate and case.parallel["zero"]["stage"] < 3:
        before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(Path(folder) / "final"))
    engine = trainer.model_wrapped
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_rows")
    return {
        "before": before,
        "engine": type(engine).__name__,
        "optimizer": type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__ if case.parallel else "",
        "history": [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history],
    }


def launched(case: Case, folder: Path, resume: bool = False) -> dict[str, Any]:
    results = run_ranks(train, 2, case, str(folder), resume, tmp_path=folder.parent, timeout=300, env=ENV)
    return results[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("ddp") / "run"
    return launched(shaped(Case("ddp", parallel=None)), folder), folder


def shaped(case: Case) -> Case:
    """With all that could differ: clipping, accumulation, rows of unequal length, evaluation before and while training."""
    more = {"variable_length": True, "evaluate": True, "metrics": True}
    return dataclasses.replace(case, steps=STEPS, accumulation=2, clip=0.5, **more)


def assert_equal(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    assert len(mine["history"]) == len(reference["history"])
    for step, (here, there) in enumerate(zip(mine["history"], reference["history"], strict=True)):
        assert here.keys() == there.keys()
        for key, value in there.items():
            assert here[key] == pytest.approx(value, abs=1e-5), f"{key} of log {step}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_norms_and_weights_are_those_of_data_parallelism(
    case: Case, reference: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    expected, folder = reference
    result = launched(shaped(case), tmp_path / "run")
    assert result["engine"] == "DeepSpeedEngine"
    assert result["optimizer"] == ("DeepSpeedCPUAdam" if "cpu" in case.name or "both" in case.name else "AdamW")
    if result["before"] is not None:
        assert result["before"] == pytest.approx(expected["before"], abs=1e-5)
    assert_equal(result, expected)
    mine, theirs = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "run", folder))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            mine[name], tensor, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_without_a_compiler_torchs_optimizer_trains_the_same(
    reference: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    case = shaped(Case("bare", parallel=zero(2, offload_optimizer="cpu")))
    env = ENV | {"PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    result = run_ranks(train, 2, case, str(tmp_path / "run"), tmp_path=tmp_path, timeout=300, env=env)[0]
    assert result["optimizer"] == "AdamW"
    assert_equal(result, reference[0])
    assert not (tmp_path / "ops").exists()


@pytest.mark.parametrize(("stage", "offload"), [(2, {"offload_optimizer": "cpu"}), (3, BOTH)])
def test_a_run_resumes_where_it_stopped(stage: int, offload: dict[str, str], tmp_path: Path) -> None:
    case = shaped(Case("whole", parallel=zero(stage, **offload), save=True))
    whole = launched(case, tmp_path / "run")
    for path in sorted((tmp_path / "run").glob("checkpoint-*"))[1:]:
        path.rename(tmp_path / path.name)  # only the first is left to resume from
    resumed = launched(case, tmp_path / "run", resume=True)
    assert_equal(resumed, whole)
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "run" / "final"
    model = AutoModelForCausalLM.from_pretrained(folder)
    files = load_file(folder / "model.safetensors")
    assert {name for name, _ in model.named_parameters()} == files.keys()


def larger(vocab: int = 512) -> LlamaForCausalLM:
    """A model whose parts are worth a file: DeepSpeed keeps what is below a MiB in memory."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "vocab_size": vocab}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64))


def arguments(folder: str, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        folder, max_steps=2, per_device_train_batch_size=1, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_steps=1, learning_rate=1e-3, **more,
    )  # fmt: skip


class FileSizes(TrainerCallback):
    """Bytes in a folder after each step: DeepSpeed removes its files at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()))


def swap(
    rank: int, world_size: int, settings: dict[str, Any] | None, folder: str, bf16: bool
) -> tuple[list[float], list[int]]:
    from hf_parallel import HFParallelCallback

    sizes = FileSizes(Path(folder))
    callbacks = [sizes] if settings is None else [sizes, HFParallelCallback(settings)]
    data = tiny.rows(8)
    trainer = Trainer(
        larger(8192), arguments(folder, bf16=bf16), train_dataset=data, data_collator=tiny.collate, callbacks=callbacks
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], sizes.found


@pytest.mark.parametrize(
    ("offload", "bf16", "same_as"),
    [(("offload_optimizer",), False, None), (("offload_optimizer", "offload_param"), True, zero(3))],
    ids=["optimizer", "both"],
)
def test_files_hold_what_is_offloaded_and_change_nothing(
    offload: tuple[str, ...], bf16: bool, same_as: dict[str, Any] | None, tmp_path: Path
) -> None:
    from hf_parallel.deepspeed.ops import ASYNC_IO, build, refuse_missing_aio

    try:
        refuse_missing_aio()
    except ConfigError:
        pytest.skip("the headers of libaio are not installed")
    build([ASYNC_IO])
    files = tmp_path / "files"
    files.mkdir()
    settings = zero(3, nvme_path=str(files), **dict.fromkeys(offload, "nvme"))
    (mine, sizes), _ = run_ranks(swap, 2, settings, str(files), bf16, tmp_path=tmp_path, timeout=300, env=ENV)
    (theirs, _), _ = run_ranks(
        swap, 2, same_as, str(tmp_path / "whole"), bf16, tmp_path=tmp_path, timeout=300, env=ENV
    )
    assert mine == pytest.approx(theirs, abs=1e-5)
    count = sum(p.numel() for p in larger(8192).parameters())
    assert min(sizes) > 12 * count  # fp32 copy and both states of Adam


def hold(rank: int, world_size: int, settings: dict[str, Any], folder: str) -> float:
    """Bytes per parameter that live after a step, wherever they are."""
    import gc

    from hf_parallel import HFParallelTrainer, load_recipe

    model = larger()
    count = sum(p.numel() for p in model.parameters())
    data = tiny.rows(8)
    config = load_recipe("cpu_dp2_deepspeed").with_overrides(**settings)
    given = arguments(folder, bf16=True)
    trainer = HFParallelTrainer(model, given, train_dataset=data, data_collator=tiny.collate, config=config)
    trainer.train()
    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.device.type == "cpu"]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / count


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (zero(1, offload_optimizer="none"), 2 + 12 / 2),
        (zero(2, offload_optimizer="none"), 2 + 12 / 2),
        ({}, 2 + 2 / 2 + 16 / 2),  # the recipe: stage 2, its gradients stay beside the copies on the host
        (zero(3, offload_optimizer="none"), 16 / 2),
        (zero(3, **BOTH), 20 / 2),
    ],
    ids=["1", "2", "2_cpu", "3", "3_both"],
)
def test_a_rank_holds_the_bytes_of_the_formula(settings: dict[str, Any], expected: float, tmp_path: Path) -> None:
    found = run_ranks(hold, 2, settings, str(tmp_path / "run"), tmp_path=tmp_path, timeout=300, env=ENV)
    for held in found:
        assert held == pytest.approx(expected, rel=0.05)


def evaluate_first(rank: int, world_size: int, case: Case, folder: str) -> str:
    trainer = make_trainer(case, Path(folder), world_size)
    trainer.evaluate()
    with pytest.raises(ConfigError) as caught:
        trainer.train()
    return str(caught.value)


def test_evaluation_before_training_is_refused_where_it_would_leave_no_optimizer(tmp_path: Path) -> None:
    case = Case("stage3", parallel=zero(3), evaluate=True)
    said = run_ranks(evaluate_first, 2, case, str(tmp_path / "run"), tmp_path=tmp_path, timeout=120, env=ENV)
    assert all("zero.stage=3 with evaluate() or predict() before train()" in text for text in said), said
