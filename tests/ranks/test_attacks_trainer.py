"""Trainers of users that change batches, gradients and losses where few look: as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import user_steps
from transformers import Trainer, TrainerCallback


pytestmark = pytest.mark.long


PP2 = {"pp_size": 2, "num_microbatches": 2}
ZERO2 = {"zero": {"stage": 2}}
TP2 = {"tp_size": 2}


class HalvesBetween(TrainerCallback):
    """Halves the gradients between the batches of a step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Masking:
    """Gives each batch of a window other labels, in the dictionaries that the window has."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        for sample in samples:
            sample["labels"] = sample["labels"].masked_fill(sample["labels"] % 3 == 0, -100)
        return samples, count


class MaskingTrainer(Masking, Trainer):
    pass


def masking_ours() -> type[Trainer]:
    from hf_parallel import HFParallelTrainer

    class Mine(Masking, HFParallelTrainer):
        pass

    return Mine


class NormPenalty(Trainer):
    """Not the sum of squares, whose gradient is right on any part."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss + 0.01 * sum(p.norm() for p in model.parameters())


class LimitsWeights(TrainerCallback):
    """Norms, means and differences of whole parameters decide what is done to them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.first = [parameter.detach().clone() for parameter in model.parameters()]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.05 * parameter.detach().norm() / (1.0 + parameter.grad.norm()))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), self.first, strict=True):
                if parameter.ndim > 1:
                    parameter.mul_((0.5 / parameter.norm()).clamp(max=1))
                    parameter.sub_(0.1 * parameter.mean(dim=0, keepdim=True))
                parameter.data.add_((parameter - first) * (parameter - first).pow(2).sum().sqrt().clamp(max=0.1))


class EditsRows(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data[:3] = 0.0


class Reseeds(TrainerCallback):
    """Later than the first checks; each rank with its own number."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 6:
            torch.manual_seed(args.process_index)


user_steps.KINDS |= {
    "reseeds": (Trainer, {"change": lambda trainer: trainer.add_callback(Reseeds())}),
    "limits": (Trainer, {"change": lambda trainer: trainer.add_callback(LimitsWeights())}),
    "rows": (Trainer, {"change": lambda trainer: trainer.add_callback(EditsRows())}),
    "halves_between": (Trainer, {"change": lambda trainer: trainer.add_callback(HalvesBetween())}),
    "masking": (MaskingTrainer, {"form": masking_ours}),
    "norm_penalty": (NormPenalty, {}),
}
# Name, settings, accumulation; all with one replica or two.
JOBS: dict[str, tuple[str, dict[str, Any], int]] = {
    "substeps_pp2": ("halves_between", PP2, 3),
    "substeps_zero2": ("halves_between", ZERO2, 3),
    "substeps_dp2": ("halves_between", {}, 3),
    "batches_pp2": ("masking", PP2, 2),
    "penalty_tp2": ("norm_penalty", TP2, 1),
    "limits_tp2": ("limits", TP2, 1),
    "limits_zero1": ("limits", {"zero": {"stage": 1}}, 1),
    "rows_dp2": ("rows", {}, 1),
    "rows_tp2": ("rows", TP2, 1),
    "reseeds_tp2": ("reseeds", TP2, 1),
}
MODELS = {"reseeds_tp2": {"model": "gpt2_dropout", "steps": 8}}
REFUSED = {"reseeds_tp2": "another random state", "rows_tp2": "so rows and views are not those of the whole tensor"}


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    ones, twos = {}, {}
    for job, (name, parallel, accumulation) in JOBS.items():
        options = {"accumulation": accumulation, **MODELS.get(job, {})}
        ones[job] = (name, None, {"rows": 8, **options})
        twos[job] = (name, parallel, {"rows": user_steps.rows_on_two(parallel), **options})
    return user_steps.launch_both(ones, twos, tmp_path_factory.mktemp("attacks"), many)


@pytest.mark.parametrize("job", JOBS)
def test_as_one_process(job: str, runs: user_steps.Runs) -> None:
    ones, twos = runs
    if job in REFUSED:
        assert REFUSED[job] in str(twos[job][0]["error"])
        return
    user_steps.same(twos[job][0], ones[job][0])
