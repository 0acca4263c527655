"""What is frozen in a fully trained pipeline is not trained from that step on, and a steady step asks nobody about it.

If a row fails, a stage goes on training what a callback froze, waits for gradients that nobody sends, or every step pays a
message for callbacks that freeze nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import RankError, run_ranks
from thinning import rest_runs, slow_if
from trainer_cases import ENV, NO_NOISE, Case, Snapshots, compare, finished, make_trainer, runs_and_references
from transformers import TrainerCallback

from hf_parallel.guards.weights.freezing import Freezing


pytestmark = pytest.mark.long


class Freezes(TrainerCallback):
    """Freezes the head (of a tied pair by its own name), trains everything, freezes all of the first stage."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        blocks = [m for n, m in model.named_modules() if n.rpartition(".")[0].endswith("layers") and n[-1:].isdigit()]
        if state.global_step == 1:
            model.get_output_embeddings().weight.requires_grad_(False)
        if state.global_step == 3:
            for parameter in model.parameters():
                parameter.requires_grad = True
        if state.global_step == 4:
            model.get_input_embeddings().weight.requires_grad_(False)
            for block in blocks[:2]:
                block.requires_grad_(False)


PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}
CASES: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "pp2": (2, "llama", "", PP2),
    "pp2_tied": (2, "llama_tied", "", PP2),
    "pp2_logits": (2, "llama", "subclass", PP2),
    "pp2_zbv": (2, "llama", "", {**PP2, "pipeline": {"schedule": "zbv_zero_bubble"}}),
    "pp2_dp2": (4, "llama_tied", "", PP2),
}
REST = ("pp2", "pp2_tied")  # slow: with another loss or schedule, and on replicas, in other rows


def frozen_main(rank: int, world_size: int, names: list[tuple[str, str, str, Any]], folder: str) -> list[Any]:
    found = []
    for name, model, loss, parallel in names:
        case = Case(
            name,
            model,
            steps=6,
            accumulation=2,
            count=96,
            loss=loss,
            arguments=NO_NOISE,
            user_optimizer=True,
            parallel=parallel,
        )
        where = Path(folder) / name
        snapshots = Snapshots(where)
        trainer = snapshots.trainer = make_trainer(case, where, world_size, [Freezes(), snapshots])
        trainer.train()
        found.append(json.loads(json.dumps(finished(trainer, where))))
    return found


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    cases = {name: case for name, case in CASES.items() if name not in REST or rest_runs(request)}
    return runs_and_references(frozen_main, cases, tmp_path_factory.mktemp("freezing"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_if(name, REST)) for name in CASES])
def test_what_is_frozen_while_training_is_left_alone_as_in_one_process(name: str, runs: Any) -> None:
    found, references = runs
    _, model, loss, _ = CASES[name]
    compare(found[name], references[f"{model}-{loss}"])


class Messages(TrainerCallback):
    """Notes the collectives of each step, from one step's begin to the next one's: name, dtype and elements."""

    def __init__(self, freezes: bool) -> None:
        self.freezes = freezes
        self.calls: list[list[tuple[str, str, int]]] = []
        self._own: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name in ("all_reduce", "all_gather", "broadcast"):
            own = self._own[name] = getattr(dist, name)

            def noted(first: Any, *args: Any, _own: Any = own, _name: str = name, **kwargs: Any) -> Any:
                tensor = first if isinstance(first, torch.Tensor) else first[0]
                if self.calls:
                    self.calls[-1].append((_name, str(tensor.dtype), tensor.numel()))
                return _own(first, *args, **kwargs)

            setattr(dist, name, noted)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.calls.append([])
        if state.global_step == 5 and self.freezes:
            model.get_input_embeddings().weight.requires_grad_(False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, own in self._own.items():
            setattr(dist, name, own)


def counted_main(rank: int, world_size: int, folder: str) -> list[list[list[tuple[str, str, int]]]]:
    """The collectives of a run with the guard and of one without it."""
    case = Case("counted", "llama_tied", steps=8, arguments=NO_NOISE, user_optimizer=True, parallel=PP2)
    found = []
    for guarded in (True, False):
        counter = Messages(freezes=guarded)
        if not guarded:
            Freezing.begin = lambda self: False  # type: ignore[method-assign]
        trainer = make_trainer(case, Path(folder) / str(guarded), world_size, [counter])
        trainer.train()
        trainer.accelerator.hf_parallel.watchdog.stop()
        found.append(counter.calls)
    return found


def test_a_steady_step_sends_no_message_about_freezing(tmp_path: Path) -> None:
    guarded, bare = run_ranks(counted_main, 2, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)[0]
    assert guarded[:5] == bare[:5], "the flag is part of a message that is sent anyway"
    question = ("all_reduce", "torch.int32", 3)  # was anything changed, is anything frozen, and the tied parameter
    assert [call for call in guarded[5] if call not in bare[5]] == [question], "once, after the flag"
    assert guarded[6].count(question) == 1, "what is frozen now may be unfrozen"


def refused_main(rank: int, world_size: int, folder: str) -> None:
    parallel = {**PP2, "zero": {"stage": 1}}
    case = Case("refused", "llama", steps=4, arguments=NO_NOISE, user_optimizer=True, parallel=parallel)
    make_trainer(case, Path(folder), world_size, [Freezes()]).train()


def test_zero_refuses_what_is_unfrozen(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"unfrozen after zero.stage=1.*Set requires_grad before training"):
        run_ranks(refused_main, 4, str(tmp_path / "out"), tmp_path=tmp_path, env=ENV)
