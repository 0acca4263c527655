"""Which elements of a gradient a rank counts: over all ranks of a model copy, each element exactly once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from hf_parallel.compat.private_clipping import answer_norms_of_nothing
from hf_parallel.data_parallel.flat import refuse_overlaps
from hf_parallel.data_parallel.replica_wire import ReplicaSettings
from hf_parallel.data_parallel.replicas import Replicas
from hf_parallel.engine.gradients.changed_parts import ChangedParts
from hf_parallel.engine.gradients.counted import Counted
from hf_parallel.engine.gradients.global_norm import GlobalNorm
from hf_parallel.engine.gradients.optimizer_guard import OptimizerGuard
from hf_parallel.engine.gradients.sync import GradientSync
from hf_parallel.engine.gradients.told import ToldOverParts
from hf_parallel.errors import UnsupportedError
from hf_parallel.guards.gradients.arrivals import Arrivals
from hf_parallel.guards.gradients.showing import ShownGradients
from hf_parallel.guards.optimizers.settings import OptimizerSettings
from hf_parallel.ledger import Ledger, build_ledger
from hf_parallel.mesh.groups import Mesh
from hf_parallel.mesh.shape import MeshShape
from hf_parallel.tensor_parallel.layout import ShardSpec


ALONE = Mesh.build(MeshShape(1, 1, 1), timeout=timedelta(seconds=5))


class Model(nn.Module):
    """A first and a second stage that share `shared`; the matrix is sharded, the bias is not."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("shared", (5, 4)), ("matrix", (7, 4)), ("bias", (4,)), ("late", (3, 3))):
            parameter = nn.Parameter(torch.zeros(shape))
            parameter.grad = torch.randn(shape, generator=generator)
            self.register_parameter(name, parameter)


SPECS = {"matrix": ShardSpec.contiguous(0, 7), "shared": ShardSpec.contiguous(1, 4)}
STAGES = {"shared": (0, 1), "matrix": (0,), "bias": (0,), "late": (1,)}


def syncs(model: Model, shape: MeshShape) -> Iterator[tuple[Ledger, GradientSync]]:
    """What every rank of one model copy has, without process groups: sharded parameters with sharded gradients."""
    specs = SPECS if shape.tp_size > 1 else {}
    holders = STAGES if shape.pp_size > 1 else dict.fromkeys(STAGES, (0,))
    ledger = build_ledger(model, pp_size=shape.pp_size, holds=lambda s, name: s in holders[name], specs=specs)
    for rank in range(shape.mp_size):
        mesh = dataclasses.replace(ALONE, shape=shape, rank=rank)
        held = {}
        for entry in ledger.held_by(mesh.pp_rank):
            gradient: Any = model.get_parameter(entry.name).grad
            if entry.spec is not None:
                gradient = entry.spec.shard(gradient, shape.tp_size, mesh.tp_rank)
            held[entry.name] = nn.Parameter(torch.zeros_like(gradient))
            held[entry.name].grad = gradient.clone()
        sync = GradientSync.__new__(GradientSync)  # its constructor makes groups
        sync.ledger, sync.parameters, sync.mesh = ledger, held, mesh
        sync._counted, sync.changed_parts = Counted(ledger, mesh), ChangedParts(lambda: torch.zeros(()), shape.tp_size)
        sync.arrivals, sync.settings = Arrivals(list(held.values())), OptimizerSettings(mesh, held)
        counted = sync._counted.of_stage
        sync.shown = ShownGradients(ledger, held, mesh, counted, lambda text: nullcontext(), sync.settings)
        sync.replicas = Replicas(ledger, held, mesh, ReplicaSettings(), sync._counted.of_model)
        told = ToldOverParts(mesh, held.values(), sync.settings, sync.replicas)
        sync.total_norm = GlobalNorm(held, mesh, sync._counted, sync.replicas, told, sync.shown)
        yield ledger, sync


@pytest.mark.parametrize("shape", [MeshShape(1, 1, 1), MeshShape(1, 2, 1), MeshShape(1, 1, 2), MeshShape(1, 2, 3)])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_the_ranks_of_a_model_copy_count_every_element_once(shape: MeshShape, norm_type: float) -> None:
    model = Model()
    parts = torch.stack([sync.norm(norm_type) for _, sync in syncs(model, shape)]).double()
    together = parts.max() if norm_type == float("inf") else parts.pow(norm_type).sum().pow(1 / norm_type)
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type)
    assert float(together) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_is_torchs(max_norm: float) -> None:
    model, (_, sync) = Model(), next(syncs(Model(), MeshShape(1, 1, 1)))
    norm = sync.clip(max_norm)
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sync.parameters[name].grad, parameter.grad)


def test_half_precision_gradients_are_measured_in_fp32() -> None:
    _, sync = next(syncs(Model(), MeshShape(1, 1, 1)))
    sync.parameters["late"] = nn.Parameter(torch.zeros(3, 3, dtype=torch.float16))
    sync.parameters["late"].grad = torch.full((3, 3), 300.0, dtype=torch.float16)  # its square overflows fp16
    assert float(sync.norm()) == pytest.approx(900.0, rel=1e-3)


def test_an_optimizer_keeps_live_parameters_only_and_steps_on_reduced_gradients_only() -> None:
    model = Model()
    ledger = build_ledger(model, pp_size=1, holds=lambda stage, name: True, specs={})
    live = {name: p for name, p in model.named_parameters() if name != "late"}
    sync = GradientSync(ledger, live, ALONE)
    optimizer = torch.optim.AdamW(model.parameters())
    OptimizerGuard(optimizer, sync)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in live.values()]
    with pytest.raises(UnsupportedError, match=r"gradients that were never reduced.*accelerator\.backward\(loss\)"):
        optimizer.step()
    sync.reduce(0.5)
    optimizer.step()
    with pytest.raises(UnsupportedError, match="never reduced"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # nothing to apply: allowed


def test_a_whole_tensor_optimizer_is_refused_on_shards_only() -> None:
    from transformers.optimization import Adafactor

    for shape, fails in ((MeshShape(1, 1, 2), True), (MeshShape(1, 2, 1), False)):
        _, sync = next(syncs(Model(), shape))
        optimizer = Adafactor(list(sync.parameters.values()), lr=1e-3, relative_step=False, scale_parameter=False)
        if fails:
            with pytest.raises(UnsupportedError, match=r"Adafactor.*AdamW.*or tp_size 1"):
                OptimizerGuard(optimizer, sync)
        else:
            OptimizerGuard(optimizer, sync)


def test_parameters_that_share_memory_are_not_partitioned() -> None:
    first = nn.Parameter(torch.zeros(4, 4))
    second = nn.Parameter(first.data[2:])
    with pytest.raises(UnsupportedError, match=r"parameters a and b are two objects that share memory"):
        refuse_overlaps([("a", first), ("b", second), ("c", nn.Parameter(torch.zeros(4)))])
    refuse_overlaps([("a", first), ("tied", first), ("c", nn.Parameter(torch.zeros(4)))])


class Answers:
    """Says what norm nothing has, as a model whose other stages have gradients."""

    def __init__(self, answer: float | None) -> None:
        self.answer, self.asked = answer, 0

    def norm_of_nothing(self, norm_type: float) -> torch.Tensor | None:
        self.asked += 1
        return None if self.answer is None else torch.tensor(self.answer)


def test_of_several_models_of_a_process_the_newest_that_trains_says_the_norm_of_nothing() -> None:
    first, second, third = Answers(1.0), Answers(2.0), Answers(None)
    for owner in (first, second, third):
        answer_norms_of_nothing(owner)
    assert float(nn.utils.clip_grad_norm_([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))], 1.0)) == 2.0
    asked = [third.asked, second.asked, first.asked]
    assert asked == [1, 1, 0], "another order on another rank would wait for ever"
