"""User code that goes from the optimizer to the model's parameters and back by identity: as in one process, or refused by name.

With ZeRO the optimizer itself has flat parts. Code that looks for a parameter in them would find nothing, and freeze nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import user_loops
import user_steps
from thinning import FAMILIES, chosen, covering, rest_runs, slow_if, unsaid
from transformers import Trainer, TrainerCallback
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def grouped(loop: Loop) -> Any:
    """The embedding in a group of its own; the optimizer as it is prepared."""
    inner = dict(loop.model.named_parameters())
    rest = [parameter for name, parameter in inner.items() if name != EMBEDDING]
    groups = [{"params": [inner[EMBEDDING]], "weight_decay": 0.0}, {"params": rest}]
    loop.prepare(torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.1))
    return loop.optimizers[0]


def steps(loop: Loop, between: Callable[[int], Any] = lambda step: None) -> None:
    """With `between` after the first backward pass."""
    for step in range(STEPS):
        loop.backward(step)
        if step:
            between(step)
        loop.step()


def by_identity(loop: Loop) -> None:
    """Another learning rate for the group that has a parameter."""
    optimizer = grouped(loop)

    def change(step: int) -> None:
        embedding, found = loop.named()[EMBEDDING], 0
        for group in optimizer.param_groups:
            if any(parameter is embedding for parameter in group["params"]):
                group["lr"] *= 0.1
                found += 1
        assert found == 1

    steps(loop, change)


def by_set(loop: Loop) -> None:
    """Every parameter that is trained is one of the model, and has its gradient."""
    optimizer = grouped(loop)

    def check(step: int) -> None:
        known = set(loop.model.parameters())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert parameter in known
                parameter.grad.mul_(0.5)

    steps(loop, check)


def frozen(loop: Loop) -> None:
    optimizer = grouped(loop)

    def freeze(step: int) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.requires_grad_(False)

    loop.backward(0)
    loop.step()
    freeze(0)
    steps(loop)


def decayed(loop: Loop) -> None:
    """Weight decay by hand."""
    optimizer = grouped(loop)

    def decay(step: int) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * parameter.norm())

    steps(loop, decay)


def clipped(loop: Loop) -> None:
    optimizer = grouped(loop)

    def clip(step: int) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    steps(loop, clip)


def reset(loop: Loop) -> None:
    """Moments to zero, found by parameter."""
    optimizer = grouped(loop)

    def forget(step: int) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert optimizer.state[parameter]["step"] == step
                optimizer.state[parameter]["exp_avg"].zero_()

    steps(loop, forget)


def reset_one(loop: Loop) -> None:
    """Of one parameter, by new tensors."""
    optimizer = grouped(loop)

    def forget(step: int) -> None:
        embedding = loop.named()[EMBEDDING]
        assert embedding in optimizer.state
        optimizer.state[embedding]["exp_avg"] = torch.zeros_like(embedding)
        for parameter, state in optimizer.state.items():
            if parameter is embedding:
                state["exp_avg_sq"].mul_(0.5)

    steps(loop, forget)


def cleared(loop: Loop) -> None:
    optimizer = grouped(loop)
    steps(loop, lambda step: optimizer.state.clear())


def saved_settings(loop: Loop) -> None:
    """Settings are kept, changed by a scheduler, and put back."""
    optimizer = grouped(loop)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    steps(loop, lambda step: scheduler.step())
    for group, kept in zip(optimizer.param_groups, before, strict=True):
        group.update(kept)
        group["params"] = list(group["params"])
    loop.backward(STEPS)
    loop.step()


def twice(loop: Loop) -> None:
    """A parameter that has a group is given another one."""
    optimizer = grouped(loop)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [loop.named()[EMBEDDING]], "lr": 1.0})
    steps(loop)


def other_parameters(loop: Loop) -> None:
    group = grouped(loop).param_groups[1]
    group["params"] = group["params"][1:]


def fewer_parameters(loop: Loop) -> None:
    grouped(loop).param_groups[1]["params"].pop()


def other_groups(loop: Loop) -> None:
    optimizer = grouped(loop)
    optimizer.param_groups = optimizer.param_groups[:1]


def restarted(name: str) -> Callable[[Loop], None]:
    """The step count of one parameter begins anew."""

    def body(loop: Loop) -> None:
        optimizer = grouped(loop)
        steps(loop, lambda step: optimizer.state[loop.named()[name]]["step"].zero_())

    return body


def forgotten(name: str) -> Callable[[Loop], None]:
    """The state of one parameter is removed."""

    def body(loop: Loop) -> None:
        optimizer = grouped(loop)
        steps(loop, lambda step: optimizer.state.pop(loop.named()[name], None))

    return body


def all_restarted(loop: Loop) -> None:
    optimizer = grouped(loop)

    def restart(step: int) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()

    steps(loop, restart)


def frozen_part(loop: Loop) -> None:
    """Of the optimizer that was given to `prepare`."""
    optimizer = grouped(loop).optimizer
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.requires_grad = False


RIGHT: dict[str, Callable[[Loop], None]] = {
    body.__name__: body
    for body in (
        by_identity,
        by_set,
        frozen,
        decayed,
        clipped,
        reset,
        reset_one,
        cleared,
        all_restarted,
        saved_settings,
        twice,
    )
}
# The embedding is alone in its flat part, since it is alone in its group.
RIGHT |= {"restarted_embedding": restarted(EMBEDDING), "forgotten_embedding": forgotten(EMBEDDING)}
LAYOUTS = ("dp2", "zero1", "zero2", "zero1_offload", "zero3", "pp2", "tp2")
EXCHANGED, SHARES = "was given other groups or parameters", r"model.norm.weight with zero.stage above 0"
REFUSED: dict[str, tuple[Callable[[Loop], None], str]] = {
    "other_parameters": (other_parameters, EXCHANGED),
    "fewer_parameters": (fewer_parameters, EXCHANGED),
    "other_groups": (other_groups, EXCHANGED),
    "restarted_norm": (restarted(NORM), SHARES),
    "forgotten_norm": (forgotten(NORM), SHARES),
    "frozen_part": (frozen_part, "has flat parts of several parameters"),
}
# Name and layout -> what an error says, where the loop is not that of one process.
EXPECTED = {("frozen", "zero3"): "was frozen or unfrozen after zero.stage=3"}
# A stage has some of the parameters of a group; in a loop of one's own a norm of a shard is that of the part.
LEFT_OUT = {("decayed", "tp2")}
CASES = [(name, layout) for name in RIGHT for layout in LAYOUTS if (name, layout) not in LEFT_OUT]
CASES += [(name, layout) for name in REFUSED for layout in ("zero1", "zero2")]
EXPECTED |= {(name, layout): text for name, (_, text) in REFUSED.items() for layout in ("zero1", "zero2")}
# Slow: layouts that are no parts of an optimizer's states take turns too; whatever a row is refused with is in a case of it.
KEPT = covering(CASES, (*FAMILIES, ("dp2", "pp2"), ("tp2", "zero3")))
KEPT += unsaid(CASES, KEPT, lambda *case: EXPECTED.get(case, ""))
REST = set(CASES).difference(KEPT)
BODIES = RIGHT | {name: body for name, (body, _) in REFUSED.items()}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return user_loops.launched(
        user_loops.main_of(__name__), RIGHT, chosen(request, CASES), tmp_path_factory.mktemp("groups")
    )


@pytest.mark.parametrize(("name", "layout"), [pytest.param(*case, marks=slow_if(case, REST)) for case in CASES])
def test_a_parameter_of_the_optimizer_is_one_of_the_model(name: str, layout: str, runs: list[dict[str, Any]]) -> None:
    user_loops.check(runs, name, layout, EXPECTED.get((name, layout), ""))


class FreezesGroup(TrainerCallback):
    """The group without weight decay is not trained from the second step on; the other one learns more slowly."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        known = {id(parameter) for parameter in model.parameters()}
        for group in kwargs["optimizer"].param_groups if state.global_step == 1 else ():
            for parameter in group["params"]:
                assert id(parameter) in known
                if not group["weight_decay"]:
                    parameter.requires_grad = False


class SlowsGroup(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        norms = {id(p) for name, p in model.named_parameters() if "norm" in name}
        for group in kwargs["optimizer"].param_groups:
            if any(id(parameter) in norms for parameter in group["params"]):
                group["lr"] = 1e-4


user_steps.KINDS |= {
    kind.__name__: (Trainer, {"change": lambda trainer, kind=kind: trainer.add_callback(kind())})
    for kind in (FreezesGroup, SlowsGroup)
}
TRAINERS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3}},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2": {"tp_size": 2},
}
JOBS = [
    (kind, layout)
    for kind in ("FreezesGroup", "SlowsGroup")
    for layout in TRAINERS
    if (kind, layout) != ("FreezesGroup", "zero3")
]
# Slow: the callbacks meet the layouts in turns.
JOBS_REST = [
    *(("FreezesGroup", layout) for layout in ("dp2", "zero2", "tp2")),
    ("SlowsGroup", "zero1"),
    ("SlowsGroup", "pp2"),
]


def trainers(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    decays = {"arguments": {"weight_decay": 0.1}}
    ones = {kind: (kind, None, decays) for kind in ("FreezesGroup", "SlowsGroup")}
    twos = {
        (kind, layout): (kind, TRAINERS[layout], {"rows": user_steps.rows_on_two(TRAINERS[layout]), **decays})
        for kind, layout in JOBS
        if (kind, layout) not in JOBS_REST or rest_runs(request)
    }
    return user_steps.launch_both(ones, twos, tmp_path_factory.mktemp("trainers"), trainers)


@pytest.mark.parametrize("job", [pytest.param(job, marks=slow_if(job, JOBS_REST), id="-".join(job)) for job in JOBS])
def test_a_callback_finds_parameters_in_the_groups(job: tuple[str, str], trained: Any) -> None:
    ones, twos = trained
    user_steps.same(twos[job][0], ones[job[0]][0])
