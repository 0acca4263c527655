"""What a checkpoint would not hold of an optimizer is found, before its first step where a copy shows it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_parallel.checkpoints.state.lost import what_is_lost


class Counter(torch.optim.AdamW):
    """Counts in its state_dict, as Ranger21 does."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}


class Common(torch.optim.SGD):
    """Keeps what belongs to no parameter, once it has stepped."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"] = {"count": 1}
        return super().step(closure)


class Projector:
    """As GaLore's."""


class Projects(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["projector"] = Projector()
        return super().step(closure)


class Quantised(torch.Tensor):
    """As torchao's, which are no plain tensors."""


class Quantises(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = parameter.detach().clone().as_subclass(Quantised)
        return super().step(closure)


class Plain(torch.optim.SGD):
    """Numbers, text, a tuple, a tensor of a parameter."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {
                "step": torch.tensor(1.0),
                "moment": parameter.detach().clone(),
                "mode": "fast",
                "k": (1, 2),
            }
        return super().step(closure)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 5)) for _ in range(3)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Common, "its state 'all'"),
        (Projects, "'projector' of type Projector"),
        (Quantises, "'moment' of type Quantised"),
    ],
)
def test_what_a_step_will_leave_is_known_before_it(kind: Any, said: str) -> None:
    optimizer = kind(parameters(), lr=1e-2)
    assert what_is_lost(optimizer) is None
    assert said in str(what_is_lost(optimizer, later=True))
    assert not optimizer.state
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert said in str(what_is_lost(optimizer))


def test_more_than_states_in_a_state_dict_is_known() -> None:
    found = str(what_is_lost(Counter(parameters())))
    assert "('count')" in found
    assert "torch.optim.AdamW" in found
    assert "save_only_model=True" in found


def test_tables_with_other_keys_than_text_are_known() -> None:
    groups: list[dict[str, Any]] = [{"params": parameters(), "rates": {2: 0.5}}]
    assert "'rates' of a parameter group" in str(what_is_lost(torch.optim.SGD(groups, lr=1e-2)))


@pytest.mark.parametrize("kind", [Plain, torch.optim.AdamW, torch.optim.LBFGS])
def test_what_a_checkpoint_holds_is_not_refused(kind: Any) -> None:
    optimizer = kind(parameters(), lr=1e-2)
    if kind is not torch.optim.LBFGS:  # which keeps lists of tensors
        assert what_is_lost(optimizer, later=True) is None
    assert what_is_lost(copy.copy(optimizer)) is None
