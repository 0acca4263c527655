"""What an optimizer's update depends on is found out on a copy: a scheduler's marks and a rate of zero do not hide it."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from hf_parallel.guards.optimizers.crossing import crosses_parameters, draws_numbers, goes_by_place
from hf_parallel.guards.optimizers.elementwise import treats_elements_alone
from hf_parallel.guards.optimizers.trial import CannotTry


class Clips(torch.optim.AdamW):
    """By the norm of all gradients; counts its steps."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class Halves(torch.optim.AdamW):
    """Gradients whose norm is above `limit`, or where that is None above the mean of the norms before, once it has seen two."""

    def __init__(self, parameters: Any, limit: float | None) -> None:
        super().__init__(parameters, lr=1e-2)
        self.limit, self.norms = limit, list[float]()

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        limit = self.limit if self.limit is not None else sum(self.norms) / len(self.norms)
        if self.norms[-1] > limit and (self.limit is not None or len(self.norms) > 2):
            for gradient in gradients:
                gradient.mul_(0.5)
        return super().step(closure)


class EveryOther(torch.optim.SGD):
    """Turns around the gradients of parameters with an odd number."""

    def step(self, closure: Any = None) -> Any:
        for index, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if index % 2 and parameter.grad is not None:
                parameter.grad.neg_()
        return super().step(closure)


class Counts(Clips):
    """Harmless."""

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return torch.optim.AdamW.step(self, closure)


class Noisy(torch.optim.SGD):
    """Adds noise, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 5)) for _ in range(4)]


def scheduled(optimizer: torch.optim.Optimizer, rate: float) -> torch.optim.Optimizer:
    """With a scheduler that begins with `rate` times the learning rate, as a warm-up begins with 0."""
    LambdaLR(optimizer, lambda step: rate)
    return optimizer


@pytest.mark.parametrize("rate", [None, 1.0, 0.0], ids=["alone", "scheduled", "warm-up"])
def test_updates_that_cross_parameters_are_found(rate: float | None) -> None:
    made = [Clips(parameters(), lr=1e-2), EveryOther(parameters(), lr=1e-2), Counts(parameters(), lr=1e-2)]
    clips, other, counts = made if rate is None else [scheduled(one, rate) for one in made]
    assert crosses_parameters(clips) is True
    assert (crosses_parameters(other), goes_by_place(other)) == (False, True)
    assert (crosses_parameters(counts), goes_by_place(counts)) == (False, False)
    assert (clips.steps, counts.steps) == (0, 0)
    assert not counts.state
    assert not treats_elements_alone(clips)


@pytest.mark.parametrize("limit", [None, 0.1, 3.0, 40.0, 500.0], ids=str)
def test_limits_of_any_size_are_found(limit: float | None) -> None:
    assert crosses_parameters(Halves(parameters(), limit)) is True


def test_drawn_numbers_are_found() -> None:
    for kind, draws in ((Noisy, True), (Counts, False), (Clips, False)):
        optimizer = scheduled(kind(parameters(), lr=1e-2), 0.0)
        state = torch.get_rng_state()
        assert draws_numbers(optimizer) is draws
        assert torch.equal(torch.get_rng_state(), state)
    assert not goes_by_place(Noisy(parameters(), lr=1e-2))


class Sharpness(torch.optim.SGD):
    """Asks for gradients where they are largest within a distance, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found if p.grad is not None]).norm()
        with torch.no_grad():
            for parameter in found:
                parameter.add_(parameter.grad, alpha=0.05 / float(norm))
        closure()
        return super().step()


class Restores(Sharpness):
    """Puts the weights back before it steps with these gradients, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]

        def asks() -> None:
            closure()
            for parameter, value in zip((p for g in self.param_groups for p in g["params"]), before, strict=True):
                parameter.data.copy_(value)

        return super().step(asks)


class Locked(torch.optim.SGD):
    """Cannot be copied."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.lock = threading.Lock()

    def step(self, closure: Any = None) -> Any:
        with self.lock:
            return super().step(closure)


def test_optimizers_that_ask_for_gradients_are_given_them() -> None:
    assert crosses_parameters(torch.optim.LBFGS(parameters(), lr=1e-2)) is True
    assert crosses_parameters(Sharpness(parameters(), lr=1e-2)) is True
    assert crosses_parameters(Restores(parameters(), lr=1e-2)) is True


class Polyak(torch.optim.SGD):
    """Steps by the loss over the norm of all gradients, as AliG does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        rate = float(loss) / sum(float(p.grad.square().sum()) for p in self.param_groups[0]["params"])
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=rate)
        return loss


class Distance(torch.optim.SGD):
    """Moves no further than it must before its estimate over all gradients has grown, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            seen = sum(float(p.grad.square().sum()) for p in group["params"])
            group["seen"] = group.get("seen", 0.0) + seen
            group["scale"] = max(group.get("scale", 1e-6), 1e-9 * group["seen"])
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign(), alpha=group["scale"])


class Modes(torch.optim.SGD):
    """Steps in training mode alone, as schedule-free optimizers do."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> Any:
        if not self.is_training:
            raise RuntimeError("Please insert .train() and .eval() calls")
        return super().step(closure)


class Forgets(torch.optim.SGD):
    """Leaves out of copies what its step reads."""

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state, "param_groups": self.param_groups}

    def step(self, closure: Any = None) -> Any:
        assert "lr" in self.defaults
        return super().step(closure)


class Waits(torch.optim.SGD):
    """Does nothing for long."""

    waits = 1000

    def step(self, closure: Any = None) -> Any:
        self.waits -= 1
        return None if self.waits > 0 else super().step(closure)


class Marks(torch.optim.SGD):
    """Says of each parameter, as it is built, what a step does with it: those of Muon are made so."""

    def __init__(self, parameters: Any, clips: bool = False) -> None:
        super().__init__(parameters, lr=1e-2)
        self.clips = clips
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["turns"] = parameter.ndim > 1

    def step(self, closure: Any = None) -> Any:
        everything = self.param_groups[0]["params"]
        if self.clips:
            clip_grad_norm_(everything, 0.05)
        for parameter in everything:
            if self.state[parameter]["turns"]:
                parameter.grad.neg_()
        return super().step(closure)


class Seeds(torch.optim.SGD):
    """Counts the parameters as it is built, and draws by that (APOLLO's projections)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter]["seed"] = index

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            generator = torch.Generator().manual_seed(self.state[parameter]["seed"])
            parameter.grad.mul_(torch.rand(parameter.shape, generator=generator))
        return super().step(closure)


class StandsIn(torch.optim.Optimizer):
    """Does nothing, where hooks step in the backward pass."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


def test_rates_by_the_loss_are_found() -> None:
    assert crosses_parameters(Polyak(parameters(), lr=1.0)) is True


def test_numbers_of_groups_that_all_gradients_make_are_found_before_they_matter() -> None:
    assert crosses_parameters(Distance(parameters(), lr=1.0)) is True


@pytest.mark.parametrize("kind", [Modes, Forgets])
def test_a_copy_is_as_a_step_needs_it(kind: Any) -> None:
    optimizer = kind(parameters(), lr=1e-2)
    assert crosses_parameters(optimizer) is False
    assert not getattr(optimizer, "is_training", False)


class Rectified(torch.optim.RAdam):
    """Moves nothing before its sixth step, as those of packages; it `clips` by the norm of all gradients."""

    def __init__(self, parameters: Any, clips: bool) -> None:
        super().__init__(parameters, lr=1e-2)
        self.clips, self.taken = clips, 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        everything = self.param_groups[0]["params"]
        if self.clips:
            clip_grad_norm_(everything, 0.05)
        rate, self.param_groups[0]["lr"] = self.param_groups[0]["lr"], 1e-2 if self.taken > 5 else 0.0
        super().step(closure)
        self.param_groups[0]["lr"] = rate


@pytest.mark.parametrize("clips", [False, True])
def test_one_that_moves_nothing_at_first_takes_more_steps(clips: bool) -> None:
    assert crosses_parameters(Rectified(parameters(), clips)) is clips


class Masked(torch.optim.SGD):
    """Keeps a mask for each parameter, which it made when it was built."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mask"] = torch.zeros_like(parameter, dtype=torch.bool)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.masked_fill_(self.state[parameter]["mask"], 0.0)
        return super().step(closure)


def test_a_mask_among_the_states_is_copied() -> None:
    assert crosses_parameters(Masked(parameters())) is False


def test_what_does_not_move_is_not_believed() -> None:
    with pytest.raises(CannotTry, match="moved none"):
        crosses_parameters(Waits(parameters(), lr=1e-2))


@pytest.mark.parametrize("clips", [False, True])
def test_what_it_notes_of_parameters_when_it_is_built_is_there_for_a_step(clips: bool) -> None:
    assert crosses_parameters(Marks(parameters(), clips)) is clips
    assert goes_by_place(Marks(parameters())) is False


def test_parameters_that_were_counted_when_it_was_built_go_by_their_places() -> None:
    optimizer = Seeds(parameters())
    assert crosses_parameters(optimizer) is False
    assert goes_by_place(optimizer) is True


class Heads(torch.optim.Optimizer):
    """Scales the gradients of a query or key by their size in each head, as Adam-mini does; one of a norm over all of them `clips`."""

    def __init__(self, named: Iterator[tuple[str, nn.Parameter]], clips: bool = False) -> None:
        self.named, self.clips, self.of_a_head = named, clips, 16 * 64
        super().__init__([{"name": name, "params": [parameter]} for name, parameter in named], {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.clips:
            clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if "k_proj" in group["name"]:
                    gradient = gradient.view(-1, self.of_a_head)
                    gradient = gradient / gradient.square().mean(1, keepdim=True).sqrt()
                parameter.add_(gradient.view_as(parameter), alpha=-group["lr"])


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
def test_blocks_of_so_many_elements_are_tried_in_sizes_that_have_them(clips: bool, layers: int) -> None:
    """The generator that it read its parameters from is kept, and cannot be copied."""
    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "down": (64, 96)}
    named = {
        f"{layer}.{name}": nn.Parameter(torch.randn(size)) for layer in range(layers) for name, size in sizes.items()
    }
    optimizer = Heads(((name, parameter) for name, parameter in named.items()), clips)
    assert crosses_parameters(optimizer) is clips
    assert clips or goes_by_place(optimizer) is False
    assert not optimizer.state


class Slow(torch.optim.SGD):
    """Pulls parameters to tensors that it was built with, every second step: in its state, or beside it."""

    def __init__(self, parameters: Any, place: str) -> None:
        super().__init__(parameters, lr=1e-2)
        everything = self.param_groups[0]["params"]
        self.steps, self.place = 0, place
        self.slow: Any = {p: p.detach().clone() for p in everything}
        if place == "state":
            for parameter, tensor in self.slow.items():
                self.state[parameter]["slow"] = tensor
        if place == "list":
            self.slow = list(self.slow.values())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        self.steps += 1
        for index, parameter in enumerate(self.param_groups[0]["params"] if self.steps % 2 == 0 else ()):
            key = index if self.place == "list" else parameter
            slow = self.state[parameter]["slow"] if self.place == "state" else self.slow[key]
            parameter.lerp_(slow, 0.5)


class Breaks(torch.optim.SGD):
    """Raises in every second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps % 2 == 0:
            raise RuntimeError("odd steps only")
        return super().step(closure)


@pytest.mark.parametrize("place", ["dict", "list", "state"])
def test_a_copy_has_tensors_that_go_with_parameters_in_its_sizes(place: str) -> None:
    optimizer = Slow(parameters(), place)
    assert crosses_parameters(optimizer) is False
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    for _ in range(2):
        optimizer.step()
    assert crosses_parameters(optimizer) is False


def test_a_later_step_that_raises_is_not_taken_for_one_that_asks_for_a_closure() -> None:
    """With one its count goes on, so the step that raised would never be tried."""
    with pytest.raises(CannotTry, match="odd steps only"):
        crosses_parameters(Breaks(parameters(), lr=1e-2))


def test_a_step_that_reads_nothing_is_believed_not_to_move() -> None:
    assert crosses_parameters(StandsIn(parameters())) is False


def test_what_cannot_be_tried_says_why() -> None:
    with pytest.raises(CannotTry) as found:
        crosses_parameters(Locked(parameters(), lr=1e-2))
    assert "lock" in str(found.value.__cause__)


def test_a_step_that_was_put_on_one_optimizer_is_not_known() -> None:
    stock = scheduled(torch.optim.AdamW(parameters()), 1.0)
    assert treats_elements_alone(stock)
    patched = torch.optim.AdamW(parameters())
    step = patched.step

    def clipped(self: Any, closure: Any = None) -> Any:
        clip_grad_norm_([p for group in patched.param_groups for p in group["params"]], 0.05)
        return step(closure)

    patched.step = types.MethodType(clipped, patched)  # type: ignore[method-assign]
    scheduled(patched, 1.0)
    assert not treats_elements_alone(patched)
    with pytest.raises(CannotTry, match=r"step of its own"):
        crosses_parameters(patched)
    assert not patched.state
