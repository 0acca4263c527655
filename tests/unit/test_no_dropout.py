"""Dropout is off where it should be, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_parallel.model.dropout import NoDropout


ONES = torch.ones(2, 3, 8, 8)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5, True),
    "dropout by name": lambda x: functional.dropout(input=x, p=0.5, training=True),
    "dropout1d": lambda x: functional.dropout1d(x[0], 0.5, True),
    "dropout2d": lambda x: functional.dropout2d(x, 0.5, True),
    "dropout3d": lambda x: functional.dropout3d(x, 0.5, True),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x, 0.5, True),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "nn.Dropout": lambda x: nn.Dropout(0.5)(x),
}


def attends(*args: Any, **kwargs: Any) -> Tensor:
    return functional.scaled_dot_product_attention(ONES, ONES, torch.eye(8).expand(2, 3, 8, 8), *args, **kwargs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_dropout_function_returns_its_input(name: str) -> None:
    with NoDropout():
        assert torch.equal(FUNCTIONS[name](ONES).reshape(-1), ONES[: 1 if name == "dropout1d" else 2].reshape(-1))
    assert not torch.equal(FUNCTIONS[name](ONES).reshape(-1), ONES[: 1 if name == "dropout1d" else 2].reshape(-1))


@pytest.mark.parametrize("rate", [(None, 0.5), (None, 0.5, False)])
def test_attention_keeps_all_of_its_weights(rate: tuple[Any, ...]) -> None:
    with NoDropout():
        assert torch.equal(attends(*rate), attends())
        assert torch.equal(attends(dropout_p=0.5), attends())
    assert not torch.equal(attends(*rate), attends())


def test_attention_of_nn_keeps_all_of_its_weights() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.5)
    with NoDropout():
        first, second = (attention(ONES[0], ONES[0], ONES[0])[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(attention(ONES[0], ONES[0], ONES[0])[0], attention(ONES[0], ONES[0], ONES[0])[0])


def backward_of_all(loss: Tensor) -> None:
    torch.autograd.backward([loss], [torch.ones_like(loss)])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward, backward_of_all])
def test_a_checkpointed_block_runs_again_without_dropout(backward: Callable[[Tensor], None], reentrant: bool) -> None:
    weight = torch.full((1000,), 2.0, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return functional.dropout(x * x, 0.5, True)

    def nested(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=False)

    with NoDropout():
        backward(checkpoint(nested, weight, use_reentrant=reentrant, preserve_rng_state=False).sum())
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((1000,), 4.0))


def test_another_thread_draws_dropout_meanwhile_and_no_function_of_torch_is_replaced() -> None:
    before = functional.dropout, functional.scaled_dot_product_attention
    drawn: list[Tensor] = []

    def augment() -> None:
        drawn.append(functional.dropout(torch.ones(1000), 0.5, True))

    with NoDropout():
        assert functional.dropout is before[0]
        assert functional.scaled_dot_product_attention is before[1]
        thread = threading.Thread(target=augment)
        thread.start()
        thread.join()
        assert torch.equal(functional.dropout(ONES, 0.5, True), ONES)
    assert 0 < int((drawn[0] == 0).sum()) < 1000
