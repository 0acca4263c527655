"""Dropout under tensor parallelism: one mask for all ranks outside of pairs, one for each inside, and all can be repeated.

If these fail, ranks hold different activations and never notice, heads of different ranks drop at the same places, or a
run cannot be repeated, resumed or recomputed.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from torch import Tensor, nn
from tp_models import gathered, grads, on_all_ranks, spread
from trainer_cases import NO_NOISE, Case, compare, run_cases
from zoo.shards import AllDouble

from hf_parallel.errors import UnsupportedError
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.run.shard_seeds import PairSeeds
from hf_parallel.tensor_parallel.shard_plan import TPPlan


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# Even heads; three heads and one key-value head on two ranks; dropout inside the MLP, pairs whose root is the block;
# attention and MLP side by side.
KINDS = ("gpt2_dropout", "uneven_dropout", "biogpt_dropout", "gpt_neox_dropout")


def batch() -> dict[str, Tensor]:
    return tiny.collate(tiny.rows(3))


def sharded(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, TPPlan]:
    model = tiny.MODELS[kind]()
    spread(model)
    model.to(dtype).train()
    sample = {name: value for name, value in batch().items() if name != "labels"}
    plan = plan_tensor_parallel(model, dist.get_world_size(), sample)
    apply_tensor_parallel(model, plan, dist.group.WORLD, dist.get_rank(), lambda name: True)
    return model, plan


def loss_of(model: nn.Module, seed: int = 5) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(**batch(), use_cache=False).loss
    return loss


class Masks:
    """Every dropout mask that is drawn while this is installed, as functional dropout draws it."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []
        self._dropout = nn.functional.dropout

    def __call__(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        mask = self._dropout(torch.ones_like(x), p, training)
        if training and p > 0:
            self.drawn.append(mask)
        return x * mask

    def __enter__(self) -> Masks:
        self._patch = mock.patch.object(nn.functional, "dropout", self)
        self._patch.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._patch.__exit__(*exc)


def masks_of_ranks(rank: int, world_size: int) -> None:
    for kind in KINDS:
        model, _ = sharded(kind)
        hidden = model.get_input_embeddings().weight.shape[-1]
        with Masks() as masks:
            loss_of(model).backward()
        # Probabilities of local heads [B N S S], or local channels of an MLP; whole hidden states [B S H].
        inside = [mask for mask in masks.drawn if mask.ndim == 4 or mask.shape[-1] != hidden]
        outside = [mask for mask in masks.drawn if mask.ndim == 3 and mask.shape[-1] == hidden]
        assert len(inside) >= 2
        assert len(outside) + len(inside) == len(masks.drawn)
        assert bool(outside) == (kind != "uneven_dropout")
        for mine, other in zip(*on_all_ranks(outside), strict=True):
            assert torch.equal(mine, other), kind
        everywhere = [mask[:, :1] for ranks in on_all_ranks(inside) for mask in ranks if mask.ndim == 4]
        everywhere += [mask for ranks in on_all_ranks(inside) for mask in ranks if mask.ndim == 3]
        for i, mask in enumerate(everywhere):
            assert not any(mask.shape == other.shape and torch.equal(mask, other) for other in everywhere[:i]), kind
        assert all(torch.equal(state, torch.get_rng_state()) for state in on_all_ranks(torch.get_rng_state())), kind


def test_masks_are_equal_outside_of_pairs_and_differ_inside(tmp_path: Path) -> None:
    run_ranks(masks_of_ranks, 2, tmp_path=tmp_path)


def repeated(rank: int, world_size: int) -> None:
    for kind in KINDS:
        model, _ = sharded(kind)
        loss = loss_of(model)
        loss.backward()
        first = {name: grad.clone() for name, grad in grads(model).items()}
        assert len(set(on_all_ranks(loss.item()))) == 1, kind
        copied = copy.deepcopy(model)
        plain = copied(**batch(), use_cache=False).loss
        for other in (model, copied):
            other.zero_grad(set_to_none=True)
            again = loss_of(other)
            again.backward()
            assert torch.equal(again, loss)
            assert all(torch.equal(grad, first[name]) for name, grad in grads(other).items()), kind
        assert plain != loss
        model.eval()
        before = torch.get_rng_state()
        model(**batch(), use_cache=False).loss.backward()
        assert torch.equal(before, torch.get_rng_state()), "evaluation draws nothing"


def test_one_seed_gives_one_loss_on_all_ranks_and_the_same_again(tmp_path: Path) -> None:
    run_ranks(repeated, 2, tmp_path=tmp_path)


def checkpointed(rank: int, world_size: int) -> None:
    for kind in KINDS:
        model, _ = sharded(kind)
        loss = loss_of(model)
        loss.backward()
        first = grads(model)
        for reentrant in (False, True):
            again, _ = sharded(kind)
            again.gradient_checkpointing_enable({"use_reentrant": reentrant})
            repeated_loss = loss_of(again)
            repeated_loss.backward()
            assert torch.equal(repeated_loss, loss), (kind, reentrant)
            for name, grad in grads(again).items():
                torch.testing.assert_close(grad, first[name], rtol=1e-5, atol=1e-7)
            assert all(torch.equal(state, torch.get_rng_state()) for state in on_all_ranks(torch.get_rng_state()))


def test_a_checkpointed_block_draws_its_masks_again(tmp_path: Path) -> None:
    run_ranks(checkpointed, 2, tmp_path=tmp_path)


def score(model: nn.Module) -> Tensor:
    """Sum of logits with fixed weights, under fixed masks."""
    torch.manual_seed(5)
    with AllDouble():
        logits: Tensor = model(**{k: v for k, v in batch().items() if k != "labels"}, use_cache=False).logits
    return (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)).sum()


def slopes(rank: int, world_size: int) -> None:
    for kind in KINDS:
        model, plan = sharded(kind, torch.float64)
        score(model).backward()
        gradient = gathered(plan, grads(model))
        generator = torch.Generator().manual_seed(2)
        direction = {n: torch.randn(g.shape, generator=generator, dtype=g.dtype) for n, g in gradient.items()}
        expected = sum(float((gradient[name] * direction[name]).sum()) for name in gradient)
        specs, step, scores = plan.shard_specs(), 1e-6, []
        parameters = {name: p for name, p in model.named_parameters() if name in gradient}
        for sign in (1, -1):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    spec = specs.get(name)
                    mine = direction[name] if spec is None else spec.shard(direction[name], world_size, rank)
                    parameter.add_(mine, alpha=step if sign == 1 else -2 * step)
            scores.append(score(model).item())
        assert (scores[0] - scores[1]) / (2 * step) == pytest.approx(expected, rel=1e-6), kind


def test_the_gradient_is_that_of_the_loss_with_these_masks(tmp_path: Path) -> None:
    run_ranks(slopes, 2, tmp_path=tmp_path)


class _Broken(RuntimeError):
    pass


def broken_off(rank: int, world_size: int) -> None:
    model, _ = sharded("gpt2_dropout")
    expected = loss_of(model)
    block = model.transformer.h[1].attn

    def fail(module: nn.Module, args: Any) -> None:
        raise _Broken

    hook = block.c_proj.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(_Broken):
        loss_of(model)
    assert all(torch.equal(state, torch.get_rng_state()) for state in on_all_ranks(torch.get_rng_state()))
    hook.remove()
    assert torch.equal(loss_of(model), expected)
    plain, _ = sharded("uneven")
    assert not any("tp_rows" in vars(module) for module in plain.modules()), "nothing is installed without dropout"


def test_a_pair_that_is_broken_off_is_left(tmp_path: Path) -> None:
    run_ranks(broken_off, 2, tmp_path=tmp_path)


def test_pairs_that_run_at_the_same_time_are_refused() -> None:
    seeds, module = PairSeeds(2, 0), nn.Linear(1, 1)
    seeds.enter("a", module)
    seeds.enter("a", module)
    with pytest.raises(UnsupportedError, match="a are rows of two pairs"):
        seeds.enter("b", module)
    seeds.leave("b")
    seeds.leave("a")
    seeds.enter("b", module)
    seeds.leave("b")


BASE = Case(
    "tp2",
    model="gpt2_dropout",
    parallel={"tp_size": 2},
    accumulation=2,
    steps=4,
    variable_length=True,
    save=True,
    arguments=NO_NOISE,
)


def variant(name: str, arguments: dict[str, Any] | None = None, **settings: Any) -> Case:
    changed = {"name": name, "parallel": {**(BASE.parallel or {}), **settings}, "save": False}
    return dataclasses.replace(BASE, arguments={**NO_NOISE, **(arguments or {})}, **changed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tp_dropout")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    recompute = {"gradient_checkpointing": True}
    groups = {"activation_checkpointing": {"every": 2}}
    selective = variant("selective", activation_checkpointing={"every": 1, "mode": "selective"})
    biogpt = dataclasses.replace(variant("biogpt"), model="biogpt_dropout")
    again = dataclasses.replace(variant("biogpt_groups", **groups), model="biogpt_dropout")
    two = [BASE, variant("again"), variant("checkpointing", recompute), variant("groups", **groups), biogpt, again]
    two.append(selective)
    pipeline = {"pp_size": 2, "num_microbatches": 4}
    four = [
        variant("pp2_tp2", **pipeline),
        variant("pp2_tp2_v", schedule="zbv_zero_bubble", **pipeline),
        variant("pp2_tp2_checkpointing", recompute, **pipeline),
    ]
    return run_cases(two, 2, folder) | run_cases(four, 4, folder)


def test_a_training_run_repeats_bit_for_bit(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["again"]["history"] == runs["tp2"]["history"]


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("checkpointing", "tp2"),
        ("groups", "tp2"),
        ("selective", "tp2"),
        ("biogpt_groups", "biogpt"),
        ("pp2_tp2_v", "pp2_tp2"),
        ("pp2_tp2_checkpointing", "pp2_tp2"),
    ],
)
def test_masks_do_not_depend_on_schedule_or_recomputation(
    name: str, same: str, runs: dict[str, dict[str, Any]]
) -> None:
    compare(runs[name], runs[same])


def test_a_resumed_run_draws_the_masks_of_the_unbroken_one(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    resumed = run_cases([dataclasses.replace(BASE, resume_at=2)], 2, folder)["tp2"]
    assert resumed["history"] == runs["tp2"]["history"]
