"""One entry of the zoo with LoRA on its linear layers: as two pipeline stages, and as two tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from hf_parallel.model.support import refuse_model
from zoo import shards, sweep
from zoo.models import batch, build, quiet, why_not
from zoo.sweep import deadline, samples_of, verdict_of


RANK = 4
SPREAD = 0.05  # of the B factors, which PEFT starts at 0: the gradient of A would be 0 too
PP, TP, TP_LINEAR = "pp2", "tp2", "tp2 without experts"
LAYOUTS = (PP, TP, TP_LINEAR)


@dataclass
class Outcome:
    """One entry on one layout.

    Args:
        verdict: "exact"; "refused": the product said why not; "failed": a difference, or an error of another kind.
        dtype: Precision in which it is exact.
        difference: Largest relative difference of the loss or an adapter's gradient from one process's, in fp32.
        note: What was said.
    """

    verdict: str = "failed"
    dtype: str = ""
    difference: float | None = None
    note: str = ""


@dataclass
class LoraRow:
    """What the sweep found out about one entry.

    Args:
        name: Type, or type@variant.
        verdict: Where no layout was tried, why: "unusable": the model cannot train; "not with PEFT": the model with
            adapters cannot be made, or cannot train, in one process; "failed".
        adapters: Tensors that train.
        reached: Those of them with a gradient that is not zero.
        on_experts: Whether PEFT adapts weights of experts beside linear layers; tp refuses that.
        layouts: Results by layout; `TP_LINEAR` only if `on_experts`.
        note: PEFT's error, or the other reason.
    """

    name: str
    verdict: str = ""
    adapters: int = 0
    reached: int = 0
    on_experts: bool = False
    layouts: dict[str, Outcome] = field(default_factory=dict)
    note: str = ""

    @property
    def failed(self) -> bool:
        return "failed" in (self.verdict, *(outcome.verdict for outcome in self.layouts.values()))


def sweep_lora(name: str, seconds: int = 240) -> LoraRow:
    """Everything about one entry, in `seconds` for each layout; never raises."""
    row = LoraRow(name)
    try:
        with deadline(seconds), quiet():
            row.note = why_not(name) or ""
            row.verdict = "unusable" if row.note else ""
            if not row.note:
                _train_whole(row)
    except Exception as error:
        row.verdict, row.note = verdict_of(error)
    if not row.verdict:
        row.layouts[PP] = _outcome(_on_stages, name, seconds)
        row.layouts[TP] = _outcome(_on_ranks, name, seconds)
        if row.on_experts:
            row.layouts[TP_LINEAR] = _outcome(_linear_on_ranks, name, seconds)
    return row


def adapted(name: str, targets: str | Iterable[str] = "all-linear") -> Any:
    """A tiny PEFT model of an entry in training mode; every call gives the same weights."""
    chosen = targets if isinstance(targets, str) else sorted(targets)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=chosen, task_type="CAUSAL_LM")
    model: Any = get_peft_model(build(name), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.copy_(SPREAD * torch.randn(parameter.shape, generator=generator))
    return model.train()


def _train_whole(row: LoraRow) -> None:
    """Whether PEFT can do it in one process, and which adapters the batches reach."""
    try:
        model = adapted(row.name)
        losses = [model(**sample).loss for sample in samples_of(row.name, model.get_base_model())]
        sum(losses).backward()
    except TimeoutError:
        raise
    except Exception as error:  # PEFT's, or the model's with layers that PEFT replaced
        row.verdict, row.note = "not with PEFT", f"{type(error).__name__}: {error}"
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    row.adapters = len(trained)
    row.reached = sum(parameter.grad is not None and bool(parameter.grad.any()) for parameter in trained)
    config = model.peft_config["default"]
    row.on_experts = bool(config.target_parameters and config.target_modules)
    if not row.reached or not all(map(math.isfinite, losses)):
        shown = ", ".join(f"{float(loss):.3g}" for loss in losses)
        row.verdict, row.note = "not with PEFT", f"the losses are {shown}; {row.reached} adapters have a gradient"


def _outcome(examine: Callable[[str], Outcome], name: str, seconds: int) -> Outcome:
    try:
        with deadline(seconds), quiet():
            return examine(name)
    except Exception as error:
        verdict, note = verdict_of(error)
        return Outcome(verdict, note=note)


def _on_stages(name: str) -> Outcome:
    model = adapted(name)
    refuse_model(model, 2)
    row = sweep.Row(name)
    sweep.examine(row, model, samples_of(name, model.get_base_model()), (2,))
    split = row.splits[2]
    evaluation = "" if split.evaluation in ("exact", "") else f"evaluation: {split.evaluation}"
    return Outcome(row.verdict, "fp32", split.difference, row.note or evaluation)


def _on_ranks(name: str, targets: str | Iterable[str] = "all-linear") -> Outcome:
    model = adapted(name, targets)
    refuse_model(model, 2, tp_size=2)
    row = shards.ShardRow(name, 2)
    shards.examine(row, model, batch(name, model.get_base_model()))
    return Outcome(row.verdict, row.dtype, row.difference, row.note)


def _linear_on_ranks(name: str) -> Outcome:
    """With the linear layers alone that `all-linear` stands for."""
    return _on_ranks(name, adapted(name).peft_config["default"].target_modules)
