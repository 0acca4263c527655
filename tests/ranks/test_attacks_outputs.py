"""Losses and metrics that read a model's outputs in unusual ways: as on one process, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from scoring import SCORED, pairs, scoring
from torch import Tensor
from torch.nn import functional
from trainer_cases import ENV, NO_NOISE
from transformers import DynamicCache, Trainer, TrainingArguments

from hf_parallel.compat.private_transformers import CACHES


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2, "num_microbatches": 4},
    "pp2_tp2": {
        "pp_size": 2, "tp_size": 2, "num_microbatches": 2, "tensor_parallel": {"vocab_parallel_loss": False},
    },
}  # fmt: skip


def gemma2() -> Any:
    """Soft caps of attention and logits, sliding windows."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 6}
    caps = {"final_logit_softcapping": 1.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}
    return Gemma2ForCausalLM(Gemma2Config(**tiny.SMALL, **sizes, **caps, pad_token_id=0))


def routed() -> Any:
    """Gives the router's logits and its loss, which counts nothing: it is no sum over rows."""
    model = tiny.mixtral()
    model.router_aux_loss_coef = model.config.router_aux_loss_coef = 0.0
    return model


def sharpness(logits: Tensor) -> Tensor:
    return 1e-2 * logits.float().logsumexp(-1).mean()


class OnResult(Trainer):
    """What stock gives, and a term on its outputs."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + sharpness(outputs.logits)
        return (loss, outputs) if return_outputs else loss


class ByPlace(Trainer):
    """Everything by its place, as of a tuple."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss, logits = outputs.to_tuple()
        assert len(outputs) == 2
        loss = loss + sharpness(logits) + sharpness(outputs[-1]) + sharpness(outputs[1:][0]) + 0.1 * outputs[0]
        return (loss, outputs) if return_outputs else loss


class ByItems(Trainer):
    """Everything by going through it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        found = dict(outputs.items())
        assert list(found) == list(outputs) == list(outputs.keys()) == ["loss", "logits"]
        assert "logits" in outputs
        loss = found["loss"] + sharpness({**outputs}["logits"])
        return (loss, outputs) if return_outputs else loss


class Weighed(Trainer):
    """A factor made of logits, without gradients of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss * (1 + outputs.logits.detach().float().std())
        return (loss, outputs) if return_outputs else loss


class InPlace(Trainer):
    """A temperature and a mask, written into the logits of a call without labels and of one with them."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        plain = {name: value for name, value in inputs.items() if name != "labels"}
        total = torch.zeros(())
        for outputs in (model(**plain), model(**inputs)):
            outputs.logits.div_(2.0)
            outputs.logits[..., 0] = -5.0
            total = total + sharpness(outputs.logits)
        loss = total + outputs.loss
        return (loss, outputs) if return_outputs else loss


class TwoBatches(Trainer):
    """Another batch of other rows and length in the same step, without labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        other = {name: value[:-1, :5].flip(0) for name, value in inputs.items() if name != "labels"}
        loss = outputs.loss + sharpness(model(**other).logits)
        return (loss, outputs) if return_outputs else loss


class Scoring(Trainer):
    """The model's loss, a multiple of it on an output, and a term that is none: all of one forward."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, scored=SCORED)
        count = (inputs["labels"][:, 1:] != -100).sum()
        loss = outputs.loss - 0.5 * outputs.log_probs.sum() / count
        if self.state.global_step > 0:
            loss = loss + 0.1 * outputs.entropy.sum() / count
        return (loss, outputs) if return_outputs else loss


class OneRow(Trainer):
    """One row after the other, each a forward, as of a list of unequal lengths."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        parts = [{name: value[row : row + 1] for name, value in inputs.items()} for row in range(2)]
        outputs = [model(**part, scored=SCORED) for part in parts]
        loss = sum(output.log_probs.sum().pow(2) for output in outputs) * 1e-3 + pairs(model, inputs)
        return (loss, outputs[0]) if return_outputs else loss


# Name -> trainer, model, settings.
CASES: dict[str, tuple[type[Trainer], Any, dict[str, Any]]] = {
    "result": (OnResult, tiny.llama, {}),
    "place": (ByPlace, tiny.gpt2, {}),
    "items": (ByItems, gemma2, {}),
    "weighed": (Weighed, tiny.llama, {}),
    "in_place": (InPlace, tiny.llama, {}),
    "two": (TwoBatches, tiny.gpt2, {}),
    "smoothed": (Trainer, gemma2, {"label_smoothing_factor": 0.1}),
    "routed": (OnResult, routed, {}),
    "scoring": (Scoring, lambda: scoring(tiny.llama), {}),
    "scoring_gemma2": (Scoring, lambda: scoring(gemma2), {}),
    "one_row": (OneRow, lambda: scoring(tiny.gpt2), {}),
}
IGNORED = ["aux_loss", "router_logits"]


def top(logits: Any, labels: Tensor) -> Tensor:
    assert isinstance(logits, Tensor)
    return logits.argmax(-1)


def hits(found: Any) -> dict[str, float]:
    kept = found.label_ids[:, 1:] != -100
    return {"hits": float((found.predictions[:, :-1] == found.label_ids[:, 1:])[kept].mean())}


def trainer_of(name: str, parallel: dict[str, Any] | None, folder: Path, **options: Any) -> Trainer:
    from hf_parallel import HFParallelCallback

    kind, build, more = CASES[name]
    arguments = TrainingArguments(
        str(folder / name),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        **NO_NOISE,
        **more,
    )
    return kind(
        model=build(),
        args=arguments,
        train_dataset=tiny.rows(19, True),  # a last batch of three rows
        eval_dataset=tiny.rows(6, True),
        data_collator=tiny.collate,
        callbacks=[] if parallel is None else [HFParallelCallback({}, **parallel)],
        **options,
    )


def attacks_main(rank: int, world_size: int, layout: str, folder: str) -> dict[str, Any]:
    parallel = LAYOUTS.get(layout)
    found: dict[str, Any] = {}
    for name in CASES:
        measures = {} if name == "one_row" else {"compute_metrics": hits, "preprocess_logits_for_metrics": top}
        trainer = trainer_of(name, parallel, Path(folder), **(measures if "scoring" not in name else {}))
        trainer.train()
        evaluated = trainer.evaluate(ignore_keys=IGNORED) if name != "one_row" else {}
        trainer.save_model()
        entries = [*trainer.state.log_history, evaluated]
        found[name] = [{k: e[k] for k in ("loss", "grad_norm", "eval_loss", "eval_hits") if k in e} for e in entries]
        if parallel is not None:
            trainer.accelerator.hf_parallel.watchdog.stop()
    return found


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("one")
    [found] = run_ranks(attacks_main, 1, "one", str(folder), tmp_path=folder, timeout=200, init_group=False, env=ENV)
    return found, folder


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2_tp2", marks=pytest.mark.slow)])
def test_unusual_losses_train_on_stages_as_on_one_process(layout: str, stock: Any, tmp_path: Path) -> None:
    world = 4 if layout == "pp2_tp2" else 2
    expected, there = stock
    for found in run_ranks(attacks_main, world, layout, str(tmp_path), tmp_path=tmp_path, timeout=300, env=ENV):
        for name in CASES:
            for mine, other in zip(found[name], expected[name], strict=True):
                assert mine == pytest.approx(other, rel=1e-5, abs=1e-6), name
    for name in CASES:
        weights = [load_file(folder / name / "model.safetensors") for folder in (tmp_path, there)]
        for key, value in weights[1].items():
            assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), f"{name} {key}"


def refusals_main(rank: int, world_size: int) -> dict[str, str]:
    from hf_parallel.errors import ParallelError

    found: dict[str, str] = {}
    trainer = trainer_of("routed", LAYOUTS["pp2"], Path("out"))
    trainer.compute_metrics = lambda given: {"count": float(np.size(given.predictions))}

    def refused(name: str, action: Any) -> None:
        try:
            found[name] = repr(action())
        except ParallelError as error:
            found[name] = f"{type(error).__name__}: {error}"

    refused("predictions", trainer.evaluate)
    batch = tiny.collate(tiny.rows(4, True))
    model = trainer.model.train()
    refused("aux", lambda: model(**batch).aux_loss)
    refused("items", lambda: dict(model(**batch)))
    refused("last", lambda: model(**batch)[-1])
    refused("hidden", lambda: model(**batch, output_hidden_states=True))
    plain = {name: value for name, value in batch.items() if name != "labels"}
    refused("place", lambda: model(**plain)[0])
    for name in CACHES:
        refused(name, lambda name=name: model(**plain, **{name: DynamicCache()}))
        refused(f"generate {name}", lambda name=name: model.generate(plain["input_ids"], **{name: DynamicCache()}))
    with torch.no_grad():
        output = model.eval()(**plain)
        functional.softmax(output.logits, -1)
        refused("evaluated", lambda: output.to_tuple())
    trainer.accelerator.hf_parallel.watchdog.stop()
    return found


def test_places_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    for found in run_ranks(refusals_main, 2, tmp_path=tmp_path, env=ENV):
        for name in ("predictions", "aux", "items"):
            assert "outputs['aux_loss'] with pp_size above 1: it is not made of the rows" in found[name], name
        assert "outputs['router_logits']" in found["last"]
        assert "output_hidden_states with pp_size=2" in found["hidden"]
        for name in CACHES:
            assert f"{name} with pp_size=2" in found[name]
            assert f"model.generate({name}) with pp_size=2" in found[f"generate {name}"]
        for name in ("place", "evaluated"):
            assert "MissingOutput: outputs by place" in found[name], name
            assert "router_logits" in found[name]
