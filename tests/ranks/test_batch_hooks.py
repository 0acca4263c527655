"""Hooks on the parameters of a pipeline run once per batch, on its whole gradient, as in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
from rank_runner import run_ranks
from thinning import chosen, thinned
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from user_loops import STEPS, Loop


pytestmark = pytest.mark.long

ENV = {"ACCELERATE_USE_CPU": "true"}
ACCUMULATION = 2
EMBEDDING = "model.embed_tokens.weight"  # tied: the first and the last stage have it
NAMES = (EMBEDDING, "model.layers.0.mlp.up_proj.weight", "model.layers.3.self_attn.q_proj.weight", "model.norm.weight")
Change = Callable[[torch.Tensor], torch.Tensor]


def build() -> Any:
    return tiny.llama(tied=True, layers=4)


def mask(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (torch.arange(len(gradient)) % 3 > 0).view(-1, *[1] * (gradient.ndim - 1))


def factor(gradient: torch.Tensor) -> torch.Tensor:
    return 0.5 * gradient


def limit(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-2e-3, 2e-3)


CHANGES: tuple[Change, ...] = (mask, factor, limit)


def on_gradient(parameter: nn.Parameter, change: Change) -> None:
    parameter.register_hook(change)


def on_accumulated(parameter: nn.Parameter, change: Change) -> None:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(change(parameter.grad))

    parameter.register_post_accumulate_grad_hook(hook)


def steps_in_backward(parameter: nn.Parameter, change: Change) -> None:
    own = torch.optim.AdamW([parameter], lr=1e-2, eps=1e-4)

    def hook(parameter: torch.Tensor) -> None:
        own.step()
        own.zero_grad()

    parameter.register_post_accumulate_grad_hook(hook)


Put = Callable[[nn.Parameter, Change], None]
KINDS: dict[str, tuple[Put, Change]] = {
    f"{put.__name__}-{change.__name__}": (put, change) for put in (on_gradient, on_accumulated) for change in CHANGES
}
KINDS["steps_in_backward"] = (steps_in_backward, mask)


def hooked(parameters: dict[str, nn.Parameter], kind: str) -> None:
    put, change = KINDS[kind]
    everything = put is steps_in_backward
    for name, parameter in parameters.items():
        if everything or name in NAMES:
            put(parameter, change)


def in_loop(loop: Loop, kind: str, *, of_logits: bool = False, early: bool = False) -> None:
    """A raw loop that accumulates two batches a step; the loss is the model's own, or computed from its logits."""
    loop.accelerator.gradient_accumulation_steps = ACCUMULATION
    if early:
        hooked(dict(loop.model.named_parameters()), kind)
    loop.prepare()
    if not early:
        hooked(loop.named(), kind)
    for index in range(ACCUMULATION * STEPS):
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(logits_loss(loop, index) if of_logits else loop.loss(index))
            if loop.accelerator.sync_gradients:
                loop.history.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)))
            loop.step()


def logits_loss(loop: Loop, index: int) -> torch.Tensor:
    rows = tiny.collate(tiny.rows(64))
    batch = {name: value[8 * index % 64 :][:8] for name, value in rows.items()}
    labels = batch.pop("labels")[:, 1:].flatten()
    logits = loop.model(**batch).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def several_losses(loop: Loop) -> None:
    """One backward pass of two losses, and two reduced backward passes before a step."""
    loop.prepare()
    hooked(loop.named(), "on_gradient-limit")
    hooked(loop.named(), "on_accumulated-factor")
    for step in range(STEPS):
        loop.accelerator.backward(loop.loss(3 * step) + loop.loss(3 * step + 1))
        loop.backward(3 * step + 2)
        loop.step()


def removes_itself(loop: Loop) -> None:
    loop.prepare()
    handles = []

    def once(gradient: torch.Tensor) -> torch.Tensor:
        handles.pop().remove()
        return 3.0 * gradient

    for name, parameter in loop.named().items():
        if name == EMBEDDING:
            handles.append(parameter.register_hook(once))
    for step in range(STEPS):
        loop.backward(step)
        loop.step()


BODIES: dict[str, Callable[[Loop], None]] = {
    **{kind: functools.partial(in_loop, kind=kind) for kind in KINDS},
    "logits-limit": functools.partial(in_loop, kind="on_gradient-limit", of_logits=True),
    "logits-factor": functools.partial(in_loop, kind="on_accumulated-factor", of_logits=True),
    "logits-steps": functools.partial(in_loop, kind="steps_in_backward", of_logits=True),
    "early-limit": functools.partial(in_loop, kind="on_gradient-limit", early=True),
    "early-factor": functools.partial(in_loop, kind="on_accumulated-factor", early=True),
    "several_losses": several_losses,
    "removes_itself": removes_itself,
}


class PutsHooks(TrainerCallback):
    """As soon as the model is prepared, or at a later step."""

    def __init__(self, kind: str, step: int) -> None:
        self.kind, self.step = kind, step
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            session = getattr(self.trainer.accelerator, "hf_parallel", None)
            parameters = (
                dict(self.trainer.model.named_parameters())
                if session is None
                else session.engine.attachment.parameters
            )
            hooked(parameters, self.kind)


class Never(torch.optim.Optimizer):
    """What a Trainer gets where hooks step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        return None


def in_trainer(layout: str, kind: str, folder: str, step: int = 0) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState

    from hf_parallel import HFParallelCallback

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(0)
    parallel, puts = user_loops.LAYOUTS[layout], PutsHooks(kind, step)
    model = build()
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=tiny.rows(64, True),
        data_collator=tiny.collate,
        callbacks=[puts] if parallel is None else [puts, HFParallelCallback({}, **parallel)],
        optimizers=(Never(model.parameters()), None) if kind == "steps_in_backward" else (None, None),
    )
    puts.trainer = trainer
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model)
    session = getattr(trainer.accelerator, "hf_parallel", None)
    if session is not None:
        session.watchdog.stop()
    state.pop("lm_head.weight", None)
    history = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return {"history": history, "state": {k: v.detach().float().numpy() for k, v in state.items()}}


IN_TRAINER = {**{kind: (kind, 0) for kind in KINDS}, "late-factor": ("on_accumulated-factor", 2)}
LAYOUTS = {2: ["pp2_thirds", "pp2_zbv"], 4: ["pp2_tp2"]}
UNDER_TP = [
    name for name in BODIES if "accumulated" not in name and name not in ("steps_in_backward", "several_losses")
]
UNDER_TP = [name for name in UNDER_TP if name not in ("logits-factor", "logits-steps", "early-factor")]


def main(rank: int, world_size: int, cases: list[tuple[str, str]], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layout in cases:
        if name in BODIES:
            found[f"{layout}-{name}"] = user_loops.tried(layout, BODIES[name], build=build)
        else:
            kind, step = IN_TRAINER[name.removeprefix("trainer-")]
            found[f"{layout}-{name}"] = in_trainer(layout, kind, folder, step)
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run = chosen(request, CASES)
    ones = [(name, "one") for name in dict.fromkeys(name for name, _ in run)]
    meshes = {size: [case for case in run if case[1] in layouts] for size, layouts in LAYOUTS.items()}
    for world_size, cases in ((1, ones), *meshes.items()):
        folder = tmp_path_factory.mktemp("hooks")
        options = {"init_group": world_size > 1, "env": ENV, "timeout": 280.0}
        found |= run_ranks(main, world_size, cases, str(folder), tmp_path=folder, **options)[0]
    return found


CASES = [(name, layout) for layout in LAYOUTS[2] for name in (*BODIES, *(f"trainer-{name}" for name in IN_TRAINER))]
CASES += [(name, "pp2_tp2") for name in UNDER_TP]


# The two schedules of two stages take turns.
@pytest.mark.parametrize(("name", "layout"), thinned(CASES, [LAYOUTS[2]]))
def test_a_hook_does_to_a_pipeline_what_it_does_to_one_process(name: str, layout: str, runs: dict[str, Any]) -> None:
    assert user_loops.difference(runs[f"{layout}-{name}"], runs[f"one-{name}"]) < 1e-5


def replicas_that_step(loop: Loop) -> None:
    in_loop(loop, "steps_in_backward")


def one_holder(loop: Loop) -> None:
    loop.prepare()
    session = loop.accelerator.hf_parallel
    if session.mesh.pp_rank == 0:
        hooked({EMBEDDING: loop.named()[EMBEDDING]}, "on_gradient-mask")
    loop.backward(0)


def penalised(loop: Loop) -> None:
    loop.prepare()
    hooked(loop.named(), "on_gradient-limit")
    tied = next(parameter for name, parameter in loop.named().items() if name == EMBEDDING)
    loop.accelerator.backward(loop.loss(0) + 0.1 * tied.square().sum())


REFUSED: dict[str, tuple[str, Callable[[Loop], None], str]] = {
    "replicas that step": ("pp2_dp2", replicas_that_step, "updates the parameter or drops its gradient before the 2"),
    "a hook on one of two stages": (
        "pp2_thirds",
        one_holder,
        f"parameter {EMBEDDING} has gradient hooks on some of its",
    ),
    "a loss of parameters with hooks": (
        "pp2_thirds",
        penalised,
        f"parameter {EMBEDDING} has gradient hooks and the loss",
    ),
}


def refused(rank: int, world_size: int, case: str) -> str:
    layout, body, _ = REFUSED[case]
    found = user_loops.tried(layout, body)
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name_on_every_rank(case: str, tmp_path: Path) -> None:
    layout, _, message = REFUSED[case]
    world_size = 4 if layout == "pp2_dp2" else 2
    for found in run_ranks(refused, world_size, case, tmp_path=tmp_path, env=ENV, timeout=120.0):
        assert "UnsupportedError" in found
        assert message in found
