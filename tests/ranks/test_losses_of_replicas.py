"""On several replicas losses are those of stock DDP, and a warning says where these are not those of one process.

The stock Trainer multiplies every loss by the number of replicas, because it takes each for a sum over tokens divided by their
number: a router's auxiliary loss, a mean that ignores the number and a penalty then count once a replica. Rows have equally many
labels, and those of the router are alike, so that means over replicas are those over all rows: what the warning tells
to do gives the losses of one process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_runner import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import ENV
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast


BATCH, LENGTH, VOCAB = 8, 12, 96
LAYOUTS: dict[str, tuple[int, int, dict[str, Any] | None]] = {  # processes, replicas, settings
    "one": (1, 1, None),
    "stock": (2, 2, None),
    "dp2": (2, 2, {"zero": {"stage": 1}}),
    "zero3": (2, 2, {"zero": {"stage": 3}}),
    "dp2_pp2": (4, 2, {"pp_size": 2, "num_microbatches": 2}),
    "dp2_tp2": (4, 2, {"tp_size": 2}),
}
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": VOCAB},
}


class OwnMean(LlamaForCausalLM):
    """A mean of its own; takes `num_items_in_batch` among all else, and ignores it."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Told(OwnMean):
    accepts_loss_kwargs = False


class WithPenalty(LlamaForCausalLM):
    """The sum over tokens by their number, and a penalty on the logits."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        output = super().forward(input_ids, labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss + 0.1 * output.logits.logsumexp(-1).pow(2).mean()
        return output


def tokens(outputs: Any, labels: Tensor) -> Tensor:
    """The losses of all labels, [B S-1]."""
    logits = outputs.logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none").view(len(labels), -1)


def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    mine = tokens(outputs, labels)
    return (mine * (labels[:, 1:] != -100)).sum() / (labels[:, 1:] != -100).sum()


def total(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return 0.01 * tokens(outputs, labels).sum()


def counted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return tokens(outputs, labels).sum() / num_items_in_batch


def counted_and_more(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return counted(outputs, labels, num_items_in_batch) + 0.1 * outputs.logits.logsumexp(-1).pow(2).mean()


def llama(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> Any:
    return kind(LlamaConfig(**SIZES))


def mixtral(is_mended: bool = False) -> Any:
    weight = 1.0 if is_mended and torch.distributed.is_initialized() else 2.0
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=weight)
    )


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Tensor] | None, float]] = {
    "plain": (llama, None, 0.0),
    "router": (mixtral, None, 0.0),
    "own_mean": (functools.partial(llama, OwnMean), None, 0.0),
    "own_penalty": (functools.partial(llama, WithPenalty), None, 0.0),
    "mean": (llama, mean, 0.0),
    "total": (llama, total, 0.0),
    "counted": (llama, counted, 0.0),
    "counted_and_more": (llama, counted_and_more, 0.0),
    "smoothed": (llama, None, 0.1),
    "router_mended": (functools.partial(mixtral, True), None, 0.0),
    "own_mean_mended": (functools.partial(llama, Told), None, 0.0),
    "mean_mended": (llama, mean, 0.0),
}
WARNED = {
    "router": "it adds 2 (config.router_aux_loss_coef) times the auxiliary loss of its routers",
    "own_mean": "it does not use num_items_in_batch",
    "mean": "it does not use num_items_in_batch, and does not grow with the rows",
    "counted_and_more": "a part of it is not divided by num_items_in_batch",
}


Run = tuple[dict[str, list[float]], dict[str, list[str]]]  # by case: losses, and warnings


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def rows(is_alike: bool) -> list[dict[str, Tensor]]:
    """Rows of which each has three labels that do not count; every batch has one row over and over where they are alike."""
    count = 6 * BATCH
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    if is_alike:
        ids = ids[:: 2 * BATCH].repeat_interleave(2 * BATCH, 0)
    return [{"input_ids": row, "labels": row.masked_fill(torch.arange(LENGTH) < 3, -100)} for row in ids]


def trains(rank: int, world_size: int, layout: str, folder: str) -> Run:
    from hf_parallel import HFParallelCallback

    found: dict[str, list[float]] = {}
    told: dict[str, list[str]] = {}
    _, replicas, parallel = LAYOUTS[layout]
    heard = Heard()
    logging.getLogger("hf_parallel").addHandler(heard)
    for name, (model, function, smoothing) in CASES.items():
        heard.lines.clear()
        torch.manual_seed(0)
        arguments = TrainingArguments(
            f"{folder}/{name}",
            per_device_train_batch_size=BATCH // replicas,
            per_device_eval_batch_size=BATCH // replicas,
            gradient_accumulation_steps=1 if name.endswith("mended") else 2,
            average_tokens_across_devices=name != "mean_mended",
            max_steps=3,
            logging_steps=1,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            label_smoothing_factor=smoothing,
            train_sampling_strategy="sequential",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        callbacks = [] if parallel is None else [HFParallelCallback({}, **parallel)]
        data = rows(name.startswith("router"))
        trainer = Trainer(
            model(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks, compute_loss_func=function
        )
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.save_model(f"{folder}/{name}")
        found[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [evaluated]
        told[name] = [line for line in heard.lines if "every loss by the number of replicas" in line]
        if parallel is not None:
            trainer.hf_parallel_session.watchdog.stop()
    return found, told


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Run, Path]]:
    @functools.cache
    def run(layout: str) -> tuple[Run, Path]:
        world, folder = LAYOUTS[layout][0], tmp_path_factory.mktemp(layout)
        options: dict[str, Any] = {"tmp_path": folder, "timeout": 240, "init_group": world > 1, "env": ENV}
        runs: list[Run] = run_ranks(trains, world, layout, str(folder), **options)
        told = {name: sorted({line for _, lines in runs for line in lines[name]}) for name in CASES}
        return (runs[0][0], told), folder

    return run


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in ("one", "stock")])
def test_losses_and_weights_are_those_of_stock_replicas(
    layout: str, name: str, run_of: Callable[[str], tuple[Run, Path]]
) -> None:
    (losses, told), here = run_of(layout)
    (expected, _), there = run_of("one" if name.endswith("mended") else "stock")
    assert losses[name] == pytest.approx(expected[name], rel=1e-5)
    weights = [load_file(folder / name / "model.safetensors") for folder in (here, there)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[1].items():
        assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), key
    if name in WARNED:
        (line,) = told[name]
        assert f"({LAYOUTS[layout][1]}), so that part of loss and gradients is 2 times that of one process" in line
        assert WARNED[name] in line
    elif name != "router_mended":
        assert not told[name]
