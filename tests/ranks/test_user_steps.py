"""User code between the data loader and the optimizer trains with pipeline stages as on one process, or is refused.

If a row fails, somebody's subclass trains on old labels, with gradients scaled twice, or with another loss on each rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from thinning import rest_runs, slow_if
from user_steps import ENV, Drawing, launch, same


pytestmark = pytest.mark.long


PP2: dict[str, Any] = {"pp_size": 2, "num_microbatches": 3}
TP2: dict[str, Any] = {"tp_size": 2}
LATE: dict[str, Any] = {"steps": 9}  # the first steps are checked more closely
RIGHT: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("Editing", "EditingSecond", "Replacing", "Copying", "ThroughNumpy", "ThroughView")),
    *((name, {}) for name in ("Removing", "Preparing", "Prepared", "hooked", "replaced_step", "our_subclass")),
    *((name, {}) for name in ("TwoBackwards", "UnequalBackwards", "ScaledByBatch", "Unread")),
    *((name, {"model": "llama_tied"}) for name in ("Temperature", "Weighted", "TiedPenalty", "UnequalBackwards")),
    *((name, {"accumulation": 1}) for name in ("Temperature", "Weighted", "Editing", "TwoBackwards")),
    ("Editing", {"model": "gpt2", "accumulation": 3}),
    ("Trainer", {"accumulation": 3}),
]
# Slow: what other rows show of the same user code, with another model or number of batches in a step.
REST = [
    RIGHT.index(row)
    for row in (
        ("Editing", {}),
        ("TwoBackwards", {}),
        ("Weighted", {"model": "llama_tied"}),
        ("UnequalBackwards", {"model": "llama_tied"}),
        ("Temperature", {"accumulation": 1}),
        ("Editing", {"accumulation": 1}),
    )
]
# name -> optimizer steps before it, class of the error and what it names.
REFUSED: dict[str, tuple[int, str]] = {
    "Poisoned": (
        1,
        r"RankMismatchError: .*rank 0 \(pp 0 of 2\): its losses were scaled by nan over 2.*rank 1 .*scaled by 2 over 2",
    ),
    "PoisonedLogits": (1, r"RankMismatchError: .*rank 0 \(pp 0 of 2\): the gradient that its loss gave .*nan"),
    "UnlikeScales": (0, r"RankMismatchError: .*rank 1 \(pp 1 of 2\): its losses were scaled by 2\.02"),
    "UnlikeLabels": (0, r"RankMismatchError: .*different losses in one optimizer step"),
    "Penalty": (
        0,
        r"UnsupportedError: .*\d+ parameters past the model's forward \(first: lm_head\.weight\).*weight_decay",
    ),
    "PenaltyOnLogits": (0, r"UnsupportedError: .*\d+ parameters past the model's forward .*set pp_size to 1"),
    "drawn_inputs": (4, r"RankMismatchError: rank 1 \(pp 1 of 2\) read a different batch than rank 0 .*seeded alike"),
    "drawn_labels": (4, r"RankMismatchError: rank 1 \(pp 1 of 2\) read a different batch than rank 0 .*seeded alike"),
}


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[int, dict[str, Any]], dict[int | str, list[dict[str, Any]]]]:
    """By index in RIGHT: the stock run, and what each rank of a mesh found; the latter by name for what is refused too."""
    folder = tmp_path_factory.mktemp("user-steps")
    right = {index: row for index, row in enumerate(RIGHT) if index not in REST or rest_runs(request)}
    stock = launch([(name, None, options) for name, options in right.values()], 1, folder / "one")
    refused = [(name, PP2, LATE) for name in REFUSED]
    mine = launch([*((name, PP2, options) for name, options in right.values()), *refused], 2, folder / "pp2")
    return dict(zip(right, (found[0] for found in stock), strict=True)), dict(
        zip((*right, *REFUSED), mine, strict=True)
    )


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=slow_if(index, REST), id="-".join(map(str, (name, *options.values()))))
        for index, (name, options) in enumerate(RIGHT)
    ],
)
def test_user_code_trains_as_on_one_process(index: int, runs: Any) -> None:
    stock, mine = runs
    for found in mine[index]:
        same({**found, "folder": mine[index][0]["folder"]}, stock[index])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_before_its_first_update_on_every_rank(name: str, runs: Any) -> None:
    steps, message = REFUSED[name]
    found = runs[1][name]
    assert [each["steps"] for each in found] == [steps, steps]
    assert found[0]["error"] == found[1]["error"]
    assert found[0]["error"] is not None
    assert re.search(message, found[0]["error"]), found[0]["error"]


REPLICATED: list[tuple[str, dict[str, Any]]] = [
    ("ScaledByBatch", {"rows": 4}),
    ("ScaledByBatch", {"rows": 4, "accumulation": 1, "model": "llama_tied"}),
    ("Editing", {"rows": 4}),
]


def test_each_replica_has_factors_of_its_own_as_under_ddp(tmp_path: Path) -> None:
    stock = launch([(name, None, options) for name, options in REPLICATED], 2, tmp_path / "ddp")
    mine = launch([(name, PP2, options) for name, options in REPLICATED], 4, tmp_path / "pp2dp2")
    for reference, found in zip(stock, mine, strict=True):
        for each in found:
            same({**each, "folder": found[0]["folder"]}, reference[0])


# -- loops of their own, and what a pipeline cannot be asked ---------------------------------------------------------


def loops_main(rank: int, world_size: int) -> dict[str, Any]:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import ParallelError

    found: dict[str, Any] = {}
    plugin = None if world_size == 1 else HFParallelPlugin({}, **PP2)
    accelerator = Accelerator(cpu=True, **({} if plugin is None else {"parallelism_config": plugin}))
    model = tiny.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = [tiny.collate(tiny.rows(16, True)[start : start + 4]) for start in (0, 4, 8, 12)]

    def norm_of(*factors: float) -> float:
        """Two backward passes in one step, without `accumulate`."""
        optimizer.zero_grad()
        for factor, batch in zip(factors, batches, strict=False):
            accelerator.backward(model(**batch).loss * factor)
        return float(accelerator.clip_grad_norm_(model.parameters(), 1e9))

    found["norms"] = [norm_of(0.5, 0.5), norm_of(0.5, 2.0), norm_of(1.0, 1.0, 0.125), norm_of(-1.0, 0.0)]
    loss = model(**batches[0]).loss
    optimizer.zero_grad()  # between forward and backward, as many loops do
    accelerator.backward(loss)
    found["zeroed"] = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
    if world_size == 1:
        return found

    def refused(name: str, action: Any) -> None:
        try:
            found[name] = action()
        except (ParallelError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    optimizer.zero_grad()
    trained = model(**batches[0])
    refused("log_probs", lambda: trained.log_probs)
    refused("by key", lambda: trained["aux_loss"])
    refused("by position", lambda: list(trained[1].shape))
    refused("get", lambda: trained.get("router_logits"))
    found["asked politely"] = [hasattr(trained, "log_probs"), "logits" in trained, trained.hidden_states]
    accelerator.backward(trained.loss, retain_graph=True)
    accelerator.backward(trained.loss)
    refused("twice", lambda: accelerator.backward(trained.loss))
    model.eval()
    with torch.no_grad():
        refused("evaluated", lambda: model(**batches[0]).entropy)
    weight = [model.lm_head.weight, model.model.embed_tokens.weight][rank]
    refused("dropped weight", lambda: weight.square().sum())

    def embedded() -> None:
        inputs = dict(batches[0])
        model(inputs_embeds=model.get_input_embeddings()(inputs.pop("input_ids")), **inputs)

    refused("embedded", embedded)
    accelerator.hf_parallel.watchdog.stop()
    return found


def test_a_loop_with_several_backwards_a_step(tmp_path: Path) -> None:
    [stock] = run_ranks(loops_main, 1, tmp_path=tmp_path, init_group=False, env=ENV)
    for found in run_ranks(loops_main, 2, tmp_path=tmp_path, env=ENV):
        assert found["norms"] == pytest.approx(stock["norms"], rel=1e-5)
        assert found["zeroed"] == pytest.approx(stock["zeroed"], rel=1e-5)
        assert "MissingOutput: outputs['log_probs'] of a training step with pp_size above 1" in found["log_probs"]
        assert "outputs['aux_loss'] of a training step" in found["by key"]
        assert "model is called without labels" in found["get"]
        assert len(found["by position"]) == 3
        assert found["asked politely"] == [False, True, None]  # as in one process
        assert "backpropagated twice with pp_size above 1" in found["twice"]
        assert "a pipeline returns loss and logits only" in found["evaluated"]
        assert "weight was read outside of the model's forward, but another pipeline rank" in found["dropped weight"]
        assert "inputs_embeds" in found["embedded"]
        assert "input_ids" in found["embedded"]


def shared_main(rank: int, world_size: int) -> list[str]:
    """Under tp the ranks share every layer; batches that differ late, in training and in evaluation."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import RankMismatchError

    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **TP2))
    model = accelerator.prepare(tiny.llama(layers=1))
    draw, data, found = Drawing(), tiny.rows(8), []
    for _ in range(8):
        model(**draw(data))
    for training in (True, False):
        model.train(training)
        try:
            with torch.set_grad_enabled(training):
                model(**draw(data))
            found.append("nothing")
        except RankMismatchError as error:
            found.append(str(error))
    accelerator.hf_parallel.watchdog.stop()
    return found


def test_ranks_that_share_layers_compare_every_batch(tmp_path: Path) -> None:
    first, second = run_ranks(shared_main, 2, tmp_path=tmp_path, env=ENV)
    assert first == second
    for text in first:
        assert "rank 1 (tp 1 of 2) read a different batch than rank 0 (tp 0 of 2)" in text
