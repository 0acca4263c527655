"""Every field of TrainingArguments gives on a mesh what it gives without one, or is refused by name before training.

One value at a time, other than the default, under tp, pp and replicas. The runs also make the table build/reports/arguments.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from argument_cases import ROWS, Row, rows_main
from rank_runner import run_ranks
from safetensors.torch import load_file


# All runs of a layout happen in the set-up of its first test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


ROOT = Path(__file__).resolve().parents[2]
ENV = {"ACCELERATE_USE_CPU": "true"}
TOGETHER = 35  # runs of a launch
EXACT = 1e-5
NOISE = 2.0  # the largest of some differences by rounding is seldom more than twice that of some others
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None, str]] = {  # processes, settings, what it must equal
    "stock": (1, None, ""),
    "noise": (1, None, ""),
    "ddp2": (2, None, ""),
    "tp2": (2, {"tp_size": 2, "tensor_parallel": {"reduce_dtype": "float32"}}, "stock"),
    "pp2": (2, {"pp_size": 2, "num_microbatches": 4}, "stock"),
    "dp2": (2, {}, "ddp2"),
    "zero1": (2, {"zero": {"stage": 1}}, "ddp2"),
    "zero3": (2, {"zero": {"stage": 3}}, "ddp2"),
}
MESHES = [name for name, (_, _, reference) in LAYOUTS.items() if reference]
MODELS = ["llama", "gpt2"]
FIELDS_WITH_NOISE = ("loss", "grad_norm", "square", "hits", "predicted", "weights")
Found = dict[str, list[dict[str, Any]]]  # row -> what each rank gave


class Runs:
    """Runs rows under a layout when somebody asks for it."""

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        self.folder, self.rows = folder, rows
        self._found: dict[tuple[str, str], Found] = {}

    def of(self, layout: str, model: str) -> Found:
        if (layout, model) not in self._found:
            self._found[layout, model] = self._run(layout, model)
        return self._found[layout, model]

    def judged(self, layout: str, model: str, name: str, rank: int = 0) -> tuple[str, str]:
        """The verdict on what one rank gave: one process has the same, or this rank of stock replicas."""
        row, other = ROWS[name], self.of(LAYOUTS[layout][2], model)[name]
        noise = [self.of("noise", model)[f"{name} {number}"][0] for number in range(len(row.noise))]
        return verdict(row, self.of(layout, model)[name][rank], other[rank % len(other)], noise)

    def _run(self, layout: str, model: str) -> Found:
        world_size, parallel, _ = LAYOUTS[layout]
        found: Found = {}
        rows = self.rows
        if layout == "noise":
            rows = [
                dataclasses.replace(row, name=f"{row.name} {number}", arguments=row.arguments | noise)
                for row in rows
                for number, noise in enumerate(row.noise)
            ]
        options: dict[str, Any] = {"tmp_path": self.folder, "timeout": 900.0, "init_group": world_size > 1, "env": ENV}
        for start in range(0, len(rows), TOGETHER):
            chosen = rows[start : start + TOGETHER]
            jobs = [(row, model, layout, parallel) for row in chosen]
            results = run_ranks(rows_main, world_size, jobs, str(self.folder), **options)
            found |= {row.name: list(each) for row, each in zip(chosen, zip(*results, strict=True), strict=True)}
        return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    here: list[Any] = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["name"] for item in here}  # `-k` may have chosen some
    made = Runs(tmp_path_factory.mktemp("arguments"), [row for name, row in ROWS.items() if name in wanted])
    yield made
    write_table(made)


def differences(mine: Any, other: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(path, difference) of every number; what cannot be compared differs by infinity."""
    if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
        for key in other:
            yield from differences(mine[key], other[key], f"{path}/{key}")
    elif isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        for index, pair in enumerate(zip(mine, other, strict=True)):
            yield from differences(*pair, f"{path}/{index}")
    elif isinstance(mine, float) and isinstance(other, float) and not math.isnan(mine) and not math.isnan(other):
        yield path, abs(mine - other) / max(1.0, abs(other))
    elif mine != other and not (mine != mine and other != other):
        yield f"{path}: {mine!r:.80} instead of {other!r:.80}", math.inf


def of_weights(mine: str, other: str) -> Iterator[tuple[str, float]]:
    here, there = load_file(mine), load_file(other)
    if here.keys() != there.keys():
        yield "names of weights", math.inf
        return
    for name, tensor in there.items():
        yield name, float((here[name].float() - tensor.float()).norm() / tensor.float().norm().clamp(min=1e-30))


def all_differences(mine: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, float]]:
    """(path, difference) of all that two runs gave."""
    numbers = ({key: value for key, value in one.items() if key != "weights"} for one in (mine, other))
    weights = ((f"weights of {name}", value) for name, value in of_weights(mine["weights"], other["weights"]))
    return [*differences(*numbers), *weights]


def limits(other: dict[str, Any], noise: Sequence[dict[str, Any]]) -> Callable[[str], float]:
    """What may differ: rounding, or in reduced precision what one process differs by where it rounds otherwise."""
    found = [pair for one in noise for pair in all_differences(one, other)]

    def limit(path: str) -> float:
        field = next((name for name in FIELDS_WITH_NOISE if name in path.rpartition("/")[2]), None)
        if field is None:
            return EXACT
        return max([EXACT, *(NOISE * difference for where, difference in found if field in where.rpartition("/")[2])])

    return limit


def verdict(
    row: Row, mine: dict[str, Any], other: dict[str, Any], noise: Sequence[dict[str, Any]] = ()
) -> tuple[str, str]:
    """equal, refused, refused without a mesh too, or wrong; and why."""
    if "refused" in other:
        return "stock refuses it", other["refused"]
    if "refused" in mine:
        text = mine["refused"]
        named = any(name in text for field in row.arguments.items() for name in (field[0], str(field[1])))
        return ("refused" if mine["ours"] and not mine["steps"] and named else "wrong"), text
    limit = limits(other, noise)
    found = [(path, difference, limit(path)) for path, difference in all_differences(mine, other)]
    wrong = [
        f"{path} ({difference:.1e}, limit {allowed:.1e})"
        for path, difference, allowed in found
        if not difference <= allowed
    ]
    return ("wrong", "; ".join(wrong[:3])) if wrong else ("equal", "")


def write_table(runs: Runs) -> None:
    """A row for each value, a column for each layout that has run."""
    columns = [(layout, model) for model in MODELS for layout in MESHES if (layout, model) in runs._found]
    lines = ["| argument | " + " | ".join(f"{layout} {model}" for layout, model in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for row in runs.rows:
        cells = [runs.judged(layout, model, row.name)[0] for layout, model in columns]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    path = ROOT / "build" / "reports" / "arguments.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", MESHES)
def test_a_field_has_its_effect_or_is_refused_by_name(layout: str, model: str, name: str, runs: Runs) -> None:
    mine, other = runs.of(layout, model)[name], runs.of(LAYOUTS[layout][2], model)[name]
    for rank, found in enumerate(mine):
        word, text = runs.judged(layout, model, name, rank)
        assert word != "wrong" or layout in ROWS[name].other_draws, text
        # The mean of all losses is of each replica's own since the last that was logged, with stock too.
        assert found == mine[0] or other[rank % len(other)] != other[0], "ranks see the same"
