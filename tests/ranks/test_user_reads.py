"""Numbers that user code takes of weights are those of the whole model, or refused on all ranks; never those of a part."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import reads_cases
import torch
import user_loops
import user_steps
from rank_runner import run_ranks
from reads_cases import ENV, PLACES, READERS, READS
from transformers import Trainer, TrainerCallback
from user_loops import Loop

from hf_parallel.guards import meeting


pytestmark = pytest.mark.slow  # some thousand rows


LAYOUTS = ("tp2", "pp2", "zero1", "zero2", "zero3")
FOUR = ("pp2_tp2", "tp2_zero1")
# Rows, views and what is made of them are those of a shard, and refused.
OF_ROWS = frozenset({"tolist", "cat", "vector", "dot", "rows"})
# On stages each tensor that a rank has tells its own size; a block of another stage has no tensors.
OF_STAGES = frozenset({"shape", "size", "nbytes"})


def ranks(world_size: int, layouts: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    parallel = {layout: user_loops.LAYOUTS[layout] for layout in layouts}
    options = {"env": ENV, "timeout": 300.0, "init_group": world_size > 1}
    return run_ranks(reads_cases.main, world_size, parallel, str(folder), list(READERS), tmp_path=folder, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float | str]]]:
    found: dict[str, list[dict[str, float | str]]] = {}
    for world_size, layouts in ((1, ("one",)), (2, LAYOUTS), (4, FOUR)):
        by_rank = ranks(world_size, layouts, tmp_path_factory.mktemp("reads"))
        found |= {layout: [each[layout] for each in by_rank] for layout in layouts}
    return found


def names_for(layout: str) -> list[str]:
    staged = layout.startswith("pp2")
    return [n for n in READERS if not staged or (n.rpartition("_")[2] not in OF_STAGES and not n.startswith("block_"))]


def wrong(mine: list[dict[str, float | str]], alone: dict[str, float | str], place: str, names: Any) -> dict[str, Any]:
    """Readers whose number is on some rank neither that of one process nor refused."""
    found = {}
    for name in names:
        expected, here = alone[f"{place}-{name}"], [each[f"{place}-{name}"] for each in mine]
        assert isinstance(expected, float), expected
        numbers = [value for value in here if isinstance(value, float)]
        if any(not math.isclose(number, expected, rel_tol=1e-5) for number in numbers):
            found[name] = here, expected
    return found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", [*LAYOUTS, *FOUR])
def test_a_number_of_weights_is_that_of_one_process_or_refused(layout: str, place: str, runs: Any) -> None:
    assert not wrong(runs[layout], runs["one"][0], place, names_for(layout))


@pytest.mark.parametrize("layout", ["tp2", "tp2_zero1", "zero1", "zero2"])
@pytest.mark.parametrize("place", PLACES)
def test_shards_are_put_together_wherever_a_trainer_runs_user_code(place: str, layout: str, runs: Any) -> None:
    refused = {
        name: value
        for name in READERS
        for each in runs[layout]
        if isinstance(value := each[f"{place}-{name}"], str)
        and not (layout.startswith("tp2") and name.rpartition("_")[2] in OF_ROWS)
    }
    assert not refused


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["tp2", "pp2", "pp2_tp2"])
def test_a_refusal_says_what_to_do(layout: str, place: str, runs: Any) -> None:
    texts = [
        value
        for each in runs[layout]
        for name in READERS
        if isinstance(value := each[f"{place}-{name}"], str) and not value.startswith(("KeyError", "AttributeError"))
    ]
    assert texts or place == "compute_loss"
    for text in texts:
        assert text.startswith("UnsupportedError"), text
        assert "tensor_parallel.plan" in text or "get_state_dict(model)" in text, text


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", [*LAYOUTS, *FOUR])
def test_gathered_weights_are_read_anywhere(layout: str, place: str, runs: Any) -> None:
    mine, alone = (runs[each][0][f"{place}-gathered"] for each in (layout, "one"))
    assert mine == pytest.approx(alone, rel=1e-6)


class OnOneRank(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            reads_cases.norm_of(model.state_dict().values())


def by_itself(rank: int, world_size: int, folder: str) -> str:
    until = meeting._until
    meeting._until = lambda condition, bound_s: until(condition, 2.0)
    user_steps.KINDS["OnOneRank"] = (Trainer, {"change": lambda trainer: trainer.add_callback(OnOneRank())})
    with contextlib.suppress(RuntimeError):  # of rank 1, when the other one is gone
        return str(user_steps.run("OnOneRank", {"tp_size": 2}, Path(folder))["error"])
    return ""


def test_a_number_that_one_rank_asks_for_alone_is_refused(tmp_path: Path) -> None:
    error = run_ranks(by_itself, 2, str(tmp_path), tmp_path=tmp_path, env=ENV)[0]
    assert "a number of sharded weights was called by" in error
    assert "log on one" in error


# -- loops -----------------------------------------------------------------------------------------------------------


def reading(loop: Loop) -> None:
    """In a loop of one's own nobody may wait for others: shards of a state dict are not put together."""
    loop.prepare()
    loop.backward(0)
    loop.step()
    for name, read in READS.items():
        try:
            loop.history.append((name, float(read(list(loop.model.state_dict().values())))))
        except Exception as error:
            loop.history.append((name, str(error)))


def loops(rank: int, world_size: int) -> Any:
    return user_loops.run("tp2", reading)["history"]


def test_a_loop_reads_no_numbers_of_shards(tmp_path: Path) -> None:
    history = dict(one for one in run_ranks(loops, 2, tmp_path=tmp_path, env=ENV)[0] if isinstance(one, tuple))
    sizes = {"numel", "shape", "size", "bytes", "nbytes"}  # of the shard, which is what a loop has
    assert history.keys() == READS.keys()
    for name in READS.keys() - sizes:
        assert "get_state_dict(model)" in str(history[name]), name
    assert all(isinstance(history[name], float) for name in sizes)
    assert torch.tensor(history["numel"]) > 0
