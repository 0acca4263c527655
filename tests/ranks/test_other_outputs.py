"""Losses on other outputs of a model than loss and logits train on pipeline stages as on one process."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from scoring import SCORED, pairs, score, scoring
from torch import Tensor
from torch.nn import functional
from trainer_cases import ENV


pytestmark = pytest.mark.timeout(300)

PP2 = {"pp_size": 2, "num_microbatches": 4}


def own(model: Any, batch: Any) -> Tensor:
    """The model's loss; an output is only looked at."""
    output = model(**batch, scored=SCORED)
    assert float(output.entropy.detach().sum()) > 0
    return output.loss


def likelihood(model: Any, batch: Any) -> Tensor:
    """A multiple of the model's loss."""
    return -3.0 * model(**batch, scored=SCORED).log_probs.sum() / 17


def mixed(model: Any, batch: Any) -> Tensor:
    """Two outputs and the model's loss."""
    output = model(**batch, scored=SCORED)
    weights = output.log_probs.detach().exp()
    return output.loss + 0.1 * output.entropy.sum() / output.mask.sum() - (weights * output.log_probs).mean()


def curved(model: Any, batch: Any) -> Tensor:
    """Logits and an output, with a term that is not linear in the rows, divided by what the caller counts."""
    targets = batch["labels"][:, 1:] != -100
    output = model(**batch, scored="all", num_items_in_batch=targets.sum())
    rows = (output.log_probs * targets).sum(1) / targets.sum(1)
    return output.loss + rows.std() + 0.01 * output.squashed.pow(2).mean() + 1e-3 * output.logits.logsumexp(-1).mean()


def twice(model: Any, batch: Any) -> Tensor:
    """Two forwards before one backward."""
    return pairs(model, batch) + likelihood(model, {name: value.flip(0) for name, value in batch.items()})


LOSSES = {loss.__name__: loss for loss in (own, likelihood, pairs, mixed, curved, twice)}


def losses_main(rank: int, world_size: int, model: str, more: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of two accumulated steps with each loss, and an evaluation after them."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    plugin = {} if world_size == 1 else {"parallelism_config": HFParallelPlugin({}, **PP2, **more)}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **plugin)
    trained = scoring(tiny.MODELS[model])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, eps=1e-4)
    trained, optimizer = accelerator.prepare(trained, optimizer)
    rows, found = tiny.rows(24, True), {}
    for name, loss_of in LOSSES.items():  # one after the other on one model
        trained.train()
        steps = found[name] = []
        for start in range(0, 20, 5):
            with accelerator.accumulate(trained):
                loss = loss_of(trained, tiny.collate(rows[start : start + 4 + 2 * (start % 2)]))
                accelerator.backward(loss)
                steps.append(float(loss.detach()))
                if accelerator.sync_gradients:
                    steps.append(float(accelerator.clip_grad_norm_(trained.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
        trained.eval()
        with torch.no_grad():
            output = trained(**tiny.collate(rows[:4]), scored=SCORED)
            steps += [float(output.loss), float(output.log_probs.mean()), int(output.mask.sum())]
        if world_size > 1:
            others = accelerator.hf_parallel_engine.outputs._others
            found[f"{name} passes"] = [kind.in_two_passes for kind in others._kinds.values()]
            others._kinds.clear()
    if world_size > 1:
        accelerator.hf_parallel.watchdog.stop()
    return found


@pytest.mark.parametrize(
    ("model", "more"),
    [("llama", {}), pytest.param("gpt2", {"schedule": "zbv_zero_bubble"}, marks=pytest.mark.long)],
)
def test_losses_on_outputs_are_those_of_one_process(model: str, more: dict[str, Any], tmp_path: Path) -> None:
    [stock] = run_ranks(losses_main, 1, model, more, tmp_path=tmp_path, init_group=False, env=ENV)
    for found in run_ranks(losses_main, 2, model, more, tmp_path=tmp_path, env=ENV):
        for name in LOSSES:
            assert found[name] == pytest.approx(stock[name], rel=1e-5, abs=1e-7), name
        passes = {name: found[f"{name} passes"] for name in LOSSES}
        assert not any(passes["own"] + passes["likelihood"])
        assert passes["pairs"] == [True, False]
        assert passes["mixed"] == [True, False]


def replay_main(rank: int, world_size: int) -> dict[str, Any]:
    """With dropout: gradients of a loss on outputs, and of the same loss on logits of the same step."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **PP2))
    model = scoring(tiny.MODELS["gpt2_dropout"])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model.train()

    def gradients(on_logits: bool) -> list[Tensor]:
        accelerator.hf_parallel_engine.seeds.step = 0
        for start in (0, 4, 8):
            optimizer.zero_grad()
            batch = tiny.collate(tiny.rows(16, True)[start : start + 4])
            if on_logits:
                labels = batch.pop("labels")[:, 1:]
                every = functional.log_softmax(model(**batch).logits[:, :-1].float(), -1)
                log_probs = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels == -100, 0.0)
            else:
                log_probs = model(**batch, scored=SCORED).log_probs
            first, second = log_probs.sum(1).chunk(2)
            accelerator.backward(-functional.logsigmoid(0.1 * (first - second)).mean())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    mine, other = gradients(False), gradients(True)
    accelerator.hf_parallel.watchdog.stop()
    return {"far": max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in zip(mine, other, strict=True))}


@pytest.mark.long
def test_the_second_pass_draws_the_masks_of_the_first(tmp_path: Path) -> None:
    for found in run_ranks(replay_main, 2, tmp_path=tmp_path, env=ENV):
        assert found["far"] < 1e-5


def refusals_main(rank: int, world_size: int) -> dict[str, Any]:
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import ParallelError

    found: dict[str, Any] = {}

    def refused(name: str, action: Any) -> None:
        try:
            found[name] = action()
        except ParallelError as error:
            found[name] = f"{type(error).__name__}: {error}"

    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **PP2))
    model = scoring(tiny.llama)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    batch = tiny.collate(tiny.rows(4, True))
    output = model(**batch, scored=SCORED)
    refused("spread", lambda: output.spread)
    refused("shared", lambda: output["shared"])
    refused("logits", lambda: output.logits)
    refused("unknown", lambda: output.probability)
    found["nothing"] = output.nothing
    found["dtypes"] = [str(output.mask.dtype), list(output.mask.shape) == list(output.log_probs.shape)]
    found["graphs"] = [output.mask.requires_grad, output.log_probs.requires_grad]
    accelerator.backward(pairs(model, batch))
    optimizer.zero_grad()
    loss = pairs(model, batch)
    batch["labels"][0, -1] = 5
    refused("batch changed", lambda: accelerator.backward(loss))
    optimizer.zero_grad()
    loss = pairs(model, tiny.collate(tiny.rows(4, True)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    refused("weights changed", lambda: accelerator.backward(loss))
    accelerator.hf_parallel.watchdog.stop()
    return found


def test_what_microbatches_or_a_second_pass_cannot_make_is_refused(tmp_path: Path) -> None:
    for found in run_ranks(refusals_main, 2, tmp_path=tmp_path, env=ENV):
        assert (
            "RankMismatchError: a batch whose loss is computed from the model's outputs runs forward twice"
            in (found["weights changed"])
        )
        assert "MissingOutput: outputs['spread'] with pp_size above 1" in found["spread"]
        assert "not made of the rows of the batch one by one" in found["shared"]
        assert found["logits"] is None
        assert "MissingOutput: outputs['probability']" in found["unknown"]
        assert found["nothing"] is None
        assert found["dtypes"] == ["torch.bool", True]
        assert found["graphs"] == [False, True]
        assert "changed in place" in found["batch changed"]


def late_main(rank: int, world_size: int) -> dict[str, Any]:
    """An output that is taken out of the graph in the first call only; hidden states that the config asks for."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin
    from hf_parallel.errors import ParallelError

    found: dict[str, Any] = {}
    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, **PP2))
    model = tiny.llama()
    model.config.output_hidden_states = True
    model.plain, calls = model.forward, []

    def forward(self: Any, *args: Any, **kw: Any) -> Any:
        output = score(self, *args, **kw)
        calls.append(kw.get("scored"))
        if kw.get("scored") and calls.count(SCORED) <= PP2["num_microbatches"]:
            output.log_probs = output.log_probs.detach()
        return output

    model.forward = MethodType(forward, model)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.train()
    calls.clear()
    batch = tiny.collate(tiny.rows(4, True))
    output = model(**batch, scored=SCORED)
    try:
        accelerator.backward(output.log_probs.pow(2).mean() + 0.1 * output.entropy.mean())
    except ParallelError as error:
        found["joins"] = str(error)
    try:
        found["hidden"] = model(**batch).hidden_states
    except ParallelError as error:
        found["hidden"] = str(error)
    accelerator.hf_parallel.watchdog.stop()
    return found


@pytest.mark.long
def test_an_output_that_joins_the_graph_later_is_refused(tmp_path: Path) -> None:
    for found in run_ranks(late_main, 2, tmp_path=tmp_path, env=ENV):
        assert "runs forward twice" in found["joins"]
        assert "outputs['hidden_states']" in found["hidden"]
