"""Callbacks that prune an optimizer's moments, or draw adapters anew, as restarts of LoRA do: those of one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from callback_runs import ENV, assert_same_state, trained_with
from rank_runner import run_ranks
from transformers import TrainerCallback

from hf_parallel.errors import ParallelError


pytestmark = pytest.mark.long


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "tp2": {"tp_size": 2},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3}},
}
SETTINGS = {"max_steps": 4, "logging_steps": 1, "max_grad_norm": 0.5, "adam_epsilon": 1e-3}


class Restarts(TrainerCallback):
    """Changes what the optimizer keeps of each parameter, before the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            with torch.no_grad():
                self.restart(kwargs["model"], kwargs["optimizer"])

    def restart(self, model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            kept = optimizer.state.get(parameter)
            if kept:
                self.change(kept, parameter)

    def change(self, kept: Any, parameter: Any) -> None:
        raise NotImplementedError


class AtRandom(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        moment = kept["exp_avg"]
        moment.mul_((torch.rand(moment.shape) > 0.5).to(moment.dtype))


class LikeIt(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"].mul_(torch.rand_like(kept["exp_avg"]))


class Assigned(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = torch.randn(kept["exp_avg"].shape)


class AssignedLike(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = torch.randn_like(kept["exp_avg"])


class AssignedMask(Restarts):
    """Out of place: the product has the class of the state."""

    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = kept["exp_avg"] * (torch.rand(kept["exp_avg"].shape) > 0.5)


class AddedThenWhere(Restarts):
    """Through several functions, and back in place."""

    def change(self, kept: Any, parameter: Any) -> None:
        moment = kept["exp_avg"]
        noise = torch.rand(moment.shape)
        moment.copy_(torch.where(noise > 0.5, moment, torch.zeros_like(moment)) * 2)


class IntoOut(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        moment = kept["exp_avg"]
        torch.mul(moment, torch.rand(moment.shape), out=moment)


class IntoData(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"].data = torch.randn(kept["exp_avg"].shape)


class Replaced(Restarts):
    """The whole state of a parameter."""

    def restart(self, model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            kept = optimizer.state.get(parameter)
            if kept:
                new = {name: torch.randn(one.shape) if name == "exp_avg" else one for name, one in kept.items()}
                optimizer.state[parameter] = new


class Updated(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept.update(exp_avg=torch.randn(kept["exp_avg"].shape))


class AssignedLikeWeights(Restarts):
    """Numbers drawn like the parameter, of which each rank has its part."""

    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = torch.randn_like(parameter) * 0.01


class MaskLikeWeights(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = kept["exp_avg"] * (torch.rand_like(parameter) > 0.5)


class AssignedWeights(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = parameter.detach().clone() * 0.01


class AssignedMaskOfWeights(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = kept["exp_avg"] * (parameter.abs() > 0.01)


class AssignedZeros(Restarts):
    """As restarts of ReLoRA have it."""

    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = torch.zeros_like(parameter)
        kept["exp_avg_sq"] = torch.full(kept["exp_avg_sq"].shape, 0.5)


class ReplacedByItself(Restarts):
    """The whole state, by what is made of it."""

    def restart(self, model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            kept = optimizer.state.get(parameter)
            if kept:
                new = {name: one * 0.5 if name == "exp_avg" else one for name, one in kept.items()}
                optimizer.state[parameter] = new


class DataOfItself(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"].data = kept["exp_avg"] * 0.5
        torch.mul(kept["exp_avg_sq"], 0.5, out=kept["exp_avg_sq"])


class AssignedItself(Restarts):
    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"] = kept["exp_avg"] * 0.5
        kept["exp_avg_sq"] = torch.where(kept["exp_avg"] > 0, kept["exp_avg_sq"], 0.1)


class AllAtOnce(Restarts):
    """By a limit over all of them."""

    def restart(self, model: Any, optimizer: Any) -> None:
        moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
        limit = torch.cat([moment.abs().flatten() for moment in moments]).kthvalue(100).values
        for moment in moments:
            moment.mul_(moment.abs() > limit)


class ByItself(Restarts):
    """By what the moments are: it is the same on parts."""

    def change(self, kept: Any, parameter: Any) -> None:
        moment = kept["exp_avg"]
        moment.mul_(moment > 0).mul_(0.5).add_(moment.clone(), alpha=0.1)
        kept["exp_avg_sq"].mul_(torch.tensor(2.0))


class ByWeights(Restarts):
    """By a mask of the parameter, of which tp has the same part."""

    def change(self, kept: Any, parameter: Any) -> None:
        kept["exp_avg"].mul_((parameter > 0).to(parameter.dtype))


class DrawsAdapters(Restarts):
    """Merges adapters, which PEFT draws anew."""

    def restart(self, model: Any, optimizer: Any) -> None:
        for module in model.modules():
            if hasattr(module, "reset_lora_parameters"):
                module.get_base_layer().weight.data += module.get_delta_weight("default")
                module.reset_lora_parameters("default", True)


def adapted() -> Any:
    return tiny.lora(tiny.llama(layers=2), target_modules=["q_proj", "o_proj", "down_proj"])


CALLBACKS: dict[str, type[Restarts]] = {kind.__name__: kind for kind in Restarts.__subclasses__()}
OF_PART = "of an optimizer's state by random numbers, or by a tensor of its shape that was not made of it"
DRAWN = ("AssignedLike", "AssignedMask", "AddedThenWhere", "IntoOut", "IntoData", "Updated")
IN_A_ROW = "random numbers that a callback draws one after another"
REFUSED: dict[tuple[str, str], str] = {
    **{(kind, layout): OF_PART for kind in ("AtRandom", "LikeIt") for layout in ("tp2", "zero1", "zero2")},
    **{(kind, layout): OF_PART for kind in ("Assigned", *DRAWN) for layout in ("tp2", "zero1", "zero2")},
    ("Replaced", "tp2"): OF_PART,
    **{
        (kind, layout): "its state is replaced"
        for kind in ("Replaced", "ReplacedByItself")
        for layout in ("zero1", "zero2")
    },
    **{(kind, "pp2"): IN_A_ROW for kind in ("AtRandom", "LikeIt", "Assigned", "Replaced", *DRAWN)},
    (
        "DrawsAdapters",
        "pp2",
    ): f"{IN_A_ROW}|was read outside of the model's forward",  # the last stage reads before it draws
    ("AllAtOnce", "pp2"): "made of the parameters of",
    **{("AllAtOnce", layout): r"kthvalue\(\) of an optimizer's state" for layout in ("tp2", "zero1", "zero2")},
}
# What is made of the state or of the parameter: alike on parts.
MADE = ("AssignedWeights", "AssignedZeros", "AssignedItself", "DataOfItself")
RIGHT = [
    *((kind, layout) for kind in MADE for layout in ("tp2", "zero1", "zero2", "pp2")),
    *(
        (kind, layout)
        for kind in ("MaskLikeWeights", "AssignedMaskOfWeights", "ReplacedByItself")
        for layout in ("tp2",)
    ),
    *(("AssignedLikeWeights", layout) for layout in ("tp2", "zero1", "zero2")),
    *((kind, "zero3") for kind in ("AssignedLike", "AssignedMask", "AssignedItself")),
    *(("ByItself", layout) for layout in LAYOUTS),
    *((kind, layout) for kind in ("ByWeights",) for layout in ("pp2", "tp2", "zero3")),
    *((kind, "zero3") for kind in ("AtRandom", "LikeIt")),
    *(("DrawsAdapters", layout) for layout in ("tp2", "zero1", "zero3")),
]


def many(rank: int, world_size: int, jobs: list[tuple[str, str]]) -> list[Any]:
    found = []
    for kind, layout in jobs:
        model = {"model": adapted} if kind == "DrawsAdapters" else {}
        try:
            found.append(trained_with(CALLBACKS[kind](), LAYOUTS.get(layout), **model, **SETTINGS))
        except ParallelError as error:
            found.append(f"{error}")
    return found


def test_moments_are_changed_as_by_one_process_or_refused(tmp_path: Any) -> None:
    jobs = [*REFUSED, *RIGHT]
    kinds = sorted({kind for kind, _ in RIGHT})
    alone = run_ranks(many, 1, [(kind, "one") for kind in kinds], tmp_path=tmp_path, env=ENV, init_group=False)
    wanted = dict(zip(kinds, alone[0], strict=True))
    together = run_ranks(many, 2, jobs, tmp_path=tmp_path, timeout=300, env=ENV)
    for job, *found in zip(jobs, *together, strict=True):
        if job in REFUSED:
            for text in found:
                assert isinstance(text, str), job
                with pytest.raises(AssertionError, match=REFUSED[job]):
                    raise AssertionError(text)
            continue
        assert isinstance(found[0], dict), (job, found[0])
        assert found[0]["history"] == pytest.approx(wanted[job[0]]["history"], rel=1e-5), job
        assert_same_state(found[0]["state"], wanted[job[0]]["state"], str(job))
