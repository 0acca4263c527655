"""User code on stages, shards and parts of rows that were read with care: right, or refused before an update with the true cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import user_steps
from rank_runner import run_ranks
from torch import nn
from transformers import Trainer, TrainerCallback


PP2 = {"pp_size": 2, "num_microbatches": 2}
TP2 = {"tp_size": 2}
SP2 = {"sp_size": 2}
ZERO1 = {"zero": {"stage": 1}}
LIMIT = 0.01


class ClipsEach(TrainerCallback):
    """Each parameter by its own norm, also where it has no gradient."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, LIMIT)


class ClipsAll(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


class ClipsLists(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_([parameter], LIMIT)


class SlowsFirst(TrainerCallback):
    """Another rate for one step, on one rank, when the gradients are there."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 1:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


class DecaysFirst(TrainerCallback):
    """Another weight decay from the third step on, on one rank."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 2:
            for group in optimizer.param_groups:
                group["weight_decay"] = 5.0


class Ties(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.lm_head.weight = model.model.embed_tokens.weight


class TiesByConfig(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.config.tie_word_embeddings = True
        model.tie_weights()


class Masks(TrainerCallback):
    """Trains new tokens alone, by a hook on the embedding, wherever that is."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.get_input_embeddings().weight.register_hook(self.of_new)

    def of_new(self, gradient: Any) -> Any:
        new = torch.zeros_like(gradient)
        new[90:] = gradient[90:]
        return new


def by_norm(module: Any, given: Any, gradients: Any) -> Any:
    """Limits what goes back by its norm in the batch."""
    return tuple(one / (1.0 + one.norm()) for one in given)


def limited(model: Any) -> None:
    model.model.layers[2].register_full_backward_hook(by_norm)


class OnAttentions(Trainer):
    """A loss of what heads look at."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_attentions=True)
        return outputs.loss + sum(one.pow(2).mean() for one in outputs.attentions)


class OnCache(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs, use_cache=True)
        return outputs.loss + 0.1 * sum(layer.keys.pow(2).mean() for layer in outputs.past_key_values.layers)


class OnFlatLogits(Trainer):
    """The loss as scripts write it, with views of the logits; what the model does not give is None."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        again = model(**inputs)
        assert again.hidden_states is None
        assert again.attentions is None
        labels = nn.functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
        logits = model(**inputs).logits
        whole = nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)
        return whole + again.loss


class OnKept(Trainer):
    """A term on what blocks give, which forward hooks keep."""

    blocks: slice = slice(1, 2)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Any] = []
        for block in self.model.model.layers[self.blocks]:
            block.register_forward_hook(lambda module, given, out: self.kept.append(out))

    def term(self, kept: Any) -> Any:
        return kept.pow(2).mean()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.kept.clear()
        loss = model(**inputs).loss
        return loss + sum(map(self.term, self.kept))


class OnFirstKept(Trainer):
    """A term on what a block gives, which a hook keeps that is there for one call."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        kept: list[Any] = []
        handle = model.model.layers[1].register_forward_hook(lambda module, given, out: kept.append(out))
        loss = model(**inputs).loss
        handle.remove()
        return loss + kept[0].pow(2).mean()


class Probed(OnKept):
    """It trains a probe alone: nothing goes back into the model."""

    blocks = slice(None)

    def term(self, kept: Any) -> Any:
        return self.model.probe(kept.detach()).pow(2).mean()


class OnGradients(Trainer):
    """A penalty on the gradients of weights."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        made = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + 0.01 * sum(one.pow(2).sum() for one in made)


class Around(nn.Module):
    """A module of the user's round a model, which knows nothing of transformers."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any, **options: Any) -> Any:
        outputs = self.base(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **options)
        return {"loss": outputs.loss, "logits": outputs.logits}


class Wrapping(Trainer):
    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model=Around(model), **kwargs)


class Valued(Around):
    """It says of what kind the model is, and reads what the last block gives."""

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.config = base.config
        torch.manual_seed(1)
        self.value = nn.Linear(32, 1)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, **options: Any) -> Any:
        outputs = self.base(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels, output_hidden_states=True
        )
        return {"loss": outputs.loss, "logits": outputs.logits, "value": self.value(outputs.hidden_states[-1])}


class Valuing(Trainer):
    """Trains a value head beside the model, as reward models of a causal model do."""

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model=Valued(model), **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return outputs["logits"][:, 0].square().mean() + outputs["value"][:, 0].square().mean()


def with_probe(model: Any) -> None:
    model.probe = nn.Linear(32, 1)


def only(*names: str) -> dict[str, Any]:
    """Train parameters of these names alone."""

    def freeze(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(one in name for one in names))

    return {"prepare": freeze}


def adding(kind: type[TrainerCallback], **options: Any) -> tuple[type[Trainer], dict[str, Any]]:
    return Trainer, {"change": lambda trainer: trainer.add_callback(kind()), **options}


def in_float64(model: Any) -> None:
    model.double()


ENDS, LATE = ("embed_tokens", "lm_head"), ("layers.3", "lm_head")
user_steps.KINDS |= {
    "each_of_one": adding(ClipsEach, **only(*ENDS)),
    "each_of_none": adding(ClipsEach, **only(*LATE)),
    "each_of_many": adding(ClipsEach, **only("layers.3", *ENDS)),
    "all_of_one": adding(ClipsAll, **only(*ENDS)),
    "lists_of_one": adding(ClipsLists, **only(*ENDS)),
    "slows": adding(SlowsFirst),
    "decays": adding(DecaysFirst),
    "ties": adding(Ties),
    "ties_by_config": adding(TiesByConfig),
    "attentions": (OnAttentions, {}),
    "cache": (OnCache, {}),
    "flat": (OnFlatLogits, {}),
    "float64": (Trainer, {"prepare": in_float64}),
    "masks": adding(Masks),
    "limited": (Trainer, {"prepare": limited}),
    "kept": (OnKept, {}),
    "kept_first": (OnFirstKept, {}),
    "wrapping": (Wrapping, {}),
    "valuing": (Valuing, {}),
    "on_gradients": (OnGradients, {}),
    "probed": (Probed, {"prepare": with_probe}),
}
RATE, DECAY = (
    "lr of parameter group 0 of the optimizer is",
    "weight_decay of parameter group 0 of the optimizer is 5.0 on rank 0",
)
HEADS = "output_attentions with tp_size=2: each rank computes its own heads"
PROBED = "different gradients to the parameters that only the loss reads"
TIED = "puts one parameter in the place of another"
QUICK: user_steps.Jobs = {
    "each_of_one_pp2": ("each_of_one", PP2, "", 0),
    "each_of_none_pp2": ("each_of_none", PP2, "", 0),
    "slows_pp2": ("slows", PP2, RATE, 1),
    "decays_zero1": ("decays", ZERO1, DECAY, 2),
    "attentions_tp2": ("attentions", TP2, HEADS, 0),
    "flat_sp2": ("flat", SP2, "", 0),
    "float64_pp2": ("float64", PP2, "", 0),
}
MORE: user_steps.Jobs = {
    "each_of_many_pp2": ("each_of_many", PP2, "", 0),
    "all_of_one_pp2": ("all_of_one", PP2, "", 0),
    "slows_zbv": ("slows", {**PP2, "schedule": "zbv"}, RATE, 1),
    "slows_tp2": ("slows", TP2, RATE, 2),
    "slows_zero1": ("slows", ZERO1, RATE, 2),
    "slows_zero3": ("slows", {"zero": {"stage": 3}}, RATE, 2),
    "decays_pp2": ("decays", PP2, DECAY, 2),
    "attentions_shared_tp2": ("attentions", {**TP2, "tensor_parallel": {"sequence_parallel": True}}, HEADS, 0),
    "cache_tp2": ("cache", TP2, "a loss on keys or values of a cache, of which each rank has its own heads", 0),
    "flat_tp2": ("flat", TP2, "", 0),
    "flat_ring": ("flat", {**SP2, "sp_attention": "ring"}, "", 0),
    "float64_ring": ("float64", {**SP2, "sp_attention": "ring"}, "", 0),
    "masks_pp2": ("masks", PP2, "", 0),
    "limited_pp2": ("limited", PP2, "", 0),
    "limited_tp2": ("limited", TP2, "", 0),
    "wrapping_dp2": ("wrapping", {}, "", 0),
    "wrapping_zero1": ("wrapping", ZERO1, "", 0),
    "valuing_zero3": ("valuing", {"zero": {"stage": 3}}, "", 0),
    "probed_pp2": ("probed", PP2, PROBED, 0),
    "probed_tp2": ("probed", TP2, "", 0),
    "kept_tp2": ("kept", TP2, "", 0),
    "on_gradients_pp2": ("on_gradients", PP2, "torch.autograd.grad of a loss with pp_size=2: the schedule", 0),
    "on_gradients_tp2": ("on_gradients", TP2, "torch.autograd.grad of a loss with tp_size=2: the loss is computed", 0),
    "float64_zbv": ("float64", {**PP2, "schedule": "zbv"}, "", 0),
}


def many(*given: Any) -> Any:  # of this file, so that a rank imports it and with it what it adds to `KINDS`
    return user_steps.many(*given)


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return user_steps.runs_of(QUICK, tmp_path_factory.mktemp("quick"), many)


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory: pytest.TempPathFactory) -> user_steps.Runs:
    return user_steps.runs_of(MORE, tmp_path_factory.mktemp("more"), many)


@pytest.mark.parametrize("job", QUICK)
def test_right_or_refused(job: str, quick_runs: user_steps.Runs) -> None:
    user_steps.check_job(QUICK, job, quick_runs)


@pytest.mark.long
@pytest.mark.parametrize("job", MORE)
def test_more_is_right_or_refused(job: str, more_runs: user_steps.Runs) -> None:
    user_steps.check_job(MORE, job, more_runs)


def alone(rank: int, world_size: int, name: str, folder: str) -> str:
    return str(user_steps.run(name, PP2, Path(folder))["error"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("lists_of_one", "a list of one gradient is clipped"),
        ("ties", TIED),
        ("ties_by_config", TIED),
        ("kept", "the loss depends on a graph that was used and let go, with pp_size=2"),
        (
            "kept_first",
            "IndexError: list index out of range\nhf_parallel: pp_size=2: each rank runs the blocks of its own stages only",
        ),
    ],
)
def test_what_one_stage_cannot_do_is_refused_there(name: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=error):
        run_ranks(failing, 2, name, str(tmp_path), tmp_path=tmp_path, env=user_steps.ENV)


def failing(rank: int, world_size: int, name: str, folder: str) -> None:
    error = alone(rank, world_size, name, folder)
    assert error == "None", error
