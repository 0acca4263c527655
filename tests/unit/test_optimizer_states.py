"""Memory of optimizers is what they keep, by the names of TrainingArguments.optim."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames
from typer.testing import CliRunner

from hf_parallel import Cluster, predict
from hf_parallel.cli.main import app
from hf_parallel.dry_run.rank.run import Job, run_dry
from hf_parallel.errors import ConfigError
from hf_parallel.memory.estimate import OVERHEAD, estimate
from hf_parallel.memory.optimizers import ADAMW, OPTIMIZERS, kept_bytes, more_of_embedding, optimizer_of
from hf_parallel.memory.shape import shape_of_config
from hf_parallel.memory.terms import Work, layout_of
from hf_parallel.settings.config import HFParallelConfig


MOMENTUM = "sgd_momentum"
QUICK = (ADAMW, MOMENTUM, "adafactor", "adamw_8bit", "lion_32bit")
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=8192,
)
WORK = Work(rows=4, length=128)


def test_the_names_are_those_of_training_arguments() -> None:
    assert {one for one in OPTIMIZERS if one != MOMENTUM} <= {one.value for one in OptimizerNames}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in QUICK and dtype == torch.bfloat16 else pytest.mark.long)
        for name in OPTIMIZERS
        for dtype in (torch.float32, torch.bfloat16)
        if "paged_ademamix" not in name  # bitsandbytes makes none without a GPU
    ],
)
def test_a_trainer_with_the_name_keeps_as_many_bytes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a matrix and of the embedding of a model, after a step on the CPU; fused AdamW keeps what AdamW does."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=512,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(dtype)
    more = {"optim": "sgd", "optim_args": "momentum=0.9"} if name == MOMENTUM else {"optim": name}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], learning_rate=1e-3, **more)  # type: ignore[arg-type]
    trainer = Trainer(model=model, args=arguments)
    trainer.create_optimizer()
    model(input_ids=torch.ones(1, 4, dtype=torch.int64), labels=torch.ones(1, 4, dtype=torch.int64)).loss.backward()
    trainer.optimizer.step()  # type: ignore[union-attr]

    def each(parameter: Tensor) -> float:
        state = trainer.optimizer.state[parameter]  # type: ignore[union-attr]
        own = [one for key, one in state.items() if isinstance(one, Tensor) and "qmap" not in key]
        return sum(one.nbytes for one in own) / parameter.numel()

    element, factors = dtype.itemsize, 4 * (256 + 512) / (256 * 512) if name == "adafactor" else 0.0
    matrix, table = model.model.layers[0].mlp.up_proj.weight, model.model.embed_tokens.weight
    assert each(matrix) == pytest.approx(kept_bytes(name, element) + factors, abs=1e-3)
    assert each(table) == pytest.approx(kept_bytes(name, element) + more_of_embedding(name) + factors, abs=1e-3)


def test_arguments_of_a_trainer_name_an_optimizer() -> None:
    assert optimizer_of("adamw_bnb_8bit", None) == "adamw_bnb_8bit"
    assert optimizer_of("sgd", None) == optimizer_of("sgd", "momentum=0.0") == "sgd"
    assert optimizer_of("sgd", "nesterov=true, momentum=0.9") == MOMENTUM
    assert optimizer_of("galore_adamw", "rank=64") == ADAMW  # counted as AdamW, as all were


def dry(made: Callable[..., Any], section: dict[str, Any], precision: Any) -> int:
    """The peak of a dry run that trains with another optimizer."""
    with mock.patch.object(torch.optim, "AdamW", lambda parameters, lr, fused: made(parameters, lr)):
        config = HFParallelConfig.from_mapping(section)
        processes = max(config.pp_size, 2 if config.zero.stage else 1)
        jobs = [
            Job(config, CONFIG, WORK, rank, processes, processes, precision=precision)
            for rank in range(config.pp_size)
        ]
        return max(run_dry(one).peak_bytes for one in jobs)


MADE: dict[str, Callable[..., Any]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr),
    MOMENTUM: lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "adafactor": lambda parameters, lr: Adafactor(parameters, lr, scale_parameter=False, relative_step=False),
}


PP2, ZERO1 = {"pp_size": 2}, {"zero": {"stage": 1}}
RUNS: list[tuple[str, dict[str, Any]]] = [(name, section) for name in MADE for section in ({}, PP2)]
RUNS += [("sgd", ZERO1), (MOMENTUM, ZERO1)]  # Adafactor needs whole matrices, which flat parts are not


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.long), "half"])
@pytest.mark.parametrize(("name", "section"), RUNS)
def test_an_estimate_with_another_optimizer_is_the_peak_of_a_dry_run(
    name: str, section: dict[str, Any], precision: Any
) -> None:
    config = HFParallelConfig.from_mapping(section)
    processes = max(config.pp_size, 2 if config.zero.stage else 1)
    layout = dataclasses.replace(layout_of(config, processes, processes, precision), optim=name)
    found = estimate(shape_of_config(CONFIG, precision), layout, WORK)
    assert found.gpu_bytes - found.gpu[OVERHEAD] == pytest.approx(dry(MADE[name], section, precision), rel=0.05)


def test_a_plan_counts_the_optimizer_that_is_named() -> None:
    cluster, layout = Cluster(1, 1, "a100_80"), {"dtype": "fp32"}

    def kept(**more: Any) -> float:
        return predict(CONFIG, cluster, layout | more, seq_len=128).memory_bytes["optimizer"]

    size = kept() / 8
    assert kept(optim="sgd") == 0
    assert kept(optim=MOMENTUM) == pytest.approx(4 * size)
    table = CONFIG.vocab_size * CONFIG.hidden_size
    assert kept(optim="adamw_bnb_8bit") == pytest.approx((size - table) * 2 * (1 + 1 / 64) + 8 * table, rel=1e-3)
    assert kept(optim="lion_32bit", zero=1) == pytest.approx(4 * size)


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ({"optim": "adamw_8bits"}, "optim='adamw_8bits': unknown. Did you mean .*adamw_bnb_8bit"),
        ({"optim": "sgd", "state_bytes": (2, 2, 12)}, "optim=sgd with state_bytes=.*Leave out one"),
    ],
)
def test_an_optimizer_that_is_not_known_is_refused(layout: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        predict(CONFIG, Cluster(1, 1, "a100_80"), layout, seq_len=128)


def test_validate_takes_an_optimizer(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    command = ["validate", "cpu_pp2", "--model", str(tmp_path), "--length", "64"]
    shown = [CliRunner().invoke(app, [*command, "--optim", name]).output for name in ("sgd", ADAMW)]
    assert "optimizer state" in shown[1]
    assert "optimizer state" not in shown[0]
    refused = CliRunner().invoke(app, [*command, "--optim", "adam"])
    assert refused.exit_code == 1
    assert "optim='adam': unknown. Did you mean" in refused.output
