"""Find out, by running them, whether a model's embedding and head can be sharded over the vocabulary.

An embedding qualifies if the parts that the ranks look up sum to what it returns. A head qualifies if everything that
the model does to its output before `loss_function` commutes with cutting the vocabulary (scales, caps, biases do; a
softmax does not), if that function is transformers' own, which `vocab_loss` computes, and if nothing else in the loss
depends on the logits. The function is known by identity: one that weighs a special token gives the numbers of a plain one
wherever that token does not occur. A head that does not qualify keeps its gathered output, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from hf_parallel.compat.private_peft import base_model, trained_copy
from hf_parallel.compat.private_torch import own_parameters
from hf_parallel.compat.private_transformers import is_causal_loss
from hf_parallel.errors import PlanError
from hf_parallel.model.tensors import only_tensor
from hf_parallel.settings.sections import Treatment
from hf_parallel.tensor_parallel.layout import ShardSpec, split_sizes
from hf_parallel.tensor_parallel.plan.overrides import OVERRIDDEN, override_for
from hf_parallel.tensor_parallel.plan.trace import (
    NOISE_SEED,
    agree,
    find_linears,
    replaced,
    run,
    trace_linears,
    undisturbed,
)
from hf_parallel.tensor_parallel.run.followed import Followed
from hf_parallel.tensor_parallel.run.functions import VirtualGroup
from hf_parallel.tensor_parallel.run.vocab import rows_of
from hf_parallel.tensor_parallel.run.vocab_loss import vocab_parallel_loss
from hf_parallel.tensor_parallel.shard_plan import LinearPlan, TPPlan


Foreign: TypeAlias = Callable[[], frozenset[str]]  # parameters that code outside of their modules reads
WHOLE_LOGITS = "the loss needs whole logits"  # in the reason of a head that is not `vocab_head`


@dataclass
class Ends:
    """Embedding and head of a model by name; empty where it has none."""

    embedding: str
    head: str
    tied: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the embedding and the head, as far as the plan shards them."""
        return tuple(name for name in (self.embedding, self.head) if name)


@dataclass
class _Tail:
    """One run of the model from the head's input to the loss function."""

    hidden: Tensor
    weights: list[Tensor]
    logits: Tensor
    labels: Tensor | None
    vocab_size: Any


class _RefusedError(Exception):
    """An end that cannot be sharded; the message says why."""


def shard_vocabulary(
    model: nn.Module,
    plan: TPPlan,
    sample: Mapping[str, Any],
    parallel_loss: Literal["auto"] | bool = "auto",
    overrides: Mapping[str, Treatment] | None = None,
    foreign: frozenset[str] | None = None,
) -> TPPlan:
    """Add the roles `vocab_embedding` and `vocab_head` to a plan, where they verify.

    Pure, deterministic. Runs the model forward `tp_size + 2` times on `sample`.

    Args:
        model: The full model with materialised weights that the plan was made for.
        plan: From `plan_tensor_parallel`.
        sample: Keyword arguments of a forward pass; `input_ids` serve as labels if there are none.
        parallel_loss: `tensor_parallel.vocab_parallel_loss`: False leaves the plan as it is; True insists on the loss.
        overrides: Pattern of module names -> "pair" (refuse to do without), "gather" (whole logits) or "replicate".
        foreign: Parameters that code outside of their modules reads; None: to be found out.

    Returns:
        The plan; what stays gathered or replicated has the reason in `fallbacks`.

    Raises:
        PlanError: `parallel_loss` is True and the loss does not verify, or an override asks for what does not verify.
    """
    if plan.tp_size == 1:
        return plan
    ends = find_ends(model)
    treatments = {name: override_for(overrides or {}, name) for name in ends.names}
    if parallel_loss is False:
        _require(treatments, ends, dict.fromkeys(("embedding", "head"), "vocab_parallel_loss is false"))
        return plan
    with undisturbed(model):
        read = functools.cache(lambda: trace_linears(model, {}, sample).foreign if foreign is None else foreign)
        storage = {
            "embedding": _reason(lambda: _check_embedding(model, ends, plan.tp_size, read)),
            "head": _reason(lambda: _check_head(model, ends, plan.tp_size, read)),
        }
        if any(ends.head in (*pair.columns, pair.row) for pair in plan.pairs):
            storage["head"] = "it belongs to a pair, which cuts it along its other dim"
        storage |= {end: OVERRIDDEN for end in storage if treatments.get(getattr(ends, end)) == "replicate"}
        if ends.tied and any(storage.values()):
            storage = dict.fromkeys(storage, storage["embedding"] or storage["head"])
        loss = storage["head"] or (OVERRIDDEN if treatments.get(ends.head) == "gather" else "")
        loss = loss or _reason(lambda: _check_loss(model, ends.head, plan.tp_size, sample))
    _require(treatments, ends, {"embedding": storage["embedding"], "head": loss})
    if loss and parallel_loss is True:
        raise PlanError(
            f"tensor_parallel.vocab_parallel_loss: true, but {ends.head or 'the head'} needs whole logits: {loss}. Set "
            "it to auto to gather them."
        )
    return _extended(model, plan, ends, storage, loss)


def _require(treatments: Mapping[str, Treatment | None], ends: Ends, reasons: Mapping[str, str]) -> None:
    for end, reason in reasons.items():
        name = getattr(ends, end)
        if reason and treatments.get(name) == "pair":
            raise PlanError(
                f"tensor_parallel.plan wants {name} sharded over the vocabulary, but: {reason}. Remove its pattern."
            )


def _reason(check: Callable[[], None]) -> str:
    try:
        check()
    except _RefusedError as refusal:
        return str(refusal)
    except Exception as error:  # noqa: BLE001  the model's own code, run in parts, may raise anything; reported
        return f"raises {type(error).__name__}: {str(error).strip()[:100]}"
    return ""


def _extended(model: nn.Module, plan: TPPlan, ends: Ends, storage: Mapping[str, str], loss: str) -> TPPlan:
    linears, reasons = dict(plan.linears), dict(plan.fallbacks)
    if not storage["embedding"]:
        weight = own_parameters(model.get_submodule(ends.embedding))["weight"]
        if weight is not None:
            linears[ends.embedding] = LinearPlan(
                "vocab_embedding", False, ShardSpec.contiguous(0, weight.shape[0]), None
            )
            reasons.pop(ends.embedding, None)
    elif ends.embedding:
        reasons[ends.embedding] = f"replicated: {storage['embedding']}"
    if not loss or (ends.tied and not storage["head"]):
        info = find_linears(model.get_submodule(ends.head))[""]
        spec = ShardSpec.contiguous(0, info.out_features)
        bias = spec if info.has_bias else None
        linears[ends.head] = LinearPlan("gather" if loss else "vocab_head", False, spec, bias)
        reasons.pop(ends.head, None)
    if loss and ends.head:
        kept = {None: "replicated", "row": "paired"}.get(
            linears[ends.head].role if ends.head in linears else None, "gathered"
        )
        reasons[ends.head] = f"{kept}: {loss}" if OVERRIDDEN in loss else f"{kept}: {WHOLE_LOGITS}: {loss}"
    return replace(plan, linears=linears, fallbacks=reasons)


def find_ends(model: nn.Module) -> Ends:
    found = []
    for end in ("input", "output"):
        module = None
        with contextlib.suppress(NotImplementedError, AttributeError):
            module = trained_copy(getattr(model, f"get_{end}_embeddings")())
        found.append(next((name for name, other in model.named_modules() if other is module), ""))
    weights = [own_parameters(model.get_submodule(name)).get("weight") if name else None for name in found]
    return Ends(found[0], found[1], weights[0] is not None and weights[0] is weights[1])


def _check_storage(model: nn.Module, name: str, ends: Ends, tp_size: int, foreign: Foreign) -> None:
    """Check that the weight can be sharded by rows: only embedding and head read it, and every rank gets some rows."""
    module = model.get_submodule(name)
    own = {id(parameter) for parameter in own_parameters(module).values() if parameter is not None}
    allowed = {id(model.get_submodule(other)) for other in (ends.embedding, ends.head) if other}
    for other, owner in model.named_modules():
        if id(owner) not in allowed and any(id(p) in own for p in own_parameters(owner).values()):
            raise _RefusedError(f"its parameter is tied to {other}")
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in own}
    if names & foreign():
        raise _RefusedError("its parameter is read by code outside the module")
    rows = module.get_parameter("weight").shape[0]
    if 0 in split_sizes(rows, tp_size):
        raise _RefusedError(f"{rows} rows leave a rank of {tp_size} without any")


def _check_embedding(model: nn.Module, ends: Ends, tp_size: int, foreign: Foreign) -> None:
    module = model.get_submodule(ends.embedding) if ends.embedding else None
    if not isinstance(module, nn.Embedding):
        raise _RefusedError("the input embedding is not an nn.Embedding")
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise _RefusedError("max_norm, sparse or scale_grad_by_freq is set, which looks at whole batches or tables")
    if len(list(module.parameters())) > 1:
        raise _RefusedError("it has parameters beside its table, whose gradients would be of parts of the rows")
    _check_storage(model, ends.embedding, ends, tp_size, foreign)
    if type(module) is nn.Embedding and "forward" not in vars(module):
        return  # known; spares looking up a large table
    tokens = torch.arange(module.num_embeddings, device=module.weight.device).unsqueeze(0)
    (whole,), expected = _looked_up(module, tokens, 1)
    parts, grads = _looked_up(module, tokens, tp_size)
    if not agree(torch.stack(parts).sum(0), whole) or not agree(torch.cat(grads), expected[0]):
        raise _RefusedError("the rows of its parts do not sum to its output")


def _looked_up(module: nn.Embedding, tokens: Tensor, tp_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Run the embedding as each rank would; gives the outputs, and the gradients of their weights."""
    outputs, grads, start = [], [], 0
    for size in split_sizes(module.num_embeddings, tp_size):
        weight = module.weight.detach()[start : start + size].clone().requires_grad_()

        def forward(ids: Tensor, weight: Tensor = weight) -> Tensor:
            result: Tensor = functional_call(module, {"weight": weight}, (ids,))
            return result

        rows = forward(tokens) if tp_size == 1 else rows_of(forward, module, tokens, start, size)
        (grad,) = torch.autograd.grad(rows, weight, _noise(rows))
        outputs.append(rows.detach())
        grads.append(grad)
        start += size
    return outputs, grads


def _check_head(model: nn.Module, ends: Ends, tp_size: int, foreign: Foreign) -> None:
    if not ends.head:
        raise _RefusedError("the model has no output embedding")
    info = find_linears(model.get_submodule(ends.head)).get("")
    if info is None or info.transposed:
        raise _RefusedError("the head is not a linear module with one row a token")
    _check_storage(model, ends.head, ends, tp_size, foreign)


def _check_loss(model: nn.Module, name: str, tp_size: int, sample: Mapping[str, Any]) -> None:
    """Check that the code after the head, run as every rank, gives the parts of the whole result."""
    inner = base_model(model)
    if not callable(getattr(inner, "loss_function", None)):
        raise _RefusedError("the model has no loss_function")
    _check_loss_function(inner.loss_function)  # type: ignore[arg-type]
    head = model.get_submodule(name)
    info = find_linears(head)[""]
    sizes = split_sizes(info.out_features, tp_size)
    whole = _run_tail(model, head, sample, None, slice(None))
    _run_in_training(model, lambda: _run_tail(model, head, sample, None, slice(None)))
    if whole.logits.shape[-1] != info.out_features or whole.vocab_size not in (None, info.out_features):
        raise _RefusedError(f"the loss sees {whole.logits.shape[-1]} of {info.out_features} columns")
    starts = [sum(sizes[:rank]) for rank in range(tp_size)]
    rows = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    parts = [_run_tail(model, head, sample, whole.hidden.detach(), part) for part in rows]
    if any(not _same(part.labels, whole.labels) for part in parts):
        raise _RefusedError("the labels depend on the logits")
    if any(part.logits.shape[-1] != size for part, size in zip(parts, sizes, strict=True)) or not agree(
        torch.cat([part.logits.detach() for part in parts], -1), whole.logits.detach()
    ):
        raise _RefusedError("what the model does to the logits does not commute with cutting the vocabulary")
    _check_tail_gradients(model, whole, parts, rows)


def _run_in_training(model: nn.Module, run_tail: Callable[[], _Tail]) -> None:
    """Run with the model alone in training mode, for another loss there; not its modules, so without dropout."""
    model = base_model(model)
    model.training = True
    try:
        run_tail()
    except _RefusedError:
        raise
    except Exception:  # noqa: BLE001  it may refuse to train while its modules do not
        return
    finally:
        model.training = False


def _same(labels: Tensor | None, others: Tensor | None) -> bool:
    """Labels are absent where a model passes `shift_labels` in their place."""
    if labels is None or others is None:
        return labels is others
    return torch.equal(labels, others)


def _check_tail_gradients(model: nn.Module, whole: _Tail, parts: list[_Tail], rows: list[slice]) -> None:
    cotangent = _noise(whole.logits)
    others = [p for p in model.parameters() if p.requires_grad]
    reached = torch.autograd.grad(whole.logits, others, cotangent, allow_unused=True, retain_graph=True)
    if any(grad is not None for grad in reached):
        raise _RefusedError("a parameter is used on the logits after the head")
    expected = torch.autograd.grad(whole.logits, [whole.hidden, *whole.weights], cotangent)
    grads = [
        torch.autograd.grad(part.logits, [part.hidden, *part.weights], cotangent[..., row])
        for part, row in zip(parts, rows, strict=True)
    ]
    if not agree(torch.stack([grad[0] for grad in grads]).sum(0), expected[0]):
        raise _RefusedError("the gradients of the parts of the logits do not sum to the whole one")
    for index in range(1, len(expected)):
        if not agree(torch.cat([grad[index] for grad in grads]), expected[index]):
            raise _RefusedError("the gradient of the head's parameters differs")


def _run_tail(
    model: nn.Module,
    head: nn.Module,
    sample: Mapping[str, Any],
    hidden: Tensor | None,
    rows: slice,
) -> _Tail:
    """Run the model with rows `rows` of the head, on its own input or on `hidden`; in fp32 if it is in half."""
    weights = [
        p.detach()[rows] for p in (head.get_parameter("weight"), own_parameters(head).get("bias")) if p is not None
    ]
    weights = [(w.float() if w.dtype.itemsize < 4 else w).requires_grad_() for w in weights]
    inputs: list[Tensor] = []
    calls: list[tuple[Tensor, Tensor | None, Any]] = []

    def forward(*args: Tensor, **named: Tensor) -> Tensor:
        x = only_tensor(args, named) if hidden is None else hidden
        inputs.append(x.detach().to(weights[0].dtype).requires_grad_())
        made = F.linear(inputs[-1], weights[0], weights[1] if len(weights) > 1 else None)
        followed.mark(made)
        return made

    def loss(logits: Tensor, labels: Tensor | None = None, vocab_size: Any = None, **_: Any) -> Tensor:
        calls.append((logits, labels, vocab_size))
        return torch.ones((), device=logits.device)

    given = dict(sample)
    given.setdefault("labels", sample.get("input_ids"))
    if given["labels"] is None:
        raise _RefusedError("the sample has neither labels nor input_ids")
    followed = Followed()
    with replaced(head, "forward", forward), replaced(base_model(model), "_loss_function", loss), followed:
        output = run(model, given)
    if followed.read or followed.reaches(_loss_in(output)):
        raise _RefusedError("beside loss_function something else in the loss depends on the logits")
    if len(inputs) != 1 or len(calls) != 1:
        raise _RefusedError(f"one forward calls the head {len(inputs)} times and loss_function {len(calls)} times")
    return _Tail(inputs[0], weights, *calls[0])


def _loss_in(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    return output[0] if isinstance(output, tuple) and output else getattr(output, "loss", output)


def _check_loss_function(function: Callable[..., Tensor]) -> None:
    """Check that the model's loss function is transformers' own, and gives what ours gives, however it is called."""
    name = getattr(function, "__name__", function)
    if not is_causal_loss(function):
        raise _RefusedError(f"{name} is not the loss of a causal language model as transformers ships it")
    generator = torch.Generator().manual_seed(NOISE_SEED)
    logits = torch.randn(2, 5, 11, generator=generator)
    labels = torch.randint(0, 11, (2, 5), generator=generator).index_fill_(1, torch.tensor([2]), -100)
    group = VirtualGroup([None], threading.Barrier(1), 0)
    for extra in ({}, {"num_items_in_batch": 7}, {"shift_labels": labels.flip(1)}):
        results = []
        for is_ours in (True, False):
            leaf = logits.clone().requires_grad_()
            if is_ours:
                value = vocab_parallel_loss(leaf, labels, group, 0, **extra)
            else:
                value = function(logits=leaf, labels=labels, vocab_size=11, **extra)
            (grad,) = torch.autograd.grad(value, leaf)
            results.append((value.detach(), grad))
        if not all(agree(a, b) for a, b in zip(*results, strict=True)):
            raise _RefusedError(f"{name} of this transformers computes something else")


def _noise(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
