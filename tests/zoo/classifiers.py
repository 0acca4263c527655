"""One type as a classifier of rows: as two pipeline stages, and as two tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from hf_parallel.errors import ParallelError
from hf_parallel.model.probes import Probes
from hf_parallel.model.support import refuse_model
from zoo import shards, sweep
from zoo.lora import Outcome
from zoo.models import _enliven, quiet, tiny_config
from zoo.sweep import deadline, verdict_of


CLASSES = 3
TABLE = "zoo-classifiers"
MARK = "# Classifiers"
HEADER = "| type | pp2 | tp2 | note |"
LONGEST_NOTE = 200


@dataclass
class ClassifierRow:
    """What the sweep found out about one type.

    Args:
        name: The type.
        pp: On two stages.
        tp: On two ranks.
    """

    name: str
    pp: Outcome = field(default_factory=Outcome)
    tp: Outcome = field(default_factory=Outcome)

    @property
    def failed(self) -> bool:
        return "failed" in (self.pp.verdict, self.tp.verdict)


def classifier_types() -> list[str]:
    """Every type of `AutoModelForSequenceClassification`, sorted."""
    return sorted(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)


def sweep_classifier(name: str, seconds: int = 240) -> ClassifierRow:
    """Everything about one type, in `seconds` for each layout; never raises."""
    why = _why_not(name)
    if why:
        return ClassifierRow(name, Outcome("unusable", note=why), Outcome("unusable", note=why))
    return ClassifierRow(name, _outcome(_on_stages, name, seconds), _outcome(_on_ranks, name, seconds))


def classifier(name: str) -> nn.Module:
    """A tiny classifier in training mode; every call gives the same weights."""
    torch.manual_seed(0)
    config = tiny_config(name)
    config.num_labels = CLASSES
    for one in (config, config.get_text_config()):
        if getattr(one, "pad_token_id", None) is None:
            one.pad_token_id = 0
    model: nn.Module = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                _enliven(parameter, generator)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def _why_not(name: str) -> str:
    """Why a type cannot score text, whole, in one process: the exception it raises; empty if it can."""
    try:
        with quiet():
            model = classifier(name)
            for batch in Probes(model, torch.device("cpu")).check:
                model(**batch).loss.backward()
    except ParallelError:
        return ""  # ours, which each layout says
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _outcome(examine: Callable[[nn.Module, Probes], Outcome], name: str, seconds: int) -> Outcome:
    try:
        with deadline(seconds), quiet():
            model = classifier(name)
            refuse_model(model, 2, tp_size=2)
            probes = Probes(model, torch.device("cpu"))
            with probes.running():
                return examine(model, probes)
    except Exception as error:
        verdict, note = verdict_of(error)
        return Outcome(verdict, note=note)


def _on_stages(model: nn.Module, probes: Probes) -> Outcome:
    row = sweep.Row(type(model).__name__)
    sweep.examine(row, model, probes.check, (2,))
    return Outcome(row.verdict, difference=row.splits[2].difference, note=row.note)


def _on_ranks(model: nn.Module, probes: Probes) -> Outcome:
    row = shards.ShardRow(type(model).__name__, 2)
    shards.examine(row, model, probes.batch)
    return Outcome(row.verdict, row.dtype, row.difference, row.note)


def classifier_lines(rows: Sequence[ClassifierRow]) -> list[str]:
    """Counts over all rows, and a table of those that are not exact in both layouts."""

    def count(layout: str, verdict: str) -> int:
        return sum(getattr(row, layout).verdict == verdict for row in rows)

    lines = [
        f"* {layout}2: exact: {count(layout, 'exact')} of {len(rows)} types. Refused with a reason: {count(layout, 'refused')}. "
        f"Unusable: {count(layout, 'unusable')}. Failed: {count(layout, 'failed')}."
        for layout in ("pp", "tp")
    ]
    left = [row for row in rows if (row.pp.verdict, row.tp.verdict) != ("exact", "exact")]
    return [*lines, "", HEADER, "|" + "---|" * (HEADER.count(" | ") + 1), *map(_line, left)]


def _line(row: ClassifierRow) -> str:
    note = " ".join((row.pp.note or row.tp.note).split()).replace("|", "\\|")
    note = note if len(note) <= LONGEST_NOTE else f"{note[:LONGEST_NOTE].rsplit(' ', 1)[0]} ..."
    return f"| {row.name} | {row.pp.verdict} | {row.tp.verdict} | {note} |"
