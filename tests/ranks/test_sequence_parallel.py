"""Sequence parallelism on real ranks must train what one process trains, with half of the activations between layers.

If a test fails, `tensor_parallel.sequence_parallel: true` gives other gradients than one process, hangs, or saves nothing.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_runner import run_ranks
from saved_tensors import saved_bytes
from torch import Tensor, nn
from tp_models import (
    Counter,
    assert_equal_to_one_process,
    backward,
    gathered,
    grads,
    plan_sample,
    spread,
    tiny_batch,
    tiny_model,
)
from transformers import AutoModelForCausalLM, BertConfig

from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.sequence_plan import shard_sequence
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.shard_plan import TPPlan


MODELS = ["llama", "llama_tied", "llama_kv1", "llama_heads3", "llama_odd", "smollm2", "gpt2", "qwen3", "phi3"]
NAMES = ("all_reduce", "all_gather", "reduce_scatter")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def sharded(case: str, rank: int, dtype: torch.dtype = torch.float32, **model: Any) -> tuple[nn.Module, TPPlan]:
    """A model whose ranks share the sequence; its batches are 7 tokens long, which 2 and 4 do not divide."""
    made = tiny_model(case, dtype, **model)
    plan = shard_sequence(made, plan_tensor_parallel(made, dist.get_world_size(), plan_sample()), plan_sample())
    apply_tensor_parallel(made, plan, dist.group.WORLD, rank, lambda name: True)
    return made, plan


def parity(rank: int, world_size: int, cases: list[str]) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        for case in cases:
            reference = tiny_model(case, dtype)
            expected = backward(reference, 2)
            model, plan = sharded(case, rank, dtype)
            assert backward(model, 2) == pytest.approx(expected, rel=tolerance), case
            assert_equal_to_one_process(gathered(plan, grads(model)), grads(reference), tolerance)


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    run_ranks(parity, 2, MODELS, tmp_path=tmp_path)


def test_four_ranks_equal_one_process(tmp_path: Path) -> None:
    run_ranks(parity, 4, ["llama_kv4", "llama_kv1", "llama", "gpt2"], tmp_path=tmp_path)


def counts(rank: int, world_size: int) -> None:
    for case, num_pairs, head in (("llama", 4, 1), ("gpt2", 4, 0), ("phi3", 4, 1)):
        model, _ = sharded(case, rank)
        blocks = num_pairs // 2
        with ExitStack() as stack:
            calls = {name: stack.enter_context(Counter(name)) for name in NAMES}
            loss = model(**tiny_batch(), use_cache=False).loss
            # A gather and a reduce-scatter per pair; one gather where the stack ends.
            forward = {name: counter.calls for name, counter in calls.items()}
            assert forward == {"all_reduce": 0, "all_gather": num_pairs + head + 1, "reduce_scatter": num_pairs}, case
            for counter in calls.values():
                counter.calls = 0
            loss.backward()
            # The mirror; each region gathers its input again; the parameters of each block sum their gradients at once.
            again = 2 * num_pairs + 1
            after = {name: counter.calls for name, counter in calls.items()}
            assert after == {"all_reduce": blocks + head, "all_gather": again, "reduce_scatter": num_pairs}, case


def test_a_pair_costs_a_gather_and_a_reduce_scatter_each_way(tmp_path: Path) -> None:
    run_ranks(counts, 2, tmp_path=tmp_path)


def memory(rank: int, world_size: int) -> None:
    for case in ("llama", "gpt2"):
        batch = tiny_batch(rows=4, length=32)
        plain = tiny_model(case)
        ordinary = copy.deepcopy(plain)
        plan = plan_tensor_parallel(ordinary, 2, plan_sample())
        apply_tensor_parallel(ordinary, plan, dist.group.WORLD, rank, lambda name: True)
        shared, _ = sharded(case, rank)
        saved = [saved_bytes(model, batch) for model in (plain, ordinary, shared)]
        hidden = batch["input_ids"].numel() * 32 * 4
        # Of each of the 2 blocks at least the inputs of 2 norms and of 2 pairs, of which this rank has a half.
        assert saved[1] - saved[2] >= 2 * 4 * hidden / 2, (case, saved)
        assert saved[0] > saved[1]


def test_fewer_bytes_are_saved_for_the_backward_pass(tmp_path: Path) -> None:
    run_ranks(memory, 2, tmp_path=tmp_path)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def checkpointing(rank: int, world_size: int) -> None:
    for case in ("llama", "gpt2"):
        expected = tiny_model(case)
        losses = backward_of_lengths(expected)
        for reentrant in (False, True):
            model, plan = sharded(case, rank)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            without_dropout(model)
            assert backward_of_lengths(model) == pytest.approx(losses, rel=1e-5)
            assert_equal_to_one_process(gathered(plan, grads(model)), grads(expected), 1e-5)


def backward_of_lengths(model: nn.Module) -> list[float]:
    """Both forwards before both backwards: on rank 0 a part of 5 tokens is as long as one of 6."""
    losses = [model(**tiny_batch(1, length=length), use_cache=False).loss for length in (5, 6)]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses]


def test_recomputed_blocks_know_the_length_of_their_sequence(tmp_path: Path) -> None:
    run_ranks(checkpointing, 2, tmp_path=tmp_path)


def without_gradients(rank: int, world_size: int) -> None:
    plain = without_dropout(tiny_model("llama"))
    model, _ = sharded("llama", rank)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    without_dropout(model)
    with torch.no_grad():
        batch = tiny_batch() | {"use_cache": False}
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)


def test_blocks_that_checkpoint_are_exact_in_training_without_gradients(tmp_path: Path) -> None:
    run_ranks(without_gradients, 2, tmp_path=tmp_path)


def other_paths(rank: int, world_size: int) -> None:
    for case in ("llama", "gpt2"):
        plain = tiny_model(case)
        model, plan = sharded(case, rank)
        prompt = tiny_batch()["input_ids"][1:]
        with torch.no_grad():
            for ids in (prompt, prompt[:, :1]):  # a single token does not make a part for two ranks
                torch.testing.assert_close(model(ids).logits, plain(ids).logits)
            asked = model(prompt, output_hidden_states=True).hidden_states
            for mine, whole in zip(asked, plain(prompt, output_hidden_states=True).hidden_states, strict=True):
                torch.testing.assert_close(mine, whole)
        copied = copy.deepcopy(model)
        backward(model)
        backward(copied)
        assert_equal_to_one_process(gathered(plan, grads(copied)), gathered(plan, grads(model)), 1e-6)
        one = {key: value[1:, :1] for key, value in tiny_batch().items() if key != "labels"}
        for part in (model, plain):
            part.zero_grad()
            part(**one, use_cache=False).logits.square().sum().backward()
        assert_equal_to_one_process(gathered(plan, grads(model)), grads(plain), 1e-5)


def test_evaluation_short_sequences_hidden_states_and_copies(tmp_path: Path) -> None:
    run_ranks(other_paths, 2, tmp_path=tmp_path)


def generation(rank: int, world_size: int) -> None:
    for case in ("llama", "gpt2"):
        plain = tiny_model(case)
        model, _ = sharded(case, rank)
        prompt = tiny_batch()["input_ids"][1:]
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options)), case


def test_generate_with_a_cache(tmp_path: Path) -> None:
    run_ranks(generation, 2, tmp_path=tmp_path)


class Masks:
    """What dropout modules do to ones, by name."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.seen: dict[str, Tensor] = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(self.note(name))

    def note(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, out: Tensor) -> None:
            self.seen[name] = (out != 0) | (args[0] == 0)

        return hook


def tiny_bert() -> nn.Module:
    """Its pairs end outside of the regions that their columns are in."""
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        is_decoder=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    spread(model)
    return model


def dropout(rank: int, world_size: int) -> None:
    gpt2 = ["transformer.drop", "transformer.h.0.attn.resid_dropout", "transformer.h.1.mlp.dropout"]
    bert = ["bert.embeddings.dropout", *(f"bert.encoder.layer.{i}.output.dropout" for i in (0, 1))]
    for made, names in ((tiny_model("gpt2"), gpt2), (tiny_bert(), bert)):
        plan = shard_sequence(made, plan_tensor_parallel(made, world_size, plan_sample()), plan_sample())
        model = copy.deepcopy(made)
        apply_tensor_parallel(model, plan, dist.group.WORLD, rank, lambda name: True)
        check_draws(copy.deepcopy(model).train(), plan, names, rank)


def check_draws(model: nn.Module, plan: TPPlan, names: list[str], rank: int) -> None:
    masks = Masks(model, names)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(**tiny_batch(step, length=7 + step), use_cache=False).loss.backward()
        optimizer.step()
        after: list[Any] = [None, None]
        dist.all_gather_object(after, (masks.seen, torch.get_rng_state()))
        (mine, state), (others, other) = after
        assert torch.equal(state, other), "ranks must leave the stack in step"
        assert torch.equal(mine[names[0]], others[names[0]])
        for name in names[1:]:
            length = min(mine[name].shape[1], others[name].shape[1])
            assert not torch.equal(mine[name][:, :length], others[name][:, :length]), name
    gathered(plan, {name: p.detach() for name, p in model.named_parameters()})  # replicated ones are bit-equal


def test_dropout_differs_between_parts_and_is_in_step_elsewhere(tmp_path: Path) -> None:
    run_ranks(dropout, 2, tmp_path=tmp_path)
