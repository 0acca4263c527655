"""Models that score rows or label tokens train on stages and shards as in one process, in a stock Trainer with labels.

The last stage finds the last token of each row by the `pad_token_id` of the ids that it has read itself. How the labels look
is a matter of the config (numbers, a class, several classes), which the loss writes to when it is first computed.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from thinning import chosen, covering, slow_if
from trainer_cases import ENV
from transformers import Trainer, TrainingArguments


LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "one": (1, None),
    "tp2": (2, {"tp_size": 2}),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 2}),
    "pp2_tp2": (4, {"pp_size": 2, "num_microbatches": 2, "tp_size": 2}),
}
CLASSES = 3
PAD = 0


def make(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "pad_token_id": PAD}
    like_llama = {**tiny.SMALL, **small, "intermediate_size": 64}
    if name == "numbers":
        return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**like_llama, num_labels=1))
    if name in ("classes", "smoothed", "summed", "weighted"):
        like_gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_implementation": "eager"}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"vocab_size": tiny.VOCAB, "pad_token_id": PAD, "num_labels": CLASSES}
        return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**like_gpt2, **dropout, **sizes))
    if name == "several":
        config = transformers.Qwen3Config(**like_llama, head_dim=8, num_labels=CLASSES)
        return transformers.Qwen3ForSequenceClassification(config)
    if name == "tokens":
        return transformers.LlamaForTokenClassification(
            transformers.LlamaConfig(**like_llama, num_labels=CLASSES, classifier_dropout=0.0)
        )
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **rates, intermediate_size=64, pad_token_id=PAD, num_labels=CLASSES)
    return tiny.biased(transformers.BertForSequenceClassification(config))


def rows_of(name: str, count: int = 36) -> list[dict[str, Any]]:
    """Rows of odd and even lengths with the labels of a kind of model; a pad token inside of one is no padding."""
    generator = torch.Generator().manual_seed(1)
    found: list[dict[str, Any]] = []
    for index in range(count):
        ids = torch.randint(1, tiny.VOCAB, (5 + index * 3 % 8,), generator=generator)
        ids[1] = PAD
        labels: Any = int(ids[-1]) % CLASSES
        if name == "numbers":
            labels = float(ids[-1]) / tiny.VOCAB
        elif name == "several":
            labels = [float(int(ids[-1]) >> bit & 1) for bit in range(CLASSES)]
        elif name == "tokens":
            labels = (ids % CLASSES).tolist()
        found.append({"input_ids": ids.tolist(), "labels": labels})
    return found


def collated(side: str, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in features)

    def padded(values: list[int], fill: int) -> list[int]:
        gap = [fill] * (width - len(values))
        return gap + values if side == "left" else values + gap

    ids = [row["input_ids"] for row in features]
    labels = [row["labels"] for row in features]
    if isinstance(labels[0], list) and isinstance(labels[0][0], int):
        labels = [padded(row, -100) for row in labels]
    return {
        "input_ids": torch.tensor([padded(row, PAD) for row in ids]),
        "attention_mask": torch.tensor([padded([1] * len(row), 0) for row in ids]),
        "labels": torch.tensor(labels),
    }


def late(language: str, parallel: dict[str, Any] | None) -> Any:
    """A classifier on the weights of a language model, which lack its head, each rank reading its own part."""
    from transformers import LlamaForSequenceClassification

    from hf_parallel import sharded_loading

    torch.manual_seed(0)
    with sharded_loading({}, **parallel) if parallel else contextlib.nullcontext():
        return LlamaForSequenceClassification.from_pretrained(language, num_labels=1)


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


class Weighted(Trainer):
    """Classes that count differently, as transformers' documentation has it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 3.0])
        loss = torch.nn.functional.cross_entropy(outputs.logits.view(-1, CLASSES), labels.view(-1), weight=weight)
        return (loss, outputs) if return_outputs else loss


def metrics(found: Any) -> dict[str, float]:
    predictions = torch.as_tensor(found.predictions).double()
    return {"mean": predictions.mean().item(), "spread": predictions.std().item(), "rows": float(len(predictions))}


def trains(rank: int, world_size: int, parallel: dict[str, Any] | None, names: list[str], folder: str) -> Any:
    from hf_parallel import HFParallelCallback

    found = {}
    for name in names:
        arguments = TrainingArguments(
            f"{folder}/{name}",
            per_device_train_batch_size=5,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-3,
            adam_epsilon=1e-5,
            max_grad_norm=0.5,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            label_smoothing_factor=0.1 if name == "smoothed" else 0.0,
        )
        data = rows_of("numbers" if name == "late" else name)
        trainer = (Weighted if name == "weighted" else Trainer)(
            late(f"{folder}/language", parallel) if name == "late" else make(name),
            arguments,
            data_collator=functools.partial(collated, "left" if name in ("classes", "several") else "right"),
            train_dataset=data,
            eval_dataset=data[:9],
            compute_metrics=metrics,
            compute_loss_func=summed if name == "summed" else None,
            callbacks=[] if parallel is None else [HFParallelCallback({}, **parallel)],
        )
        trainer.train()
        trainer.evaluate()
        trainer.save_model(f"{folder}/{name}/final")
        keys = ("loss", "grad_norm", "eval_loss", "eval_mean", "eval_spread", "eval_rows")
        logged = [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]
        found[name] = [entry for entry in logged if entry]
        if parallel is not None:
            trainer.hf_parallel_session.watchdog.stop()
    return found


Runs = Callable[[str, tuple[str, ...]], tuple[dict[str, Any], Path]]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What runs of a layout logged, and where their models are."""

    @functools.cache
    def run(layout: str, names: tuple[str, ...]) -> tuple[dict[str, Any], Path]:
        world, parallel = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp(layout)
        tiny.llama(layers=2, pad_token_id=PAD).save_pretrained(folder / "language")
        options: dict[str, Any] = {"tmp_path": folder, "timeout": 240, "init_group": world > 1, "env": ENV}
        return run_ranks(trains, world, parallel, list(names), str(folder), **options)[0], folder

    return run


def compare(name: str, layout: str, cases: list[tuple[str, str]], run_of: Runs) -> None:
    """A run of `layout` among those of the cases that are launched together, beside one process."""
    mine, here = run_of(layout, tuple(each for each, on in cases if on == layout))
    stock, there = run_of("one", tuple(dict.fromkeys(each for each, _ in cases)))
    assert len(stock[name]) == 4  # three steps and an evaluation
    for found, expected in zip(mine[name], stock[name], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    weights = [load_file(folder / name / "final" / "model.safetensors") for folder in (here, there)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[1].items():
        assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), key
    configs = [json.loads((folder / name / "final" / "config.json").read_text()) for folder in (here, there)]
    assert configs[0] == configs[1]  # with the kind of problem that the labels showed, not that of a made-up batch


SHORT = ("numbers", "classes")
LONG = ("several", "tokens", "bert", "smoothed", "summed", "weighted", "late")
SEVERAL_AXES = ("several", "late")
CASES = [(name, layout) for name in LONG for layout in ("tp2", "pp2")] + [(name, "pp2_tp2") for name in SEVERAL_AXES]
# Slow: kinds are on stages and on shards in turns, or on both at once.
REST = [
    case
    for case in CASES
    if case[1] != "pp2_tp2" and (case[0] in SEVERAL_AXES or case not in covering(CASES, [("tp2", "pp2")]))
]


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("name", SHORT)
def test_a_classifier_trains_on_stages_and_shards_as_in_one_process(name: str, layout: str, run_of: Runs) -> None:
    compare(name, layout, [(each, on) for each in SHORT for on in ("tp2", "pp2")], run_of)


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=slow_if(case, REST)) for case in CASES],
)
def test_classifiers_of_every_kind_train_as_in_one_process(
    name: str, layout: str, request: pytest.FixtureRequest, run_of: Runs
) -> None:
    compare(name, layout, chosen(request, CASES), run_of)
