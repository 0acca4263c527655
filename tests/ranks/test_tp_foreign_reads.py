"""Whoever reads a sharded parameter outside of the module that owns it gets the whole one, or an error that names it.

If a case fails, somebody else's forward, loss or regulariser computes with a part of a weight as if it were all of it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_runner import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from trainer_cases import ENV
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast


pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def token_loss(logits: Tensor, labels: Tensor, count: Any = None) -> Tensor:
    total = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / ((labels[:, 1:] != -100).sum() if count is None else count)


class _Scores(torch.autograd.Function):
    """A head of its own kind: an autograd function that takes the weight itself, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, 1).t() @ hidden.flatten(0, 1)


def fused(function: bool) -> Callable[[Any], None]:
    """A forward on the instance that reads the head's weight, as TRL's does, when an argument asks for it."""

    def patch(model: Any) -> None:
        original = model.forward

        def forward(self: Any, *args: Any, fused: bool = False, labels: Any = None, **kwargs: Any) -> Any:
            if not fused:
                return original(*args, labels=labels, **kwargs)
            count = kwargs.pop("num_items_in_batch", None)
            hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
            head = self.get_output_embeddings()
            hidden = hidden.to(head.weight.device)
            logits = _Scores.apply(hidden, head.weight) if function else F.linear(hidden, head.weight)
            return CausalLMOutputWithPast(loss=token_loss(logits, labels, count))

        model.forward = types.MethodType(forward, model)

    return patch


def called_head(model: Any) -> None:
    """A forward that calls the head, in halves of the sequence, and computes the loss from its output."""
    original = model.forward

    def forward(self: Any, *args: Any, fused: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused:
            return original(*args, labels=labels, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        logits = torch.cat([self.get_output_embeddings()(half) for half in hidden.chunk(2, 1)], 1)
        return CausalLMOutputWithPast(loss=token_loss(logits, labels, count))

    model.forward = types.MethodType(forward, model)


def z_loss(model: Any) -> None:
    """A forward that adds a term of the logits to the model's own loss."""
    original, base = model.forward, model.base_model

    def forward(self: Any, *args: Any, fused: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused:
            return original(*args, labels=labels, **kwargs)
        count = {k: v for k in ("num_items_in_batch",) if (v := kwargs.pop(k, None)) is not None}
        hidden = base(*args, use_cache=False, **kwargs).last_hidden_state
        logits = self.get_output_embeddings()(hidden)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **count)
        return CausalLMOutputWithPast(loss=loss + 0.1 * logits.logsumexp(-1).pow(2).mean())

    model.forward = types.MethodType(forward, model)


class Plain(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self.loss_of(model, inputs, num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss

    def loss_of(self, model: Any, inputs: Any, count: Any) -> Tensor:
        return model(**inputs, fused=True, num_items_in_batch=count).loss


class HeadInLoss(Plain):
    def loss_of(self, model: Any, inputs: Any, count: Any) -> Tensor:
        labels = inputs.pop("labels")
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        return token_loss(F.linear(hidden, model.get_output_embeddings().weight), labels, count)


class Regularised(Plain):
    """Norms of sharded parameters: of the head, of a projection in a block, of an embedding."""

    def loss_of(self, model: Any, inputs: Any, count: Any) -> Tensor:
        loss = model(**inputs, num_items_in_batch=count).loss
        block = model.base_model.layers[1] if hasattr(model.base_model, "layers") else model.base_model.h[1]
        inner = block.mlp.down_proj if hasattr(block.mlp, "down_proj") else block.mlp.c_proj
        weights = [model.get_output_embeddings().weight, inner.weight, model.get_input_embeddings().weight]
        return loss + 0.1 * sum(weight.float().norm() for weight in weights)


class Embedded(Plain):
    """`inputs_embeds` from the embedding module."""

    def loss_of(self, model: Any, inputs: Any, count: Any) -> Tensor:
        embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
        return model(inputs_embeds=embedded, **inputs, num_items_in_batch=count).loss


class LookedUp(Plain):
    """`inputs_embeds` from the embedding's table."""

    def loss_of(self, model: Any, inputs: Any, count: Any) -> Tensor:
        embedded = F.embedding(inputs.pop("input_ids"), model.get_input_embeddings().weight)
        return model(inputs_embeds=embedded, **inputs, num_items_in_batch=count).loss


def untouched(model: Any) -> None:
    return None


CASES: dict[str, tuple[str, Callable[[Any], None], type[Plain]]] = {
    "fused_llama": ("llama", fused(False), Plain),
    "fused_function_llama": ("llama", fused(True), Plain),
    "fused_function_tied": ("llama_tied", fused(True), Plain),
    "fused_function_gpt2": ("gpt2", fused(True), Plain),
    "fused_qwen3": ("qwen3", fused(False), Plain),
    "fused_mixtral": ("mixtral", fused(True), Plain),
    "called_head_llama": ("llama", called_head, Plain),
    "called_head_gpt2": ("gpt2", called_head, Plain),
    "z_loss_llama": ("llama", z_loss, Plain),
    "head_in_loss_llama": ("llama", untouched, HeadInLoss),
    "head_in_loss_gpt2": ("gpt2", untouched, HeadInLoss),
    "regularised_llama": ("llama", untouched, Regularised),
    "regularised_gpt2": ("gpt2", untouched, Regularised),
    "embedded_llama": ("llama", untouched, Embedded),
    "embedded_tied": ("llama_tied", untouched, Embedded),
    "looked_up_llama": ("llama", untouched, LookedUp),
    "looked_up_tied": ("llama_tied", untouched, LookedUp),
}
CHECKPOINTED = ("fused_function_tied", "regularised_llama")


def train(name: str, folder: Path, parallel: dict[str, Any] | None, world_size: int, checkpointing: bool) -> Any:
    from hf_parallel import HFParallelCallback

    kind, patch, trainer_kind = CASES[name]
    model = tiny.MODELS[kind]()
    patch(model)
    arguments = TrainingArguments(
        str(folder / name),
        per_device_train_batch_size=8 if parallel is None else 8 // (world_size // parallel.get("tp_size", 1)),
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        adam_epsilon=1e-3,  # gradients near zero (key biases of gpt2 have no other): AdamW blows their rounding noise up
        max_grad_norm=0.5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        average_tokens_across_devices=False,
        remove_unused_columns=False,
        gradient_checkpointing=checkpointing,
    )
    callbacks = [] if parallel is None else [HFParallelCallback({}, **parallel)]
    trainer = trainer_kind(
        model=model, args=arguments, train_dataset=tiny.rows(64), data_collator=tiny.collate, callbacks=callbacks
    )
    trainer.train()
    trainer.save_model(str(folder / name / "final"))
    if parallel is not None:
        trainer.hf_parallel_session.watchdog.stop()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def runs_main(rank: int, world_size: int, names: list[str], folder: str, parallel: Any) -> dict[str, Any]:
    found = {name: train(name, Path(folder), parallel, world_size, False) for name in names}
    where = Path(folder) / "checkpointed"
    again = [name for name in CHECKPOINTED if name in names]
    return found | {f"{name}_checkpointed": train(name, where, parallel, world_size, True) for name in again}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    found = {}
    for label, world, parallel in (("one", 1, None), ("tp2", 2, {"tp_size": 2})):
        folder = tmp_path_factory.mktemp(label)
        results = run_ranks(
            runs_main,
            world,
            list(CASES),
            str(folder),
            parallel,
            tmp_path=folder,
            timeout=300,
            init_group=world > 1,
            env=ENV,
        )
        found[label] = results[0], folder
    return found


@pytest.mark.parametrize("name", [*CASES, *(f"{name}_checkpointed" for name in CHECKPOINTED)])
def test_a_foreign_read_under_tp_trains_as_one_process(name: str, runs: dict[str, tuple[Any, Path]]) -> None:
    (mine, here), (stock, there) = runs["tp2"], runs["one"]
    flat = [value for pair in mine[name] for value in pair]
    assert flat == pytest.approx([value for pair in stock[name] for value in pair], rel=1e-5)
    place = Path("checkpointed", name.removesuffix("_checkpointed")) if name.endswith("_checkpointed") else Path(name)
    weights = [load_file(folder / place / "final" / "model.safetensors") for folder in (here, there)]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[1].items():
        assert (weights[0][key] - value).norm() <= 1e-5 * value.norm(), key


# -- what is refused -------------------------------------------------------------------------------------------------


def raised(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def outside_main(rank: int, world_size: int) -> dict[str, Any]:
    """Reads of a sharded head outside of every forward, where ranks need not be in step."""
    from accelerate import Accelerator

    from hf_parallel import HFParallelPlugin

    accelerator = Accelerator(cpu=True, parallelism_config=HFParallelPlugin({}, tp_size=2))
    model = accelerator.prepare(tiny.llama())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, real = model.lm_head.weight, model.lm_head._parameters["weight"]
    found = {
        "norm": raised(lambda: weight.norm()) if rank == 0 else "",  # one rank alone: must not wait for the other
        "logged": raised(lambda: float(weight.detach().abs().max())),
        "function": raised(lambda: F.linear(torch.ones(1, 32), model.lm_head.weight)),
        "hook": raised(lambda: model.lm_head.weight.register_hook(lambda grad: grad)),
        "data": raised(lambda: model.lm_head.weight.data.zero_()),
        "inside a block": raised(lambda: model.model.layers[0].mlp.down_proj.weight.sum()),
        "shape": tuple(weight.shape),
        "kept": (str(weight.dtype), weight.device.type, weight.requires_grad, weight.grad, weight.ndim, len(weight)),
        "local": tuple(real.shape),
    }
    weight.requires_grad = False
    found["frozen"] = not real.requires_grad
    weight.requires_grad_(True)
    weight.learning_rate = 3
    found["attribute"] = (real.learning_rate, model.lm_head.weight.learning_rate)
    accelerator.backward(model(**tiny.collate(tiny.rows(4))).loss)
    optimizer.step()
    found["gradient"] = raised(lambda: model.lm_head.weight.grad)
    accelerator.hf_parallel.watchdog.stop()
    return found


def test_a_foreign_read_outside_of_a_forward_is_refused_by_name(tmp_path: Path) -> None:
    results = run_ranks(outside_main, 2, tmp_path=tmp_path, env=ENV)
    assert "lm_head.weight" in results[0].pop("norm")
    results[1].pop("norm")
    for found in results:
        for use in ("logged", "function", "hook", "data", "gradient"):
            assert found[use].startswith("UnsupportedError: lm_head.weight is used"), found[use]
            assert "tensor_parallel.plan: {lm_head: replicate}" in found[use]
        assert "model.layers.0.mlp.down_proj.weight" in found["inside a block"]
        assert found["shape"] == (99, 32)
        assert found["kept"] == ("torch.float32", "cpu", True, None, 2, 99)
        assert found["local"][0] < 99
        assert found["frozen"]
        assert found["attribute"] == (3, 3)


def embedded_main(rank: int, world_size: int, folder: str) -> str:
    return raised(lambda: train("embedded_llama", Path(folder), {"zero": {"stage": 3}}, world_size, False))


def test_an_embedding_called_outside_of_a_forward_under_zero_3_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(embedded_main, 2, str(tmp_path), tmp_path=tmp_path, env=ENV):
        assert text.startswith("UnsupportedError: zero.stage=3"), text
        assert "module model.embed_tokens was called outside of the model's forward" in text
        assert "set zero.stage to 1" in text
