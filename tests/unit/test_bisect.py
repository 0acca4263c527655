"""What names the place where two runs part, on notes made by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_parallel.proof.bisect import Event, Passages, _first_backward, first_apart, first_divergence, first_step
from hf_parallel.proof.compare import Comparison, Difference
from hf_parallel.proof.job import Job
from hf_parallel.proof.trace import TRACE, Tracer


def difference(what: str, step: int, relative: float, name: str = "a.weight") -> Difference:
    return Difference(what, step, name, 0, relative, 1e-5)


def test_a_run_that_stops_before_anything_differs_is_traced_in_the_step_that_it_stopped_in() -> None:
    assert first_step(Comparison([difference("gradient", step, 1e-7) for step in (1, 2)], [])) == 3
    assert (
        first_divergence(Job("m", steps=3, trace=True), Comparison([difference("gradient", 2, 1e-7)], []), None)
        is None
    )


def passed(order: int, module: str, kind: str, agrees: bool, microbatch: int = 0) -> Event:
    return Event(order, module, 0, microbatch, kind, agrees)


def test_the_first_step_is_the_earliest_that_differs_or_lacks_something() -> None:
    late, early = difference("gradient", 3, 1.0), difference("gradient", 2, 1e-3)
    assert first_step(Comparison([late, early, difference("gradient", 1, 1e-6)], [])) == 2
    assert first_step(Comparison([late], ["a.weight (step 1, rank 0)"])) == 1
    assert first_step(Comparison([late], ["a.weight (step 2: no rank has all of it)"])) == 2


@pytest.mark.parametrize(
    ("events", "module", "microbatch"),
    [
        ([passed(9, "head", "output_gradient", False, 1), passed(10, "b", "output_gradient", False, 1)], "loss", 1),
        ([passed(9, "head", "output_gradient", True), passed(10, "head", "input_gradient", False)], "head", 0),
        (
            [
                passed(9, "head", "output_gradient", True),
                passed(10, "b", "output_gradient", False),
                passed(11, "b", "input_gradient", False),
            ],
            "b",
            0,
        ),
    ],
    ids=["before every module", "in a module", "between two modules"],
)
def test_a_wrong_gradient_is_the_losss_only_if_none_was_right_before(
    events: list[Event], module: str, microbatch: int
) -> None:
    wrong = [event for event in events if not event.agrees]
    assert _first_backward(wrong, events) == {"module": module, "microbatch": microbatch, "kind": "input gradient"}
    assert _first_backward([], events) is None


def test_the_output_of_a_sharded_embedding_is_whole_and_that_of_a_sharded_row_of_a_block_is_not(
    tmp_path: Path,
) -> None:
    sharded = ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"]
    torch.save({"place": {"sharded": sharded, "parts": 1}, "passed": []}, tmp_path / TRACE)
    assert Passages(tmp_path / TRACE).sharded_regions == ({"model.layers.0.mlp.down_proj"}, {"model.layers.0.mlp"})


@pytest.mark.parametrize(
    ("differences", "place"),
    [
        ([difference("grad_norm", 1, 1.0, "")], ("", "clipping")),
        ([difference("parameter", 1, 1.0)], ("a", "optimizer")),
        ([difference("parameter", 1, 1.0), difference("weight_decay", 1, 0.1, "b.weight")], ("b", "optimizer")),
        ([difference("parameter", 1, 1.0), difference("learning_rate", 1, 0.1, "")], ("", "optimizer")),
        ([difference("loss", 1, 1.0, "")], ("loss", "forward")),
    ],
)
def test_what_agrees_until_the_end_of_a_step_parts_there(
    differences: list[Difference], place: tuple[str, str], tmp_path: Path
) -> None:
    found: dict[str, Any] = first_divergence(Job("m", steps=1, trace=True), Comparison(differences, []), None)
    assert (found["module"], found["kind"]) == place


class Drops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


class Dropping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Drops.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_a_tensor_that_gets_no_gradient_is_not_noted() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Dropping())
    tracer = Tracer(model, is_on=True)
    x = torch.ones(2, 3, requires_grad=True)
    (model(x).sum() + x.sum()).backward()
    kinds = {(each.module, each.kind) for each in tracer.passed}
    assert ("1", "forward") in kinds
    assert ("1", "input_gradient") not in kinds


class OneMore(torch.nn.Module):
    """Works on each token by itself, on the second rank of a sequence otherwise."""

    def __init__(self, added: float = 0.0) -> None:
        super().__init__()
        self.inner, self.added = torch.nn.Linear(3, 3), added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) + self.added
        return found


@pytest.mark.parametrize("wrong_rank", [None, 0, 1])
def test_a_part_of_each_row_is_compared_with_that_part_in_one_process(wrong_rank: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 3), OneMore()), torch.randn(4, 6, 3)
    folders = {"reference": None, "perturbed1": None, "perturbed2": None, "rank0": 0, "rank1": 1}
    for name, sp_rank in folders.items():
        own = copy.deepcopy(model)
        own[1].added = 0.5 * (sp_rank is not None and sp_rank == wrong_rank)
        tracer = Tracer(own, 2 if sp_rank is None else 1, is_on=True)
        given = x if sp_rank is None else x[:, 3 * sp_rank : 3 * sp_rank + 3]
        own(given).sum().backward()
        place = {"dp": 0, "sp": sp_rank or 0, "parts": 1, "sharded": [], "shared": []}
        (tmp_path / name).mkdir()
        tracer.write(tmp_path / name, place)
    found = first_apart(Job("m", {"sp_size": 2}, 2, steps=1, trace=True), tmp_path)
    expected = {"module": "1", "microbatch": 0, "kind": "forward"}
    assert found == (None if wrong_rank is None else expected)
