"""Dropout masks depend on the seed and the place in the model, not on how the model is cut.

A failure here means that a run with dropout changes with the number of stages, or that recomputation replays other
masks than the forward drew.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stage_models import BLOCKS, assert_same_gradients, batch, build, cut, summed
from torch import Tensor, nn

from hf_parallel.model.random_streams import default_generator, mix64, stream_seed
from hf_parallel.pipeline_parallel.plan.discover import discover_stages
from hf_parallel.pipeline_parallel.plan.verify_stages import run_stages
from hf_parallel.pipeline_parallel.run.stage import Stage


DROPOUT: dict[str, dict[str, float]] = {
    "gpt2_tied": {"embd_pdrop": 0.3, "attn_pdrop": 0.3, "resid_pdrop": 0.3},
    "llama_tied": {"attention_dropout": 0.3},
}
CUTS: list[tuple[list[int], list[tuple[int, ...]] | None]] = [
    ([0, BLOCKS], None),
    ([0, 2, BLOCKS], None),
    ([0, 1, 2, 4, BLOCKS], None),
    ([0, 2, BLOCKS, BLOCKS], None),
    ([0, 1, 2, 4, BLOCKS], [(0, 2), (1, 3)]),
    ([0, 1, 3, 4, BLOCKS], [(0, 3), (1, 2)]),
]


def step(stages: Sequence[Stage], seed: int | None) -> tuple[Tensor, dict[str, Tensor | None]]:
    for stage in stages:
        stage.seed = seed
    loss = run_stages(stages, batch())
    names = {name for stage in stages for name, _ in stage.model.named_parameters()}
    return loss, summed(stages, sorted(names))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", DROPOUT)
def test_one_seed_gives_one_result_for_every_cut(name: str, checkpointing: bool) -> None:
    model = build(name, **DROPOUT[name])
    loss, expected = step(cut(model, [0, BLOCKS]), 7)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for bounds, placement in CUTS:
        got, gradients = step(cut(model, bounds, placement=placement), 7)
        torch.testing.assert_close(got, loss, rtol=1e-6, atol=1e-6)
        assert_same_gradients(expected, gradients)


@pytest.mark.parametrize("name", DROPOUT)
def test_other_seeds_give_other_masks_and_none_draws_from_the_ambient_stream(name: str) -> None:
    model = build(name, **DROPOUT[name])
    stages = cut(model, [0, 2, BLOCKS])
    losses = [float(step(stages, seed)[0]) for seed in (7, 8, 7, -1, 2**63)]
    assert losses[0] == losses[2]
    assert len(set(losses)) == 4
    torch.manual_seed(1)
    ambient = float(step(stages, None)[0])
    torch.manual_seed(1)
    assert float(step(stages, None)[0]) == ambient
    assert float(step(stages, None)[0]) != ambient


def test_the_ambient_state_is_untouched_whatever_happens() -> None:
    stage = cut(build("gpt2_tied", **DROPOUT["gpt2_tied"]), [0, 2, BLOCKS])[0]
    stage.seed = 3
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    stage((), **batch())
    handle = stage.model.transformer.h[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stage((), **batch())
    handle.remove()
    torch.testing.assert_close(torch.rand(4), expected, rtol=0, atol=0)


def test_evaluation_draws_nothing_and_reseeds_nothing() -> None:
    model = build("gpt2_tied", **DROPOUT["gpt2_tied"]).eval()
    stage = cut(model, [0, 2, BLOCKS])[0]
    stage.seed = 3
    torch.testing.assert_close(stage((), **batch())[0], stage((), **batch())[0], rtol=0, atol=0)


def masks_of(model: nn.Module, seen: dict[int, list[Tensor]]) -> None:
    for index, block in enumerate(model.transformer.h):
        dropout = block.mlp.dropout
        dropout.register_forward_hook(lambda m, args, out, index=index: seen.setdefault(index, []).append(out == 0))


def test_every_layer_has_its_own_masks_the_same_depth_on_other_stages_included() -> None:
    model = build("gpt2_tied", **DROPOUT["gpt2_tied"])
    stages = cut(model, [0, 2, 4, BLOCKS])
    seen: dict[int, list[Tensor]] = {}
    for stage in stages:
        masks_of(stage.model, seen)
    step(stages, 7)
    masks = [seen[index][0] for index in range(BLOCKS)]
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).float().mean() < 0.75  # 0.58 for independent masks


def test_seeds_of_streams_are_mixed_well_and_stay_in_range() -> None:
    assert mix64(0) == 0xE220A8397B1DCDAF  # first output of splitmix64 from state 0
    seeds = [stream_seed(seed, segment) for seed in range(-50, 200) for segment in range(60)]
    assert len(set(seeds)) == len(seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > len(seeds) - 3  # the CPU generator keeps the low half
    assert all(0 <= seed < 2**64 for seed in seeds)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 97)
        self.drawn: list[Tensor] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.embed(input_ids)
        self.drawn.append(torch.rand(2))
        for block in self.blocks:
            hidden = block(hidden)
            self.drawn.append(torch.rand(2))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_code_outside_the_blocks_draws_the_same_on_every_stage_that_runs_it() -> None:
    inputs = {"input_ids": batch()["input_ids"], "labels": batch()["labels"]}
    model = Counting()
    plan = discover_stages(model, inputs)
    stages = cut(model, [0, 1, 4], plan, [(0,), (1,)]) + cut(model, [0, 4], plan)
    for stage in stages:
        stage.model.drawn.clear()
        stage.seed = 11
    run_stages(stages[:2], inputs)
    run_stages(stages[2:], inputs)
    first, second, whole = (stage.model.drawn for stage in stages)
    assert (len(first), len(second), len(whole)) == (1, 5, 5)
    assert torch.equal(first[0], whole[0])
    assert all(torch.equal(a, b) for a, b in zip(second, whole, strict=True))
    assert len({tuple(drawn.tolist()) for drawn in whole}) == 5


def test_a_device_without_an_index_draws_from_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert default_generator(torch.device("cuda")) == "second"
    assert default_generator(torch.device("cuda:0")) == "first"
    assert default_generator(torch.device("cpu")) is torch.default_generator
