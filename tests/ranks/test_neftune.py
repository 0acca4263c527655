"""`neftune_noise_alpha`: noise on the embeddings of the size and, where ranks draw as one process does, of the values of stock training.

Its hook is on the embedding before the model is cut by `train()`; after an `evaluate()`, or in a second `train()`, it comes late.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_runner import run_ranks
from trainer_cases import ENV, NO_NOISE, Case, Snapshots, compare, finished, make_trainer
from transformers import TrainerCallback


pytestmark = pytest.mark.long


ALPHA = 5.0
PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}
LAYOUTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "tp2": {"tp_size": 2},
    "tp2_sequence": {"tp_size": 2, "sequence_parallel": True},
    "pp2": PP2,
    "pp2_interleaved": {**PP2, "schedule": "interleaved_1f1b"},
    "pp2_zbv": {**PP2, "schedule": "zbv_zero_bubble"},
}
WHEN = ("first", "evaluated", "again")


class Noise(TrainerCallback):
    """The largest noise of each call of the embedding, next to the largest that there may be."""

    def __init__(self) -> None:
        self.ratios: list[float] = []

    def watch(self, model: Any) -> None:
        """Before the Trainer puts its hook there."""
        model.get_input_embeddings().register_forward_hook(self.note)

    def note(self, module: Any, inputs: Any, output: Any) -> None:
        self.clean = output.detach().clone()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.handle = model.get_input_embeddings().register_forward_hook(self.look)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.handle.remove()

    def look(self, module: Any, inputs: Any, output: Any) -> None:
        if module.training:
            noise = (output - self.clean).detach().abs().max()
            bound = ALPHA / (output.shape[1] * output.shape[2]) ** 0.5
            self.ratios.append(float(noise) / bound)


def run(layout: str, when: str, folder: Path, world_size: int) -> dict[str, Any]:
    parallel = LAYOUTS.get(layout)
    noisy = {**NO_NOISE, "neftune_noise_alpha": ALPHA}
    case = Case(layout, "llama", steps=3, accumulation=2, variable_length=True, arguments=noisy, parallel=parallel)
    snapshots, noise = Snapshots(folder), Noise()
    trainer = snapshots.trainer = make_trainer(case, folder, world_size, [snapshots, noise])
    noise.watch(trainer.model)
    if when == "evaluated":
        trainer.evaluate()
    if when == "again":
        trainer.train()
    trainer.train()
    return {**json.loads(json.dumps(finished(trainer, folder))), "ratios": noise.ratios}


def main(rank: int, world_size: int, layouts: list[str], folder: str) -> dict[str, Any]:
    return {
        f"{each}-{when}": run(each, when, Path(folder) / each / when, world_size) for each in layouts for when in WHEN
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("neftune")
    ones = run_ranks(main, 1, ["one"], str(folder), tmp_path=folder, init_group=False, env=ENV)
    twos = run_ranks(main, 2, list(LAYOUTS), str(folder), tmp_path=folder, env=ENV, timeout=250.0)
    return [ones[0] | each for each in twos]


# After an evaluation a stock Trainer trains replicas that no DDP keeps equal.
LIKE = [
    ("tp2", "one", WHEN),
    ("dp2", "stock", ("first", "again")),
    ("zero1", "dp2", WHEN),
    ("zero3", "dp2", WHEN),
    ("pp2_interleaved", "pp2", WHEN),
    ("pp2_zbv", "pp2", WHEN),
]


@pytest.mark.parametrize(("layout", "other", "when"), [(a, b, when) for a, b, all_of in LIKE for when in all_of])
def test_noise_has_the_values_of_the_run_that_draws_alike(
    layout: str, other: str, when: str, runs: list[dict[str, Any]]
) -> None:
    compare(runs[0][f"{layout}-{when}"], runs[0][f"{other}-{when}"])


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_noise_has_the_size_of_one_process(layout: str, when: str, runs: list[dict[str, Any]]) -> None:
    ratios = [ratio for found in runs for ratio in found[f"{layout}-{when}"]["ratios"]]
    assert len(ratios) >= 6
    assert all(0.97 < ratio <= 1.00001 for ratio in ratios)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("layout", ["pp2", "tp2_sequence"])
def test_noise_of_other_values_trains_alike(layout: str, when: str, runs: list[dict[str, Any]]) -> None:
    losses = [
        [log["loss"] for log in runs[0][f"{each}-{when}"]["history"] if "loss" in log] for each in ("one", layout)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=0.1)
