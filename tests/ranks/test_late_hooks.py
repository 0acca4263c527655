"""Hooks that callbacks register on any module of a model that is cut already: in effect, and once a microbatch.

They are on the embedding, on layers inside of blocks, on the last norm, the head and the model around the blocks, and some of them
put hooks on the tensors that they see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import user_loops
import user_steps
from thinning import chosen, rest_runs, slow_if, thinned
from transformers import Trainer, TrainerCallback
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long


PARTS = {"num_microbatches": 4}
user_loops.LAYOUTS |= {
    "late_1f1b": {"pp_size": 2, **PARTS},
    "late_interleaved": {"pp_size": 2, **PARTS, "schedule": "interleaved_1f1b"},
    "late_zbv": {"pp_size": 2, **PARTS, "schedule": "zbv_zero_bubble"},
    "late_dualpipev": {"pp_size": 2, **PARTS, "schedule": "dualpipev"},
    "late_zero_bubble": {"pp_size": 2, **PARTS, "schedule": "interleaved_zero_bubble"},
    "late_zero1": {"zero": {"stage": 1}},
    "late_zero3": {"zero": {"stage": 3}},
}
PIPELINES = ("late_1f1b", "late_interleaved", "late_zbv", "late_dualpipev", "late_zero_bubble")
REPLICAS = ("late_zero1", "late_zero3")
PLACES = {
    "embedding": "model.embed_tokens",
    "query": "model.layers.1.self_attn.q_proj",
    "attention": "model.layers.2.self_attn",
    "gate": "model.layers.3.mlp.gate_proj",
    "mlp": "model.layers.0.mlp",
    "block_norm": "model.layers.2.input_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
    "decoder": "model",
}


def first_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple | dict) or hasattr(output, "to_tuple") else output
    return found


def scaled(module: torch.nn.Module, seen: list[int]) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        seen.append(len(first_of(output)))
        if isinstance(output, torch.Tensor):
            return output * 1.2
        if isinstance(output, tuple):
            return (output[0] * 1.2, *output[1:])
        output["last_hidden_state"] = output["last_hidden_state"] * 1.2
        return output

    return module.register_forward_hook(hook)


def gradient(module: torch.nn.Module, seen: list[int]) -> Any:
    """A hook on the tensor that the module returns."""

    def hook(module: Any, inputs: Any, output: Any) -> None:
        value = first_of(output)
        if value.requires_grad:
            seen.append(len(value))
            value.register_hook(lambda arrived: 0.5 * arrived)

    return module.register_forward_hook(hook)


def backward(module: torch.nn.Module, seen: list[int]) -> Any:
    def hook(module: Any, to_inputs: Any, to_outputs: Any) -> Any:
        seen.append(len(to_outputs[0]))
        return tuple(None if each is None else 0.6 * each for each in to_inputs)

    return module.register_full_backward_hook(hook)


def backward_pre(module: torch.nn.Module, seen: list[int]) -> Any:
    def hook(module: Any, gradients: Any) -> Any:
        seen.append(len(gradients[0]))
        return tuple(None if each is None else 0.7 * each for each in gradients)

    return module.register_full_backward_pre_hook(hook)


KINDS: dict[str, Callable[[torch.nn.Module, list[int]], Any]] = {
    kind.__name__: kind for kind in (scaled, gradient, backward, backward_pre)
}


def late(kind: str, seen: dict[str, list[int]]) -> Callable[[Loop], None]:
    """On all places at once, from the second step until the last but one."""

    def body(loop: Loop) -> None:
        loop.prepare()
        loop.backward(0)
        loop.step()
        modules, handles = dict(loop.model.named_modules()), []
        for place, name in PLACES.items():
            # What returns a dictionary has no hooks of its backward pass in torch.
            if not (place == "decoder" and kind.startswith("backward")):
                handles.append(KINDS[kind](modules[name], seen.setdefault(place, [])))
        for step in range(1, STEPS):
            loop.backward(step)
            loop.step()
        for handle in handles:
            handle.remove()
        loop.backward(STEPS)
        loop.step()

    return body


def tried(layout: str, kind: str) -> Any:
    seen: dict[str, list[int]] = {}
    found = user_loops.tried(layout, late(kind, seen), build=lambda: tiny.llama(tied=True))
    return {**found, "seen": seen} if isinstance(found, dict) else found


CASES = [(kind, layout) for kind in KINDS for layout in (*PIPELINES, *REPLICAS)]
# Schedules with one backward pass for a stage, and those that split it, take turns.
TURNS = (("late_interleaved", "late_1f1b"), ("late_zbv", "late_dualpipev", "late_zero_bubble"), REPLICAS)


def main(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {f"{kind}-{layout}": tried(layout, kind) for kind, layout in cases}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cases = chosen(request, CASES, ("kind", "layout"))
    return user_loops.launched(main, KINDS, cases, tmp_path_factory.mktemp("late"))


@pytest.mark.parametrize(("kind", "layout"), thinned(CASES, TURNS))
def test_late_hooks_are_in_effect(kind: str, layout: str, runs: list[dict[str, Any]]) -> None:
    assert user_loops.difference(runs[0][f"{kind}-{layout}"], runs[0][f"{kind}-one"]) < 1e-5


@pytest.mark.parametrize(("kind", "layout"), thinned([case for case in CASES if case[1] in PIPELINES], TURNS))
def test_late_hooks_run_once_a_microbatch_on_the_stage_of_the_module(
    kind: str, layout: str, runs: list[dict[str, Any]]
) -> None:
    part = user_loops.ROWS // PARTS["num_microbatches"]
    for place, alone in runs[0][f"{kind}-one"]["seen"].items():
        assert sum(alone) == (STEPS - 1) * user_loops.ROWS
        there = [rows for found in runs if (rows := found[f"{kind}-{layout}"]["seen"][place])]
        # The first call that changes something is tested: again, with larger gradients, and with more rows.
        tests = {"scaled": [part, 2 * part], "gradient": []}.get(kind, [part, part, 2 * part, 2 * part])
        if place == "decoder":  # what returns a ModelOutput cannot be
            tests = []
        assert there[0][1 : 1 + len(tests)] == tests
        del there[0][1 : 1 + len(tests)]
        assert [sum(rows) for rows in there] == [sum(alone)], f"{place}: {there}"
        assert set(there[0]) == {part}


class Adds(TrainerCallback):
    """Registers hooks when the model is cut already: at the beginning, and amid a run."""

    def __init__(self, when: str) -> None:
        self.when = when

    def register(self, model: Any) -> None:
        modules = dict(model.named_modules())
        for place in ("embedding", "gate", "norm"):
            scaled(modules[PLACES[place]], [])
        gradient(modules[PLACES["attention"]], [])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.when == "begin":
            self.register(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.when == "step" and state.global_step == 1:
            self.register(model)


user_steps.KINDS |= {
    f"late_{when}": (Trainer, {"change": lambda trainer, when=when: trainer.add_callback(Adds(when))})
    for when in ("begin", "step")
}
TRAINED = {layout: user_loops.LAYOUTS[layout] for layout in ("late_1f1b", "late_zbv", "late_dualpipev")}
JOBS = [(f"late_{when}", layout) for when in ("begin", "step") for layout in TRAINED]
REST = JOBS[1::2]  # slow: schedules take turns


def trainers(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    ones = {name: (name, None, {}) for name in ("late_begin", "late_step")}
    twos = {job: (job[0], TRAINED[job[1]], {}) for job in JOBS if job not in REST or rest_runs(request)}
    return user_steps.launch_both(ones, twos, tmp_path_factory.mktemp("late-trainers"), trainers)


@pytest.mark.parametrize("job", [pytest.param(job, marks=slow_if(job, REST), id="-".join(job)) for job in JOBS])
def test_hooks_of_callbacks_train_as_in_one_process(job: tuple[str, str], trained: Any) -> None:
    ones, twos = trained
    user_steps.same(twos[job][0], ones[job[0]][0])
