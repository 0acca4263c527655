"""Attention whose keys go round the ranks of a row is that of one process, and sends no more than it must.

If a row fails, `sp_attention: ring` changes what users train.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from thinning import slow_if
from torch import nn
from torch.nn import functional
from trainer_cases import ENV, NO_NOISE, Case, compare, run_all, wanted_cases
from transformers import Gemma2Config, Gemma2ForCausalLM

from hf_parallel.compat.private_transformers import attention_names
from hf_parallel.engine.plan.share_rows import judge_rows
from hf_parallel.errors import PlanError, UnsupportedError
from hf_parallel.model.probes import Probes
from hf_parallel.monitor.recorder import Recorder
from hf_parallel.ulysses.attention import Shared, share_attention
from hf_parallel.ulysses.exchange import SequenceGroup
from hf_parallel.ulysses.forward import share_forward
from hf_parallel.ulysses.ring import Ring


sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from bench_ulysses import kept


pytestmark = [pytest.mark.timeout(180)]


def made(name: str) -> nn.Module:
    kind, _, how = name.partition("@")
    model: Any = tiny.MODELS[kind]()
    if how == "sdpa":
        for sets, _ in attention_names(model):
            sets("sdpa")
    if how == "checkpointed":
        model.gradient_checkpointing_enable()
    return model


def batches(length: int) -> dict[str, dict[str, Any]]:
    ids = torch.randint(1, 96, (3, length), generator=torch.Generator().manual_seed(length))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :4], left[1, :1], right[1, -5:] = 0, 0, 0
    positions = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(3, -1)
    found: dict[str, dict[str, Any]] = {
        "left": {"attention_mask": left, "labels": ids.masked_fill(left == 0, -100)},
        "right": {"attention_mask": right, "labels": ids.masked_fill(right == 0, -100)},
        "full": {"labels": ids},
        "packed": {"labels": ids, "position_ids": positions},
    }
    return {name: {"input_ids": ids, "use_cache": False, **batch} for name, batch in found.items()}


def trained(model: nn.Module, batch: dict[str, Any], forward: Any, size: int) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients of a step, and parameters after three."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        found["logits"] = forward(**{k: v for k, v in batch.items() if k != "labels"})["logits"]
    for step in range(3):
        optimizer.zero_grad()
        loss = forward(**batch)["loss"]
        loss.backward()
        for name, p in model.named_parameters():
            if size > 1 and p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= size
            if step == 0 and p.grad is not None:
                found[f"gradient of {name}"] = p.grad.clone()
        found |= {} if step else {"loss": loss.detach()}
        optimizer.step()
    return found | {name: p.detach().clone() for name, p in model.named_parameters()}


def differences(rank: int, world_size: int, models: list[str], lengths: list[int], only: str = "") -> list[str]:
    """What is not as in one process."""
    found = []
    group = SequenceGroup(dist.group.WORLD)
    for name in models:
        for length in lengths:
            for kind, batch in batches(length).items():
                if only not in ("", kind):
                    continue
                plain = made(name)
                plain.train()
                expected = trained(plain, batch, plain.forward, 1)
                model = made(name)
                model.train()
                shared = Shared(group, Ring(group))
                forward = share_forward(model, model.forward, shared, hides_logits=False)
                share_attention(model, shared)
                for what, value in trained(model, batch, forward, world_size).items():
                    wanted = expected[what]
                    error = float((value - wanted).norm() / wanted.norm().clamp(min=1e-4))
                    if not error <= 1e-5:
                        found.append(f"{name} {length} {kind}: {what} {error:.1e}")
    return found


ALL = [
    pytest.param(2, ["gpt2"], marks=pytest.mark.slow),  # with checkpoints among four in another row
    (2, ["llama", "sliding", "qwen3"]),
    (2, ["uneven", "mixtral_plain", "llama@checkpointed"]),
    (4, ["few_heads", "few_heads@sdpa"]),
    pytest.param(4, ["sliding"], marks=pytest.mark.slow),  # among two in another row
    (4, ["deepseek_v3", "gpt2@checkpointed"]),
]


def test_a_ring_with_fewer_heads_than_ranks_trains_as_one_process(tmp_path: Path) -> None:
    """Padded on the left; four does not divide 13 tokens."""
    for found in run_ranks(differences, 4, ["few_heads@sdpa"], [13], "left", tmp_path=tmp_path, env=ENV):
        assert found == []


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "models"), ALL, ids=str)
def test_a_ring_of_other_models_trains_as_one_process(ranks: int, models: list[str], tmp_path: Path) -> None:
    """With padding on either side, without, and with two documents in a row."""
    for found in run_ranks(differences, ranks, models, [13], tmp_path=tmp_path, env=ENV):
        assert found == []


RING: dict[str, Any] = {"sp_size": 2, "sp_attention": "ring"}
# Sums in another order: Adam turns the rounding of gradients near zero into steps.
VARIABLE: dict[str, Any] = {"steps": 3, "variable_length": True, "arguments": NO_NOISE}
TWO = [
    Case("ring2_zero1", model="sliding", parallel={**RING, "zero": {"stage": 1}}, evaluate=True, **VARIABLE),
    Case("ring2_zero3", parallel={**RING, "zero": {"stage": 3}}, **VARIABLE),
    Case("ring2_dynamic_rope", model="dynamic_rope", parallel=RING, steps=3),
    Case("ring2_roberta", model="roberta", parallel=RING, evaluate=True, **VARIABLE),
    Case("ring2_recomputed", parallel={**RING, "activation_checkpointing": {"every": 1, "offload": True}}, **VARIABLE),
]
FOUR = [
    Case("ring4_by_itself", model="few_heads", parallel={"sp_size": 4}, **VARIABLE),
    Case("ring2_dp2", parallel=RING, accumulation=2, **VARIABLE),
    Case("ring2_tp2", parallel={**RING, "tp_size": 2}, **VARIABLE),
    Case("ring2_pp2", parallel={**RING, "pp_size": 2, "num_microbatches": 3}, evaluate=True, **VARIABLE),
]

REST = ("ring2_zero1",)  # slow: parts of the optimizer's states are in another row


@pytest.fixture(scope="module")
def long_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {size: wanted_cases(request, rows) for size, rows in ((2, TWO), (4, FOUR))}
    return run_all(cases, tmp_path_factory.mktemp("ring"))


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=slow_if(case.name, REST), id=case.name) for case in TWO + FOUR]
)
def test_a_ring_trains_as_the_stock_trainer_does_with_all_else(
    case: Case, long_runs: dict[str, dict[str, Any]]
) -> None:
    compare(long_runs[case.name], long_runs[f"stock_{case.name}"])


REFUSED = {
    "gpt_oss_small": r"self_attn does not run.*sinks, a number for each head, in ring attention.*sp_attention to ulysses",
    "gpt2_dropout": r"h\.0\.attn does not run.*dropout=0\.2 of attention weights, in ring attention.*sp_attention to ulysses",
    "gemma2": r"self_attn does not run.*softcap=50\.0, in ring attention.*sp_attention to ulysses",
    "bloom": r"BloomForCausalLM with sp_size=2 as a ring: transformer\.h\.0\.self_attention .*or sp_size to 1",
}


def refused_model(name: str) -> nn.Module:
    if name == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**tiny.SMALL, intermediate_size=64, num_hidden_layers=2, head_dim=8))
    model = tiny.MODELS[name.removesuffix("_small")]()
    model.config.output_router_logits = False
    return model


def judged(rank: int, world_size: int, models: list[str]) -> list[str]:
    """What each model is refused with."""
    found, group = [], SequenceGroup(dist.group.WORLD)
    for name in models:
        model = refused_model(name)
        with pytest.raises(PlanError) as refused:
            judge_rows(model, Shared(group, Ring(group)), Probes(model, torch.device("cpu")))
        found.append(str(refused.value))
    return found


@pytest.mark.long
def test_what_a_ring_does_not_compute_is_refused_with_the_module(tmp_path: Path) -> None:
    for messages in run_ranks(judged, 2, list(REFUSED), tmp_path=tmp_path, env=ENV):
        for message, pattern in zip(messages, REFUSED.values(), strict=True):
            assert re.search(pattern, message), message


def two_ways(rank: int, world_size: int) -> dict[str, str]:
    """By method and tokens of a row: what is not as in one process, or the refusal, where tokens also see later ones."""
    found, group = {}, SequenceGroup(dist.group.WORLD)
    for method, ring in (("ulysses", None), ("ring", Ring(group))):
        for length in (12, 13):
            models: list[Any] = [made("llama@sdpa").train() for _ in range(2)]
            batch, shared = batches(length)["full"], Shared(group, ring)
            forward = share_forward(models[1], models[1].forward, shared, hides_logits=False)
            share_attention(models[1], shared)
            for layer in (layer for model in models for layer in model.model.layers):
                layer.self_attn.is_causal = False
            try:
                mine = trained(models[1], batch, forward, world_size)
            except UnsupportedError as error:
                found[f"{method} {length}"] = str(error)
                continue
            expected = trained(models[0], batch, models[0].forward, 1)
            errors = {k: float((mine[k] - x).norm() / x.norm().clamp(min=1e-4)) for k, x in expected.items()}
            found[f"{method} {length}"] = str({k: error for k, error in errors.items() if not error <= 1e-5} or "")
    return found


def test_tokens_that_see_later_ones_do_not_see_what_fills_up_a_row(tmp_path: Path) -> None:
    for found in run_ranks(two_ways, 2, tmp_path=tmp_path, env=ENV):
        refused = found.pop("ring 13")
        assert set(found.values()) == {""}, found
        assert "is_causal=False" in refused
        assert "rows of 13 tokens" in refused
        assert "sp_attention to ulysses" in refused


Found = tuple[list[int], float]


def attention_of(rank: int, world_size: int, dtype: torch.dtype, windows: list[int]) -> list[Found]:
    return [attention_in(rank, world_size, dtype, window) for window in windows]


def attention_in(rank: int, world_size: int, dtype: torch.dtype, window: int) -> Found:
    """Bytes that this rank sends in a forward and in a backward pass of one attention; its error against the whole."""
    recorder = Recorder(torch.device("cpu"), on=True)
    ring = Ring(SequenceGroup(dist.group.WORLD, recorder))
    generator, length = torch.Generator().manual_seed(0), 8 * world_size
    whole = [torch.randn(2, heads, length, 4, generator=generator).to(dtype) for heads in (4, 2, 2)]
    query, key, value = (x.chunk(world_size, 2)[rank].clone().requires_grad_() for x in whole)
    places = torch.arange(length)
    seen = (places[:, None] >= places) & (places[:, None] - places < (window or length))
    mask = seen.chunk(world_size)[rank][None, None] if window else None
    output, _ = ring.attention(nn.Module(), (query, key, value), mask, {})
    first = recorder.sent["sp"] - (4 * world_size if window else 0)  # less which parts a mask shows
    before = recorder.sent["sp"]
    output.sum().backward()
    reference = [x.double().requires_grad_() for x in whole]
    repeated = [x.repeat_interleave(2, 1) for x in reference[1:]]
    expected = functional.scaled_dot_product_attention(reference[0], *repeated, attn_mask=seen)
    expected.sum().backward()
    errors = []
    pairs = zip((query, key, value), reference, strict=True)
    for mine, other in [(output.transpose(1, 2), expected), *((x.grad, y.grad) for x, y in pairs)]:
        part = other.chunk(world_size, 2)[rank]
        errors.append(float((mine.double() - part).norm() / part.norm()))
    return [first, recorder.sent["sp"] - before], max(errors)


BF16 = pytest.param(torch.bfloat16, 2e-2, marks=pytest.mark.long)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), BF16], ids=str)
def test_keys_go_as_far_as_they_are_seen_and_their_gradients_come_home(
    dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """Of a causal mask, and of a window of nine tokens, so that a part is seen by the next one alone."""
    keys = 2 * 2 * 2 * 8 * 4 * dtype.itemsize  # keys and values of a part
    grads = keys * 4 // dtype.itemsize  # in fp32
    causal = [(rank + 1) * keys for rank in range(3)] + [0]
    back = [(rank + 1) * (keys + grads) for rank in range(3)] + [3 * grads]
    near = [keys + grads, keys + 2 * grads, keys + 2 * grads, grads]
    found = run_ranks(attention_of, 4, dtype, [0, 9], tmp_path=tmp_path, env=ENV)
    assert [ranks[0][0] for ranks in found] == [list(both) for both in zip(causal, back, strict=True)]
    assert [ranks[1][0] for ranks in found] == [list(both) for both in zip([keys] * 3 + [0], near, strict=True)]
    assert max(error for ranks in found for _, error in ranks) <= tolerance


@pytest.mark.long
def test_a_ring_keeps_no_more_than_exchanged_heads(tmp_path: Path) -> None:
    sizes = ("llama", 256, 2, 128, 2)
    ways = ("ulysses", "ring")
    most = [max(run_ranks(kept, 2, *sizes, way, tmp_path=tmp_path, env=ENV)) for way in ways]
    assert most[1] <= most[0]
