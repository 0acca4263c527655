"""Embedding, head and loss over parts of the vocabulary: the same numbers, and only where they are provably the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from thinning import in_turns
from torch import Tensor, nn
from tp_models import roles
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from vocab_models import CASES, VOCAB, config_of, vocab_batch, vocab_model
from zoo.models import batch, build
from zoo.shards import sweep_shards

from hf_parallel.errors import PlanError
from hf_parallel.ledger import build_ledger
from hf_parallel.tensor_parallel.layout import ShardSpec, split_sizes
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary
from hf_parallel.tensor_parallel.run import vocab_loss
from hf_parallel.tensor_parallel.run.apply import apply_tensor_parallel
from hf_parallel.tensor_parallel.run.functions import TPGroup, VirtualGroup
from hf_parallel.tensor_parallel.shard_plan import TPPlan


def on_virtual_ranks(tp_size: int, work: Callable[[TPGroup, int], Any]) -> list[Any]:
    """`work(group, rank)` of all ranks, threads of this process."""
    slots: list[Tensor | None] = [None] * tp_size
    barrier = threading.Barrier(tp_size, timeout=60)
    results: list[Any] = [None] * tp_size

    def main(rank: int) -> None:
        try:
            results[rank] = work(VirtualGroup(slots, barrier, rank), rank)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(tp_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results


def one_by_one(case: str, count: int) -> list[nn.Module]:
    """A model for each rank: in threads, transformers would leave functions of torch.nn.init exchanged, and random numbers mix."""
    return [vocab_model(case) for _ in range(count)]


def planned(model: nn.Module, tp_size: int = 2, parallel_loss: Any = "auto") -> TPPlan:
    return shard_vocabulary(model, plan_tensor_parallel(model, tp_size, vocab_batch()), vocab_batch(), parallel_loss)


# -- the loss ----------------------------------------------------------------------------------------------------


def losses(logits: Tensor, labels: Tensor, tp_size: int, **options: Any) -> tuple[list[Tensor], Tensor]:
    """Each rank's loss, and the gathered gradient of the logits."""
    sizes = split_sizes(logits.shape[-1], tp_size)

    def work(group: TPGroup, rank: int) -> tuple[Tensor, Tensor]:
        start = sum(sizes[:rank])
        part = logits[..., start : start + sizes[rank]].clone().requires_grad_()
        loss = vocab_loss.vocab_parallel_loss(part, labels, group, start, **options)
        (grad,) = torch.autograd.grad(loss, part)
        return loss.detach(), grad

    results = on_virtual_ranks(tp_size, work)
    return [loss for loss, _ in results], torch.cat([grad for _, grad in results], -1)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 40, 2**22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(7)}, {"shift": True}], ids=str)
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(
    tp_size: int, chunk: int, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_loss, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 7, VOCAB, generator=generator) * 30).to(dtype)
    labels = vocab_batch()["labels"]
    options = dict(options)
    if options.pop("shift", False):
        options["shift_labels"] = labels.flip(1)
    whole = logits.clone().requires_grad_()
    expected = ForCausalLMLoss(whole, labels, VOCAB, **options)
    expected.backward()
    mine, grad = losses(logits, labels, tp_size, **options)
    for loss in mine:
        assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    assert whole.grad is not None
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, whole.grad, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-7)


def test_without_any_label_the_loss_is_that_of_transformers() -> None:
    logits, labels = torch.randn(2, 4, VOCAB), torch.full((2, 4), -100)
    (loss, _), grad = losses(logits, labels, 2, num_items_in_batch=5)
    assert float(loss) == 0.0 == float(ForCausalLMLoss(logits, labels, VOCAB, num_items_in_batch=5))
    assert torch.equal(grad, torch.zeros_like(grad))
    assert all(loss.isnan() for loss in losses(logits, labels, 2)[0])
    assert ForCausalLMLoss(logits, labels, VOCAB).isnan()


def test_a_label_outside_of_the_vocabulary_is_not_silent() -> None:
    labels = vocab_batch()["labels"]
    labels[1, 3] = VOCAB
    assert all(loss.isnan() for loss in losses(torch.randn(3, 7, VOCAB), labels, 2)[0])


# -- the plan ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "tp_size"), in_turns(CASES, [2, 3]))
def test_every_head_whose_tail_is_elementwise_is_sharded_and_verifies(case: str, tp_size: int) -> None:
    model = vocab_model(case)
    plan = planned(model, tp_size)
    ends = {role for role in roles(plan).values() if role.startswith("vocab")}
    assert ends == {"vocab_embedding", "vocab_head"}
    verify_model(model, plan, vocab_batch())
    assert TPPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    specs = plan.shard_specs()
    ledger = build_ledger(model, pp_size=1, holds=lambda rank, name: True, specs=specs)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        (entry,) = [e for e in ledger if any(model.get_parameter(a) is module.weight for a in e.aliases)]
        assert entry.spec == ShardSpec.contiguous(0, VOCAB)
        assert [entry.spec.local_size(tp_size, rank) for rank in range(tp_size)] == split_sizes(VOCAB, tp_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["llama_tied", "gemma2", "phi"])
def test_half_precision_gets_the_same_plan(case: str, dtype: torch.dtype) -> None:
    assert planned(vocab_model(case, dtype)) == planned(vocab_model(case))


def test_planning_changes_nothing() -> None:
    model = vocab_model("gemma2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    planned(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.training


def test_false_leaves_the_plan_alone() -> None:
    model = vocab_model("llama")
    assert planned(model, parallel_loss=False) == plan_tensor_parallel(model, 2, vocab_batch())


class WithTail(LlamaForCausalLM):
    """A llama that does something to its logits."""

    tail: Callable[[Tensor], Tensor]

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("use_cache", None)
        hidden = self.model(input_ids, attention_mask).last_hidden_state
        logits = self.tail(self.lm_head(hidden))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def with_tail(tail: Any, tied: bool = False) -> WithTail:
    torch.manual_seed(0)
    config = config_of("llama_tied" if tied else "llama")
    model = WithTail(config)
    model.tail = tail
    return model.train()


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (lambda x: x.log_softmax(-1), "does not commute"),
        (lambda x: x - x.mean(-1, keepdim=True), "does not commute"),
        (lambda x: x.sort(-1).values, "does not commute"),
        (lambda x: x + torch.arange(VOCAB), "raises RuntimeError"),
        (LearnedScale(), "a parameter is used on the logits"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_tail_that_needs_whole_logits_gets_them(tail: Any, reason: str, tied: bool) -> None:
    model = with_tail(tail, tied)
    plan = planned(model)
    assert roles(plan)["lm_head"] == "gather"
    assert roles(plan)["model.embed_tokens"] == "vocab_embedding"
    assert plan.fallbacks["lm_head"].startswith("gathered: the loss needs whole logits: ")
    assert reason in plan.fallbacks["lm_head"]
    if not reason.startswith("raises"):
        verify_model(model, plan, vocab_batch())
    with pytest.raises(PlanError, match=r"vocab_parallel_loss: true, but lm_head needs whole logits.*auto"):
        planned(model, parallel_loss=True)


def test_a_head_wider_than_the_loss_gets_whole_logits() -> None:
    model = with_tail(lambda x: x[..., : VOCAB - 1])
    batch = vocab_batch()
    batch["labels"].clamp_(max=VOCAB - 2)
    plan = shard_vocabulary(model, plan_tensor_parallel(model, 2, batch), batch)
    assert "the loss sees 100 of 101 columns" in plan.fallbacks["lm_head"]
    verify_model(model, plan, batch)


@pytest.mark.parametrize(
    "tail", [lambda x: x, lambda x: (x / 3).tanh() * 3, lambda x: x.float() * 0.1], ids=["itself", "tanh", "scaled"]
)
def test_an_elementwise_tail_is_sharded(tail: Any) -> None:
    model = with_tail(tail)
    plan = planned(model, parallel_loss=True)
    assert roles(plan)["lm_head"] == "vocab_head"
    verify_model(model, plan, vocab_batch())


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    flat = logits[:, :-1].reshape(-1, vocab_size)
    return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), label_smoothing=0.1)


def test_another_loss_function_gets_whole_logits() -> None:
    model = vocab_model("llama")
    model.loss_function = smoothed
    plan = planned(model)
    assert roles(plan)["lm_head"] == "gather"
    assert "smoothed is not the loss of a causal language model" in plan.fallbacks["lm_head"]
    verify_model(model, plan, vocab_batch())


def test_weights_that_others_use_stay_whole() -> None:
    model = vocab_model("llama_tied")
    model.third = nn.Linear(48, VOCAB, bias=False)
    model.third.weight = model.lm_head.weight
    plan = planned(model)
    assert not set(roles(plan)) & {"lm_head", "model.embed_tokens"}
    assert "tied to third" in plan.fallbacks["lm_head"]
    foreign = with_tail(None)
    foreign.tail = lambda x: x + foreign.lm_head.weight.sum()
    plan = planned(foreign)
    assert roles(plan).get("lm_head") != "vocab_head"
    assert "read by code outside the module" in plan.fallbacks["lm_head"]


class NormedEmbedding(nn.Embedding):
    """A table whose rows pass through a norm with a learned weight."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim)
        self.weight = table.weight
        self.norm = nn.RMSNorm(table.embedding_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        normed: Tensor = self.norm(super().forward(tokens))
        return normed


def test_an_embedding_with_other_parameters_stays_whole() -> None:
    model = vocab_model("llama")
    model.set_input_embeddings(NormedEmbedding(model.get_input_embeddings()))
    plan = planned(model)
    assert "model.embed_tokens" not in roles(plan)
    assert "parameters beside its table" in plan.fallbacks["model.embed_tokens"]
    assert roles(plan)["lm_head"] == "vocab_head"
    verify_model(model, plan, vocab_batch())


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3.0


class MixingEmbedding(nn.Embedding):
    """Each token sees those before it."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).cumsum(-2)


@pytest.mark.parametrize(("kind", "sharded"), [(ScaledEmbedding, True), (MixingEmbedding, False)])
def test_an_embedding_of_another_class_is_tried(kind: type[nn.Embedding], sharded: bool) -> None:
    model = vocab_model("llama")
    table = kind(VOCAB, 48, padding_idx=VOCAB - 1)
    table.weight = model.get_input_embeddings().weight
    model.set_input_embeddings(table)
    plan = planned(model)
    assert ("model.embed_tokens" in roles(plan)) is sharded
    assert sharded or "do not sum to its output" in plan.fallbacks["model.embed_tokens"]
    verify_model(model, plan, vocab_batch())


class AllOrNothing(LlamaForCausalLM):
    """Refuses to train while its inner model does not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and not self.model.training:
            raise ValueError("call model.train()")
        return super().forward(*args, **kwargs)


def test_a_model_that_does_not_train_in_part_is_checked_in_evaluation() -> None:
    model = AllOrNothing(config_of("llama"))
    plan = planned(model)
    assert roles(plan)["lm_head"] == "vocab_head"
    verify_model(model, plan, vocab_batch())


def test_the_whole_model_check_sees_a_head_that_should_not_be_sharded() -> None:
    model = with_tail(lambda x: x.log_softmax(-1))
    plan = planned(model)
    head = replace(plan.linears["lm_head"], role="vocab_head")
    with pytest.raises(PlanError, match=r"differs.*gradient of"):
        verify_model(model, replace(plan, linears={**plan.linears, "lm_head": head}), vocab_batch())


@pytest.mark.parametrize(("case", "tp_size"), in_turns(CASES, [2, 3]))
def test_loss_and_every_gradient_equal_one_process(case: str, tp_size: int) -> None:
    reference = vocab_model(case)
    loss = reference(**vocab_batch(), use_cache=False).loss
    loss.backward()
    plan = planned(reference, tp_size)
    models = one_by_one(case, tp_size)

    def work(group: TPGroup, rank: int) -> tuple[float, dict[str, Tensor]]:
        model = models[rank]
        apply_tensor_parallel(model, plan, group, rank, lambda name: True)
        mine = model(**vocab_batch(), use_cache=False).loss
        mine.backward()
        return mine.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    ranks = on_virtual_ranks(tp_size, work)
    specs = plan.shard_specs()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for mine, grads in ranks:
        assert mine == pytest.approx(loss.item(), rel=1e-5)
        assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        parts = [grads[name] for _, grads in ranks]
        whole = [specs[name].assemble(parts)] if name in specs else parts
        scale = max(float(grad.abs().max()), 1e-3 * largest)
        for part in whole:
            assert float((part - grad).abs().max()) <= 1e-5 * scale, name


# -- calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama_tied", "gemma2", "phi"])
def test_whoever_asks_for_logits_gets_whole_ones(case: str) -> None:
    reference = vocab_model(case)
    batch = vocab_batch()
    expected = reference(**batch, use_cache=False)
    plan = planned(reference)
    models = one_by_one(case, 2)

    def work(group: TPGroup, rank: int) -> None:
        model = models[rank]
        apply_tensor_parallel(model, plan, group, rank, lambda name: True)
        output = model(**batch, use_cache=False)
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        assert "logits" not in output
        with pytest.raises(AttributeError, match=r"sharded over the vocabulary.*compute_loss_func"):
            _ = output.logits
        unlabelled = {name: tensor for name, tensor in batch.items() if name != "labels"}
        positional = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"], use_cache=False)
        assert "logits" not in positional
        training = model(**unlabelled, use_cache=False).logits
        assert training.requires_grad
        as_tuple = model(**batch, use_cache=False, return_dict=False)
        with torch.no_grad():
            silent = model(**batch, use_cache=False)
        evaluation = model.eval()(**batch, use_cache=False)
        for logits in (training, as_tuple[1], silent.logits, evaluation.logits):
            torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
        assert evaluation.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)

    on_virtual_ranks(2, work)


def test_a_head_that_is_the_row_of_a_pair_keeps_its_place() -> None:
    row = sweep_shards("rembert", 2)
    assert (row.verdict, row.vocabulary) == ("exact", False), row.note
    model = build("rembert")
    inputs = {k: v for k, v in batch("rembert", model).items() if k != "labels"}
    plan = shard_vocabulary(model, plan_tensor_parallel(model, 2, inputs), inputs)
    assert plan.linears["cls.predictions.decoder"].role == "row"
    assert "paired: the loss needs whole logits: it belongs to a pair" in plan.fallbacks["cls.predictions.decoder"]
