"""Optimizers and weight edits that look beyond one parameter: right on every layout, or refused before they do harm."""

from __future__ import annotations

import threading
import types
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
from torch.nn.utils import clip_grad_norm_
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


class ClippedAdamW(torch.optim.AdamW):
    """Clips by the norm of all its gradients."""

    def step(self, closure: Any = None) -> Any:
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


class ClipsLater(ClippedAdamW):
    """It begins to clip in its last step, or when it is told to."""

    counts, clips, calls = True, False, 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        late = self.calls >= STEPS if self.counts else self.clips
        return super().step(closure) if late else torch.optim.AdamW.step(self, closure)


class Centred(torch.optim.AdamW):
    """Changes each gradient by itself, and calls the step of its base."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim > 1:
                    parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
        return super().step(closure)


class Normalised(torch.optim.Optimizer):
    """A step of one length, whatever the gradients are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for parameter in found:
            parameter.add_(parameter.grad, alpha=-1e-2 / float(norm))


class Lars(Normalised):
    """A step whose length is that of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=-1e-2)


def trained(loop: Loop, after: Callable[[int], None] = lambda step: None) -> None:
    for step in range(STEPS):
        loop.backward(step)
        loop.step()
        after(step)


def clipped(loop: Loop) -> None:
    loop.prepare(ClippedAdamW(loop.model.parameters(), lr=1e-2, eps=1e-4))
    trained(loop)


def clips_later(loop: Loop) -> None:
    loop.prepare(ClipsLater(loop.model.parameters(), lr=1e-2, eps=1e-4))
    trained(loop)


def clips_when_told(loop: Loop) -> None:
    optimizer = ClipsLater(loop.model.parameters(), lr=1e-2, eps=1e-4)
    optimizer.counts = False
    loop.prepare(optimizer)
    trained(loop, lambda step: setattr(optimizer, "clips", True))


def of_some(loop: Loop, stays: str = "embed") -> None:
    """An optimizer of some parameters, while the gradients of all are clipped by one norm."""
    some = [parameter for name, parameter in loop.model.named_parameters() if stays not in name]
    loop.prepare(torch.optim.SGD(some, lr=1e-1))
    for step in range(STEPS):
        loop.backward(step)
        loop.history.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.05)))
        loop.step()
        loop.model.zero_grad()


def of_some_blocks(loop: Loop) -> None:
    of_some(loop, "mlp")


def clipped_with_warm_up(loop: Loop) -> None:
    """A scheduler that begins with a rate of zero wraps the step."""
    optimizer = ClippedAdamW(loop.model.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    loop.prepare(optimizer)
    trained(loop, lambda step: schedule.step())


class Polyak(torch.optim.SGD):
    """Steps by the loss over the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        (group,) = self.param_groups
        norm = torch.stack([p.grad.square().sum() for p in group["params"] if p.grad is not None]).sum()
        group["lr"] = 0.1 * float(loss) / float(norm)
        super().step()
        return loss


def by_the_loss(loop: Loop) -> None:
    asking(loop, Polyak(loop.model.parameters(), lr=1.0))


def with_closure(loop: Loop) -> None:
    """An optimizer that asks for gradients itself, and searches by the norm of all."""
    asking(loop, torch.optim.LBFGS(loop.model.parameters(), lr=1e-2, max_iter=1))


def asking(loop: Loop, optimizer: torch.optim.Optimizer) -> None:
    loop.prepare(optimizer)
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            loop.optimizers[0].zero_grad()
            loss = loop.loss(step)
            loop.accelerator.backward(loss)
            return loss

        loop.optimizers[0].step(closure)


def clip_in_step(optimizer: torch.optim.Optimizer) -> None:
    """Put a step on an optimizer that clips by the norm of all its gradients."""
    step = optimizer.step

    def clipped(self: Any, closure: Any = None) -> Any:
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return step(closure)

    optimizer.step = types.MethodType(clipped, optimizer)  # type: ignore[method-assign]


def with_a_step_of_its_own(loop: Loop) -> None:
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2, eps=1e-4)
    clip_in_step(optimizer)
    loop.prepare(optimizer)
    trained(loop)


def with_a_later_step(loop: Loop) -> None:
    """The step is put there after the first one."""
    loop.prepare()
    trained(loop, lambda step: None if step else clip_in_step(loop.optimizers[0].optimizer))


def with_an_update_of_its_own(loop: Loop) -> None:
    """A step is put on the optimizer that updates by itself, by steps of one length."""
    loop.prepare()
    one = loop.optimizers[0].optimizer
    one.step = types.MethodType(lambda self, closure=None: Normalised.step(self), one)
    trained(loop)


def with_an_update_for_each(loop: Loop) -> None:
    """The same, of each parameter alone."""
    loop.prepare()
    one = loop.optimizers[0].optimizer
    one.step = types.MethodType(lambda self, closure=None: Lars.step(self), one)
    trained(loop)


def locked(loop: Loop) -> None:
    """The optimizer cannot be copied."""
    optimizer = ClippedAdamW(loop.model.parameters(), lr=1e-2, eps=1e-4)
    optimizer.lock = threading.Lock()
    loop.prepare(optimizer)
    trained(loop)


def with_a_later_class(loop: Loop) -> None:
    """After the first step the optimizer is of a class that clips."""
    loop.prepare()
    trained(loop, lambda step: setattr(loop.optimizers[0].optimizer, "__class__", ClippedAdamW))


def centred(loop: Loop) -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # from now on the step of the base runs hooks too
    loop.prepare(Centred(loop.model.parameters(), lr=1e-2, eps=1e-4))
    trained(loop)


def normalised(loop: Loop) -> None:
    loop.prepare(Normalised(loop.model.parameters()))
    trained(loop)


def lars(loop: Loop) -> None:
    loop.prepare(Lars(loop.model.parameters()))
    trained(loop)


def hooked(loop: Loop) -> None:
    """A hook of the step that is registered when everything is prepared clips."""
    loop.prepare()
    clip: Callable[..., None] = lambda *args: loop.history.append(  # noqa: E731
        float(clip_grad_norm_(loop.model.parameters(), 0.05))
    )
    loop.optimizers[0].optimizer.register_step_pre_hook(clip)
    trained(loop)


def through_groups(loop: Loop) -> None:
    """Gradients are clipped where the optimizer has its parameters."""
    loop.prepare()
    for step in range(STEPS):
        loop.backward(step)
        clip_grad_norm_(loop.optimizers[0].param_groups[0]["params"], 0.05)
        loop.step()


def noisy(loop: Loop) -> None:
    """Noise that is drawn for one parameter after another."""
    loop.prepare()

    def disturb(step: int) -> None:
        torch.manual_seed(100 + step)
        for parameter in reversed(list(loop.named().values())):
            parameter.data.add_(torch.randn_like(parameter), alpha=0.01)

    trained(loop, disturb)


def noisy_by_name(loop: Loop) -> None:
    """Noise whose seed is the parameter's name."""
    loop.prepare()

    def disturb(step: int) -> None:
        for name, parameter in loop.named().items():
            torch.manual_seed(zlib.crc32(name.encode()) + step)
            parameter.data.add_(torch.randn_like(parameter), alpha=0.01)

    trained(loop, disturb)


def reset(loop: Loop) -> None:
    """The moments of each parameter are forgotten."""
    loop.prepare()

    def forget(step: int) -> None:
        for parameter in loop.model.parameters():
            loop.optimizers[0].state.pop(parameter, None)

    trained(loop, forget)


def reset_all(loop: Loop) -> None:
    """The moments of whatever the optimizer has are forgotten."""
    loop.prepare()

    def forget(step: int) -> None:
        for state in loop.optimizers[0].state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].mul_(0.5)

    trained(loop, forget)


BODIES: dict[str, Callable[[Loop], None]] = {
    body.__name__: body
    for body in (
        of_some,
        of_some_blocks,
        clipped_with_warm_up,
        clipped,
        clips_later,
        clips_when_told,
        by_the_loss,
        with_closure,
        with_a_step_of_its_own,
        with_a_later_step,
        with_an_update_of_its_own,
        with_an_update_for_each,
        with_a_later_class,
        locked,
        centred,
        normalised,
        lars,
        hooked,
        through_groups,
        noisy,
        noisy_by_name,
        reset,
        reset_all,
    )
}
CROSSES = "depends on the gradients of others"
UNTRIED = "could not be tried"
WHOLE = "its update may use norms or factors of whole tensors"
# Name -> layout -> what the error says, or nothing where the loop is right.
EXPECTED: dict[str, dict[str, str]] = {
    "of_some": {"dp2": "", "zero1": "", "zero2": "", "pp2": "", "tp2": ""},
    "of_some_blocks": {"zero1": "", "zero2": ""},
    "clipped_with_warm_up": {"dp2": "", "pp2": CROSSES},
    "clipped": {"dp2": "", "pp2": CROSSES},
    "clips_later": {"dp2": "", "pp2": CROSSES},
    "clips_when_told": {"dp2": "", "pp2": CROSSES},
    "by_the_loss": {"dp2": "", "pp2": CROSSES, "zero1": WHOLE},
    "with_closure": {"dp2": "", "pp2": CROSSES},
    "with_a_step_of_its_own": {"dp2": "", "pp2": "", "zero1": WHOLE, "tp2": WHOLE},
    "with_a_later_step": {"dp2": "", "pp2": "", "zero1": WHOLE, "zero3": WHOLE, "tp2": WHOLE},
    "with_an_update_of_its_own": {"dp2": "", "pp2": "", "zero1": WHOLE, "tp2": WHOLE},
    "with_an_update_for_each": {"pp2": "", "zero1": WHOLE, "tp2": WHOLE},
    "with_a_later_class": {"dp2": "", "pp2": CROSSES, "zero1": WHOLE, "zero3": WHOLE, "tp2": WHOLE},
    "locked": {"dp2": "", "pp2": UNTRIED},
    "centred": {"dp2": "", "pp2": ""},
    "normalised": {"dp2": "", "pp2": CROSSES},
    "lars": {"dp2": "", "pp2": ""},
    "hooked": {"dp2": "", "zero1": "", "zero2": "", "zero3": "", "pp2": "", "tp2": ""},
    "through_groups": {"dp2": "", "zero1": "", "zero3": "", "pp2": "", "tp2": ""},
    "noisy": {"dp2": "", "zero1": "", "pp2": "its values differ there"},
    "noisy_by_name": {"dp2": "", "zero1": "", "pp2": ""},
    "reset": {"dp2": "", "zero1": "", "zero1_offload": "", "zero3": "", "pp2": ""},
    "reset_all": {"zero1": "", "zero3": "", "pp2": "", "tp2": ""},
}
CASES = [(name, layout) for name, layouts in EXPECTED.items() for layout in layouts]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(user_loops.main_of(__name__), BODIES, CASES, tmp_path_factory.mktemp("attacks"))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_optimizers_and_weights(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, EXPECTED[name][layout])
