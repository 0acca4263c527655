"""Set-ups are drawn alike from the same seed, their scripts stand alone, and shrinking leaves what matters."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from differential import Runner, regrouped, shrink, simpler, wanted  # noqa: E402
from differential_cases import CALLBACKS, LAYOUTS, LOSSES, Setup, consistent, draw, script  # noqa: E402
from differential_ranks import Verdict, broken, compare_histories, compare_tensors, place_of  # noqa: E402


DRAWN = [draw(seed) for seed in range(400)]


def test_the_same_seed_is_the_same_setup() -> None:
    assert [draw(seed) for seed in range(50)] == DRAWN[:50]
    assert all(consistent(setup) == setup for setup in DRAWN)


def test_all_choices_are_drawn() -> None:
    assert {(s.tp, s.pp, s.dp) for s in DRAWN} == set(LAYOUTS)
    assert {s.loss for s in DRAWN} == {"", *LOSSES}
    assert {s.callback for s in DRAWN} == {"", *CALLBACKS}
    assert {s.settings.get("zero", {}).get("stage") for s in DRAWN} == {None, 1, 2, 3}
    assert any(s.resume for s in DRAWN)
    assert any(s.bf16 for s in DRAWN)
    assert {s.delay for s in DRAWN} == {0, 1, 2, 3}
    assert any(s.settings.get("ep_size") for s in DRAWN)
    attention = {s.settings.get("sp_attention", "auto") for s in DRAWN if "sp_size" in s.settings}
    assert attention == {"auto", "ring"}


def test_a_script_names_nothing_that_it_does_not_hold() -> None:
    for setup in DRAWN[:150]:
        tree = ast.parse(script(setup))
        known = set(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__) | {"__name__"}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        assert used <= known, setup


class Pretender(Runner):
    """Fails wherever a clamp meets a pipeline."""

    def verdicts(self, setups: list[Setup], together: int = 12) -> list[Verdict]:
        return [Verdict("differs" if s.callback == "Clamp" and s.pp > 1 else "equal") for s in setups]


def test_shrinking_keeps_what_fails_and_nothing_else(tmp_path: Path) -> None:
    large = next(s for s in (draw(seed) for seed in range(20000)) if s.callback == "Clamp" and s.pp > 1 and s.tp > 1)
    small, verdict = shrink(large, "differs", Pretender(tmp_path))
    assert verdict is not None
    assert small == Setup(seed=large.seed, callback="Clamp", pp=2, steps=1)
    assert simpler(small) == [small.replaced(callback="")]


def test_filters_know_values_and_anything_but_the_default() -> None:
    setup = Setup(callback="Clamp", pp=2)
    assert wanted(setup, [("callback", "*"), ("pp", "2")], [("callback", "Rebind")])
    assert not wanted(setup, [], [("callback", "*")])
    assert not wanted(setup, [("bf16", "*")], [])


def test_regrouping_keeps_the_rows_of_a_step() -> None:
    for setup in DRAWN:
        other = regrouped(setup)
        if other is not None:
            assert other.rows * other.accumulation == setup.rows * setup.dp * setup.accumulation
            assert other.world_size == 1


def test_figures_that_are_no_numbers_and_names_on_one_side_are_differences() -> None:
    import torch

    nan = float("nan")
    assert compare_histories([{"loss": nan}], [{"loss": 1.0}])[0] == float("inf")
    assert compare_histories([{"loss": nan}], [{"loss": nan}])[0] == 0
    assert compare_tensors({"a": torch.ones(2)}, {}, "gradients")[0] == float("inf")
    assert compare_tensors({"a": torch.tensor([nan])}, {"a": torch.ones(1)}, "gradients")[0] == float("inf")


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ([{"error": "refused", "message": "m", "updates": 0, "trace": ""}] * 2, "refused"),
        ([{"error": "refused", "message": "m", "updates": 1, "trace": ""}] * 2, "crashed"),
        ([{"error": "refused", "message": "m", "updates": 0, "trace": ""}, {"history": [], "updates": 0}], "hung"),
        ([{"error": "silent", "message": "", "updates": 0}] * 2, "hung"),
    ],
)
def test_only_a_refusal_of_all_ranks_before_the_first_update_is_one(facts: list[dict[str, object]], word: str) -> None:
    found = broken(facts, "")
    assert found is not None
    assert found.word == word


@pytest.mark.parametrize(
    ("sizes", "more", "replicas"),
    [
        ({"pp": 2, "dp": 2}, {}, [[0, 2], [1, 3]]),
        ({"pp": 2, "dp": 2}, {"topology": {"dp_inside": 2}}, [[0, 1], [2, 3]]),
        ({"tp": 2, "dp": 2}, {}, [[0, 2], [1, 3]]),
        ({"dp": 4}, {"ep_size": 2}, [[0, 2], [1, 3]]),
        ({"dp": 2}, {"sp_size": 2}, [[0, 1, 2, 3]]),
    ],
)
def test_ranks_of_one_place_in_the_model_are_replicas(
    sizes: dict[str, int], more: dict[str, object], replicas: list[list[int]]
) -> None:
    setup = Setup(seed=0, settings=more, **sizes)  # type: ignore[arg-type]
    places: dict[tuple[int, ...], list[int]] = {}
    for rank in range(4):
        places.setdefault(place_of(setup, 4, rank), []).append(rank)
    assert list(places.values()) == replicas
