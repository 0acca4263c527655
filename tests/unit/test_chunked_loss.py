"""A loss computed without logits: the same numbers, wherever code looks at the logits after all."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from vocab_models import CASES, VOCAB, config_of, vocab_batch, vocab_model
from zoo.models import batch as zoo_batch
from zoo.models import build, entries, why_not

from hf_parallel.engine.plan.head import HeadPlan, judge_head
from hf_parallel.errors import ConfigError, UnsupportedError
from hf_parallel.head.defer import LogitsDeferral, defer_logits
from hf_parallel.head.tiles import Head, Tiling, tiled_loss
from hf_parallel.head.unmade import UnmadeLogits
from hf_parallel.settings.config import HFParallelConfig
from hf_parallel.tensor_parallel.plan.derive import plan_tensor_parallel
from hf_parallel.tensor_parallel.plan.verify_model import verify_model
from hf_parallel.tensor_parallel.plan.vocab_plan import shard_vocabulary


def deferred(model: nn.Module, rows: int = 5) -> LogitsDeferral:
    """Have a model's head leave its logits unmade, `rows` tokens a tile."""
    head = model.get_output_embeddings()
    defer_logits(head)
    found: LogitsDeferral = head.logits_deferral
    found.tiling.rows = rows
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = 1e-5) -> None:
    got, wanted = gradients(model), gradients(reference)
    assert got.keys() == wanted.keys()
    largest = max(float(tensor.norm()) for tensor in wanted.values())
    for name, tensor in wanted.items():
        assert float((got[name] - tensor).norm()) <= tolerance * max(float(tensor.norm()), 1e-3 * largest), name


# -- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": torch.tensor(9)}], ids=["mean", "items"])
def test_loss_and_gradients_of_a_model_are_those_with_logits(case: str, extra: dict[str, Any]) -> None:
    reference = vocab_model(case)
    model = copy.deepcopy(reference)
    found = deferred(model)
    expected = reference(**vocab_batch(), **extra).loss
    loss = model(**vocab_batch(), **extra).loss
    assert (found.last.tiled, found.last.made) == (1, [])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    loss.backward()
    assert_same(model, reference)


def test_the_loss_of_a_router_stays() -> None:
    reference: Any = build("mixtral")
    reference.config.output_router_logits = True
    model = copy.deepcopy(reference)
    found = deferred(model)
    batch = zoo_batch("mixtral", reference)
    expected, output = reference(**batch).loss, model(**batch)
    assert (found.last.tiled, found.last.made) == (1, [])
    assert output.aux_loss.item() > 0
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    expected.backward()
    output.loss.backward()
    assert_same(model, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", entries())
def test_every_type_gives_the_same_where_the_trial_accepts_it(name: str) -> None:
    if why_not(name) is not None:
        pytest.skip("it cannot be trained on text")
    reference = build(name)
    batch = zoo_batch(name, reference)
    plan = judge_head(reference, batch)
    if not plan.is_deferred:
        assert plan.why
        pytest.skip(plan.why)
    model = copy.deepcopy(reference)
    head = model.get_submodule(plan.name)
    defer_logits(head)
    vars(head)["logits_deferral"].tiling.rows = 5
    for one in (reference, model):
        torch.manual_seed(0)
        one(**batch).loss.backward()
    assert vars(head)["logits_deferral"].last.made == []
    assert_same(model, reference)


@pytest.mark.parametrize("case", ["llama_tied", "gemma2", "phi", "cohere"])
def test_heads_sharded_over_the_vocabulary_leave_logits_unmade(case: str) -> None:
    model = vocab_model(case)
    plan = plan_tensor_parallel(model, 2, vocab_batch())
    verify_model(model, shard_vocabulary(model, plan, vocab_batch(), True), vocab_batch(), defers_logits=True)


class Largest(TorchDispatchMode):
    """The most elements of a float that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not isinstance(tensor, UnmadeLogits):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("case", ["llama", "gemma2", "cohere", "phi"])
def test_logits_of_all_tokens_are_never_made(case: str) -> None:
    batch = vocab_batch(rows=36, length=7)  # more than attention matrices, hidden states and weights
    logits = 36 * 7 * VOCAB
    for defers in (False, True):
        model = vocab_model(case)
        if defers:
            deferred(model, rows=16)
        with Largest() as seen:
            model(**batch).loss.backward()
        assert (seen.numel < logits) is defers


ROWS = 16


class Alive(TorchDispatchMode):
    """Most bytes alive at once of tensors [ROWS VOCAB] that operations return."""

    now = most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.shape == (ROWS, VOCAB):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        if any(own() is storage for own in self.known):
            return
        size = storage.nbytes()

        def freed(own: Any) -> None:
            self.now -= size
            self.known.remove(own)

        self.known.append(weakref.ref(storage, freed))
        self.now += size
        self.most = max(self.most, self.now)

    def __enter__(self) -> Self:
        self.known: list[weakref.ref[torch.UntypedStorage]] = []
        return super().__enter__()


def test_one_tile_is_alive_at_a_time_with_what_memory_is_counted_for_it() -> None:
    states = torch.randn(5 * ROWS, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCAB, 8, dtype=torch.bfloat16, requires_grad=True)
    head = Head(weight, None, torch.bfloat16, (Tensor.float,), Tiling(ROWS))
    with Alive() as seen:
        tiled_loss(states, head, torch.zeros(5 * ROWS, dtype=torch.long), -100).backward()
    assert seen.most == 12 * ROWS * VOCAB


def test_a_frozen_head_gets_no_gradient_and_no_product_for_it() -> None:
    reference = vocab_model("llama")
    reference.lm_head.requires_grad_(False)
    model = copy.deepcopy(reference)
    deferred(model)
    for one in (reference, model):
        one(**vocab_batch()).loss.backward()
    assert model.lm_head.weight.grad is None
    assert_same(model, reference)
    shape = model.lm_head.weight.shape

    class Shapes(TorchDispatchMode):
        found: list[Any] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if "mm" in str(func):
                self.found.append(out.shape)
            return out

    with Shapes() as seen:
        model(**vocab_batch()).loss.backward()
    assert shape not in seen.found


def test_without_labels_that_count_the_loss_is_nan_and_gradients_are_zero() -> None:
    reference = vocab_model("llama")
    model = copy.deepcopy(reference)
    deferred(model)
    batch = vocab_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for one in (reference, model):
        loss = one(**batch).loss
        assert loss.isnan()
        loss.backward()
        assert all(float(p.grad.abs().max()) == 0 for p in one.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_with_logits(dtype: torch.dtype) -> None:
    exact = vocab_model("gemma2")
    exact(**vocab_batch()).loss.backward()
    for casts in (True, False):
        errors = []
        for defers in (False, True):
            model = vocab_model("gemma2", torch.float32 if casts else dtype)
            if defers:
                assert deferred(model).tiling.rows == 5
            with torch.autocast("cpu", dtype, enabled=casts):
                loss = model(**vocab_batch()).loss
            assert loss.dtype == torch.float32
            loss.backward()
            wanted = exact.lm_head.weight.grad
            errors.append(float((model.lm_head.weight.grad.float() - wanted).norm() / wanted.norm()))
        assert errors[1] <= 1.2 * errors[0] + 1e-4


def test_losses_in_flight_hold_one_gradient_of_the_weight_and_all_are_right() -> None:
    reference = vocab_model("llama_tied")
    model = copy.deepcopy(reference)
    found = deferred(model)
    batches = [vocab_batch(seed) for seed in range(3)]
    for batch in batches:
        reference(**batch).loss.backward()
    losses = []
    for batch in batches:
        before = found.tiling.waits()
        losses.append(model(**batch).loss)
        assert before is bool(losses[1:])
    for loss in losses:
        loss.backward()
    assert not found.tiling.waits()
    assert_same(model, reference)
    dropped = model(**batches[0]).loss
    assert found.tiling.waits()
    del dropped
    assert not found.tiling.waits()


def test_a_second_backward_pass_through_a_kept_graph_gives_the_same() -> None:
    model = vocab_model("llama")
    deferred(model)
    loss = model(**vocab_batch()).loss
    loss.backward(retain_graph=True)
    first = {name: grad.clone() for name, grad in gradients(model).items()}
    loss.backward()
    for name, grad in gradients(model).items():
        assert torch.allclose(grad, 2 * first[name], rtol=1e-4, atol=1e-7), name


def test_a_model_can_be_copied_and_pickled_between_forward_and_backward() -> None:
    model = vocab_model("llama")
    found = deferred(model)
    loss = model(**vocab_batch()).loss
    copied = copy.deepcopy(model)
    assert found.tiling.waits()
    assert not copied.lm_head.logits_deferral.tiling.waits()
    assert pickle.loads(pickle.dumps(Tiling(3))).rows == 3
    loss.backward()
    copied(**vocab_batch()).loss.backward()
    assert_same(copied, model)


# -- code that looks at logits -----------------------------------------------------------------------------------

LABELS = torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[True, False, True], [False, True, True]])


def in_place(logits: Tensor) -> Tensor:
    logits = logits.clone()
    logits[..., 3] = -1.0
    return F.cross_entropy(logits.view(-1, 11), LABELS.view(-1))


def capped_in_place(logits: Tensor) -> Tensor:
    logits /= 2.0
    logits.tanh_()
    return F.cross_entropy((logits * 3).flatten(0, 1), LABELS.flatten())


def read_and_lost(logits: Tensor) -> Tensor:
    best = logits.argmax(-1)
    return F.cross_entropy(logits.view(-1, 11), LABELS.view(-1)) + (best == LABELS).float().mean()


def written_without_graph(logits: Tensor) -> Tensor:
    with torch.no_grad():
        logits[..., 2] += 1.0
    return F.cross_entropy(logits.view(-1, 11), LABELS.view(-1))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


USES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    # name -> (what is done to logits f[2 3 11], whether they stay unmade)
    "plain": (lambda x: F.cross_entropy(x.view(-1, 11), LABELS.view(-1)), True),
    "module": (lambda x: nn.CrossEntropyLoss(ignore_index=4)(x.reshape(6, 11), LABELS.reshape(6)), True),
    "sum": (lambda x: F.cross_entropy(input=x.view(6, -1), target=LABELS.view(-1), reduction="sum"), True),
    "shifted": (lambda x: F.cross_entropy(x[..., :-1, :].reshape(-1, 11), LABELS[..., 1:].reshape(-1)), True),
    "masked": (lambda x: F.cross_entropy(x[MASK], LABELS[MASK]), True),
    "row": (lambda x: F.cross_entropy(x[1], LABELS[1]), True),
    "capped": (lambda x: F.cross_entropy((torch.tanh(x / 2.0) * 2.0).view(-1, 11), LABELS.view(-1)), True),
    "capped in place": (capped_in_place, True),
    "half": (lambda x: F.cross_entropy(x.double().float().view(-1, 11), LABELS.view(-1)), True),
    "scaled by a tensor": (lambda x: F.cross_entropy((x * torch.tensor(0.5)).view(-1, 11), LABELS.view(-1)), True),
    "twice": (lambda x: F.cross_entropy(x[0], LABELS[0]) + F.cross_entropy(x[1] * 2, LABELS[1]), True),
    "smoothed": (lambda x: F.cross_entropy(x.view(-1, 11), LABELS.view(-1), label_smoothing=0.1), False),
    "each": (lambda x: F.cross_entropy(x.view(-1, 11), LABELS.view(-1), reduction="none").square().mean(), False),
    "weighted": (lambda x: F.cross_entropy(x.view(-1, 11), LABELS.view(-1), weight=torch.arange(11.0)), False),
    "classes second": (lambda x: F.cross_entropy(x.transpose(1, 2), LABELS), False),
    "other shape": (lambda x: x.view(2, -1).logsumexp(-1).sum(), False),
    "columns": (lambda x: x[..., 2:5].sum(), False),
    "last position": (lambda x: x[:, -1].square().sum(), False),
    "log softmax": (lambda x: -x.log_softmax(-1).gather(-1, LABELS[..., None]).mean(), False),
    "joined": (lambda x: torch.cat([x, x * 2]).exp().mean(), False),
    "with each other": (lambda x: (x * x[:1]).sum(), False),
    "in place": (in_place, False),
    "read first": (read_and_lost, False),
    "written": (written_without_graph, False),
    "own function": (lambda x: Doubled.apply(x).mean(), False),
    "aten": (lambda x: torch.ops.aten.logsumexp(x, [-1]).sum(), False),
}


def head_and_hidden() -> tuple[nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(7, 11)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head, torch.randn(2, 3, 7, generator=generator).requires_grad_()


@pytest.mark.parametrize("use", USES)
def test_whatever_code_does_with_logits_comes_out_as_with_ordinary_ones(use: str) -> None:
    function, stays = USES[use]
    results = []
    for defers in (False, True):
        head, hidden = head_and_hidden()
        if defers:
            defer_logits(head)
            head.logits_deferral.tiling.rows = 2
        value = function(head(hidden))
        value.backward()
        results.append([value.detach(), hidden.grad, head.weight.grad, head.bias.grad])
        if defers:
            assert (not head.logits_deferral.last.made) is stays
    for one, other in zip(*results, strict=True):
        assert type(other) is type(one)
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_what_is_known_of_logits_is_known_without_making_them() -> None:
    head, hidden = head_and_hidden()
    defer_logits(head)
    head.logits_deferral.tiling.rows = 2
    logits = head(hidden)
    assert isinstance(logits, Tensor)
    assert logits.shape == logits.size() == (2, 3, 11)
    assert (logits.dtype, logits.device.type, logits.ndim, len(logits)) == (torch.float32, "cpu", 3, 2)
    assert logits.requires_grad
    assert logits.grad_fn is not None
    assert logits.float() is logits
    assert head.logits_deferral.last.made == []
    assert torch.equal(logits.detach(), F.linear(hidden, head.weight, head.bias))
    assert torch.equal(copy.deepcopy(logits.detach()), torch.tensor(logits.tolist()))
    with torch.no_grad():
        assert type(head(hidden)) is Tensor


def test_a_hook_on_logits_sees_their_gradient_or_is_refused() -> None:
    seen = []
    for defers in (False, True):
        head, hidden = head_and_hidden()
        if defers:
            defer_logits(head)
            head.logits_deferral.tiling.rows = 2
        logits = head(hidden)
        logits.register_hook(seen.append)
        logits.retain_grad()
        F.cross_entropy(logits.view(-1, 11), LABELS.view(-1)).backward()
        seen += [logits.grad, hidden.grad, head.weight.grad]
    half = len(seen) // 2
    for one, other in zip(seen[:half], seen[half:], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    logits = head(hidden)
    F.cross_entropy(logits.view(-1, 11), LABELS.view(-1))
    with pytest.raises(UnsupportedError, match=r"logits\.retain_grad\(\) after the loss.*chunked_loss: false"):
        logits.retain_grad()


def test_a_change_in_place_after_a_part_was_taken_is_refused() -> None:
    head, hidden = head_and_hidden()
    defer_logits(head)
    head.logits_deferral.tiling.rows = 2
    logits = head(hidden)
    part = logits[:, :-1]
    with pytest.raises(UnsupportedError, match=r"changes logits in place of which a part.*logits\.clone"):
        logits.mul_(2)
    with pytest.raises(UnsupportedError, match="chunked_loss: false"):
        part[0, 0, 0] = 1.0


def test_logits_are_not_made_with_a_weight_that_was_updated_since() -> None:
    model = vocab_model("llama")
    deferred(model)
    early, late = (model(**vocab_batch()) for _ in range(2))
    wanted = early.logits.sum().item()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    assert early.logits.sum().item() == wanted
    with pytest.raises(UnsupportedError, match="after the head's weight had changed"):
        late.logits.sum()


# -- the plan ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_trial_accepts_models_and_leaves_them_alone(case: str) -> None:
    model = vocab_model(case)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = judge_head(model, vocab_batch())
    assert (plan.is_deferred, plan.why) == (True, "")
    assert gradients(model) == {}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.training
    assert "forward" not in vars(model.get_output_embeddings())


def test_the_trial_makes_no_gradient_of_a_frozen_head(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    real = torch.autograd.grad

    def grad(loss: Tensor, leaves: list[Tensor]) -> Any:
        made.append(len(leaves) > 1)
        return real(loss, leaves)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    for is_trained in (True, False):
        model = vocab_model("llama")
        model.get_output_embeddings().requires_grad_(is_trained)
        assert judge_head(model, vocab_batch()).is_deferred
    assert made == [True, True, False, False]


class Softened(LlamaForCausalLM):
    """A loss term of its own on the logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).square().mean()
        return output


class Twice(LlamaForCausalLM):
    """Two losses of one head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + super().forward(*args, **kwargs).loss
        return output


@pytest.mark.parametrize(
    ("kind", "why"), [(Softened, r"its forward reads them \(logsumexp\)"), (Twice, "calls the head 2 times")]
)
def test_the_trial_says_why_logits_are_needed(kind: type[LlamaForCausalLM], why: str) -> None:
    plan = judge_head(kind(config_of("llama")), vocab_batch())
    assert not plan.is_deferred
    assert pytest.importorskip("re").search(why, plan.why)
    assert plan.describe() == [f"loss: the logits are made for it ({plan.why})"]


def test_nothing_is_said_of_a_head_that_nobody_asked_about() -> None:
    assert HeadPlan().describe() == []
    assert not HeadPlan().is_deferred


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"chunked_loss": True}, r"chunked_loss=true with tp_size=1 and pp_size=1 is not available.*pp_size to 2"),
        ({"chunked_loss": "yes"}, "chunked_loss.*'auto'"),
    ],
)
def test_settings_that_cannot_have_an_effect_are_errors(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HFParallelConfig(**settings)


@pytest.mark.parametrize(("tokens", "stays"), [(256, False), (257, True)])
def test_logits_that_fit_into_one_tile_are_made_by_the_head_itself(tokens: int, stays: bool) -> None:
    head = nn.Linear(8, 64)
    defer_logits(head)
    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    logits = head(hidden)
    assert isinstance(logits, UnmadeLogits) is stays
    targets = torch.randint(64, (tokens,))
    found = torch.autograd.grad(nn.functional.cross_entropy(logits.view(-1, 64), targets), hidden)[0]
    plain = nn.functional.cross_entropy(nn.Linear.forward(head, hidden).view(-1, 64), targets)
    expected = torch.autograd.grad(plain, hidden)[0]
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-9) if stays else torch.equal(found, expected)
