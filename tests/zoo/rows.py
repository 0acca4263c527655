"""One entry of the zoo on ranks that share the sequence of each row: refused with the module named, or exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_parallel.engine.plan.share_rows import judge_rows
from hf_parallel.errors import ParallelError, UnsupportedError
from hf_parallel.model.probes import Probes
from hf_parallel.ulysses.attention import Shared, share_attention
from hf_parallel.ulysses.exchange import SequenceGroup
from hf_parallel.ulysses.forward import share_forward
from hf_parallel.ulysses.ring import Ring
from zoo.models import batch, build, quiet, why_not
from zoo.shards import AllDouble, _cast, _doubled
from zoo.sweep import FLOOR, relative


TOLERANCE = {"fp32": 1e-5, "fp64": 1e-9}


@dataclass
class RowsRow:
    """What the sweep found out about one entry.

    Args:
        name: Type, or type@variant.
        sp_size: Ranks that share a row.
        verdict: "exact", "refused", "failed" (it differs though it was not refused), or "unusable".
        dtype: Precision in which it is exact.
        documents: Whether rows of several documents are served.
        note: The refusal or the failure.
        ring: The same verdict with keys that go round; "" where it was not tried.
        ring_note: Its refusal or failure.
    """

    name: str
    sp_size: int
    verdict: str = "failed"
    dtype: str = ""
    documents: bool = False
    note: str = ""
    ring: str = ""
    ring_note: str = ""


def rows_main(rank: int, world_size: int, names: list[str], ring: bool = False) -> list[RowsRow]:
    """The entries on this rank; all ranks of the world share each row, as a ring on request."""
    torch.set_num_threads(1)
    return [_sweep(name, world_size, ring) for name in names]


def _sweep(name: str, world_size: int, ring: bool) -> RowsRow:
    row = RowsRow(name, world_size)
    with quiet():
        row.note = why_not(name) or ""
        if row.note:
            row.verdict = "unusable"
            return row
        model = _without_router_loss(build(name))
        group = SequenceGroup(dist.group.WORLD)
        shared = Shared(group, Ring(group) if ring else None)
        try:
            judge_rows(model, shared, Probes(model, torch.device("cpu")))
        except ParallelError as error:
            row.verdict, row.note = "refused", " ".join(str(error).split())
            return row
        row.documents = not shared.no_documents
        _examine(row, name, model, shared)
    return row


def _without_router_loss(model: Any) -> nn.Module:
    text = model.config.get_text_config()
    if hasattr(text, "output_router_logits"):
        text.output_router_logits = False
    return model


def _examine(row: RowsRow, name: str, model: nn.Module, shared: Shared) -> None:
    for dtype in ("fp32", "fp64"):
        if dtype == "fp64":
            model = _doubled(model)
        try:
            error = _difference(name, model, shared)
        except UnsupportedError as refusal:
            row.verdict, row.note = "refused", " ".join(str(refusal).split())
            return
        except Exception as failure:
            row.note = f"{row.note} {dtype}: {type(failure).__name__}: {str(failure)[:200]}".strip()
            return
        if error <= TOLERANCE[dtype]:
            row.verdict, row.dtype, row.note = "exact", dtype, ""
            return
        row.note = f"{row.note} differs by {error:.1e} in {dtype}".strip()


def _batches(name: str, model: nn.Module) -> list[dict[str, Any]]:
    made = [batch(name, model), batch(name, model, 3, 11, left=True), batch(name, model, 2, 13)]
    del made[-1]["attention_mask"]
    for one in made:
        one.pop("output_router_logits", None)
    return made


def _difference(name: str, model: nn.Module, shared: Shared) -> float:
    """Largest relative difference of loss and gradients over the batches, parts against the plain model."""
    is_double = next(model.parameters()).dtype == torch.float64
    errors = []
    for inputs in _batches(name, model):
        given = _cast(inputs) if is_double else inputs
        loss, expected = _measure(model, model.forward, given, is_double)
        undo = [shared.whole.install(model), share_attention(model, shared)]
        try:
            mine, parts = _measure(model, share_forward(model, model.forward, shared), given, is_double)
        finally:
            for restore in undo:
                restore()
        errors.append(relative(loss, mine, 0.0))
        largest = max(float(g.abs().max()) for g in expected.values() if g is not None and g.numel())
        for key, gradient in expected.items():
            if gradient is not None:
                part = parts[key]
                total = shared.group.total(torch.zeros_like(gradient) if part is None else part) / shared.group.size
                errors.append(relative(gradient, total, max(float(gradient.abs().max()), FLOOR * largest)))
    return max(errors)


def _measure(
    model: nn.Module, forward: Any, inputs: dict[str, Any], is_double: bool
) -> tuple[Tensor, dict[str, Tensor | None]]:
    named = dict(model.named_parameters())
    with AllDouble() if is_double else torch.enable_grad():
        loss = forward(**inputs)["loss"]
        gradients = torch.autograd.grad(
            loss, [p for p in named.values() if p.requires_grad], allow_unused=True, materialize_grads=False
        )
    trained = [key for key, p in named.items() if p.requires_grad]
    return loss.detach(), dict(zip(trained, gradients, strict=True))
