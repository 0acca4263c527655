"""What callbacks make of weights and gradients, and write to them: with shards as in one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callback_runs import ENV, assert_same_state, trained_with
from rank_runner import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from hf_parallel.errors import UnsupportedError


pytestmark = pytest.mark.long


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "zero3": {"zero": {"stage": 3}},
    "pp2_tp2": {"pp_size": 2, "tp_size": 2, "num_microbatches": 2},
}
BLOCK = "model.layers.0."
MATRICES = ("model.embed_tokens.weight", *(f"{BLOCK}{name}.weight" for name in ("self_attn.q_proj", "mlp.down_proj")))
Number = Callable[[Tensor], Any]

# Each mixes elements: over the dimension that is cut, over the other one, or over both.
NUMBERS: dict[str, Number] = {
    "gram": lambda p: (p @ p.T - torch.eye(p.shape[0])).pow(2).sum(),
    "gram_of_columns": lambda p: (p.T @ p).abs().sum(),
    "spectral": lambda p: torch.linalg.matrix_norm(p, 2),
    "rows": lambda p: p.norm(dim=1).sum(),
    "spread_of_rows": lambda p: p.norm(dim=1).std(),
    "columns": lambda p: p.norm(dim=0).sum(),
    "unit_rows": lambda p: (p / p.norm(dim=1, keepdim=True)).pow(4).sum(),
    "unit_columns": lambda p: (p / p.norm(dim=0, keepdim=True)).pow(4).sum(),
    "softmax_of_columns": lambda p: p.softmax(dim=0).pow(2).sum(),
    "softmax_of_rows": lambda p: F.softmax(p, 1).pow(2).sum(),
    "cumsum": lambda p: p.cumsum(0).abs().sum() + p.cumsum(1).abs().sum(),
    "sort": lambda p: (p.sort(dim=0).values * torch.arange(p.shape[0]).unsqueeze(1)).sum(),
    "topk": lambda p: p.topk(3, dim=0).values.sum() + p.topk(3, dim=1).values.sum(),
    "quantile": lambda p: torch.quantile(p.abs(), 0.7, dim=0).sum(),
    "differences": lambda p: p.diff(dim=0).abs().sum() + p.diff(dim=1).abs().sum(),
    "flipped": lambda p: (p.flip(0) - p.flip(1) if p.shape[0] == p.shape[1] else p.flip(0) - p).abs().sum(),
    "normalized": lambda p: F.normalize(p, dim=0).pow(4).sum() + F.normalize(p, dim=1).pow(4).sum(),
    "cosines": lambda p: F.cosine_similarity(p, -2 * p, dim=1).sum(),
    "distances": lambda p: torch.cdist(p, p).sum(),
    "logsumexp": lambda p: p.logsumexp(0).sum() + p.logsumexp(1).sum(),
    "triangle": lambda p: p.tril().abs().sum() + p.triu().pow(2).sum(),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p).abs().sum(),
    "vector": lambda p: (p @ torch.ones(p.shape[1])).abs().sum() + (torch.ones(p.shape[0]) @ p).abs().sum(),
    "stacked": lambda p: torch.stack([p, 2 * p]).std() + torch.cat([p, p]).norm(),
    "outer": lambda p: torch.outer(p.abs().mean(0), p.abs().mean(1)).sum(),
    "mean_squares": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "largest": lambda p: p.argmax(0).float().sum() + p.argmax(1).float().sum(),
    "numpy": lambda p: p.detach().numpy().std(),
}


def centred(p: Any) -> None:
    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def orthogonal(p: Any) -> None:
    x = p.grad / (p.grad.norm() + 1e-7)
    for _ in range(2):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    p.grad = x


def unit_gradient(p: Any) -> None:
    p.grad = F.normalize(p.grad, dim=0)


def kept_largest(p: Any) -> None:
    p.grad.mul_(p.grad.abs() >= p.grad.abs().topk(3, dim=1).values[:, -1:])


def tangent(p: Any) -> None:
    p.grad.sub_(p * (p * p.grad).sum(0, keepdim=True) / p.pow(2).sum(0, keepdim=True))


def summed_data(p: Any) -> None:
    p.grad.data = p.grad.data.cumsum(0)


def triangle(p: Any) -> None:
    p.grad.tril_()


def triangle_of_double(p: Any) -> None:
    doubled = p.grad * 2
    doubled.tril_()
    p.grad = doubled


def unit_columns(p: Any) -> None:
    p.data = F.normalize(p.data, dim=0)


def limited_rows(p: Any) -> None:
    p.renorm_(2, 0, 0.05)


def softmaxed(p: Any) -> None:
    p.copy_(p.softmax(0))


def large_rows(p: Any) -> None:
    p.mul_((p.norm(dim=1) > p.norm(dim=1).median()).unsqueeze(1))


def product(p: Any) -> None:
    p.grad.addmm_(p @ p.T, p, alpha=0.1)
    p.grad.addmm_(torch.ones(p.shape[0], 2), torch.ones(2, p.shape[1]), alpha=1e-3)


def product_into(p: Any) -> None:
    torch.mm(p.grad.clone(), 0.5 * torch.eye(p.shape[1]), out=p.grad)
    torch.mm(p.detach().clone(), 0.5 * torch.eye(p.shape[1]), out=p.data)


def preconditioned(p: Any) -> None:
    """A plain tensor that is changed by a gradient."""
    left = torch.eye(p.shape[0])
    left.addmm_(p.grad, p.grad.T)
    p.grad.copy_(torch.linalg.inv(left) @ p.grad)


def added_rows(p: Any) -> None:
    rows = torch.zeros(p.shape)
    rows.index_add_(0, torch.arange(p.shape[0]), p.grad)
    p.grad.copy_(0.5 * rows)


def masked_by_weight(p: Any) -> None:
    p.grad[p.abs() < 2e-2] = 0.0


def norm_of_copies(p: Any) -> None:
    """Parameters of the user's, made of the model's."""
    p.grad.mul_(copy.deepcopy(p).norm() / nn.Parameter(2 * p.detach().clone()).norm())


def xavier(p: Any) -> None:
    nn.init.xavier_uniform_(p)


WRITES: dict[str, Callable[[Any], None]] = {
    f.__name__: f
    for f in (
        *(centred, orthogonal, unit_gradient, kept_largest, tangent, summed_data, triangle, triangle_of_double),
        *(unit_columns, limited_rows, softmaxed, large_rows, xavier),
        *(product, product_into, preconditioned, added_rows, masked_by_weight, norm_of_copies),
    )
}


def tried(number: Number, tensor: Any) -> Any:
    try:
        return float(number(tensor))
    except Exception as error:  # judged by the test
        return f"{type(error).__name__}: {error}"


class Numbers(TrainerCallback):
    """Numbers of weights, of gradients, and the gradients of these numbers."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def _note(self, kind: str, model: Any, of: Callable[[Number, Any], Any]) -> None:
        for name, parameter in model.named_parameters():
            if name in MATRICES:
                self.found |= {f"{kind} {key} {name}": of(number, parameter) for key, number in NUMBERS.items()}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        def backpropagated(number: Number, parameter: Any) -> Any:
            try:
                made = number(parameter)
                if not isinstance(made, Tensor) or not made.requires_grad:
                    return 0.0
                made.backward()
                return float(parameter.grad.pow(2).sum().sqrt())
            except Exception as error:  # judged by the test
                return f"{type(error).__name__}: {error}"
            finally:
                parameter.grad = None

        with torch.no_grad():
            self._note("weight", model, tried)
        self._note("slope", model, backpropagated)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._note("gradient", model, lambda number, parameter: tried(number, parameter.grad))


class Writes(TrainerCallback):
    def __init__(self, name: str) -> None:
        self.write = WRITES[name]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    self.write(parameter)


def numbers_of(rank: int, world_size: int, parallel: dict[str, Any] | None) -> dict[str, Any]:
    callback = Numbers()
    trained_with(callback, parallel, max_steps=1, adam_epsilon=1e-3)
    return callback.found


def written(rank: int, world_size: int, parallel: dict[str, Any] | None) -> dict[str, Any]:
    options = {"max_steps": 2, "adam_epsilon": 1e-3}
    return {name: trained_with(Writes(name), parallel, **options)["state"] for name in WRITES}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    found = [run_ranks(main, 1, None, tmp_path=folder, init_group=False, env=ENV)[0] for main in (numbers_of, written)]
    return found[0], found[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_whole_tensors(layout: str, alone: Any, tmp_path: Any) -> None:
    ranks = 4 if layout == "pp2_tp2" else 2
    found = run_ranks(numbers_of, ranks, LAYOUTS[layout], tmp_path=tmp_path, env=ENV, timeout=120.0)[0]
    refused = {key for key, value in found.items() if isinstance(value, str)}
    assert found.keys() <= alone[0].keys()
    assert len(found) > 200
    assert not refused or layout == "zero3", sorted(refused)[:5]
    assert len(refused) < len(found) / 2
    wrong = {
        k: (v, alone[0][k]) for k, v in found.items() if k not in refused and v != pytest.approx(alone[0][k], rel=2e-5)
    }
    assert not wrong


def test_what_is_written_to_shards_is_what_one_process_writes(alone: Any, tmp_path: Any) -> None:
    found = run_ranks(written, 2, LAYOUTS["tp2"], tmp_path=tmp_path, env=ENV, timeout=120.0)[0]
    for name, state in alone[1].items():
        assert_same_state(found[name], state, name)


# Changed or read by what torch does not compute from parts; it says so by itself for plain tensors beside them.
UNKNOWN_TO_PARTS: dict[str, Callable[[Any], Any]] = {
    "aten.mv": lambda p: p.grad.mv(torch.ones(p.shape[1])),
    "aten.index_select": lambda p: p.index_select(0, torch.tensor([1, 2])),
    "aten.mm.out": lambda p: torch.mm(p.detach(), torch.eye(p.shape[1]), out=p.grad),
    "as_strided": lambda p: p.grad.fill_diagonal_(0.0),
    "tolist()": lambda p: p.detach().tolist(),
}
RIGHT_ON_PARTS = ("product", "added_rows", "norm_of_copies")


def told(rank: int, world_size: int, parallel: dict[str, Any]) -> dict[str, Any]:
    options = {"max_steps": 2, "adam_epsilon": 1e-3}
    found = {name: trained_with(Writes(name), parallel, **options)["state"] for name in RIGHT_ON_PARTS}
    for name, write in UNKNOWN_TO_PARTS.items():
        WRITES[name] = write
        try:
            trained_with(Writes(name), parallel, **options)
        except UnsupportedError as error:
            found[name] = str(error)
    return found


def test_what_parts_cannot_be_used_for_is_refused_by_parameter_and_function(alone: Any, tmp_path: Any) -> None:
    ranks = run_ranks(told, 2, LAYOUTS["zero3"], tmp_path=tmp_path, env=ENV)
    for found in ranks:
        for name in UNKNOWN_TO_PARTS:
            assert name in found[name]
            assert "parameter model.embed_tokens.weight of shape (99, 32)" in found[name]
            assert "new = p.full_tensor()" in found[name]
    for name in RIGHT_ON_PARTS:
        assert_same_state(ranks[0][name], alone[1][name], name)
