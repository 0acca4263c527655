"""Optimizer states, gradients and weights that are parts (ZeRO), in the hands of user code: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
from thinning import FAMILIES, chosen, covering, slow_if, unsaid
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


def trained(loop: Loop, before: Callable[[int], None] = lambda step: None) -> None:
    """With `before` between the backward pass and the step."""
    loop.prepare()
    for step in range(STEPS):
        loop.backward(step)
        before(step)
        loop.step()


def amplified(loop: Loop) -> None:
    """Slow gradients are added, by `p.grad.data = ...`."""
    means: dict[str, Any] = {}

    def amplify(step: int) -> None:
        for name, parameter in loop.named().items():
            gradient = parameter.grad
            assert gradient is not None
            means[name] = means.get(name, torch.zeros_like(gradient)) * 0.9 + gradient.detach() * 0.1
            gradient.data = gradient.data + means[name] * 2

    trained(loop, amplify)


def swapped(loop: Loop) -> None:
    """What was taken out comes back."""

    def swap(step: int) -> None:
        for parameter in loop.named().values():
            assert parameter.grad is not None
            kept = parameter.grad.data
            parameter.grad.data = torch.zeros_like(kept)
            if step != 1:
                parameter.grad.data = kept

    trained(loop, swap)


def plain(loop: Loop) -> None:
    """A tensor of another kind is assigned."""

    def assign(step: int) -> None:
        for parameter in loop.named().values():
            assert parameter.grad is not None
            parameter.grad.data = torch.zeros(parameter.shape)

    trained(loop, assign)


def rows(change: Callable[[Any], Any], *, of_gradient: bool) -> Callable[[Loop], None]:
    """Rows of the embedding, or of its gradient, are changed in place: only some tokens are trained."""

    def body(loop: Loop) -> None:
        loop.prepare()
        for step in range(STEPS):
            loop.backward(step)
            weight = loop.model.get_input_embeddings().weight
            with torch.no_grad():
                change(weight.grad if of_gradient else weight.data)
            loop.step()

    return body


def assigned(tensor: Any) -> None:
    tensor[:50] = tensor[:50] * 0.5


def corner(tensor: Any) -> None:
    tensor[:50, :7] = tensor[:50, :7] * 0.5


ROWS: dict[str, Callable[[Any], Any]] = {
    "sliced": lambda tensor: tensor[:50].zero_(),
    "selected": lambda tensor: tensor[7].mul_(0.5),
    "narrowed": lambda tensor: tensor.narrow(0, 3, 70).mul_(0.5),
    "split": lambda tensor: tensor.split(40)[1].zero_(),
    "assigned": assigned,
    "corner": corner,
    "columns": lambda tensor: tensor[:, :7].zero_(),
    "read": lambda tensor: tensor.mul_(1.0 / (1.0 + tensor[:50].norm())),
}


def changed_in_place(parameter: Any) -> None:
    with torch.no_grad():
        parameter.add_(parameter, alpha=-0.1)


def scaled(parameter: Any) -> None:
    parameter.data *= 0.9


def exchanged(parameter: Any) -> None:
    parameter.data = parameter.data * 0.9


def shrunk_together(parameter: Any) -> None:
    torch._foreach_mul_([parameter.detach()], 0.9)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "clamped": lambda parameter: parameter.data.clamp_(-0.02, 0.02),
    "changed_in_place": changed_in_place,
    "scaled": scaled,
    "exchanged": exchanged,
    "shrunk_together": shrunk_together,
    "looked_at": lambda parameter: float(parameter.detach().norm() + parameter.data.abs().max()),
}


def through_groups(change: Callable[[Any], Any], first: int = 0, *, inner: bool = False) -> Callable[[Loop], None]:
    """Weights are changed where the optimizer, or the one that it was made of, has its parameters, from a step on."""

    def body(loop: Loop) -> None:
        loop.prepare()
        optimizer = loop.optimizers[0].optimizer if inner else loop.optimizers[0]
        for step in range(STEPS):
            loop.backward(step)
            loop.step()
            for group in optimizer.param_groups:
                for parameter in group["params"] if step >= first else ():
                    change(parameter)

    return body


def clamped_in_hook(loop: Loop) -> None:
    """Before the step of the optimizer."""
    loop.prepare()

    def clamp(optimizer: Any, *args: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.clamp_(-0.02, 0.02)

    loop.optimizers[0].optimizer.register_step_pre_hook(clamp)
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


def of_states(change: Callable[[Any], Any]) -> Callable[[Loop], None]:
    def body(loop: Loop) -> None:
        loop.prepare()
        for step in range(STEPS):
            loop.backward(step)
            loop.step()
            for state in loop.optimizers[0].state.values():
                change(state)

    return body


def pruned(state: Any) -> None:
    """Small moments are forgotten."""
    moment = state["exp_avg"]
    moment.mul_(moment.abs() > moment.abs().mean())


def halved(state: Any) -> None:
    state["exp_avg"].mul_(0.5)
    state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"]) + state["exp_avg_sq"] * 0.5
    assert state["step"] > 0


def unprepared(loop: Loop) -> None:
    """An optimizer that is kept from `prepare`."""
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2, eps=1e-4)
    loop.model = loop.accelerator.prepare(loop.model)
    for step in range(STEPS):
        loop.backward(step)
        optimizer.step()
        optimizer.zero_grad()


def changing(change: Callable[[Any], object], *, only: str = "") -> Callable[[Loop], None]:
    """Of every matrix after a step, outside of autograd."""

    def body(loop: Loop) -> None:
        loop.prepare()
        for step in range(STEPS):
            loop.backward(step)
            loop.step()
            with torch.no_grad():
                for name, parameter in loop.named().items():
                    if parameter.ndim > 1 and only in name:
                        change(parameter)

    return body


def masked(parameter: Any) -> None:
    parameter[parameter.abs() < 0.01] = 0


def masked_by_others(parameter: Any) -> None:
    """A mask that is a plain tensor, which all ranks draw alike."""
    generator = torch.Generator().manual_seed(parameter.shape[1])
    parameter.data[torch.rand(parameter.shape, generator=generator) < 0.1] = 0
    parameter.mul_(torch.rand(parameter.shape, generator=generator) > 0.1)
    parameter.add_(torch.rand(parameter.shape[1:], generator=generator), alpha=1e-3)


def permuted(parameter: Any) -> None:
    parameter[torch.tensor([3, 9])] = 0.01
    parameter.copy_(parameter[torch.arange(len(parameter) - 1, -1, -1)])


def flattened(parameter: Any) -> None:
    """Of 99 rows, which two ranks do not share out evenly."""
    parameter.copy_(parameter.view(-1).view_as(parameter))


def skipped(loop: Loop) -> None:
    """A step without gradients counts for nothing: the moments and their number of steps stay."""

    def drop(step: int) -> None:
        for parameter in loop.named().values() if step == 1 else ():
            parameter.grad = None

    trained(loop, drop)


def dropped(*steps: int, which: str = "layers.0") -> Callable[[Loop], None]:
    """Some parameters are left out of some steps, others never."""

    def body(loop: Loop) -> None:
        def drop(step: int) -> None:
            for name, parameter in loop.named().items():
                if which in name and step in steps:
                    parameter.grad = None

        trained(loop, drop)

    return body


def dropped_by_sgd(loop: Loop) -> None:
    loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=0.05, momentum=0.5))
    for step in range(STEPS):
        loop.backward(step)
        for name, parameter in loop.named().items():
            if "layers.0" in name and step == 1:
                parameter.grad = None
        loop.step()


def temperature(loop: Loop) -> None:
    """A parameter that the loss reads past the model: its gradient may be the first to arrive."""
    loop.model.temperature = torch.nn.Parameter(torch.ones(1))
    loop.prepare()
    for step in range(STEPS):
        loop.accelerator.backward(loop.loss(step) * loop.accelerator.unwrap_model(loop.model).temperature.sum())
        loop.step()


def as_array(parameter: Any) -> None:
    parameter.detach().numpy()[:] *= 0.5


def resized(loop: Loop) -> None:
    loop.prepare()
    loop.model.resize_token_embeddings(120)


WHOLE: dict[str, Callable[[Loop], None]] = {
    body.__name__: changing(body) for body in (masked, masked_by_others, permuted)
}
WHOLE |= {body.__name__: changing(body, only="embed") for body in (flattened, as_array)}


BODIES: dict[str, Callable[[Loop], None]] = {body.__name__: body for body in (amplified, swapped, plain, unprepared)}
BODIES |= {f"{name}_gradient": rows(change, of_gradient=True) for name, change in ROWS.items()}
BODIES |= {f"{name}_weight": rows(change, of_gradient=False) for name, change in ROWS.items()}
BODIES |= {name: through_groups(change) for name, change in CHANGES.items()}
BODIES |= {f"{name}_inside": through_groups(change, inner=True) for name, change in CHANGES.items()}
BODIES |= {"clamped_last": through_groups(CHANGES["clamped"], STEPS - 1), "clamped_in_hook": clamped_in_hook}
BODIES |= {"clamped_last_inside": through_groups(CHANGES["clamped"], STEPS - 1, inner=True)}
BODIES |= WHOLE | {"resized": resized, "skipped": skipped, "temperature": temperature}
BODIES |= {f"dropped_at_{step}": dropped(step) for step in range(STEPS)}
BODIES |= {"dropped_always": dropped(*range(STEPS)), "dropped_by_sgd": dropped_by_sgd}
BODIES |= {"pruned": of_states(pruned), "halved": of_states(halved)}
COUNTED = "its gradient was dropped by p.grad = None, or it was frozen), and is stepped on now"
OF_PART = "the change would reach one replica only"
IS_COPY, IS_PART = "rows are a copy and the change would be lost", "this rank has a part of it"
# Changes where the optimizer has flat parts, and what is said of them.
IN_GROUPS = {
    "changed_in_place": OF_PART,
    "scaled": OF_PART,
    "exchanged": "p.data = ... was called",
    "shrunk_together": OF_PART,
}
# Name -> layout -> what the error says, or nothing where the loop is right.
EXPECTED: dict[str, dict[str, str]] = {
    "amplified": {"zero1": "", "zero2": "", "zero3": ""},
    "swapped": {"zero3": ""},
    "plain": {"zero3": "Assign what is computed from the tensor itself"},
    "clamped": {"zero1": "", "zero2": "", "zero1_offload": "", "zero3": "", "tp2": ""},
    "clamped_inside": {"zero1": OF_PART, "zero2": OF_PART, "zero1_offload": OF_PART, "zero3": "", "tp2": ""},
    "clamped_last": {"zero1": "", "zero1_offload": "", "zero3": "", "tp2": ""},
    "clamped_last_inside": {"zero1": OF_PART, "zero1_offload": OF_PART, "zero3": "", "tp2": ""},
    "clamped_in_hook": {"zero1": OF_PART, "zero1_offload": OF_PART, "tp2": ""},
    **{name: {"zero1": "", "zero1_offload": "", "tp2": ""} for name in IN_GROUPS},
    **{f"{name}_inside": {"zero1": text, "zero1_offload": text, "tp2": ""} for name, text in IN_GROUPS.items()},
    "looked_at": {"zero1": "", "zero2": "", "zero1_offload": "", "tp2": ""},
    "looked_at_inside": {"zero1": "", "tp2": ""},
    "pruned": {"dp2": "", "zero1": IS_PART, "zero2": IS_PART, "tp2": IS_PART, "zero3": "", "pp2": ""},
    "halved": {"zero1": "", "zero1_offload": "", "tp2": ""},
    "masked": {"zero3": "", "zero1": "", "dp2": ""},
    "masked_by_others": {"zero3": "", "zero1": ""},
    "permuted": {"zero3": "", "zero1": ""},
    "flattened": {"zero3": "aten.view.default on parameter model.embed_tokens.weight of shape (99, 32)", "dp2": ""},
    "as_array": {"zero3": "numpy() on parameter model.embed_tokens.weight of shape (99, 32)", "dp2": ""},
    "skipped": {"dp2": "", "zero1": "", "zero2": "", "zero1_offload": "", "zero3": "", "pp2": ""},
    "dropped_at_0": {"dp2": "", "zero1": COUNTED, "pp2": ""},
    "dropped_at_1": {"dp2": "", "zero1": COUNTED, "zero2": COUNTED, "zero1_offload": COUNTED, "zero3": ""},
    "dropped_at_2": {"zero1": "", "zero2": ""},
    "dropped_always": {"zero1": "", "zero1_offload": ""},
    "dropped_by_sgd": {"zero1": "", "zero2": ""},
    "temperature": {"dp2": "", "zero1": "", "zero2": "", "zero1_offload": "", "tp2": ""},
    "resized": dict.fromkeys(("zero3", "tp2", "pp2", "zero1"), "resize_token_embeddings() was called after"),
    "unprepared": {"dp2": "", "zero3": "was not prepared with it", "tp2": ""},
}
for name in ROWS:
    of_parts = "" if name in ("columns", "read") else IS_COPY
    EXPECTED |= {f"{name}_gradient": {"zero2": "", "zero3": of_parts}, f"{name}_weight": {"zero3": of_parts}}
CASES = [(name, layout) for name, layouts in EXPECTED.items() for layout in layouts]
# Slow: what other rows show. Flat parts, gradients that are parts, and what else there is take turns in a row; whatever a row
# is refused with is said in some case of it that is not.
KEPT = covering(CASES, (*FAMILIES, ("zero2", "zero3"), ("dp2", "tp2", "zero3", "pp2")))
KEPT += unsaid(CASES, KEPT, lambda name, layout: EXPECTED[name][layout])
# Rows are cut out of a weight as out of its gradient; and shards have no flat parts, so that ways to change them are alike.
KEPT = [
    case
    for case in KEPT
    if case[0] not in ("selected_weight", "split_weight", "corner_weight")
    and case not in [(f"{row}_gradient", "zero3") for row in ("sliced", "narrowed", "assigned")]
    and case
    not in [(name, "tp2") for name in ("scaled", "shrunk_together", "changed_in_place_inside", "exchanged_inside")]
]
REST = [case for case in CASES if case not in KEPT]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cases = chosen(request, CASES)
    names = dict.fromkeys(name for name, layout in cases if not EXPECTED[name][layout])  # what is refused has no equal
    return user_loops.launched(user_loops.main_of(__name__), names, cases, tmp_path_factory.mktemp("attacks"))


@pytest.mark.parametrize(("name", "layout"), [pytest.param(*case, marks=slow_if(case, REST)) for case in CASES])
def test_parts(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, EXPECTED[name][layout])
