"""Users' code in backward passes of pipeline stages: it sees what it sees in one process, or the run ends with an error.

If a row fails, gradients that user code limits by their norm, or shifts, are those of a microbatch or of another scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import user_loops
from rank_runner import RankError, run_ranks
from torch import Tensor, nn
from torch.nn import functional
from user_loops import ROWS, STEPS, Loop


pytestmark = pytest.mark.long

ENV = {"ACCELERATE_USE_CPU": "true"}
LAYOUTS = ("pp2", "pp2_zbv")
Placed = Callable[[Any], None]


def normed(gradient: Tensor) -> Tensor:
    """By the norm of the batch."""
    return gradient / (gradient.norm() + 1e-3)


def clamped(gradient: Tensor) -> Tensor:
    """Each element by itself, but not in proportion."""
    return gradient.clamp(-1e-4, 1e-4)


def halved(gradient: Tensor) -> Tensor:
    return gradient / 2


class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.change(gradient), None


def of_module(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    for layer in model.model.layers:
        layer.mlp.register_full_backward_hook(lambda _, given, __: tuple(change(one) for one in given))


def of_tensor(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(change)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(hook)


def of_function(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: Changed.apply(output, change))


def of_output(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Of what a module returns, forward."""
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: change(output))


def of_input(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: (change(args[0]),))


def of_forward(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Of what a forward returns that is put on a module."""
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, inner=layer.mlp.forward: change(inner(x))


def of_its_function(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    """In the backward pass of such a forward."""
    of_forward(model, lambda output: Changed.apply(output, change))


def of_class(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Modules are of another class, whose forward does."""
    for layer in model.model.layers:
        kind = type(layer)

        def forward(self: Any, *args: Any, kind: Any = kind, **kwargs: Any) -> Any:
            return Changed.apply(kind.forward(self, *args, **kwargs), change)

        layer.__class__ = type("Own", (kind,), {"forward": forward})


def of_class_with_dropout(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    of_class(model, change)


def only_looks(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    for layer in model.model.layers:
        layer.mlp.register_full_backward_hook(lambda _, given, __: None)


def own_loss(loop: Loop, index: int) -> Tensor:
    """Of the logits; labels of a row are its tokens."""
    rows = tiny.collate(tiny.rows(64))
    ids = rows["input_ids"][index * ROWS : index * ROWS + ROWS]
    logits = loop.model(input_ids=ids).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 1e-3 * logits.pow(2).mean()
    loop.history.append(float(loss.detach()))
    return loss


def training(loop: Loop, late: Placed | None, how: str) -> None:
    loop.prepare(torch.optim.SGD(loop.model.parameters(), lr=1e-2))  # Adam makes steps of rounding
    loop.model.train()
    for step in range(STEPS):
        if step == 1 and late is not None:
            late(loop.model)
        loss = own_loss(loop, step) if how == "own_loss" else loop.loss(step)
        loop.accelerator.backward(loss * 0.3 if how == "scaled" else loss)
        loop.step()


CASES: dict[str, tuple[Placed, str, str]] = {}  # what is done, when, how the loss is made
for name, place in {"module": of_module, "tensor": of_tensor, "function": of_function}.items():
    for change in (normed, clamped):
        put = functools.partial(place, change=change)
        for how in ("plain", "own_loss", "scaled"):
            put = functools.partial(place, change=change)
            CASES[f"{name}_{change.__name__}_{how}"] = (put, "early", how)
for name, place in {"module": of_module, "tensor": of_tensor}.items():
    CASES[f"late_{name}_clamped"] = (functools.partial(place, change=clamped), "late", "plain")
    CASES[f"late_{name}_halved_scaled"] = (functools.partial(place, change=halved), "late", "scaled")


def halved_and_noisy(gradient: Tensor) -> Tensor:
    """Nobody can tell, and drawn numbers are others for each microbatch anyway; here none are left."""
    return gradient / 2 + 0 * torch.rand_like(gradient)


for name, place in {"forward": of_forward, "its_function": of_its_function, "class": of_class}.items():
    CASES[f"late_{name}_halved_scaled"] = (functools.partial(place, change=halved), "late", "scaled")
CASES["late_its_function_clamped"] = (functools.partial(of_its_function, change=clamped), "late", "plain")
CASES["late_output_halved"] = (functools.partial(of_output, change=halved), "late", "plain")
CASES["late_output_noisy"] = (functools.partial(of_output, change=halved_and_noisy), "late", "plain")
CASES["late_looks_scaled"] = (functools.partial(only_looks, change=clamped), "late", "scaled")
CASES["looks_scaled"] = (functools.partial(only_looks, change=clamped), "early", "scaled")


def built(put: Placed) -> Any:
    model = tiny.llama(tied=True, layers=4)
    put(model)
    return model


def main(rank: int, world_size: int, layouts: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for layout in layouts:
        for name, (put, when, how) in CASES.items():
            build = functools.partial(built, put if when == "early" else lambda model: None)
            body = functools.partial(training, late=put if when == "late" else None, how=how)
            found[f"{name}-{layout}"] = user_loops.tried(
                layout, body, dtype=torch.float64, build=build
            )  # limits amplify rounding
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return user_loops.alone_and_together(main, LAYOUTS, tmp_path_factory.mktemp("backward"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_code_of_backward_passes_sees_what_it_sees_in_one_process(layout: str, name: str, runs: Any) -> None:
    ranks, alone = runs
    assert user_loops.difference(ranks[0][f"{name}-{layout}"], alone[f"{name}-one"]) < 1e-5


def late_hook(rank: int, world_size: int, put: Placed, how: str) -> None:
    body = functools.partial(training, late=put, how=how)
    user_loops.run("pp2", body, build=lambda: tiny.llama(tied=True, layers=4))


MIXES = r"inside the model, with pp_size=2: it gives a row of a batch another gradient than the row alone"
OF_MODULE = r"on a module, with pp_size=2: it gives a row of a batch something else than the row alone"
OF_FORWARD = r"forward .*of_forward.* with pp_size=2: it gives a row of a batch something else than the row alone"
OF_ITS_GRADIENTS = r"forward .* with pp_size=2: it gives a row of a batch another gradient than the row alone"
SCALED_FORWARD = r"multiplied with 0\.3 after the model computed it, with pp_size=2: forward "
SCALED = r"multiplied with 0\.3 after the model computed it, with pp_size=2: hook "


REFUSED = [
    *(
        (place, *case)
        for place in (of_module, of_tensor)
        for case in ((normed, "plain", MIXES), (clamped, "scaled", SCALED))
    ),
    (of_tensor, normed, "own_loss", MIXES),
    (of_output, normed, "plain", OF_MODULE),
    (of_input, normed, "own_loss", OF_MODULE),
    (of_forward, normed, "plain", OF_FORWARD),
    (of_its_function, normed, "plain", OF_ITS_GRADIENTS),
    (of_its_function, clamped, "scaled", SCALED_FORWARD),
    (of_class, normed, "own_loss", OF_ITS_GRADIENTS),
    (of_class_with_dropout, normed, "plain", OF_ITS_GRADIENTS),
]


@pytest.mark.parametrize(("place", "change", "how", "refusal"), REFUSED)
def test_a_late_hook_is_tested(
    place: Any, change: Callable[[Tensor], Tensor], how: str, refusal: str, tmp_path: Path
) -> None:
    put = functools.partial(place, change=change)
    with pytest.raises(RankError, match=refusal):
        run_ranks(late_hook, 2, put, how, tmp_path=tmp_path, env=ENV)
